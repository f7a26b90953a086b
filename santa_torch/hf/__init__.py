"""Sampled attention inside Hugging Face models.

>>> from santa_torch import SantaConfig, hf                            # doctest: +SKIP
>>> with hf.use(model, SantaConfig(samples=256)):                      # doctest: +SKIP
...     model.generate(**inputs, past_key_values=hf.SantaCache(model.config))

While a model is enabled, forwards with one query row per sequence (decoding) are answered by
``santa_torch.decode``; forwards with several rows (prefill, scoring, verification) get exact
attention, or are sampled row by row under ``SantaConfig(query_rows="all")``.

========================  =====================================================================
``enable``, ``disable``   switch a model for good, and back
``use``                   the same as a context, restored also after an exception
``register``              only make the name ``"santa"`` known to transformers
``record``                count the bytes that attention reads
``SantaCache``            a cache that appends in place
========================  =====================================================================

Files: ``attention.py`` answers one layer's call, ``exact.py`` and ``rows.py`` are its two ways for
several rows, ``sketches.py`` finds the sketch of a layer's keys, ``switch.py`` turns models on and
off, ``wrappers.py`` finds them inside of others, ``record.py`` counts, ``cache.py`` and
``layer_*.py`` store. Nothing is patched, and importing ``santa_torch`` does not import this folder.
"""

from __future__ import annotations

try:
    from transformers import __version__ as _transformers_version
except ImportError as error:
    raise ImportError(
        "santa_torch.hf needs transformers >= 4.57 (pip install transformers)"
    ) from error

if tuple(int(part) for part in _transformers_version.split(".")[:2]) < (4, 57):
    raise ImportError(
        f"santa_torch.hf needs transformers >= 4.57, found {_transformers_version} "
        "(pip install --upgrade transformers)"
    )

from santa_torch.hf.cache import SantaCache
from santa_torch.hf.record import Traffic, record
from santa_torch.hf.switch import disable, enable, register, use

__all__ = ["SantaCache", "Traffic", "disable", "enable", "record", "register", "use"]
