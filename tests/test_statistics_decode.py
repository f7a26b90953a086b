"""decode as a whole: unbiasedness, independence of its draws, and the error that it reports.

Limits and false alarms as in test_statistics.py.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import pytest
import torch
from ztest import FALSE_ALARM, ONE, Moments, assert_independent, assert_mean, moments

import santa_torch
from santa_torch import _load, reference

METHODS = ("multinomial", "stratified", "systematic", "shared")
GROUP, KV_HEADS, DIM, VALUE_DIM = 3, 2, 16, 6
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(rows: int, spread: float, value_dim: int = VALUE_DIM) -> Tensors:
    """q, k, v of one sequence whose heads are related, as those of a group are."""
    generator = torch.Generator().manual_seed(rows)
    q = torch.randn(1, KV_HEADS, 1, DIM, generator=generator)
    q = q + 0.6 * torch.randn(1, KV_HEADS, GROUP, DIM, generator=generator)
    k = spread * torch.randn(1, KV_HEADS, rows, DIM, generator=generator)
    v = torch.randn(1, KV_HEADS, rows, value_dim, generator=generator) + 0.5
    return q.flatten(1, 2), k, v


def attention_like(rows: int) -> Tensors:
    """A sink, the newest rows, and a heavy tail of others; values with a common part."""
    generator = torch.Generator().manual_seed(7)
    q, k, v = inputs(rows, 0.8, value_dim=64)
    age = torch.arange(rows).flip(0).double()
    score = 3.5 * torch.exp(-age / 24) + 1.2 * torch.randn(rows, generator=generator)
    score[0] = 6.5
    direction = q.view(1, KV_HEADS, GROUP, DIM).mean(2, keepdim=True)
    direction = direction / direction.square().sum(-1, keepdim=True) * DIM**0.5
    return q, k + score[:, None].float() * direction, v


def exact_moments(
    method: str,
    samples: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> list[Moments]:
    """Of every head's output, from the operator's own integer weights."""
    scores, maxima = torch.ops.santa.score(q, k)
    weights = torch.ops.santa.weigh(scores, maxima).long()
    row_mass = torch.ones(q.shape[:2])
    if sinks is not None:
        row_mass = torch.sigmoid(scores.double().logsumexp(-1) - sinks.double()).float()
    found = []
    for head in range(q.shape[1]):
        kv = head // GROUP
        values, of_head = v[0, kv].double() * float(row_mass[0, head]), weights[0, head]
        if method != "shared":
            found.append(moments(method, of_head, samples, values / samples))
            continue
        heads = slice(kv * GROUP, (kv + 1) * GROUP)
        density = reference.inclusion(weights[:, heads], samples, 1, row_mass[:, heads])[0, 0]
        share = of_head.double() / float(of_head.sum())
        factor = torch.where(density > 0, share * ONE / density, 0.0)
        found.append(moments(method, density, samples, factor[:, None] * values))
    return found


def outputs(
    method: str, samples: int, n: int, tensors: Tensors, **key: Any
) -> santa_torch.DecodeOutput:
    """decode under n seeds; K and V are one sequence, seen n times without a copy."""
    q, k, v = (x.expand(n, -1, -1, -1) if x.dim() == 4 else x.expand(n, -1, -1) for x in tensors)
    key |= {"samples": samples, "method": method, "seed": torch.arange(n) - n // 2}
    return santa_torch.decode(q, k, v, return_stats=True, **key)


@pytest.mark.parametrize("n", [4000, pytest.param(100_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("spread", "samples"), [(0.0, 16), (0.7, 24), (2.5, 24), (9.0, 64)])
def test_unbiased(backend: str, method: str, spread: float, samples: int, n: int) -> None:
    """From uniform to one-hot: the mean of every output element, and its variance."""
    check_unbiased(method, samples, n // 20 if backend == "simt" else n, inputs(530, spread))


@pytest.mark.parametrize("method", METHODS)
def test_unbiased_beside_sinks(backend: str, method: str) -> None:
    """Sinks that take from a thousandth to nearly all of a head's softmax."""
    tensors = inputs(530, 0.7)
    lse = reference.decode(*tensors, method="dense", return_lse=True).lse[0]
    sinks = (lse + torch.linspace(-7, 7, GROUP * KV_HEADS)).float()
    check_unbiased(method, 24, 200 if backend == "simt" else 4000, tensors, sinks=sinks)


def check_unbiased(method: str, samples: int, n: int, tensors: Tensors, **extra: Any) -> None:
    dense = reference.decode(*tensors, method="dense", **extra)
    expected = exact_moments(method, samples, *tensors, **extra)
    total = torch.zeros(GROUP * KV_HEADS, VALUE_DIM, dtype=torch.float64)
    squares = torch.zeros_like(total)
    mean = torch.stack([m.mean for m in expected])
    size = min(n, 2000)
    for position in range(0, n, size):
        out = outputs(method, samples, size, tensors, position=position, **extra).out.double()
        total += out.sum(0)
        squares += (out - mean).square().sum(0)
    # the integers and fp32 scores stand for the exact softmax
    torch.testing.assert_close(mean, dense[0], rtol=0, atol=2e-5)
    for head, m in enumerate(expected):
        what = f"{method}, head {head}"
        rounding = 1e-6  # of fp32 outputs, whose errors average out
        assert_mean(total[head], n, m.mean, m.variance + rounding**2, m.bound + rounding, what)
        fourth = (m.fourth - m.variance**2).clamp(min=0) + rounding**2
        bound = m.bound.square() + rounding
        assert_mean(squares[head], n, m.variance, fourth, bound, what + ": variance")


@pytest.mark.parametrize("method", METHODS)
def test_unbiased_over_a_million_rows(fast_backend: str, method: str) -> None:
    """Rule 28, through decode: nearly flat attention, more rows than fp32 sums can bear."""
    rows, samples, steps = 2**20, 2**12, 12
    generator = torch.Generator().manual_seed(0)
    q = torch.zeros(1, 1, 8)
    q[..., 0] = 8**0.5
    k = torch.zeros(1, 1, rows, 8)
    k[..., 0] = 0.5 * torch.randn(rows, generator=generator)
    v = torch.rand(1, 1, rows, 2, generator=generator) + (torch.arange(rows) > rows // 3)[:, None]
    weights = torch.ops.santa.weigh(*torch.ops.santa.score(q, k))[0, 0].long()
    if method == "shared":
        density = reference.inclusion(weights[None, None], samples, 1)[0, 0]
        a = v[0, 0].double() * (weights.double() / float(weights.sum()) * ONE / density)[:, None]
    else:
        density, a = weights, v[0, 0].double() / samples
    m = moments(method, density, samples, a)
    total = torch.zeros(2, dtype=torch.float64)
    for step in range(steps):
        total += santa_torch.decode(q, k, v, samples=samples, method=method, position=step)[0, 0]
    assert_mean(total, steps, m.mean, m.variance + 1e-14, m.bound, method)


def test_coefficients_divide_by_the_stored_inclusion(fast_backend: str) -> None:
    """Inclusions of a few units are rounded by a tenth of themselves, and so must the weights be.

    A row of them is taken once in millions of steps: the seeds that take one are looked up.
    """
    rows, samples = 2**18, 1
    q = torch.zeros(1, 1, 8)
    q[..., 0] = 1.0
    k = torch.zeros(1, 1, rows, 8)
    k[..., 1:, 0] = torch.log(torch.linspace(3.0, 4.0, rows - 1) / ONE)
    v = torch.ones(1, 1, rows, 1)
    v[..., 0, :] = 0.0
    weights = torch.ops.santa.weigh(*torch.ops.santa.score(q, k, scale=1.0)).long()
    inclusion = reference.inclusion(weights, samples, 1)[0, 0]
    share = weights[0, 0].double() / float(weights.sum())
    found = 0
    for seed in range(12_000):
        threshold = _load.C.shared_threshold(0, _load.C.random64(seed, 1, 0, 0, 0))
        if not int(inclusion[0]) <= threshold < int(inclusion.sum()):
            continue
        row = int(torch.searchsorted(inclusion.cumsum(0), threshold, right=True))
        out = santa_torch.decode(q, k, v, samples=samples, scale=1.0, seed=seed, position=1)
        torch.testing.assert_close(
            float(out), float(share[row] * ONE / inclusion[row]), rtol=1e-6, atol=0
        )
        found += 1
    assert found >= 3


# ---- independence --------------------------------------------------------------------------------

BINS = 16
PAIRS = 128 * BINS**2


@pytest.mark.parametrize("method", METHODS)
def test_steps_layers_and_heads_draw_independently(fast_backend: str, method: str) -> None:
    """Rule 26: one draw from equal rows whose value is their index."""
    n, heads = PAIRS, 4
    q = torch.zeros(1, 1, 8).expand(n, heads, 8)
    k = torch.zeros(1, 1, 1, 8).expand(n, heads, BINS, 8)
    v = torch.arange(BINS).float()[:, None].expand(n, heads, BINS, 1)

    def probe(**key: int) -> torch.Tensor:
        seed = torch.arange(n) << 20
        out = santa_torch.decode(q, k, v, samples=1, method=method, seed=seed, **key)
        return out[..., 0].long()

    base = probe(position=70)
    others = {
        "next step": probe(position=71),
        "next layer": probe(position=70, layer=1),
        "other heads": probe(position=70, head_offset=heads),
        "step and layer exchanged": probe(position=0, layer=70),
    }
    for what, other in others.items():
        assert_independent(base[:, 0], other[:, 0], BINS, f"{method}: {what}")
    for i in range(heads):
        for j in range(i):
            assert_independent(base[:, i], base[:, j], BINS, f"{method}: heads {i}, {j}")


# ---- reported error ------------------------------------------------------------------------------

# Mean reported over true mean squared error, extremes of the six heads of attention_like(2000).
# The true error of a systematic sample depends on the order of the rows, which a sample cannot see:
# heads scatter around the ratio of a random order. Small samples miss the tail: they report less.
BANDS = {  # measured
    ("shared", 16): (0.90, 1.05),  # .96 to 1.00
    ("shared", 64): (0.90, 1.08),  # .94 to 1.05
    ("shared", 256): (0.95, 1.12),  # .99 to 1.09
    ("systematic", 16): (0.80, 1.05),  # .83 to .96
    ("systematic", 64): (0.90, 1.05),  # .94 to 1.02
    ("systematic", 256): (0.90, 1.08),  # .96 to 1.03
    ("stratified", 16): (0.80, 1.02),  # .86 to .94
    ("stratified", 64): (0.92, 1.02),  # .96 to .98
    ("stratified", 256): (0.96, 1.02),  # .99 to 1.00
    ("multinomial", 16): (0.98, 1.02),  # 1.00, unbiased
    ("multinomial", 256): (0.98, 1.02),
}


@pytest.mark.parametrize(("method", "samples"), BANDS)
def test_reported_error(fast_backend: str, method: str, samples: int) -> None:
    tensors, n = attention_like(2000), 1000
    true = torch.stack([m.variance.sum() for m in exact_moments(method, samples, *tensors)])
    found = outputs(method, samples, n, tensors, position=5)
    realised = (found.out.double() - reference.decode(*tensors, method="dense")).square().sum(-1)
    reported = found.stats.squared_error.double()
    assert_mean_by_spread(realised, true, f"{method}: realised error")
    if method == "multinomial":
        assert_mean_by_spread(reported, true, f"{method}: reported error")
    ratio = reported.mean(0) / true
    low, high = BANDS[method, samples]
    assert low <= float(ratio.min()) <= float(ratio.max()) <= high, ratio


def assert_mean_by_spread(x: torch.Tensor, mean: torch.Tensor, what: str) -> None:
    """Means over dim 0, by a z-test with the spread of the sample: a thousand mild terms."""
    z = (x.mean(0) - mean) / (x.std(0) / len(x) ** 0.5)
    limit = -NormalDist().inv_cdf(FALSE_ALARM / (2 * z.numel()))
    assert float(z.abs().max()) <= limit, f"{what}: z = {z.tolist()}"
