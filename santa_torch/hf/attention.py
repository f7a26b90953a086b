"""The attention function that transformers calls: one layer, one forward.

    layer not in ``config.layers``, or model not enabled    -> exact attention (``exact.py``)
    fewer than ``config.dense_below`` key rows              -> exact attention
    one query row per sequence                              -> santa_torch.decode
    several, under ``query_rows="all"``                     -> santa_torch.decode (``rows.py``)
    several otherwise (prefill, scoring, verification)      -> exact attention

What a layer needs to know hangs on its attention module (``Binding``, and the seed as a buffer), so
that two models, two threads or a compiled graph never read each other's settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from santa_torch import ops
from santa_torch.config import SantaConfig
from santa_torch.hf.exact import exact_attention, is_causal
from santa_torch.hf.holds import is_held
from santa_torch.hf.rows import decode_rows
from santa_torch.hf.sketches import sketch_of
from santa_torch.stats import DecodeStats

if TYPE_CHECKING:
    from santa_torch.hf.record import Traffic
    from santa_torch.sketch import KeySketch

#: Name under which transformers knows this function and its mask function.
NAME = "santa"

#: Attributes of an attention module while its model is enabled.
BINDING, SEED = "santa_binding", "santa_seed"

#: Arguments that change the scores or ask for them. SDPA drops most of them without a word, so they
#: are refused for every number of rows.
_UNSUPPORTED = {
    "position_bias": "a position bias (T5)",
    "head_mask": "a head mask",
    "indices": "a choice of rows by an indexer (DeepSeek-V3.2)",
    "block_indices": "a choice of blocks of rows by an indexer (MiniMax-M3)",
    "sinks": "a form of sinks of its own (Inkling-2)",
}

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: Seeds of neighbouring rows lie 2^64 / golden ratio apart (Knuth, TAOCP 6.4), so that row b of
#: seed s does not meet row b' of a nearby seed s'. As a signed 64-bit number.
_ROW_STRIDE = 0x9E3779B97F4A7C15 - 2**64


@dataclass
class Binding:
    """What one attention module knows while its model is enabled.

    Parameters
    ----------
    config : SantaConfig
        Settings of the model. Its ``seed`` is not read here: it lives in a buffer that is filled in
        place, so that a compiled graph does not contain it.
    layer : int
        Index of the layer in the model; part of the random counter.
    shared_rows : bool
        All rows of the batch use one seed, instead of a derived one each.
    rank : int
        Tensor-parallel rank. The module sees local heads only; the first one has the global index
        ``rank * local heads``.
    traffic : Traffic or None
        Where to count bytes; ``None`` outside of ``santa_torch.hf.record``.
    """

    config: SantaConfig
    layer: int
    shared_rows: bool = False
    rank: int = 0
    traffic: Traffic | None = None


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer, in the calling convention of ``AttentionInterface``.

    Parameters
    ----------
    module : torch.nn.Module
        The attention module, bound by ``santa_torch.hf.enable``.
    query : Tensor
        ``[B, Hq, Q, D]``, rotated; float32, bfloat16 or float16.
    key, value : Tensor
        ``[B, Hkv, L, D]`` and ``[B, Hkv, L, Dv]``, not repeated over the group.
    attention_mask : Tensor, optional
        ``[B or 1, Hq or 1, Q, >= L]``, bool (True attends) or additive float.
    dropout : float
        Probability of dropping a weight; refused where attention is sampled.
    scaling : float, optional
        Factor of the scores; default ``1 / sqrt(D)``.
    **kwargs
        ``position_ids`` ``[B or 1, Q]``, needed where old rows are evicted; ``softcap``, a number;
        ``s_aux`` ``[Hq]``, the sinks. ``is_causal`` counts where there is no mask, and
        ``sliding_window`` is in the mask already.

    Returns
    -------
    tuple of Tensor and None
        ``[B, Q, Hq, Dv]`` in the dtype of ``query``, contiguous; no attention weights.

    Raises
    ------
    ValueError
        An argument that would change the result cannot be honoured, the model is not enabled, or
        its settings ask for a sketch that the cache does not keep.
    """
    _refuse_unsupported(kwargs)
    binding: Binding | None = getattr(module, BINDING, None)
    if binding is None:
        _require_shared_config(module)
    if binding is None or not _is_sampled(binding, query, key):
        if binding is not None:
            _look_ahead(module, binding, query, key, value, attention_mask, kwargs)
        exact = exact_attention(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return exact, None
    if dropout > 0.0:
        raise ValueError(f"dropout={dropout} of sampled attention is not supported: model.eval()")
    if torch.is_autocast_enabled(query.device.type):
        # SDPA is on autocast's list of functions whose inputs are cast; rotated queries and keys
        # come in float32 next to values in 16 bits.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, value = query.to(dtype), value.to(dtype)
        key = _keep_layer(key, key.to(dtype))
    out, stats = _sample(module, binding, query, key, value, attention_mask, scaling, kwargs)
    if binding.traffic is not None:
        binding.traffic.add(stats, steps=query.shape[2])
    return out, None


def _is_sampled(binding: Binding, query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether this forward of this layer goes to the operator; the one place that decides.

    ``key`` of a static cache has the capacity as its number of rows: the rows in use are a number
    on the device, which would have to be waited for.
    """
    config = binding.config
    if not config.selects(binding.layer) or key.shape[2] < config.dense_below:
        return False
    return query.shape[2] == 1 or config.query_rows == "all"


def _look_ahead(
    module: torch.nn.Module,
    binding: Binding,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> None:
    """Count an exact forward, and say before a long prefill what decoding would refuse."""
    if binding.traffic is not None and (query.shape[2] == 1 or binding.config.query_rows == "all"):
        causal = is_causal(module, query, mask, kwargs)
        binding.traffic.add_exact(key, value, steps=query.shape[2], causal=causal)
    if binding.config.selects(binding.layer):
        _positions(module, kwargs, query)
        if hasattr(key, "santa_layer"):
            _sketch(module, binding, key, kwargs)
        autocast = torch.is_autocast_enabled(query.device.type)
        if query.dtype not in _DTYPES and not autocast:
            raise ValueError(
                f"query must be float32, bfloat16 or float16 to be sampled, got {query.dtype}"
            )


def _sample(
    module: torch.nn.Module,
    binding: Binding,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, list[DecodeStats | None]]:
    """``[B, Hq, Q, D]`` -> ``[B, Q, Hq, Dv]``, and the statistics of each call of the operator."""
    config = binding.config
    decode = partial(
        _decode,
        samples=config.samples,
        method=config.method,
        scale=scaling,
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
        bernoulli=config.bernoulli,
        layer=binding.layer,
        head_offset=binding.rank * query.shape[1],
        return_stats=binding.traffic is not None,
    )
    seed = _row_seeds(module, binding, query, key)
    sketch = _sketch(module, binding, key, kwargs)
    position = _positions(module, kwargs, query)
    if query.shape[2] > 1:
        causal = is_causal(module, query, mask, kwargs)
        return decode_rows(
            decode,
            query,
            key,
            value,
            mask=mask,
            causal=causal,
            seed=seed,
            position=position,
            sketch=sketch,
        )
    out, stats = decode(
        query[:, :, 0],
        key,
        value,
        mask=None if mask is None else mask[:, :, 0, : key.shape[2]],
        seed=seed,
        position=None if position is None else position[:, -1],
        sketch=sketch,
    )
    return out.unsqueeze(1), [stats]


def _decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any
) -> tuple[torch.Tensor, DecodeStats | None]:
    """``ops.decode`` with one kind of result: the output, and statistics or None."""
    result = ops.decode(q, k, v, **arguments)
    return (result, None) if isinstance(result, torch.Tensor) else (result.out, result.stats)


def _sketch(
    module: torch.nn.Module, binding: Binding, key: torch.Tensor, kwargs: dict[str, Any]
) -> KeySketch | None:
    """The sketch to score ``key`` from, if the settings ask for one."""
    if binding.config.sketch_bits is None:
        return None
    window = _bounded_by(module, kwargs)
    return sketch_of(key, binding.config, layer=binding.layer, window=window)


def _keep_layer(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """``new`` with the cache layer that ``old`` carries."""
    if new is not old and hasattr(old, "santa_layer"):
        new.santa_layer = old.santa_layer  # type: ignore[attr-defined]
    return new


def _row_seeds(
    module: torch.nn.Module, binding: Binding, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor:
    """Seed of each row, int64 ``[1]`` or ``[B]`` on the device of ``query``.

    Row 0 has the model's seed, so that a batch of one draws what it draws alone. Beams of one
    prompt share it, since common random numbers compare them fairly. Only the cache knows about
    beams, and it does not know whose they are: right after a SantaCache has been reordered, all
    rows of the batch share one seed, beams of different prompts too. Each estimate stays unbiased;
    those of different prompts are then not independent of each other.
    """
    seed: torch.Tensor = getattr(module, SEED)
    if seed.device != query.device:  # weights moved by offloading hooks
        seed = seed.to(query.device)
    layer_cache = getattr(key, "santa_layer", None)
    beams = layer_cache is not None and layer_cache.has_beams
    if query.shape[0] == 1 or binding.shared_rows or beams:
        return seed
    return seed + torch.arange(query.shape[0], device=query.device) * _ROW_STRIDE


def _positions(
    module: torch.nn.Module, kwargs: dict[str, Any], query: torch.Tensor
) -> torch.Tensor | None:
    """One past the position of each query row, int64 ``[B or 1, Q]``, or None if nobody tells.

    None leaves it to the operator, which takes the place after the last attended row. That moves at
    every step as long as no row is evicted; elsewhere it stands still, and the draws would repeat.
    """
    position_ids = kwargs.get("position_ids")
    if position_ids is None and kwargs.get("cache_position") is not None:
        position_ids = kwargs["cache_position"].unsqueeze(0)
    if position_ids is not None and position_ids.ndim == 3:
        # Multi-modal rotary positions: time, height and width of each token, with the place in the
        # text before them in some models. The three alone repeat within an image.
        position_ids = position_ids[0] if position_ids.shape[0] == 4 else None
    if position_ids is None:
        bounded = _bounded_by(module, kwargs)
        if bounded is not None:
            raise ValueError(
                f"position_ids=None: {type(module).__name__} attends to a part of the past "
                f"({bounded}) and is not told where the query is, without which the draws would "
                "repeat at every step; leave such layers out of SantaConfig(layers=...)"
            )
        return None
    if position_ids.ndim != 2 or position_ids.shape[1] != query.shape[2]:
        raise ValueError(
            f"position_ids must have shape [batch, rows] with rows = {query.shape[2]}, got "
            f"{tuple(position_ids.shape)}"
        )
    return position_ids.to(device=query.device, dtype=torch.int64) + 1


def _bounded_by(module: torch.nn.Module, kwargs: dict[str, Any]) -> str | None:
    """What lets a layer forget old rows, or None where every row stays.

    Layers say it by their window, or by their type alone (the chunks of Llama-4).
    """
    window = kwargs.get("sliding_window") or getattr(module, "sliding_window", None)
    if window is not None:
        return f"sliding_window={window}"
    types = getattr(getattr(module, "config", None), "layer_types", None)
    kind = types[module.layer_idx] if types else "full_attention"
    return None if kind in ("full_attention", "attention") else str(kind)


def refuse_weights(kwargs: dict[str, Any]) -> None:
    """Raise where a forward is asked for attention weights."""
    if kwargs.get("output_attentions"):
        raise ValueError(
            "output_attentions=True: sampled attention has no weights to return; "
            'disable santa_torch and use attn_implementation="eager"'
        )


def _refuse_unsupported(kwargs: dict[str, Any]) -> None:
    refuse_weights(kwargs)
    for name, meaning in _UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"{name}: {meaning} is not supported by santa_torch yet")


def _require_shared_config(module: torch.nn.Module) -> None:
    """Tell a model that shares an enabled model's configuration from one that lost its settings."""
    if not is_held(getattr(module, "config", None)):
        raise ValueError(
            f'{type(module).__name__}: attn_implementation is "{NAME}" but the model has no '
            "SantaConfig; call santa_torch.hf.enable(model, config) on the whole model"
        )
