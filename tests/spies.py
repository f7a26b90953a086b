"""What a test sees of calls of the operator, of compiled graphs, and of memory in use."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch._dynamo.testing import CompileCounterWithBackend

from santa_torch import ops


@contextmanager
def operator_calls() -> Iterator[list[dict[str, Any]]]:
    """Every call of the operator: keyword arguments, the tensors "q", "k", "v", the result "out".

    The fixture ``calls`` opens it for a whole test.
    """
    seen: list[dict[str, Any]] = []
    original = ops.decode

    def spy(q: Any, k: Any, v: Any, **arguments: Any) -> Any:
        out = original(q, k, v, **arguments)
        seen.append({**arguments, "q": q, "k": k, "v": v, "out": out})
        return out

    with mock.patch.object(ops, "decode", spy):
        yield seen


class Graphs(CompileCounterWithBackend):
    """The backend "aot_eager", counting; the copy that a CompileConfig makes counts here too."""

    def __init__(self) -> None:
        super().__init__("aot_eager")

    def __deepcopy__(self, memo: Any) -> Graphs:
        return self


_FIELDS = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Mallinfo2(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


class _Mallinfo(ctypes.Structure):
    """``struct mallinfo`` of glibc, before 2.33: wraps around at 4 GiB, with signs."""

    _fields_ = [(name, ctypes.c_int) for name in _FIELDS]


def memory_in_use() -> tuple[int, int]:
    """Bytes handed out by malloc, and blocks handed out by Python's own allocator.

    Unlike the resident size of the process they move with every tensor that stays. Needs glibc.
    """
    gc.collect()
    library = ctypes.CDLL(None)
    mallinfo = getattr(library, "mallinfo2", None) or library.mallinfo
    mallinfo.restype = _Mallinfo2 if hasattr(library, "mallinfo2") else _Mallinfo
    info = mallinfo()
    return info.uordblks + info.hblkhd, sys.getallocatedblocks()


def assert_memory_flat(calls: Callable[[int], None]) -> None:
    """``calls(n)`` keeps nothing, once its first calls have filled what fills once."""
    calls(200)
    before = memory_in_use()
    calls(1000)
    grown, blocks = (now - then for now, then in zip(memory_in_use(), before, strict=True))
    assert grown < 20 * 1000  # a tensor that stays takes 300 bytes and more, a string 48
    assert blocks < 1000
