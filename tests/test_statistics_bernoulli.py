"""Bernoulli queries: unbiased scores and features read, by tests with a known variance.

Seeds are fixed. A correct query would fail one assertion for fresh seeds with a probability below
1e-9 (``ztest.FALSE_ALARM``). Each test is shown to fail for queries with planted faults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ztest import ONE, assert_mean, moments

import santa_torch
from santa_torch import BernoulliConfig, KeySketch, reference

GROUP, DIM, SEEDS = 3, 48, 200_000
Query = Callable[..., torch.Tensor]


def heavy_tailed() -> torch.Tensor:
    """Queries ``[GROUP, DIM]`` of heads of different sizes, some features large for all of them."""
    generator = torch.Generator().manual_seed(1)
    common = torch.randn(DIM, generator=generator) ** 3
    own = torch.randn(GROUP, DIM, generator=generator)
    return (common + own) * torch.tensor([[1.0], [0.3], [2.0]])


Q = heavy_tailed()
KEYS = torch.randn(20, DIM, generator=torch.Generator().manual_seed(2)).double()


def queries(query: Query, draws: int, shared: bool) -> Iterator[torch.Tensor]:
    """Stochastic queries ``[n, GROUP, DIM]`` under SEEDS seeds, in batches."""
    for start in range(0, SEEDS, 8000):
        seeds = torch.arange(start, start + 8000) * 0x9E3779B97F4A7C1
        yield query(
            Q.expand(8000, -1, -1),
            draws=draws,
            shared=shared,
            kv_heads=1,
            seed=seeds,
            position=torch.tensor([4000]),
        ).double()


def check_scores(query: Query, draws: int, shared: bool) -> None:
    """Scores of 20 rows of keys, and the features themselves, have the mean of exact ones."""
    exact = Q.double()
    total, scores, touched = torch.zeros(GROUP, DIM), torch.zeros(GROUP, 20), torch.zeros(DIM)
    total, scores, touched = total.double(), scores.double(), touched.double()
    for sample in queries(query, draws, shared):
        total += sample.sum(0)
        scores += (sample @ KEYS.T).sum(0)
        touched += (sample != 0).any(1).sum(0)
    if shared:
        # One systematic draw: the moments of its Horvitz-Thompson sums are known exactly.
        size = Q.square().sum(0).sqrt()
        inclusion = (reference.chances(size) * draws).clamp(max=ONE)
        share = inclusion.double() / ONE
        for h in range(GROUP):
            terms = torch.where(share > 0, exact[h] / share, 0.0)[:, None]
            of_features = moments("shared", inclusion, 1, terms * torch.eye(DIM).double())
            of_scores = moments("shared", inclusion, 1, terms * KEYS.T)
            for got, want in ((total[h], of_features), (scores[h], of_scores)):
                bound = want.bound + 1e-9
                noise = want.variance + 1e-12  # fp32 of the expanded features
                assert_mean(got, SEEDS, want.mean, noise, bound, f"head {h}")
        assert_mean(touched, SEEDS, share, share * (1 - share), torch.ones(DIM), "features read")
        return
    largest = exact.abs().amax(-1, keepdim=True)
    expected = exact.abs() / largest * draws
    part = expected - expected.floor()
    unit = largest / draws
    variance = unit.square() * part * (1 - part) + 1e-12
    assert_mean(total, SEEDS, exact, variance, unit.expand_as(exact) + 1e-6, "features")
    of_scores = variance @ KEYS.T.square()
    bound = (unit * KEYS.abs().amax()).expand_as(of_scores) + 1e-6
    # Features are independent of each other: a score is a sum of DIM independent terms.
    assert_mean(scores, SEEDS, exact @ KEYS.T, of_scores, bound, "scores")
    missed = (1 - expected).clamp(0, 1).prod(0)
    assert_mean(touched, SEEDS, 1 - missed, missed * (1 - missed), torch.ones(DIM), "features read")


@pytest.mark.parametrize("draws", [1, 2, 3, 8])
@pytest.mark.parametrize("shared", [True, False])
def test_scores_are_unbiased(fast_backend: str, shared: bool, draws: int) -> None:
    check_scores(santa_torch.bernoulli_query, draws, shared)


def test_scores_are_unbiased_on_the_emulator(backend: str) -> None:
    """Few seeds: what is left to see there is that seeds reach the draw."""
    seeds = torch.arange(200)
    q = santa_torch.bernoulli_query(
        Q.expand(200, -1, -1), draws=1, kv_heads=1, seed=seeds, position=7
    )
    inclusion = reference.chances(Q.square().sum(0).sqrt()).double() / ONE
    touched = (q != 0).any(1).double().sum(0)
    variance = inclusion * (1 - inclusion)
    assert_mean(touched, 200, inclusion, variance, torch.ones(DIM), "features read")


# ---- planted faults ------------------------------------------------------------------------------


def never_draws_small_ones(q: torch.Tensor, **arguments: Any) -> torch.Tensor:
    got = santa_torch.bernoulli_query(q, **arguments)
    return torch.where(q.abs() < 0.05 * q.abs().amax(-1, keepdim=True), 0.0, got)


def forgets_to_expand(q: torch.Tensor, **arguments: Any) -> torch.Tensor:
    got = santa_torch.bernoulli_query(q, **arguments)
    return torch.where(got != 0, q, 0.0)


def one_feature_too_large(q: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """By a twentieth; one of middling size."""
    got = santa_torch.bernoulli_query(q, **arguments).clone()
    got[..., Q.norm(dim=0).argsort()[DIM // 2]] *= 1.05
    return got


def same_seed(q: torch.Tensor, **arguments: Any) -> torch.Tensor:
    return santa_torch.bernoulli_query(q, **{**arguments, "seed": 0})


def loses_the_last_feature(q: torch.Tensor, **arguments: Any) -> torch.Tensor:
    got = santa_torch.bernoulli_query(q, **arguments).clone()
    got[..., -1] = 0
    return got


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    "fault",
    [
        never_draws_small_ones,
        forgets_to_expand,
        one_feature_too_large,
        same_seed,
        loses_the_last_feature,
    ],
)
def test_faults_are_found(fault: Query, shared: bool) -> None:
    with pytest.raises(AssertionError, match=r"z =|head|features|scores"):
        check_scores(fault, 2, shared)


# ---- what does not follow ------------------------------------------------------------------------


def test_attention_is_biased_although_scores_are_not() -> None:
    """Jensen: the mean of softmax over noisy scores is flatter than the softmax of their mean.

    Two rows whose exact scores differ by 4: the first has the weight 0.982. The mean over queries
    is clearly below it, by more than any chance.
    """
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(1, 1, DIM, generator=generator)
    k = torch.randn(1, 1, 2, DIM, generator=generator)
    k[0, 0, 1] = k[0, 0, 0] - q[0, 0] * 4 * DIM**0.5 / q.square().sum()
    v = torch.tensor([[[[1.0], [0.0]]]])
    exact = float(santa_torch.decode(q, k, v, method="dense"))
    assert abs(exact - 0.982) < 0.001
    n = 4000
    out = santa_torch.decode(
        q.expand(n, -1, -1),
        k.expand(n, -1, -1, -1),
        v.expand(n, -1, -1, -1),
        method="dense",
        bernoulli=BernoulliConfig(draws=1),
        seed=torch.arange(n),
        position=1,
    ).double()
    error = float(out.std()) / n**0.5
    assert float(out.mean()) < exact - 8 * error


def test_noise_that_rows_share_cancels() -> None:
    """A large part that all keys have in common is noise to every score and to no weight."""
    generator = torch.Generator().manual_seed(4)
    q = torch.randn(1, 1, DIM, generator=generator)
    k = torch.randn(1, 1, 128, DIM, generator=generator)
    v = torch.randn(1, 1, 128, 8, generator=generator)
    offset = 50 * torch.randn(DIM, generator=generator)

    def error(keys: torch.Tensor) -> float:
        exact = santa_torch.decode(q, keys, v, method="dense")
        errors = [
            (
                santa_torch.decode(
                    q,
                    keys,
                    v,
                    method="dense",
                    sketch=KeySketch(keys),
                    bernoulli=BernoulliConfig(draws=1),
                    seed=seed,
                )
                - exact
            ).norm()
            for seed in range(20)
        ]
        return float(torch.stack(errors).mean())

    assert abs(error(k + offset) / error(k) - 1) < 1e-3
