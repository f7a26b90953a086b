"""Which key features Bernoulli queries touch: the rule, the paper's figures, operators' counts."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from packaging_tools import ROOT

import santa_torch
from santa_torch import BernoulliConfig

GROUPS = 300


@pytest.fixture(scope="module")
def study() -> Iterator[Any]:
    """``benchmarks/bernoulli_queries.py``; one thread, since its tensors are small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("bernoulli_queries")
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def bitnet(study: Any) -> Any:
    return study.fit_bitnet("log-normal", GROUPS)


# ---- the rule ------------------------------------------------------------------------------------


@pytest.mark.parametrize("draws", [1, 2, 5])
def test_the_rule_is_what_stratified_draws_do(study: Any, draws: int) -> None:
    source, trials = torch.Generator().manual_seed(draws), 40_000
    p = torch.tensor([0.0, 0.03, 0.2, 0.45, 0.8, 1.0])
    u = torch.rand(trials, draws, 1, generator=source)
    slices = (u + torch.arange(draws)[:, None]) / draws
    touched = (slices < p).any(1).double().mean(0)
    expected = study.stratified(p, draws).double()
    limit = 5 * (expected * (1 - expected) / trials).sqrt() + 1e-6
    assert ((touched - expected).abs() <= limit).all()


def test_groups_touch_what_any_head_does(study: Any) -> None:
    q = torch.tensor([[[4.0, 0.0, 1.0, 0.0], [0.0, 2.0, 0.0, 0.0]]])
    found = study.access(q, 2)
    assert (found.head, found.union) == ((1 + 0.5 + 1) / 8, (1 + 1 + 0.5) / 4)
    assert found.mean == (1 + 1 + 0.5) / 4  # means 2, 1, .5 and 0
    assert study.kurtosis(q[0, :1]) == pytest.approx((256 + 1) / 4 / (17 / 4) ** 2)


# ---- the paper's figures -------------------------------------------------------------------------


def test_bitnet_is_predicted(study: Any, bitnet: Any) -> None:
    """What one draw reads gives 12 further figures of Table 7, 67.5 % at 4 draws among them."""
    assert 3 < bitnet.kurtosis < 4
    for kind in ("head", "union", "mean"):
        for draws, share in getattr(study.BITNET, kind).items():
            found = 100 * getattr(study.access(bitnet.queries, draws), kind)
            assert found == pytest.approx(share, abs=2.0), (kind, draws)


def test_llama_is_predicted(study: Any, bitnet: Any) -> None:
    """Four draws of the mean query give eight: about 27 % fewer features."""
    fitted = study.fit_llama("log-normal", GROUPS, bitnet.alike)
    assert 9 < fitted.kurtosis < 18
    fewer = 100 - 100 * study.access(fitted.queries, 8).mean
    assert fewer == pytest.approx(100 - study.LLAMA.mean[8], abs=5.0)


def test_the_paper_stratifies(study: Any, bitnet: Any) -> None:
    """No queries let independent draws read so much more at twice the draws."""
    for shares, draws in ((study.BITNET.head, 2), (study.BITNET.mean, 4), (study.LLAMA.mean, 8)):
        assert shares[draws] - 0.05 > 100 * study.most_at_twice((shares[draws // 2] + 0.05) / 100)
    p = study.chances(bitnet.queries).double()
    for draws in (1, 2, 4):
        once, twice = (float(independent(p, n).mean()) for n in (draws, 2 * draws))
        assert once < twice <= study.most_at_twice(once)


def test_nothing_is_matched_out_of_reach(study: Any) -> None:
    with pytest.raises(ValueError, match=r"no match: 0\.99 is not within"):
        study.match(lambda x: 1 - x, 0.99, 0.5, 1.0)


# ---- the operators -------------------------------------------------------------------------------


def counted(q: torch.Tensor, kv_heads: int, config: BernoulliConfig) -> torch.Tensor:
    """Features used, int64 ``[groups, kv_heads]``."""
    kv = torch.zeros(len(q), kv_heads, 1, q.shape[-1])
    position = torch.arange(len(q))
    out = santa_torch.decode(
        q, kv, kv, method="dense", bernoulli=config, position=position, return_stats=True
    )
    assert isinstance(out, santa_torch.DecodeOutput)
    assert out.stats is not None
    return out.stats.key_features


def independent(p: torch.Tensor, draws: int) -> torch.Tensor:
    """What draws that know nothing of each other would touch."""
    return 1 - (1 - p) ** draws


def deviations(count: torch.Tensor, touched: torch.Tensor) -> float:
    """How far a count of features is from the sum of their chances, in standard deviations."""
    size = float((touched * (1 - touched)).sum().sqrt())
    return abs(float(count.sum() - touched.sum())) / (size + 1e-3)


@pytest.mark.parametrize("draws", [1, 4, 16])
def test_heads_touch_what_stratified_draws_do(study: Any, bitnet: Any, draws: int) -> None:
    q = bitnet.queries
    mean = q.abs().mean(1, keepdim=True)
    config = BernoulliConfig(draws, shared=False)
    head, union, of_mean = (counted(*of, config) for of in ((q, 4), (q, 1), (mean, 1)))
    p, p_mean = (study.chances(queries).double() for queries in (q, mean))

    def worst(rule: Any, n: int) -> float:
        each = rule(p, n)
        pairs = ((head, each), (union, 1 - (1 - each).prod(1)), (of_mean, rule(p_mean, n)))
        return max(deviations(*pair) for pair in pairs)

    assert worst(study.stratified, draws) < 5
    assert worst(study.stratified, draws + 1) > 5
    assert draws == 1 or worst(independent, draws) > 5


@pytest.mark.parametrize("draws", [1, 4, 16])
def test_one_sample_has_the_size_of_its_inclusions(study: Any, bitnet: Any, draws: int) -> None:
    size = bitnet.queries.double().square().sum(1).sqrt()
    chance = size / size.amax(-1, keepdim=True)
    features = counted(bitnet.queries, 1, BernoulliConfig(draws, shared=True))[:, 0]

    def fits(inclusion: torch.Tensor) -> bool:
        off = features - inclusion.sum(-1)  # each count is rounded up or down by chance
        return float(off.abs().max()) < 1 + 1e-4 and abs(float(off.sum())) < 2.5 * len(off) ** 0.5

    assert fits(study.stratified(chance, draws))
    assert not fits(study.stratified(chance, draws + 1))
    assert draws == 1 or not fits(independent(chance, draws))
