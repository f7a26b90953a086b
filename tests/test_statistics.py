"""Rules 24 to 30 for santa::weigh and santa::draw: means, variances and independence of the draws.

Every test takes the sampler as an argument and is shown to fail for samplers with planted faults.
Seeds are fixed. A correct sampler would fail one assertion for fresh seeds with a probability below
1e-9 (``ztest.FALSE_ALARM``), and there are fewer than a thousand: 1e-6 for the whole file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import planted
import pytest
import torch
from ztest import (
    ONE,
    assert_independent,
    assert_mean,
    count_moments,
    moments,
    tally,
    weighted_sums,
)

import santa_torch
from santa_torch import reference

METHODS = ("multinomial", "stratified", "systematic", "shared")
BATCH_ELEMENTS = 2**21  # of weights in one call
Sampler = Callable[..., planted.Sample]


def softmax_weights(scores: torch.Tensor) -> torch.Tensor:
    return reference.weigh(scores.double(), scores.double().amax(-1)).int()


def peaked(heads: int, rows: int) -> torch.Tensor:
    """Most of the mass in few rows, and a tail down to weight 0."""
    generator = torch.Generator().manual_seed(heads)
    return softmax_weights(5 * torch.randn(heads, rows, generator=generator))


def one_hot(rows: int, at: int) -> torch.Tensor:
    weights = torch.zeros(1, rows, dtype=torch.int32)
    weights[0, at] = ONE
    return weights


def with_tail(rows: int) -> torch.Tensor:
    """Row 0 has nearly everything; each other row has p = 2^-30."""
    weights = torch.ones(1, rows, dtype=torch.int32)
    weights[0, 0] = ONE
    return weights


# name: (weights [heads of one group, rows], samples). Small integers make one unit large.
CASES = {
    "peaked": (peaked(1, 600), 64),
    "peaked-one-draw": (peaked(1, 600), 1),
    "one-hot-first": (one_hot(300, 0), 16),
    "one-hot-last": (one_hot(300, 299), 16),
    "uniform": (torch.full((1, 257), ONE, dtype=torch.int32), 30),
    "as-many-draws-as-equal-rows": (torch.ones(1, 130, dtype=torch.int32), 130),
    "more-draws-than-rows": (torch.tensor([[3, 1, 2]], dtype=torch.int32), 40),
    "small-integers": (torch.tensor([[0, 1, 2, 0, 3, 5, 1, 0]], dtype=torch.int32), 5),
    "two-rows": (torch.tensor([[1, 2]], dtype=torch.int32), 1),
    "tail-of-tiny-p": (with_tail(2**15), 2**16),
    "group-of-three": (peaked(3, 600), 48),
    "group-with-a-dead-head": (peaked(3, 200) * torch.tensor([[1], [0], [1]]).int(), 8),
}


def samples_of(
    sampler: Sampler, method: str, weights: torch.Tensor, samples: int, n: int
) -> Iterator[planted.Sample]:
    """The group's sample under n seeds, in batches."""
    size = max(1, min(n, BATCH_ELEMENTS // max(weights.numel(), samples)))
    for start in range(0, n, size):
        seeds = torch.arange(start, min(start + size, n))
        rows, counts, num_rows = sampler(
            weights.expand(len(seeds), -1, -1),
            samples=samples,
            method=method,
            kv_heads=1 if method == "shared" else len(weights),
            seed=seeds * 0x9E3779B97F4A7C1,
            position=torch.tensor([4000]),
        )
        yield rows[:, 0], counts[:, 0], num_rows[:, 0]


def functionals(rows: int) -> torch.Tensor:
    """Vectors ``a`` for ``sum_j c_j a_j``, float64 ``[L, F]``: where mass could go astray."""
    at = torch.arange(rows)
    generator = torch.Generator().manual_seed(rows)
    signs = torch.randint(0, 2, (rows, 2), generator=generator) * 2 - 1
    columns = [at / rows, at >= rows // 2, at == rows - 1, at % 64 == 0, at % 256 == 255, at != 0]
    return torch.cat([signs, torch.stack(columns, 1)], 1).double()


def check_sample(
    sampler: Sampler, method: str, weights: torch.Tensor, samples: int, draws: int
) -> None:
    """Mean count of each row; mean and variance of sums over rows. Weights int32 ``[G, L]``."""
    rows = weights.shape[1]
    n = max(min(draws // samples, 10 * draws // rows), 20)
    a = functionals(rows)
    if method == "shared":
        density = reference.inclusion(weights[None].long(), samples, 1)[0, 0]
        head = int(weights.sum(1).argmax())  # its Horvitz-Thompson sum is what is tested
        p = weights[head].double() / float(weights[head].sum())
        a = a * torch.where(density > 0, p * ONE / density, 0.0)[:, None]
    else:
        density = weights[0].long()
    of_sum = moments(method, density, samples, a)
    counted = torch.zeros(rows, dtype=torch.float64)
    total, squares = torch.zeros_like(of_sum.mean), torch.zeros_like(of_sum.mean)
    for drawn, counts, num_rows in samples_of(sampler, method, weights, samples, n):
        if method == "shared":
            used = torch.arange(drawn.shape[1]) < num_rows[:, None]
            assert torch.equal(counts.long()[used], density[drawn][used]), "not the inclusion"
            counts = torch.ones_like(counts)
        counted += tally(drawn, counts, num_rows, rows)
        sums = weighted_sums(drawn, counts, num_rows, a)
        total += sums.sum(0)
        squares += (sums - of_sum.mean).square().sum(0)

    mean, variance = count_moments(method, density, samples)
    assert_mean(counted, n, mean, variance, torch.ones_like(mean), f"{method}: counts of rows")
    assert_mean(total, n, of_sum.mean, of_sum.variance, of_sum.term_bound, f"{method}: sums")
    fourth = (of_sum.fourth - of_sum.variance**2).clamp(min=0)
    fourth = torch.where(of_sum.variance > 1e-20, fourth, 0.0)
    assert_mean(
        squares, n, of_sum.variance, fourth, of_sum.bound**2 + 1e-12, f"{method}: variance of sums"
    )


DRAWS = 400_000


# ---- the draws -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES)
def test_counts_and_sums_have_their_mean_and_variance(backend: str, case: str, method: str) -> None:
    draws = DRAWS // 200 if backend == "simt" else DRAWS
    check_sample(torch.ops.santa.draw, method, *CASES[case], draws)


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", ["peaked", "small-integers"])
def test_a_hundred_million_draws(fast_backend: str, case: str, method: str) -> None:
    check_sample(torch.ops.santa.draw, method, *CASES[case], 10**8)


@pytest.mark.parametrize(
    "draws", [10 * DRAWS, pytest.param(10**8, marks=pytest.mark.long)], ids="{:.0e}".format
)
@pytest.mark.parametrize("method", METHODS)
def test_a_million_rows(fast_backend: str, method: str, draws: int) -> None:
    """Rule 28: every row by itself, and each 1,024 rows together."""
    check_million(torch.ops.santa.draw, method, million_rows(), samples=2**19, draws=draws)


def million_rows() -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(1, 2**12, (1, 10**6 + 3), generator=generator, dtype=torch.int32)


def check_million(
    sampler: Sampler, method: str, weights: torch.Tensor, samples: int, draws: int
) -> None:
    n = draws // samples
    density = weights[0].long()
    if method == "shared":
        density = reference.inclusion(weights[None].long(), samples, 1)[0, 0]
    rows = len(density)
    counted = torch.zeros(rows, dtype=torch.float64)
    for drawn, counts, num_rows in samples_of(sampler, method, weights, samples, n):
        counts = torch.ones_like(counts) if method == "shared" else counts
        counted += tally(drawn, counts, num_rows, rows)
    mean, variance = count_moments(method, density, samples)
    assert_mean(counted, n, mean, variance, torch.ones_like(mean), f"{method}: counts of rows")
    bucket = torch.arange(rows) // 1024
    mass = torch.zeros(rows // 1024 + 1, dtype=torch.int64).index_add(0, bucket, density)
    mean, variance = count_moments(method, mass, samples)
    if method == "shared":  # a bucket holds many points: floor(mean) or one more
        variance = mean.frac() * (1 - mean.frac())
    sums = torch.zeros(len(mass)).double().index_add(0, bucket, counted)
    assert_mean(sums, n, mean, variance, torch.ones_like(mean), f"{method}: counts of 1,024 rows")


@pytest.mark.parametrize("group", [1, 3])
def test_inclusion_is_the_root_of_the_summed_squares(group: int) -> None:
    weights, samples = peaked(group, 600), 40
    p = weights.double() / weights.sum(1, keepdim=True).double()
    expected = (samples * p.square().sum(0).sqrt()).clamp(max=1) * ONE
    stored = reference.inclusion(weights[None].long(), samples, 1)[0, 0].double()
    torch.testing.assert_close(stored, expected, rtol=4e-7, atol=0.5)


# ---- independence --------------------------------------------------------------------------------

BINS = 16
PAIRS = 256 * BINS**2


def probe(sampler: Sampler, method: str, heads: int = 1, seed: int = 0, **key: int) -> torch.Tensor:
    """One draw from equal rows under many seeds: leading bits of U, int64 ``[seeds, heads]``."""
    rows, _, num_rows = sampler(
        torch.ones(PAIRS, heads, BINS, dtype=torch.int32),
        samples=1,
        method=method,
        kv_heads=heads,
        seed=torch.arange(PAIRS) + seed,
        position=torch.tensor([key.pop("position", 9)]),
        **key,
    )
    assert bool((num_rows == 1).all())
    return rows[:, :, 0]


def check_steps_and_layers(sampler: Sampler, method: str) -> None:
    base = probe(sampler, method)
    for other in ({"position": 10}, {"layer": 1}, {"position": 1, "layer": 9}, {"position": 2**20}):
        assert_independent(base, probe(sampler, method, **other), BINS, f"{method}: {other}")


def check_seeds(sampler: Sampler, method: str) -> None:
    base = probe(sampler, method)
    for shift in (1, 2, 2**32, 2**33 + 1):
        other = probe(sampler, method, seed=shift)
        assert_independent(base, other, BINS, f"{method}: seeds {shift} apart")


@pytest.mark.parametrize("method", METHODS)
def test_steps_and_layers_draw_independently(fast_backend: str, method: str) -> None:
    """Rule 26."""
    check_steps_and_layers(torch.ops.santa.draw, method)


@pytest.mark.parametrize("method", METHODS)
def test_seeds_draw_independently(fast_backend: str, method: str) -> None:
    check_seeds(torch.ops.santa.draw, method)


@pytest.mark.parametrize("method", METHODS)
def test_heads_draw_independently(fast_backend: str, method: str) -> None:
    hits = probe(torch.ops.santa.draw, method, heads=4)
    for i in range(4):
        for j in range(i):
            assert_independent(hits[:, i], hits[:, j], BINS, f"{method}: heads {i} and {j}")
    # and the same head is the same head in whatever call it comes (rule 25)
    assert torch.equal(probe(torch.ops.santa.draw, method, heads=2, head_offset=2), hits[:, 2:])


# ---- rounding of the weights ---------------------------------------------------------------------


def check_rounding(weigh: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Total-variation bias of the integers is at most L 2^-31, and their errors are centred."""
    rows = 2**20
    units = torch.rand(rows, generator=torch.Generator().manual_seed(1))
    for largest in (0.4999, 0.51, 1.0, 2.0, 30.0, 4000.0):  # of the tail, in units of 2^-30
        low = 0.98 if largest < 1 else 0.0
        scores = ((low + (1 - low) * units) * largest / ONE).clamp(min=1e-30).log()
        scores[rows // 3] = 0.0
        exact = scores.double().exp()
        weights = weigh(scores[None, None], torch.zeros(1, 1))[0, 0].double()
        distance = (weights / weights.sum() - exact / exact.sum()).abs().sum() / 2
        assert distance <= rows * 2.0**-31 + 2.0**-22, f"{largest}: total variation {distance:.3g}"
        if largest >= 1:
            error = (weights - ONE * exact)[scores < 0]
            assert_mean(
                error.sum()[None],
                len(error),
                torch.zeros(1).double(),
                torch.full((1,), 1 / 12).double(),
                torch.ones(1).double(),
                f"rounding of weights below {largest}",
            )


def test_rounding_of_weights(backend: str) -> None:
    check_rounding(torch.ops.santa.weigh)


def test_rounding_of_the_references_weights() -> None:
    check_rounding(reference.weigh)


def test_the_bound_of_the_rounding_is_tight() -> None:
    """All rows just under half a unit vanish: what the bound is for."""
    rows = 2**20
    scores = torch.full((rows,), math.log(0.4999 / ONE))
    scores[0] = 0.0
    exact = scores.double().exp()
    assert int(santa_torch.weigh(scores[None, None], torch.zeros(1, 1))[0, 0, 1:].sum()) == 0
    assert 1 - 1 / float(exact.sum()) > 0.99 * rows * 2.0**-31


# ---- planted faults ------------------------------------------------------------------------------


def test_the_checks_pass_a_correct_sampler_of_other_make() -> None:
    for case in ("peaked", "uniform", "small-integers", "one-hot-last", "tail-of-tiny-p"):
        check_sample(planted.honest, "systematic", *CASES[case], DRAWS)
    check_million(planted.honest, "systematic", million_rows(), samples=2**19, draws=10 * DRAWS)
    check_steps_and_layers(planted.honest, "systematic")


@pytest.mark.parametrize(
    ("fault", "case"),
    [
        (planted.largest_remainder_tiles, "peaked"),
        (planted.largest_remainder_tiles, "uniform"),
        (planted.closed_above, "small-integers"),
        (planted.closed_above, "as-many-draws-as-equal-rows"),
        (planted.without_last_row, "uniform"),
        (planted.without_last_row, "two-rows"),
        (planted.fixed_offset, "peaked"),
        (planted.fp32_prefix, "tail-of-tiny-p"),
    ],
)
def test_a_planted_fault_is_caught(fault: Sampler, case: str) -> None:
    with pytest.raises(AssertionError, match="times the limit"):
        check_sample(fault, "systematic", *CASES[case], DRAWS)


def test_a_float32_prefix_is_caught_over_a_million_rows() -> None:
    with pytest.raises(AssertionError, match="times the limit"):
        check_million(
            planted.fp32_prefix, "systematic", million_rows(), samples=2**19, draws=10 * DRAWS
        )


def test_a_constant_offset_is_caught() -> None:
    """What the paper's own code does: right in every single step, and never averages out."""
    check_sample(planted.constant_offset, "systematic", *CASES["peaked"], DRAWS)
    with pytest.raises(AssertionError, match="chi-square"):
        check_steps_and_layers(planted.constant_offset, "systematic")


def test_floored_weights_are_caught() -> None:
    with pytest.raises(AssertionError):
        check_rounding(planted.floored_weights)
