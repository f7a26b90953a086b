"""What is measured: shapes, and the suites that list them. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

#: Bytes of one element.
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
KIB, MIB, GIB = 2**10, 2**20, 2**30


@dataclass(frozen=True)
class Case:
    """One shape, and which of our variants run at it.

    Parameters
    ----------
    batch, heads, kv_heads, head_dim, rows : int
        q ``[batch, heads, head_dim]``; k and v ``[batch, kv_heads, rows, head_dim]``.
    dtype : str
        "bfloat16", "float16" or "float32".
    threads : int
        Of torch, and of every peer.
    methods : tuple of str
        Of santa_torch.
    samples : tuple of int
        S of the methods that sample.
    levels : tuple of str
        Instruction-set levels to compare beside the one in use.
    """

    batch: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    rows: int = 32768
    dtype: str = "bfloat16"
    threads: int = 2
    methods: tuple[str, ...] = ("dense", "systematic", "shared")
    samples: tuple[int, ...] = (128,)
    levels: tuple[str, ...] = ()

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V together."""
        return 2 * self.batch * self.kv_heads * self.rows * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def standard(self) -> bool:
        """Whether it has the heads of Llama-3.1-8B in bfloat16, which the targets are about."""
        return (self.heads, self.kv_heads, self.head_dim, self.dtype) == (32, 8, 128, "bfloat16")

    def __str__(self) -> str:
        threads = "thread" if self.threads == 1 else "threads"
        return (
            f"B={self.batch} {self.heads}/{self.kv_heads} heads D={self.head_dim} L={self.rows} "
            f"{self.dtype} {self.threads} {threads}"
        )


def default_suite(threads: int) -> list[Case]:
    """What the README shows."""
    base = Case(threads=threads)
    shapes = [(1, 8192), (4, 8192), (1, 32768), (1, 131072)]
    cases = [replace(base, batch=batch, rows=rows) for batch, rows in shapes]
    cases[2] = replace(cases[2], samples=(128, 256, 1024))
    return cases


def quick_suite(threads: int) -> list[Case]:
    """Two lengths of the default suite."""
    return [Case(threads=threads, rows=rows) for rows in (8192, 32768)]


def full_suite(threads: int) -> list[Case]:
    """Everything that a target is about, and the README's shapes."""
    return list(dict.fromkeys(_full(Case(threads=threads))))


def _full(base: Case) -> Iterator[Case]:
    everything = ("dense", "multinomial", "stratified", "systematic", "shared")
    sweep = (16, 64, 128, 256, 512, 1024, 4096)
    levels = ("avx2", "avx512")
    yield from (replace(case, levels=levels) for case in default_suite(base.threads)[:2])
    yield replace(base, methods=everything, samples=sweep, levels=levels)
    yield default_suite(base.threads)[3]
    yield from (replace(base, rows=rows) for rows in (262144, 524288, 1048576))
    yield from (replace(base, rows=rows) for rows in (16, 128, 256, 512, 1024))
    yield replace(base, batch=16, rows=8192)
    for rows in (8192, 32768):
        yield replace(base, heads=9, kv_heads=3, head_dim=64, rows=rows)
    yield from (replace(base, dtype=dtype) for dtype in ("float16", "float32"))
    yield from (replace(base, heads=8 * group) for group in (1, 7, 8))


def adapt(
    case: Case,
    methods: list[str] | None,
    samples: list[int] | None,
    levels: list[str] | None,
) -> Case:
    """The case with what was given in place of its own; dense is always there to compare with."""
    if methods is not None:
        case = replace(case, methods=tuple(dict.fromkeys(["dense", *methods])))
    if samples is not None:
        case = replace(case, samples=tuple(dict.fromkeys(samples)))
    if levels is not None:
        case = replace(case, levels=tuple(dict.fromkeys(levels)))
    return case
