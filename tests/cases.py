"""One description of an attention step, and the inputs that it stands for.

Tests and benchmarks take their tensors from here, so that a shape has one meaning in both. The
numbers are seeded by the case and peaked: scores have a standard deviation of ``peak``, where a
plain ``randn`` would give a softmax that is nearly uniform and forgives everything.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

import santa_torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CPU_LEVELS: tuple[str, ...] = tuple(santa_torch.build_info().cpu_levels)
METHODS = ("dense", "multinomial", "stratified", "systematic", "shared")
DRAWING = METHODS[1:]
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 71)
HEAD_DIMS = (*range(8, 257, 8), 1, 3, 17, 33, 100, 257, 320)
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129, 255, 256, 257, 1000, 4097)
CHUNK = 256  # rows per fp32 sum, csrc/math/softmax.h


class Inputs(NamedTuple):
    """Tensors of a step, in the order and under the names of ``decode``'s arguments."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    seq_lens: torch.Tensor | None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def arguments(self) -> dict[str, Any]:
        return {"q": self.q, "k": self.k, "v": self.v, **self.scoring(), "sinks": self.sinks}

    def scoring(self) -> dict[str, Any]:
        """What stage ``score`` takes beside q and k."""
        return {"mask": self.mask, "seq_lens": self.seq_lens, "softcap": self.softcap}


@dataclass(frozen=True)
class Case:
    batch: int = 2
    kv_heads: int = 2
    group: int = 3  # query heads per KV head
    rows: int = 300
    head_dim: int = 64
    value_dim: int = 64
    dtype: torch.dtype = torch.float32
    mask: str = "none"  # a key of MASKS
    seq_lens: tuple[int, ...] | None = None
    softcap: float | None = None
    sinks: str = "none"  # a key of SINKS
    layout: str = "contiguous"  # a key of LAYOUTS
    peak: float = 4.0  # standard deviation of the scores
    seed: int = 0

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    def __str__(self) -> str:
        """Differences from the default case, as pytest prints them."""
        changed = [
            f"{name}={str(value).removeprefix('torch.')}"
            for name, value in vars(self).items()
            if value != getattr(Case, name)
        ]
        return ",".join(changed) or "default"

    def inputs(self) -> Inputs:
        torch_random = torch.Generator().manual_seed(self.seed)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=torch_random)

        q = (self.peak * randn(self.batch, self.heads, self.head_dim)).to(self.dtype)
        k = randn(self.batch, self.kv_heads, self.rows, self.head_dim).to(self.dtype)
        v = randn(self.batch, self.kv_heads, self.rows, self.value_dim).to(self.dtype)
        k, v = LAYOUTS[self.layout](k, v)
        mask = MASKS[self.mask](self, torch_random)
        lengths = None if self.seq_lens is None else torch.tensor(self.seq_lens)
        sinks = SINKS[self.sinks](self, torch_random)
        return Inputs(q, k, v, mask, lengths, self.softcap, sinks)

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)


# ---- layouts: the same numbers behind other strides; what a view does not show is NaN -----------


def _same(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return k, v


def _transposed(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Storage ``[B, L, Hkv, D]``."""
    return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))  # type: ignore


def _interleaved(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V from one pool ``[B, L, 2, Hkv, D]`` by unbind; narrower V leaves NaN beside it."""
    batch, heads, rows, dim = k.shape
    pool = k.new_full((batch, rows, 2, heads, max(dim, v.shape[3])), torch.nan)
    pool[:, :, 0, :, :dim] = k.transpose(1, 2)
    pool[:, :, 1, :, : v.shape[3]] = v.transpose(1, 2)
    k_part, v_part = pool.unbind(2)
    return k_part.transpose(1, 2)[..., :dim], v_part.transpose(1, 2)[..., : v.shape[3]]


def _offset(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Storage shifted by one element and rows an odd number of elements apart: never aligned."""

    def shift(x: torch.Tensor) -> torch.Tensor:
        batch, heads, rows, dim = x.shape
        step = dim + 1 if dim % 2 == 0 else dim + 2
        flat = x.new_full((1 + batch * heads * rows * step,), torch.nan)
        view = flat[1:].view(batch, heads, rows, step)[..., :dim]
        view.copy_(x)
        return view

    return shift(k), shift(v)


def _sliced(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The middle of larger buffers, in every dimension."""

    def embed(x: torch.Tensor) -> torch.Tensor:
        batch, heads, rows, dim = x.shape
        big = x.new_full((batch + 2, heads + 3, rows + 5, dim + 7), torch.nan)
        view = big[1 : 1 + batch, 2 : 2 + heads, 3 : 3 + rows, 4 : 4 + dim]
        view.copy_(x)
        return view

    return embed(k), embed(v)


def _expanded(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every sequence and KV head sees the first one's rows, through strides of 0."""
    return k[:1, :1].expand_as(k), v[:1, :1].expand_as(v)


def _every_other(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows with a step of 2, and K and V with different strides."""

    def spread(x: torch.Tensor, step: int) -> torch.Tensor:
        batch, heads, rows, dim = x.shape
        big = x.new_full((heads, batch, rows * step, dim), torch.nan)
        view = big[:, :, ::step].transpose(0, 1)
        view.copy_(x)
        return view

    return spread(k, 2), spread(v, 3)


Layout = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
LAYOUTS: dict[str, Layout] = {
    "contiguous": _same,
    "transposed": _transposed,
    "interleaved": _interleaved,
    "offset": _offset,
    "sliced": _sliced,
    "expanded": _expanded,
    "every_other": _every_other,
}


# ---- masks ---------------------------------------------------------------------------------------


def _bool(shape: tuple[int, ...], random: torch.Generator, share: float = 0.6) -> torch.Tensor:
    return torch.rand(shape, generator=random) < share


def _additive(
    shape: tuple[int, ...], random: torch.Generator, dtype: torch.dtype, off: float
) -> torch.Tensor:
    bias = torch.randn(shape, generator=random).to(dtype)
    return bias.masked_fill(~_bool(shape, random), off)


def _full(case: Case) -> tuple[int, int, int]:
    return case.batch, case.heads, case.rows


Mask = Callable[[Case, torch.Generator], "torch.Tensor | None"]
MASKS: dict[str, Mask] = {
    "none": lambda case, random: None,
    "rows": lambda case, random: _bool((case.rows,), random),
    "batch": lambda case, random: _bool((case.batch, 1, case.rows), random),
    "heads": lambda case, random: _bool(_full(case), random),
    "one_batch": lambda case, random: _bool((1, case.heads, case.rows), random),
    "per_head": lambda case, random: _bool((case.batch, case.heads, 1), random),
    "stride0": lambda case, random: _bool((1, 1, case.rows), random).expand(_full(case)),
    "row_last": lambda case, random: _bool((case.rows, case.batch), random).T[:, None],
    "sparse": lambda case, random: _bool((case.batch, 1, case.rows), random, 0.02),
    "nothing": lambda case, random: torch.zeros(case.rows, dtype=torch.bool),
    "prefix": lambda case, random: (torch.arange(case.rows) < case.rows * 2 // 3)[None],
    "additive": lambda case, random: _additive(
        (case.batch, 1, case.rows), random, torch.float32, -torch.inf
    ),
    "additive_heads": lambda case, random: _additive(
        _full(case), random, case.dtype, torch.finfo(case.dtype).min
    ),
    "additive_bf16": lambda case, random: _additive(
        (case.heads, case.rows), random, torch.bfloat16, torch.finfo(torch.bfloat16).min
    ),
    "additive_widened": lambda case, random: _additive(
        _full(case), random, torch.bfloat16, torch.finfo(torch.bfloat16).min
    ).float(),
    "additive_half": lambda case, random: _additive(
        _full(case), random, torch.float16, torch.finfo(torch.float16).min
    ),
}


# ---- sinks: one logit per query head -------------------------------------------------------------


def _sinks(case: Case, random: torch.Generator, about: float = 0.0) -> torch.Tensor:
    return about + 3 * torch.randn(case.heads, generator=random)


Sinks = Callable[[Case, torch.Generator], "torch.Tensor | None"]
SINKS: dict[str, Sinks] = {
    "none": lambda case, random: None,
    "float32": _sinks,
    "bfloat16": lambda case, random: _sinks(case, random).bfloat16(),
    "float16": lambda case, random: _sinks(case, random).half(),
    "strong": lambda case, random: _sinks(case, random, 25.0),
    "overwhelming": lambda case, random: _sinks(case, random, 3e4),
    "weak": lambda case, random: _sinks(case, random, -3e4),
    "absent": lambda case, random: torch.full((case.heads,), -torch.inf),
    "some": lambda case, random: _sinks(case, random).masked_fill(
        torch.arange(case.heads) % 2 == 0, -torch.inf
    ),
    "stride2": lambda case, random: _sinks(case, random).repeat_interleave(2)[::2],
    "stride0": lambda case, random: torch.tensor([4.0]).expand(case.heads),
}


def cross(**axes: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Every combination of the axes' values, as keyword arguments."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
