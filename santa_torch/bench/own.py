"""Our variants: the floor, each method at each S, and methods at another instruction-set level."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

import santa_torch
from santa_torch import _load
from santa_torch.bench.cases import Case
from santa_torch.bench.check import Exact
from santa_torch.bench.inputs import Inputs
from santa_torch.bench.timing import Variant

FLOOR = "read K and V once"
DENSE = "santa dense"

#: A call below this many bytes of K and V is about overhead: the bare operator is timed beside it.
_SMALL = 2**20

Check = Callable[[Exact, int], float]


@dataclass
class Own:
    """One of our variants.

    Parameters
    ----------
    variant : Variant
        What is timed.
    check : callable or None
        Called with the exact result of a set and the set's index, before anything is timed.
    method : str
        "" for the floor.
    samples : int or None
        S, where it samples.
    """

    variant: Variant
    check: Check | None
    method: str = ""
    samples: int | None = None


def label(method: str, samples: int | None, level: str | None = None) -> str:
    """The name of one of our variants."""
    text = f"santa {method}" if samples is None else f"santa {method} S={samples}"
    return f"{text} ({level})" if level else text


def own_variants(case: Case, inputs: Inputs) -> Iterator[Own]:
    """The floor first, then the methods."""
    yield Own(_floor(inputs), None)
    for method in case.methods:
        for samples in (None,) if method == "dense" else case.samples:
            yield _decode(inputs, method, samples)
    if case.kv_bytes < _SMALL:
        yield _bare(inputs)
    usual = 128 if 128 in case.samples else case.samples[0]
    for level in case.levels:
        for method in case.methods:
            yield _decode(inputs, method, None if method == "dense" else usual, level)


def stages(variant: Variant, sets: int, threads: int) -> dict[str, float]:
    """Milliseconds of a call in each stage, of all threads together over their number.

    A few calls of their own, apart from those that are timed: the clock costs some of the time.
    """
    calls = min(sets, 4)
    variant.prepare()
    try:
        variant.run(0)
        torch.ops.santa.time_stages(True)
        for index in range(calls):
            variant.run(index)
    finally:
        text = torch.ops.santa.time_stages(False)
        variant.rest()
    pairs = (pair.split("=") for pair in text.split())
    spent = {name: 1e3 * float(seconds) / calls / threads for name, seconds in pairs}
    return {name: milliseconds for name, milliseconds in spent.items() if milliseconds}


def scratch_bytes(case: Case, method: str) -> int:
    """Bytes of scratch that a call plans."""
    shape = (case.batch, case.heads, case.kv_heads, case.rows, case.head_dim, case.head_dim)
    return int(_load.C.plan_cpu(*shape, method)["scratch_bytes"])


def _floor(inputs: Inputs) -> Variant:
    flat, read = inputs.flat, torch.ops.santa.read_through
    return Variant(FLOOR, "floor", lambda i: read(flat[i]))


def _decode(inputs: Inputs, method: str, samples: int | None, level: str | None = None) -> Own:
    q, keys, values = inputs.q, inputs.keys, inputs.values
    name = label(method, samples, level)
    zero = torch.zeros(1, dtype=torch.int64)

    def call(i: int, seed: torch.Tensor) -> torch.Tensor:
        out = santa_torch.decode(q, keys[i], values[i], samples=samples, method=method, seed=seed)
        assert isinstance(out, torch.Tensor)
        return out

    used = torch.ops.santa.cpu_level()

    def enter() -> None:
        torch.ops.santa.set_cpu_level(level or used)

    def leave() -> None:
        torch.ops.santa.set_cpu_level(used)

    def check(exact: Exact, i: int) -> float:
        enter()
        try:
            if samples is None:
                return exact.check_exact(name, call(i, zero), q.dtype)
            return exact.check_sampled(
                name, lambda seed: call(i, torch.tensor([seed])), method, samples
            )
        finally:
            leave()

    variant = Variant(name, "santa", lambda i: call(i, zero), enter, leave)
    return Own(variant, check, method, samples)


def _bare(inputs: Inputs) -> Own:
    """The operator without the checks of its Python function."""
    q, keys, values = inputs.q, inputs.keys, inputs.values
    seed, operator = torch.zeros(1, dtype=torch.int64), torch.ops.santa.decode
    name = "santa dense, bare operator"

    def call(i: int) -> torch.Tensor:
        out: torch.Tensor = operator(q, keys[i], values[i], samples=1, method="dense", seed=seed)[0]
        return out

    check = lambda exact, i: exact.check_exact(name, call(i), q.dtype)  # noqa: E731
    return Own(Variant(name, "santa", call), check, "dense")
