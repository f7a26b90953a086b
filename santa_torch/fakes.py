"""Shapes and dtypes of the operators' outputs, for torch.compile and torch.export.

The operators themselves check their arguments. A fake repeats what would otherwise pass for a
result: on "meta", and with one argument on "meta" and the rest elsewhere, the dispatcher asks
nobody else.
"""

from __future__ import annotations

import torch

from santa_torch import _load
from santa_torch.config import METHODS


def _on_one_device(op: str, **tensors: torch.Tensor | None) -> None:
    (first, like), *rest = tensors.items()
    assert like is not None
    for name, tensor in rest:
        if tensor is not None and tensor.device != like.device:
            raise ValueError(
                f"santa::{op}: {name} must be on the device of {first} ({like.device}), got "
                f"{tensor.device}"
            )


def _refuse(op: str, name: str, rule: str, value: object) -> None:
    raise ValueError(f"santa::{op}: {name} must {rule}, got {value}")


def _check_shapes(op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None) -> None:
    if q.ndim != 3:
        _refuse(op, "q", "have shape [B, Hq, D]", list(q.shape))
    if k.ndim != 4:
        _refuse(op, "k", "have shape [B, Hkv, L, D]", list(k.shape))
    if k.shape[3] != q.shape[2]:
        _refuse(op, "k", f"have the head dim of q ({q.shape[2]})", list(k.shape))
    if k.shape[1] < 1 or q.shape[1] % k.shape[1] != 0:
        _refuse(op, "k", f"have KV heads that divide {q.shape[1]} query heads", list(k.shape))
    if v is not None and (v.ndim != 4 or v.shape[1] != k.shape[1]):
        _refuse(op, "v", "have shape [B, Hkv, L, Dv] with the KV heads of k", list(v.shape))


def _check_blocks(
    op: str, k: torch.Tensor, key_blocks: torch.Tensor | None, block_rows: torch.Tensor | None
) -> None:
    if (key_blocks is None) != (block_rows is None):
        alone = "block_rows" if key_blocks is None else "key_blocks"
        _refuse(op, "key_blocks and block_rows", "be given together", f"{alone} alone")
    if key_blocks is not None and (
        key_blocks.ndim != 5 or key_blocks.shape[1] != k.shape[1] or key_blocks.shape[4] != 64
    ):
        rule = "have shape [B, Hkv, C, D, 64] with the KV heads of k"
        _refuse(op, "key_blocks", rule, list(key_blocks.shape))


def _check_draw(op: str, method: str, samples: int) -> None:
    if method not in METHODS:
        _refuse(op, "method", f"be one of {', '.join(METHODS)}", repr(method))
    if not 1 <= samples <= _load.C.MAX_SAMPLES:
        _refuse(op, "samples", f"be between 1 and {_load.C.MAX_SAMPLES}", samples)


def _smaller(rows: int, capacity: int) -> int:
    return torch.sym_min(rows, capacity)


@torch.library.register_fake("santa::decode")
def _decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    samples: int,
    method: str = "shared",
    scale: float | None = None,
    mask: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    seed: torch.Tensor,
    position: torch.Tensor | None = None,
    layer: int = 0,
    head_offset: int = 0,
    return_stats: bool = False,
    key_blocks: torch.Tensor | None = None,
    block_rows: torch.Tensor | None = None,
    bernoulli_draws: int = 0,
    bernoulli_shared: bool = True,
) -> tuple[torch.Tensor, ...]:
    _on_one_device(
        "decode",
        q=q,
        k=k,
        v=v,
        mask=mask,
        seq_lens=seq_lens,
        sinks=sinks,
        seed=seed,
        position=position,
        key_blocks=key_blocks,
        block_rows=block_rows,
    )
    _check_shapes("decode", q, k, v)
    _check_blocks("decode", k, key_blocks, block_rows)
    if not 0 <= bernoulli_draws <= _load.C.MAX_BERNOULLI_DRAWS:
        rule = f"be between 1 and {_load.C.MAX_BERNOULLI_DRAWS} (0: none)"
        _refuse("decode", "bernoulli_draws", rule, bernoulli_draws)
    _check_draw("decode", method, samples)
    batch, heads = q.shape[0], q.shape[1]
    kept = batch if return_stats else 0
    return (
        q.new_empty((batch, heads, v.shape[3])),
        q.new_empty((batch, heads), dtype=torch.float32),
        q.new_empty((kept, k.shape[1], 3), dtype=torch.int64),
        q.new_empty((kept, k.shape[1]), dtype=torch.int64),
        q.new_empty((kept, heads), dtype=torch.float32),
    )


@torch.library.register_fake("santa::bernoulli_query")
def _bernoulli_query(
    q: torch.Tensor,
    *,
    draws: int,
    shared: bool = True,
    kv_heads: int,
    seed: torch.Tensor,
    position: torch.Tensor,
    layer: int = 0,
    head_offset: int = 0,
) -> torch.Tensor:
    _on_one_device("bernoulli_query", q=q, seed=seed, position=position)
    if q.ndim != 3:
        _refuse("bernoulli_query", "q", "have shape [B, Hq, D]", list(q.shape))
    if kv_heads < 1 or q.shape[1] % kv_heads != 0:
        rule = f"be at least 1 and divide {q.shape[1]} query heads"
        _refuse("bernoulli_query", "kv_heads", rule, kv_heads)
    if not 1 <= draws <= _load.C.MAX_BERNOULLI_DRAWS:
        rule = f"be between 1 and {_load.C.MAX_BERNOULLI_DRAWS}"
        _refuse("bernoulli_query", "draws", rule, draws)
    return q.new_empty(q.shape, dtype=torch.float32)


@torch.library.register_fake("santa::sketch_append")
def _sketch_append(
    key_blocks: torch.Tensor,
    open_rows: torch.Tensor,
    block_rows: torch.Tensor,
    k: torch.Tensor,
    *,
    num_rows: torch.Tensor | None = None,
) -> None:
    _on_one_device(
        "sketch_append",
        key_blocks=key_blocks,
        open_rows=open_rows,
        block_rows=block_rows,
        k=k,
        num_rows=num_rows,
    )


@torch.library.register_fake("santa::score")
def _score(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    scale: float | None = None,
    mask: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    softcap: float | None = None,
    key_blocks: torch.Tensor | None = None,
    block_rows: torch.Tensor | None = None,
    sparse_query: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    _on_one_device(
        "score",
        q=q,
        k=k,
        mask=mask,
        seq_lens=seq_lens,
        key_blocks=key_blocks,
        block_rows=block_rows,
    )
    _check_shapes("score", q, k, None)
    _check_blocks("score", k, key_blocks, block_rows)
    batch, heads = q.shape[0], q.shape[1]
    return (
        q.new_empty((batch, heads, k.shape[2]), dtype=torch.float32),
        q.new_empty((batch, heads), dtype=torch.float32),
    )


@torch.library.register_fake("santa::weigh")
def _weigh(scores: torch.Tensor, maxima: torch.Tensor) -> torch.Tensor:
    _on_one_device("weigh", scores=scores, maxima=maxima)
    return scores.new_empty(scores.shape, dtype=torch.int32)


@torch.library.register_fake("santa::draw")
def _draw(
    weights: torch.Tensor,
    *,
    samples: int,
    method: str = "shared",
    kv_heads: int,
    seed: torch.Tensor,
    position: torch.Tensor,
    layer: int = 0,
    head_offset: int = 0,
    row_mass: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _on_one_device("draw", weights=weights, seed=seed, position=position, row_mass=row_mass)
    _check_draw("draw", method, samples)
    batch, heads, rows = weights.shape
    if kv_heads < 1 or heads < 1 or heads % kv_heads != 0:
        _refuse("draw", "kv_heads", f"be at least 1 and divide {heads} query heads", kv_heads)
    shared = method == "shared"
    draw_heads = kv_heads if shared else heads
    capacity = _smaller(rows, _load.C.draw_capacity(shared, samples, heads // kv_heads))
    return (
        weights.new_empty((batch, draw_heads, capacity), dtype=torch.int64),
        weights.new_empty((batch, draw_heads, capacity), dtype=torch.int32),
        weights.new_empty((batch, draw_heads), dtype=torch.int32),
    )


@torch.library.register_fake("santa::gather")
def _gather(
    rows: torch.Tensor, coefficients: torch.Tensor, num_rows: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    _on_one_device("gather", coefficients=coefficients, rows=rows, num_rows=num_rows, v=v)
    batch, heads, _ = coefficients.shape
    return coefficients.new_empty((batch, heads, v.shape[3]))


@torch.library.register_fake("santa::prefer_huge_pages")
def _prefer_huge_pages(x: torch.Tensor) -> None:
    """Nothing lies under a tensor without data."""
