"""The attention function that transformers calls: one layer, one forward.

    one query row  -> santa_torch.decode
    several rows   -> transformers' own SDPA function (prefill, scoring, verification)
    layer not in ``config.layers``, or model not enabled -> transformers' own SDPA function

What a layer needs to know hangs on its attention module (``Binding``, and the seed as a buffer), so
that two models, two threads or a compiled graph never read each other's settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from santa_torch import ops
from santa_torch.config import SantaConfig
from santa_torch.hf.holds import is_held

if TYPE_CHECKING:
    from santa_torch.hf.record import Traffic

#: Name under which transformers knows this function and its mask function.
NAME = "santa"

#: Attributes of an attention module while its model is enabled.
BINDING, SEED = "santa_binding", "santa_seed"

#: Arguments that change the scores or ask for them. SDPA drops most of them without a word, so they
#: are refused for every number of rows.
_UNSUPPORTED = {
    "softcap": "soft-capped scores (Gemma-2)",
    "s_aux": "attention sinks (gpt-oss)",
    "position_bias": "a position bias (T5)",
    "head_mask": "a head mask",
}

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
        Probability of dropping a weight; refused for a single row.
    scaling : float, optional
        Factor of the scores; default ``1 / sqrt(D)``.
    **kwargs
        ``position_ids`` ``[B or 1, Q]`` is needed for a single row. ``sliding_window`` is already
        in the mask.

    Returns
    -------
    tuple of Tensor and None
        ``[B, Q, Hq, Dv]`` in the dtype of ``query``, contiguous; no attention weights.

    Raises
    ------
    ValueError
        An argument that would change the result cannot be honoured, or the model is not enabled.
    """
    _refuse_unsupported(kwargs)
    binding = getattr(module, BINDING, None)
    if binding is None:
        _require_shared_config(module)
    if binding is None or query.shape[2] != 1 or not binding.config.selects(binding.layer):
        if binding is not None and binding.traffic is not None:
            binding.traffic.add_exact(query, key, value)
        if binding is not None and binding.config.selects(binding.layer):
            _positions(kwargs, query.device)  # what decoding will need: said before a long prefill
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if dropout > 0.0:
        raise ValueError(f"dropout={dropout} of sampled attention is not supported: model.eval()")
    out = _decode(module, binding, query, key, value, attention_mask, scaling, kwargs)
    return out.unsqueeze(1), None


def _decode(
    module: torch.nn.Module,
    binding: Binding,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """One query row per sequence, ``[B, Hq, 1, D]`` -> ``[B, Hq, Dv]``."""
    config = binding.config
    if torch.is_autocast_enabled(query.device.type):
        # SDPA is on autocast's list of functions whose inputs are cast; rotated queries and keys
        # come in float32 next to values in 16 bits.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, value = query.to(dtype), value.to(dtype)
        key = _keep_layer(key, key.to(dtype))
    result = ops.decode(
        query[:, :, 0],
        key,
        value,
        samples=config.samples,
        method=config.method,
        scale=scaling,
        mask=None if attention_mask is None else attention_mask[:, :, 0, : key.shape[2]],
        seed=_row_seeds(module, binding, query, key),
        position=_positions(kwargs, query.device),
        layer=binding.layer,
        head_offset=binding.rank * query.shape[1],
        return_stats=binding.traffic is not None,
    )
    if isinstance(result, torch.Tensor):
        return result
    if binding.traffic is not None and result.stats is not None:
        binding.traffic.add(result.stats)
    return result.out


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


def _positions(kwargs: dict[str, Any], device: torch.device) -> torch.Tensor:
    """One past the position of the query row, int64 ``[1]`` or ``[B]``.

    Not left to the operator, whose default counts attended rows: that count stands still on sliding
    layers, and with it the draws.
    """
    position_ids = kwargs.get("position_ids")
    if position_ids is None:
        position_ids = kwargs.get("cache_position")
        if position_ids is None:
            raise ValueError(
                "position_ids=None: this model does not tell its attention layers where the query "
                "is, without which the draws would repeat at every step"
            )
        position_ids = position_ids.unsqueeze(0)
    if position_ids.ndim != 2:
        raise ValueError(
            f"position_ids must have shape [batch, rows], got {tuple(position_ids.shape)}"
        )
    return position_ids[:, -1].to(device=device, dtype=torch.int64) + 1


def _refuse_unsupported(kwargs: dict[str, Any]) -> None:
    if kwargs.get("output_attentions"):
        raise ValueError(
            "output_attentions=True: sampled attention has no weights to return; "
            'disable santa_torch and use attn_implementation="eager"'
        )
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
