"""Exact attention of one layer, for everything that is not sampled.

    scores as they come             -> transformers' SDPA function
    soft-capped scores, or sinks    -> the model's own eager function

SDPA knows neither a soft cap nor sinks: depending on the version of transformers it drops them or
raises. The eager function lies next to each model's attention class. It wants an additive mask,
and holds all weights ``[B, Hq, Q, L]`` at once, so it is called for blocks of query rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from santa_torch.hf.rows import row_blocks

#: Most weights that one call of an eager function holds: 128 MiB in float32, of which it makes two
#: or three copies. A prompt of 32k tokens with 8 heads goes through in 256 blocks of 128 rows.
EAGER_WEIGHTS = 2**25


def exact_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    dropout: float,
    scaling: float | None,
    **kwargs: Any,
) -> torch.Tensor:
    """Every row of V, weighted by the exact softmax.

    Parameters
    ----------
    module, query, key, value, mask, dropout, scaling, **kwargs
        As ``santa_torch.hf.attention.attention_forward`` gets them.

    Returns
    -------
    Tensor
        ``[B, Q, Hq, Dv]`` in the dtype of ``query``.

    Raises
    ------
    ValueError
        The layer has a soft cap or sinks, and no eager function is known to take care of them.
    """
    options = {"dropout": dropout, "scaling": scaling, **kwargs}
    if kwargs.get("softcap") is None and kwargs.get("s_aux") is None:
        return sdpa_attention_forward(module, query, key, value, mask, **options)[0]
    eager = _eager_function(module)
    batch, heads, rows, _ = query.shape
    parts = row_blocks(rows, batch * heads * key.shape[2], EAGER_WEIGHTS)
    blocks = [
        eager(
            module,
            query[:, :, part],
            key,
            value,
            _additive(module, query, key, mask, part, kwargs),
            **options,
        )[0]
        for part in parts
    ]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)


def is_causal(
    module: torch.nn.Module, query: torch.Tensor, mask: torch.Tensor | None, kwargs: dict[str, Any]
) -> bool:
    """Whether row i of ``query`` attends to rows 0 to i of the keys alone.

    transformers leaves such a mask out. A single row without a mask attends to everything.
    """
    if mask is not None or query.shape[2] == 1:
        return False
    given = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)


def _eager_function(module: torch.nn.Module) -> Callable[..., Any]:
    """``eager_attention_forward`` of the file that defines the module's class, or a base of it."""
    for base in type(module).__mro__:
        function = getattr(sys.modules.get(base.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise ValueError(
        f"{type(module).__name__}: exact attention with a soft cap or sinks needs the model's own "
        f"eager_attention_forward, and {type(module).__module__} has none"
    )


def _additive(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    rows: slice,
    kwargs: dict[str, Any],
) -> torch.Tensor | None:
    """Mask of the given query rows as eager functions add it, in the dtype of ``query``.

    The lowest finite number stands for "not attended", as in transformers' own eager masks: with
    -inf, a padding row that attends to nothing would turn to NaN.
    """
    length = key.shape[2]
    if mask is None:
        if not is_causal(module, query, mask, kwargs):
            return None
        here = torch.arange(rows.start, rows.stop, device=query.device)
        mask = (torch.arange(length, device=query.device) <= here[:, None])[None, None]
    else:
        mask = mask[:, :, rows, :length]
    lowest = torch.finfo(query.dtype).min
    if mask.dtype == torch.bool:
        return torch.zeros((), dtype=query.dtype, device=query.device).where(mask, lowest)
    return mask.clamp(min=lowest).to(query.dtype)
