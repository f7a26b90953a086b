"""Run everything that calls ``torch.ops.santa`` on another backend, with tensors of the CPU.

The suite is written once, against operators on the CPU. While ``redirected`` is in force, the
dispatcher's kernels for the CPU are others: those of the emulator (``"simt"``), or on a machine
with a GPU the CUDA operators, reached through copies (``"gpu"``). Whoever calls is none the wiser:
``santa_torch.decode``, ``torch.ops.santa``, a compiled graph, a model.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import simt_library
import torch
from cases import CPU_LEVELS
from simt_library import Setting

import santa_torch

OPERATORS = ("decode", "score", "weigh", "draw", "gather", "bernoulli_query", "sketch_append")
HAS_CUDA = torch.cuda.is_available() and santa_torch.build_info().cuda_module == "loaded"
LEVELS = (*CPU_LEVELS, "simt", *(["gpu"] if HAS_CUDA else []))


def setting_for(test: str) -> Setting:
    """Another order of threads and another device for every test, the same in every run."""
    bits = int.from_bytes(hashlib.sha256(test.encode()).digest()[:8], "little")
    bits, order = divmod(bits, 4)
    bits, resident_blocks = divmod(bits, 3)
    bits, multiprocessors = divmod(bits, 3)
    bits, overlap = divmod(bits, 2)
    return Setting(
        order=order,
        seed=bits % 2**31,
        resident_blocks=resident_blocks + 1,
        multiprocessors=(1, 4, 132)[multiprocessors],
        overlap=bool(overlap),
    )


@contextmanager
def redirected(kernel_of: Callable[[str], Callable[..., Any]]) -> Iterator[None]:
    """Put ``kernel_of(operator)`` in the place of every CPU kernel, and give those back."""
    library = torch.library.Library("santa", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"(?s).*overriding a previously registered")
            for name in OPERATORS:
                library.impl(name, kernel_of(name), "CPU", allow_override=True)
        yield
    finally:
        library._destroy()


@contextmanager
def use(level: str, test: str) -> Iterator[None]:
    """Let ``level`` of ``LEVELS`` do the work within."""
    if level == "simt":
        operators = simt_library.load()
        setting = setting_for(test)
        print(setting)  # shown where the test fails
        setting.use()
        try:
            with redirected(lambda name: getattr(operators, name)):
                yield
        finally:
            Setting().use()
    elif level == "gpu":
        with redirected(_on_gpu):
            yield
    else:
        before = torch.ops.santa.cpu_level()
        torch.ops.santa.set_cpu_level(level)
        try:
            yield
        finally:
            torch.ops.santa.set_cpu_level(before)


def _on_gpu(name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        moved = [transplant(x) for x in args]
        given = {key: transplant(x) for key, x in kwargs.items()}
        operator = getattr(torch.ops.santa, name)
        results = operator(*moved, **given)
        for at, argument in enumerate(operator.default._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                args[at].copy_(moved[at])
        if results is None:
            return None
        if isinstance(results, torch.Tensor):
            return results.cpu()
        return tuple(result.cpu() for result in results)

    return call


def transplant(x: Any) -> Any:
    """A tensor on the GPU in a copy of its whole storage: strides, gaps and odd addresses stay."""
    if not isinstance(x, torch.Tensor):
        return x
    storage = x.untyped_storage().cuda()
    moved = torch.empty(0, dtype=x.dtype, device="cuda")
    return moved.set_(storage, x.storage_offset(), x.shape, x.stride())  # type: ignore[call-overload]
