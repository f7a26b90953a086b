"""Samplers with faults that were found in the field, for tests that must catch them.

Each stands in for ``torch.ops.santa.draw`` with one query head; ``honest`` is the same code without
a fault. Random bits come from torch's generator: what is wrong here is never the generator.
"""

from __future__ import annotations

import numpy as np
import torch

TILE_ROWS = 64
Sample = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _uniform(seed: torch.Tensor, position: torch.Tensor, layer: int, total: int) -> torch.Tensor:
    """int64 ``[B, 1]`` in ``[0, total)``, different in every call and sequence."""
    generator = torch.Generator()
    generator.manual_seed(hash((int(seed[0]), int(seed[-1]), int(position[0]), layer)) % 2**63)
    return torch.randint(0, total, (len(seed), 1), generator=generator)


def _as_sample(rows: torch.Tensor) -> Sample:
    """Rows of every draw ``[B, S]`` in the form of the operator's outputs, repeats as they are."""
    full = torch.full((len(rows), 1), rows.shape[1], dtype=torch.int32)
    return rows[:, None], torch.ones_like(rows[:, None], dtype=torch.int32), full


def _systematic(weights: torch.Tensor, samples: int, u: torch.Tensor) -> torch.Tensor:
    """Rows ``[B, S]`` of a systematic sample of integer weights ``[L]`` for u in [0, total)."""
    points = (torch.arange(samples) * int(weights.sum()) + u) // samples
    return torch.searchsorted(weights.cumsum(0), points, right=True)


def honest(weights: torch.Tensor, *, samples: int, seed, position, layer=0, **_) -> Sample:
    """A correct systematic sample."""
    weights = weights[0, 0].long()
    u = _uniform(seed, position, layer, int(weights.sum()))
    return _as_sample(_systematic(weights, samples, u))


def largest_remainder_tiles(weights, *, samples: int, seed, position, layer=0, **_) -> Sample:
    """Each tile gets a rounded number of draws: rows of rounded-down tiles come too rarely."""
    weights = weights[0, 0].long()
    tiles = weights.split(TILE_ROWS)
    shares = torch.stack([tile.sum() for tile in tiles]) * samples
    budget = shares // weights.sum()
    left = samples - int(budget.sum())
    budget[(shares % weights.sum()).argsort(descending=True)[:left]] += 1
    rows = []
    for i, (tile, n) in enumerate(zip(tiles, budget.tolist(), strict=True)):
        if n > 0:
            u = _uniform(seed, position, layer * 1000 + i, int(tile.sum()))
            rows.append(i * TILE_ROWS + _systematic(tile, n, u))
    return _as_sample(torch.cat(rows, 1))


def fp32_prefix(weights, *, samples: int, seed, position, layer=0, **_) -> Sample:
    """The distribution function is a running float32 sum; so is the point that looks into it."""
    p = weights[0, 0].numpy().astype(np.float32)
    prefix = torch.from_numpy(np.cumsum(p / p.sum(dtype=np.float32), dtype=np.float32))
    u = _uniform(seed, position, layer, 2**24) / 2**24
    points = (torch.arange(samples) + u.float()) / samples
    rows = torch.searchsorted(prefix, points, right=True)
    return _as_sample(rows.clamp(max=len(p) - 1))


def closed_above(weights, *, samples: int, seed, position, layer=0, **_) -> Sample:
    """U in (0, total] instead of [0, total)."""
    weights = weights[0, 0].long()
    u = _uniform(seed, position, layer, int(weights.sum())) + 1
    return _as_sample(_systematic(weights, samples, u).clamp(max=len(weights) - 1))


def without_last_row(weights, **arguments) -> Sample:
    """The loop over rows ends one too early."""
    weights = weights.clone()
    weights[..., -1] = 0
    return honest(weights, **arguments)


def constant_offset(weights, *, samples: int, seed, position, layer=0, **_) -> Sample:
    """One offset per sequence, the same at all steps and in all layers."""
    return honest(weights, samples=samples, seed=seed, position=torch.zeros_like(position))


def fixed_offset(weights, *, samples: int, seed, position, layer=0, **_) -> Sample:
    """The offset 1/2, always."""
    weights = weights[0, 0].long()
    u = torch.full((len(seed), 1), int(weights.sum()) // 2)
    return _as_sample(_systematic(weights, samples, u))


def floored_weights(scores: torch.Tensor, maxima: torch.Tensor) -> torch.Tensor:
    """Weights rounded down; stands in for ``torch.ops.santa.weigh``."""
    return (2**30 * (scores - maxima[..., None]).double().exp()).int()
