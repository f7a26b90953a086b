"""Several query rows of one forward through an operator that takes one row per sequence.

The rows of a sequence become the batch of the operator: keys and values are expanded with stride 0,
so nothing is copied, and every row has its own length, mask and position. Bits do not depend on the
batch, so row i gets what a decoding step at its place would get.

    query [B, Hq, Q, D]     for each sequence, in blocks of rows:
        q     [rows, Hq, D]
        k, v  [rows, Hkv, L, D]   stride 0 over rows
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from santa_torch.hf.sketches import one_sequence
from santa_torch.sketch import KeySketch
from santa_torch.stats import DecodeStats

#: Scratch memory of one call of the operator, which keeps it for its thread. A row of a model with
#: 32/8 heads needs 5 MiB at 32k keys, so that 12 of them go at once.
SCRATCH_BYTES = 2**26

#: One query row of each sequence: q, k, v, mask, seq_lens, seed, position, sketch -> out and
#: statistics.
Decode = Callable[..., tuple[torch.Tensor, DecodeStats | None]]


def decode_rows(
    decode: Decode,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    causal: bool,
    seed: torch.Tensor,
    position: torch.Tensor | None,
    sketch: KeySketch | None = None,
) -> tuple[torch.Tensor, list[DecodeStats | None]]:
    """Answer every row of ``query`` as the decoding step that it stands for.

    Parameters
    ----------
    decode : callable
        ``decode(q, k, v, mask=, seq_lens=, seed=, position=, sketch=)`` for one row per sequence.
    query : Tensor
        ``[B, Hq, Q, D]``.
    key, value : Tensor
        ``[B, Hkv, L, D]`` and ``[B, Hkv, L, Dv]``.
    mask : Tensor, optional
        ``[B or 1, Hq or 1, Q, >= L]``.
    causal : bool
        Row i attends to rows 0 to i, which ``mask`` then does not say.
    seed : Tensor
        int64 ``[B]`` or ``[1]``.
    position : Tensor, optional
        int64 ``[B or 1, Q]``, one past the position of each row.
    sketch : KeySketch, optional
        Of the rows of ``key``; those that a row does not attend to are in it already.

    Returns
    -------
    out : Tensor
        ``[B, Q, Hq, Dv]``.
    stats : list
        What each call of ``decode`` reported.
    """
    parts = row_blocks(query.shape[2], _scratch_bytes(query, key), SCRATCH_BYTES)
    outs, stats = [], []
    for index in range(query.shape[0]):
        blocks = []
        for part in parts:
            count = part.stop - part.start
            out, report = decode(
                query[index, :, part].transpose(0, 1),
                key[index : index + 1].expand(count, -1, -1, -1),
                value[index : index + 1].expand(count, -1, -1, -1),
                mask=None if mask is None else _mask_of(mask, index, part, key.shape[2]),
                seq_lens=_lengths(part, query.device) if causal else None,
                seed=_row_of(seed, index).reshape(1),
                position=None if position is None else _row_of(position, index)[part],
                sketch=None if sketch is None else one_sequence(sketch, index, count),
            )
            blocks.append(out)
            stats.append(report)
        outs.append(torch.cat(blocks))
    return torch.stack(outs), stats


def row_blocks(rows: int, each: int, limit: int) -> list[slice]:
    """Blocks of ``rows`` rows, as many at a time as stay within ``limit``, at least one.

    Parameters
    ----------
    rows : int
        Query rows of the forward.
    each, limit : int
        What one row needs and what a block may need, in one unit.
    """
    size = max(1, limit // each)
    return [slice(first, min(first + size, rows)) for first in range(0, rows, size)]


def _scratch_bytes(query: torch.Tensor, key: torch.Tensor) -> int:
    """Scratch memory of one query row.

    The operator keeps a float32 score per key row and query head, and for ``"shared"`` an inclusion
    probability per key row and key/value head; the sums beside them are small.
    """
    return 4 * key.shape[2] * (query.shape[1] + key.shape[1])


def _mask_of(mask: torch.Tensor, index: int, part: slice, length: int) -> torch.Tensor:
    """``[rows, Hq or 1, L]`` of one sequence."""
    return _row_of(mask, index)[:, part, :length].transpose(0, 1)


def _row_of(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """Batch row ``index`` of a tensor that may have one for all."""
    return tensor[0 if tensor.shape[0] == 1 else index]


def _lengths(part: slice, device: torch.device) -> torch.Tensor:
    return torch.arange(part.start + 1, part.stop + 1, device=device)
