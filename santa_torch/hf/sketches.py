"""The sketch that belongs to the keys of one layer: finding it, and taking one sequence of it.

A layer of a ``SantaCache`` keeps the sketch and hangs on the keys that it returns. Whoever asks for
``sketch_bits`` gets an error where the keys do not lead to one, rather than scores from the keys
themselves: those would be the same scores at other costs. Sliding-window layers are the exception.
Their cache is transformers' own, so they never have a sketch, and are scored from their few rows.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from santa_torch.config import SantaConfig
from santa_torch.sketch import KeySketch

#: What to do about keys without a sketch.
_CURE = (
    "give the model a cache made by santa_torch.hf.SantaCache(model.config, config=config) with "
    "the config that it was enabled with"
)


def sketch_of(
    key: torch.Tensor, config: SantaConfig, *, layer: int, window: str | None
) -> KeySketch | None:
    """The sketch of the rows of ``key``.

    Parameters
    ----------
    key : Tensor
        ``[B, Hkv, L, D]`` as the cache returned it, in the dtype to score in.
    config : SantaConfig
        Settings of the model; those of the cache have to agree with them.
    layer : int
        Index of the layer, for messages.
    window : str or None
        What bounds the rows that the layer attends to; such layers may come without a sketch.

    Returns
    -------
    KeySketch or None
        None where ``config`` asks for none, and for layers with a window.

    Raises
    ------
    ValueError
        There is no sketch, or one of other bits or another dtype.
    """
    bits = config.sketch_bits
    if bits is None:
        return None
    sketch: KeySketch | None = getattr(getattr(key, "santa_layer", None), "sketch", None)
    if sketch is None:
        if window is not None:
            return None
        raise ValueError(
            f"sketch_bits={bits}: the keys of layer {layer} come without a sketch; {_CURE}. Models "
            "that make their keys from what the cache holds cannot have one"
        )
    if sketch.bits != bits:
        raise ValueError(
            f"sketch_bits={bits}: the sketch of layer {layer} has {sketch.bits} bits; {_CURE}"
        )
    if sketch.dtype != key.dtype:
        raise ValueError(
            f"sketch_bits={bits}: the sketch of layer {layer} holds {sketch.dtype}, and autocast "
            f"makes {key.dtype} of the keys; load the model in that dtype instead"
        )
    return sketch


def check_cache(config: SantaConfig, cache: Any, kind: type) -> None:
    """Refuse a cache that keeps no sketches before a long prefill fills it."""
    if config.sketch_bits is not None and cache is not None and not isinstance(cache, kind):
        raise ValueError(
            f"sketch_bits={config.sketch_bits}: a {type(cache).__name__} keeps no sketch; {_CURE}"
        )


def one_sequence(sketch: KeySketch, index: int, count: int) -> KeySketch:
    """Sequence ``index`` of ``sketch``, ``count`` times: views with stride 0, nothing is copied."""
    view = copy.copy(sketch)
    for name in ("blocks", "open_rows", "rows"):
        held: torch.Tensor = getattr(sketch, name)
        setattr(view, name, held[index : index + 1].expand(count, *held.shape[1:]))
    return view
