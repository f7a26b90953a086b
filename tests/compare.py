"""How close is close enough, per dtype, against the float64 reference.

The kernels keep everything between the inputs and the output in fp32 or wider, so an output may
differ from the exact one by its own rounding and by fp32's noise, and by no more. That is tighter
than the rule of the field (twice the error of the same computation in the inputs' dtype), which is
checked too for the dense method.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from cases import Case, Inputs

import santa_torch
from santa_torch import reference

OPS = torch.ops.santa
FP32 = 2.0**-24  # half a unit in the last place of 1
CAP_ROUNDING = 8  # relative error of the capping kernel, in units of FP32; 5 measured


def weights_of(inputs: Inputs, scale: float | None = None) -> torch.Tensor:
    """Integer weights of the kernels, int32 ``[B, Hq, L]``."""
    scores, maxima = OPS.score(inputs.q, inputs.k, scale=scale, **inputs.scoring())
    return OPS.weigh(scores, maxima)


@contextmanager
def reference_weights(weights: torch.Tensor) -> Iterator[None]:
    """Let ``reference.decode`` draw from given integers.

    Scores of two precisions round to integers that differ in the last place, and a threshold that
    lies just there selects another row. With the kernel's integers the draws are the same ones, and
    what is left to compare is compared tightly; the integers are compared by a test of their own.
    """
    own = reference.weigh
    reference.weigh = lambda scores, maxima: weights.long()  # type: ignore[assignment]
    try:
        yield
    finally:
        reference.weigh = own


def output_tolerance(
    exact: torch.Tensor, size: torch.Tensor, dtype: torch.dtype, cap_noise: float = 0.0
) -> torch.Tensor:
    """Elementwise bound: rounding to ``dtype``, and fp32 noise relative to ``sum |weight v|``."""
    info = torch.finfo(dtype)
    rounding = exact.abs() * info.eps / 2 + info.smallest_normal * info.eps
    return 1.01 * rounding + (2.0**-17 + 2 * cap_noise) * size


def cap_noise(inputs: Inputs) -> float:
    """Absolute error that capping adds to scores, hence the relative one of their weights."""
    if inputs.softcap is None:
        return 0.0
    scores, _ = OPS.score(inputs.q, inputs.k, **inputs.scoring())
    return CAP_ROUNDING * FP32 * float(scores[scores.isfinite()].abs().max())


def assert_within(name: str, got: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> None:
    """NaN only where NaN is due, infinities alike, and everything else within the bound."""
    got, bad = got.double(), exact.isnan()
    assert torch.equal(got.isnan(), bad), f"{name}: NaN in {got}, expected {exact}"
    infinite = exact.isinf()
    assert torch.equal(got[infinite], exact[infinite]), f"{name}: {got} instead of {exact}"
    regular = ~bad & ~infinite
    error = torch.where(regular, (got - exact).abs() - bound, -math.inf)
    if error.numel() and error.max() > 0:
        at = torch.unravel_index(error.argmax(), error.shape)
        place = tuple(int(i) for i in at)
        raise AssertionError(
            f"{name}{list(place)} is {got[at].item()!r}, expected {exact[at].item()!r} "
            f"within {bound.expand_as(error)[at].item():.3g}"
        )


def plain_attention(inputs: Inputs, scale: float | None = None) -> torch.Tensor:
    """Softmax attention in the inputs' dtype with PyTorch's operators, unmasked."""
    q, k, v = inputs.q, inputs.k, inputs.v
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    factor = 1 / math.sqrt(q.shape[2]) if scale is None else scale
    scores = torch.einsum("bhd,bhld->bhl", q, k) * factor
    return torch.einsum("bhl,bhld->bhd", scores.softmax(-1), v)


def check_scores(case: Case, inputs: Inputs, scale: float | None = None) -> None:
    """Stage ``score`` against float64, relative to what cancels in each dot product."""
    scores, maxima = OPS.score(inputs.q, inputs.k, scale=scale, **inputs.scoring())
    exact, exact_maxima = reference.score(inputs.q, inputs.k, scale=scale, **inputs.scoring())
    factor = abs(1 / math.sqrt(case.head_dim) if scale is None else scale)
    size = factor * torch.einsum(
        "bhd,bhld->bhl",
        inputs.q.double().abs(),
        inputs.k.double().abs().repeat_interleave(case.group, 1),
    )
    # Rounding errors of a sum of D products in a tree of lanes: well below the linear bound.
    rounding = 4 + (0 if case.softcap is None else CAP_ROUNDING)
    bound = FP32 * (4 + math.sqrt(case.head_dim)) * size
    bound = bound + rounding * FP32 * exact.abs().nan_to_num(0, 0, 0)
    assert_within("scores", scores, exact, bound)
    assert_within("maxima", maxima, exact_maxima, bound.amax(-1))
    assert torch.equal(maxima, scores.amax(-1))


def check_dense(inputs: Inputs, exact: Any, got: Any) -> None:
    """``out`` and ``lse`` of the dense method; ``exact`` from the reference, |v| in ``stats``."""
    size = reference.decode(**inputs._replace(v=inputs.v.abs()).arguments(), method="dense")
    bound = output_tolerance(exact.out, size, inputs.q.dtype, cap_noise(inputs))
    assert_within("out", got.out, exact.out, bound)
    assert_within("lse", got.lse, exact.lse, 2.0**-19 * (1 + exact.lse.abs().nan_to_num(0, 0, 0)))


def check_decode(
    case: Case, inputs: Inputs, method: str, samples: int, **arguments: Any
) -> santa_torch.DecodeOutput:
    """The whole step, with log-sum-exp and statistics, against the reference; returns it."""
    arguments = {"method": method, "samples": samples, **arguments}
    flags = {"return_lse": True, "return_stats": True}
    got = santa_torch.decode(**inputs.arguments(), **arguments, **flags)
    assert isinstance(got, santa_torch.DecodeOutput)
    assert got.out.dtype == case.dtype
    assert got.out.is_contiguous()
    with reference_weights(weights_of(inputs, arguments.get("scale"))):
        exact = reference.decode(**inputs.arguments(), **arguments, **flags)
    # Only a bound, and too small a one fails: the operator's own word will do for it.
    sizes = inputs._replace(v=inputs.v.abs()).arguments()
    size = santa_torch.decode(**sizes, **arguments).double().nan_to_num(0.0).clamp(max=100.0)
    capped = cap_noise(inputs) if method == "dense" else 0.0  # the others share their weights
    bound = output_tolerance(exact.out, size, case.dtype, capped)
    assert_within("out", got.out, exact.out, bound)
    assert_within("lse", got.lse, exact.lse, 2.0**-19 * (1 + exact.lse.abs().nan_to_num(0, 0, 0)))
    for name in ("key_rows", "value_rows", "bytes_read", "bytes_total"):
        assert_equal(name, getattr(got.stats, name), getattr(exact.stats, name))
    errors = exact.stats.squared_error
    noise = 1e-25 * size.square().sum(-1) + 1e-44  # where contributions are all but equal
    assert_within("squared_error", got.stats.squared_error, errors, 2.0**-14 * errors + noise)
    return got


def assert_equal(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit, NaN equal to NaN, with the first difference in the message."""
    assert got.shape == expected.shape, f"{name}: shape {got.shape} instead of {expected.shape}"
    assert got.dtype == expected.dtype, f"{name}: {got.dtype} instead of {expected.dtype}"
    different = (got != expected) & ~(got.isnan() & expected.isnan())
    if different.any():
        at = tuple(int(i) for i in different.nonzero()[0])
        raise AssertionError(
            f"{name}{list(at)} is {got[at].item()!r} instead of {expected[at].item()!r}; "
            f"{int(different.sum())} of {different.numel()} differ"
        )


def assert_same(got: santa_torch.DecodeOutput, expected: santa_torch.DecodeOutput) -> None:
    """Two results with everything in them, bit for bit."""
    assert_equal("out", got.out, expected.out)
    assert got.lse is not None
    assert expected.lse is not None
    assert_equal("lse", got.lse, expected.lse)
    if expected.stats is not None:
        assert got.stats is not None
        for name, value in expected.stats._asdict().items():
            assert_equal(name, getattr(got.stats, name), value)


def assert_drawn(
    got: tuple[torch.Tensor, torch.Tensor, torch.Tensor], expected: list[list[reference.Drawn]]
) -> None:
    """Rows and counts of the operator against the reference's lists; zeros past the count."""
    rows, counts, num_rows = got
    assert rows.dtype == torch.int64
    assert counts.dtype == num_rows.dtype == torch.int32
    for b, sequence in enumerate(expected):
        for h, drawn in enumerate(sequence):
            n = int(num_rows[b, h])
            place = f"[{b}, {h}]"
            assert n == len(drawn.rows), f"num_rows{place} is {n} instead of {len(drawn.rows)}"
            assert_equal(f"rows{place}", rows[b, h, :n], drawn.rows)
            assert_equal(f"counts{place}", counts[b, h, :n], drawn.counts.int())
            assert not rows[b, h, n:].any()
            assert not counts[b, h, n:].any()
