"""Queries and sets of K and V, enough of them that none is still in the processor's caches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from santa_torch.bench.cases import GIB, ITEM_BYTES, MIB, Case

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

#: Sets together hold this many times the last-level cache where memory allows. An exact number
#: would do for a cache that evicts the oldest line; real ones keep some lines for longer.
ROTATION = 4

#: Sets at most: small shapes then come from the last-level cache, as a model's small caches do.
MOST_SETS = 256

#: Standard deviation of the scores: a few dozen rows of 32k carry the mass, as in the heads of
#: trained models. A flat softmax over random values is nearly 0 and makes every error look large.
PEAK = 2.6

#: Elements of random numbers that all sets are cut from, each at an offset of its own. Primes: with
#: a factor of a head's elements in it heads would repeat, and K would equal V at powers of two.
_POOLS = (2**20 - 3, 2**24 - 3)

#: Sets start this many rows apart.
_STRIDE = 7919


class DoesNotFitError(Exception):
    """A shape needs more memory than there is; the message says how much."""


@dataclass(frozen=True)
class Plan:
    """How many sets of K and V a case rotates through.

    Parameters
    ----------
    sets : int
        At least 2.
    set_bytes, cache_bytes : int
        Bytes of one set, and of the last-level cache.
    """

    sets: int
    set_bytes: int
    cache_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes rotated through."""
        return self.sets * self.set_bytes

    @property
    def out_of_cache(self) -> bool:
        """Whether a set has left the last-level cache before its next turn."""
        return self.total_bytes >= 2 * self.cache_bytes

    def __str__(self) -> str:
        where = "" if self.out_of_cache else ": partly from cache"
        return (
            f"{self.sets} sets of K and V, {size(self.total_bytes)} in turn, "
            f"{self.total_bytes / self.cache_bytes:.2g}x the last-level cache of "
            f"{size(self.cache_bytes)}{where}"
        )


def plan(case: Case, cache_bytes: int, available: int, copies: float = 0.0, work: int = 0) -> Plan:
    """Choose the number of sets.

    Parameters
    ----------
    case : Case
        The shape.
    cache_bytes, available : int
        Bytes of the last-level cache, and of memory that may be used.
    copies : float
        What peers keep beside each set, in units of the set: conversions to another dtype.
    work : int
        Bytes that peers need during a call.

    Raises
    ------
    DoesNotFitError
        Not even two sets fit.
    """
    work += 8 * case.rows * (3 * case.group + 2)  # a check in float64, by KV head and in blocks
    work += 64 * MIB
    each = int(case.kv_bytes * (1 + copies))
    wanted = -(-ROTATION * cache_bytes // case.kv_bytes)
    sets = min(max(2, wanted), MOST_SETS, (available - work) // each)
    if sets < 2:
        raise DoesNotFitError(
            f"needs {size(2 * each + work)} of memory for two sets of K and V "
            f"({size(case.kv_bytes)} each), and {size(available)} may be used"
        )
    return Plan(sets, case.kv_bytes, cache_bytes)


def size(count: int) -> str:
    """Bytes for people."""
    if count >= GIB:
        return f"{count / GIB:.2f} GiB"
    return f"{count / MIB:.1f} MiB" if count >= MIB / 10 else f"{count / 1024:.1f} KiB"


class Inputs:
    """The tensors of a case.

    Parameters
    ----------
    case : Case
        The shape.
    sets : int
        Number of sets of K and V.

    Attributes
    ----------
    q : Tensor
        ``[B, Hq, D]``.
    flat : list of Tensor
        One per set, ``[2 * B * Hkv * L * D]``: the allocation that holds its K, then its V.
    keys, values : list of Tensor
        Views of it, ``[B, Hkv, L, D]``.
    """

    def __init__(self, case: Case, sets: int) -> None:
        self.case = case
        dtype = DTYPES[case.dtype]
        random = torch.Generator().manual_seed(0)
        elements = case.kv_bytes // dtype.itemsize
        pool = torch.randn(pool_size(case), generator=random).to(dtype)
        shape = (case.batch, case.heads, case.head_dim)
        self.q = (PEAK * torch.randn(shape, generator=random)).to(dtype)
        self.flat = [_cut(pool, elements, _STRIDE * index * case.head_dim) for index in range(sets)]
        self.keys, self.values = [], []
        for flat in self.flat:
            k, v = flat.view(2, case.batch, case.kv_heads, case.rows, case.head_dim).unbind()
            self.keys.append(k)
            self.values.append(v)
        self._converted: dict[torch.dtype, list[torch.Tensor]] = {}

    def converted(self, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Keys and values in another dtype, made once and shared by the peers that need them."""
        if dtype == self.q.dtype:
            return self.keys, self.values
        if dtype not in self._converted:
            self._converted[dtype] = [flat.to(dtype) for flat in self.flat]
        shape = (2, *self.keys[0].shape)
        pairs = [flat.view(shape).unbind() for flat in self._converted[dtype]]
        return [k for k, _ in pairs], [v for _, v in pairs]


def pool_size(case: Case) -> int:
    """Elements of the pool that the sets of a case are cut from."""
    small, large = _POOLS
    return small if case.kv_bytes // ITEM_BYTES[case.dtype] <= small // 4 else large


def head_starts(case: Case, sets: int) -> list[int]:
    """Where in the pool each head starts, ``[sets * 2 * B * Hkv]``: two that agree are equal.

    Heads that start at different elements hold different numbers throughout.
    """
    heads, each = 2 * case.batch * case.kv_heads, case.rows * case.head_dim
    size = pool_size(case)
    return [
        (_STRIDE * index * case.head_dim + head * each) % size
        for index in range(sets)
        for head in range(heads)
    ]


def _cut(pool: torch.Tensor, elements: int, offset: int) -> torch.Tensor:
    """A tensor of its own with ``elements`` of the pool, around and around from ``offset``."""
    out = torch.empty(elements, dtype=pool.dtype)
    offset, done = offset % len(pool), 0
    while done < elements:
        piece = pool[offset : offset + elements - done]
        out[done : done + len(piece)] = piece
        done, offset = done + len(piece), 0
    return out
