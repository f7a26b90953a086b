"""Exact tier, draws: the same integers give the same rows, on every level and in the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import CPU_LEVELS, DRAWING, LENGTHS
from compare import FP32, OPS, assert_drawn, assert_equal

from santa_torch import reference

ONE = 2**30


pytestmark = pytest.mark.usefixtures("one_thread")


def random() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def peaked(*shape: int) -> torch.Tensor:
    """Weights of a softmax with scores of standard deviation 6, its largest row at 2^30."""
    scores = 6 * torch.randn(shape, generator=random())
    return reference.weigh(scores, scores.amax(-1)).int()


def uniform(*shape: int) -> torch.Tensor:
    return torch.full(shape, ONE, dtype=torch.int32)


def one_hot(*shape: int) -> torch.Tensor:
    """A single row of nonzero weight, in another place for each head; its weight is not special."""
    weights = torch.zeros(shape, dtype=torch.int32)
    for at, head in enumerate(weights.view(-1, shape[-1])):
        head[(at * 7919 + shape[-1] - 1) % shape[-1]] = ONE if at % 2 else 3
    return weights


def rare(*shape: int) -> torch.Tensor:
    """One large row and rows of probability below 1e-7, down to one unit of weight."""
    weights = torch.randint(0, 64, shape, generator=random(), dtype=torch.int32)
    weights[..., shape[-1] // 3] = ONE
    return weights


def sparse(*shape: int) -> torch.Tensor:
    """Few rows of small, equal-sized weights between many zeros, first and last row zero."""
    weights = torch.randint(1, 4, shape, generator=random(), dtype=torch.int32)
    weights *= torch.rand(shape, generator=random()) < 0.1
    weights[..., 0] = weights[..., -1] = 0
    return weights


def uneven(*shape: int) -> torch.Tensor:
    return torch.randint(0, ONE + 1, shape, generator=random(), dtype=torch.int32)


DENSITIES = (peaked, uniform, one_hot, rare, sparse, uneven)


def draw(
    weights: torch.Tensor, method: str, samples: int, kv_heads: int = 1, **address: Any
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], list[list[reference.Drawn]]]:
    """Operator and reference on the same integers."""
    batch = weights.shape[0]
    seed = torch.arange(batch) * 977 - 5 + address.pop("seed", 0)
    position = torch.arange(batch) * 3 + weights.shape[2] + address.pop("position", 0)
    arguments = {"samples": samples, "method": method, "kv_heads": kv_heads, **address}
    got = OPS.draw(weights, seed=seed, position=position, **arguments)
    expected = reference.draw(weights.long(), seed=seed, position=position, **arguments)
    return got, expected


# ---- draw: operator against reference ------------------------------------------------------------


@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("method", DRAWING)
def test_draws_equal_the_reference(level: str, method: str, density: type) -> None:
    for at, rows in enumerate(LENGTHS):
        for samples in ((1, 7), (2, 40))[at % 2]:
            assert_drawn(*draw(density(1, 4, rows), method, samples, kv_heads=2))


@pytest.mark.parametrize("method", DRAWING)
@pytest.mark.parametrize("group", [1, 2, 3, 5, 8, 71])
def test_draws_of_groups(level: str, method: str, group: int) -> None:
    for density in (peaked, rare, one_hot):
        got = draw(density(2, 2 * group, 333), method, 20, 2, layer=5, head_offset=4)
        assert_drawn(*got)


@pytest.mark.parametrize("method", DRAWING)
def test_draws_beside_sinks(level: str, method: str) -> None:
    """The share of the rows sizes the shared sample and leaves the others as they are."""
    weights = peaked(2, 6, 700)
    weights[1, 4] = 0
    row_mass = torch.rand(2, 6, generator=torch.Generator().manual_seed(3))
    row_mass[0, :3] = torch.tensor([1.0, 0.0, 1e-9])
    got, expected = draw(weights, method, 60, 2, row_mass=row_mass)
    assert_drawn(got, expected)
    plain, _ = draw(weights, method, 60, 2)
    if method == "shared":
        assert (got[2] < plain[2]).all()
        permuted = row_mass.T.contiguous().T
        assert_drawn(draw(weights, method, 60, 2, row_mass=permuted)[0], expected)
    else:
        assert torch.equal(got[0], plain[0])


@pytest.mark.parametrize("method", DRAWING)
def test_more_samples_than_rows(level: str, method: str) -> None:
    for samples in (17, 18, 500):
        for density in (peaked, uniform, uneven):
            got, expected = draw(density(1, 2, 17), method, samples)
            assert got[0].shape[2] == 17
            assert_drawn(got, expected)


@pytest.mark.parametrize("method", DRAWING)
def test_a_million_rows(level: str, method: str) -> None:
    rows = 2**20 + 3
    for density in (uniform, peaked, rare):
        assert_drawn(*draw(density(1, 1, rows), method, 50))


def test_a_million_rows_of_two_heads(level: str) -> None:
    assert_drawn(*draw(peaked(1, 2, 2**20 + 3), "shared", 300))


@pytest.mark.parametrize("method", DRAWING)
def test_rule30_heads_without_weight_draw_nothing(level: str, method: str) -> None:
    weights = peaked(2, 4, 100)
    weights[0, 1] = 0
    weights[1] = 0
    got, expected = draw(weights, method, 9, 2)
    assert_drawn(got, expected)
    assert not got[2][1].any()
    assert got[2][0].all() == (method == "shared")


def test_the_largest_sample() -> None:
    """2^24 draws: counts are whole multiples of the probabilities, rounded down or up."""
    weights = torch.tensor([[[1, 0, 5, ONE, 12345]]], dtype=torch.int32)
    for method in ("systematic", "stratified"):
        (rows, counts, num_rows), _ = draw_operator_only(weights, method, 2**24)
        got = torch.zeros(5).double()
        n = int(num_rows)
        got[rows[0, 0, :n]] = counts[0, 0, :n].double()
        expected = 2**24 * weights[0, 0].double() / weights.sum()
        assert counts.sum() == 2**24
        slack = 1 if method == "systematic" else 2
        assert ((got - expected).abs() < slack).all()


def draw_operator_only(
    weights: torch.Tensor, method: str, samples: int
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], None]:
    where = torch.zeros(1, dtype=torch.int64)
    got = OPS.draw(
        weights, samples=samples, method=method, kv_heads=1, seed=where, position=where + 9
    )
    return got, None


@pytest.mark.parametrize("method", DRAWING)
def test_strided_weights_draw_alike(method: str) -> None:
    weights = peaked(2, 4, 300)
    for view in (
        weights.transpose(1, 2).contiguous().transpose(1, 2),
        torch.stack([weights, weights * 0], 3)[..., 0],
        torch.cat([weights * 0 + 1, weights], 2)[..., 300:],
    ):
        assert not view.is_contiguous()
        for got, expected in zip(
            draw(view, method, 12, 2)[0], draw(weights, method, 12, 2)[0], strict=True
        ):
            assert_equal("draw", got, expected)


# ---- rules 24, 26, 30 ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", DRAWING)
def test_rule24_no_row_of_zero_weight_is_drawn(level: str, method: str) -> None:
    """Totals of a few units, where each threshold falls on the edge of a row again and again."""
    weights = torch.tensor([[[0, 3, 0, 0, 2, 1, 0]]], dtype=torch.int32)
    seen = set()
    for position in range(40):
        got, expected = draw(weights, method, 3, position=position)
        assert_drawn(got, expected)
        rows = set(got[0][0, 0, : int(got[2])].tolist())
        assert rows <= {1, 4, 5}
        seen |= rows
    assert seen == {1, 4, 5}


@pytest.mark.parametrize("rows", [16, 256, 257, 600])
@pytest.mark.parametrize("method", DRAWING)
def test_rule24_the_last_nonzero_row_closes_the_range(method: str, rows: int) -> None:
    """Zeros behind the last row that counts, up to the end of its block, chunk and sequence."""
    for last in {0, 1, 14, 15, rows // 2, rows - 2, rows - 1}:
        weights = torch.zeros(1, 1, rows, dtype=torch.int32)
        weights[..., last] = 1
        for position in range(4):
            got, expected = draw(weights, method, 5, position=position)
            assert_drawn(got, expected)
            assert got[0][0, 0, 0] == last


@pytest.mark.parametrize("method", DRAWING)
def test_rule26_every_part_of_the_address_changes_the_draws(method: str) -> None:
    weights = uneven(1, 1, 1000).expand(2, 6, 1000).contiguous()
    kv_heads = 6
    base = {"seed": 3, "position": 10, "layer": 1, "head_offset": 0}

    def rows(**change: int) -> torch.Tensor:
        return draw(weights, method, 40, kv_heads, **{**base, **change})[0][0]

    first = rows()
    for name in base:
        assert not torch.equal(rows(**{name: base[name] + 1}), first), name
    assert torch.equal(rows(), first)
    assert len({tuple(head.tolist()) for head in first.flatten(0, 1)}) == 12


def test_rule26_sequences_with_one_seed_and_position_draw_alike() -> None:
    weights = peaked(1, 2, 500).expand(3, 2, 500).contiguous()
    where = torch.tensor([5])
    for method in DRAWING:
        rows, counts, _ = OPS.draw(
            weights, samples=20, method=method, kv_heads=2, seed=where, position=where
        )
        assert torch.equal(rows[0], rows[1])
        assert torch.equal(counts[0], counts[2])


@pytest.mark.parametrize("method", ["stratified", "systematic", "shared"])
@pytest.mark.parametrize("n", [1, 2, 15, 16, 100, 257, 1000])
def test_rule30_n_draws_from_n_equal_rows_take_each_once(level: str, method: str, n: int) -> None:
    for weight in (1, 3, 12345, ONE):
        weights = torch.full((1, 1, n), weight, dtype=torch.int32)
        (rows, counts, num_rows), _ = draw_operator_only(weights, method, n)
        if method == "shared":  # fp32 may leave inclusions just under 1
            assert n - 1 <= int(num_rows) <= n
            assert ((counts[counts > 0] - ONE).abs() < 2**9).all()
        else:
            assert torch.equal(rows[0, 0], torch.arange(n))
            assert (counts == 1).all()


@pytest.mark.parametrize("samples", [1, 3, 64, 1000])
def test_rule30_systematic_counts_are_the_expectation_rounded(samples: int) -> None:
    for density in DENSITIES:
        weights = density(1, 3, 257)
        (rows, counts, _), _ = draw(weights, "systematic", samples, 3)
        dense = torch.zeros(1, 3, 257, dtype=torch.int64).scatter_add(2, rows, counts.long())
        total = weights.long().sum(-1, keepdim=True)
        floor = samples * weights.long() // total
        assert ((dense == floor) | (dense == floor + 1)).all()
        assert (
            dense[samples * weights.long() % total == 0]
            == floor[samples * weights.long() % total == 0]
        ).all()
        assert (dense.sum(-1) == samples).all()


@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("method", DRAWING[:3])
def test_per_head_methods_draw_exactly_s_times(method: str, density: type) -> None:
    for samples in (1, 5, 333):
        (_, counts, num_rows), _ = draw(density(2, 2, 400), method, samples)
        assert (counts.sum(-1) == samples).all()
        assert ((counts > 0).sum(-1) == num_rows).all()


@pytest.mark.parametrize("density", DENSITIES)
def test_shared_draws_certain_rows_always_and_none_twice(density: type) -> None:
    for group in (1, 3):
        weights = density(1, group, 700)
        pi = reference.inclusion(weights.long(), 50, 1)[0, 0]
        (rows, counts, num_rows), _ = draw(weights, "shared", 50)
        n = int(num_rows)
        taken = rows[0, 0, :n]
        assert (taken.diff() > 0).all()
        assert set((pi == ONE).nonzero()[:, 0].tolist()) <= set(taken.tolist())
        assert abs(n - float(pi.sum()) / ONE) < 1
        assert_equal("inclusion", counts[0, 0, :n], pi[taken].int())


# ---- weigh ---------------------------------------------------------------------------------------


def test_weights_equal_float64_within_their_rounding(level: str) -> None:
    """``exp`` in fp32: a few units in the last place, plus the rounding to an integer."""
    edges = torch.tensor(
        [0.0, -1e-7, -0.5, -20.79, -20.8, -21.4, -21.5, -22, -86.9, -87, -88, -1e4]
    )
    scores = torch.cat([edges, -23 * torch.rand(100_000, generator=random())]).view(1, 1, -1)
    for maximum in (0.0, 13.25, -1000.5):
        moved = scores + maximum
        maxima = moved.amax(-1)
        got = OPS.weigh(moved, maxima)[0, 0].double()
        exact = 2.0**30 * (moved - maxima[..., None]).double().exp()[0, 0]
        assert ((got - exact).abs() <= 0.5 + 3 * FP32 * exact).all()
        assert got[0] == 2**30
    assert not OPS.weigh(torch.tensor([[[-22.0, -1e30, -torch.inf]]]), torch.zeros(1, 1)).any()


def test_weights_are_rounded_to_nearest(level: str) -> None:
    """Floored or truncated weights would lose half a unit on average: a bias of L 2^-31."""
    scores = (1000 * torch.rand(200_000, generator=random()) * 2.0**-30).log().view(1, 1, -1)
    got = OPS.weigh(scores, torch.zeros(1, 1)).double()
    exact = 2.0**30 * scores.double().exp()
    standard_error = 12**-0.5 / 200_000**0.5
    assert abs(float((got - exact).mean())) < 5 * standard_error


@pytest.mark.parametrize("rows", LENGTHS)
def test_weights_do_not_depend_on_their_place(level: str, rows: int) -> None:
    scores = 5 * torch.randn(2, 3, rows, generator=random())
    maxima = scores.amax(-1)
    expected = OPS.weigh(scores, maxima)
    assert_equal("weights", OPS.weigh(scores.flip(2), maxima).flip(2), expected)
    some = range(0, rows, 1 + rows // 60)
    one = torch.stack([OPS.weigh(scores[..., j : j + 1], maxima)[..., 0] for j in some], 2)
    assert_equal("weights", one, expected[..., :: some.step])


def test_dead_heads_weigh_nothing(level: str) -> None:
    scores = torch.zeros(1, 4, 20)
    maxima = torch.tensor([[torch.nan, torch.inf, -torch.inf, 0.0]])
    scores[0, 2] = -torch.inf
    weights = OPS.weigh(scores, maxima)
    assert not weights[0, :3].any()
    assert (weights[0, 3] == 2**30).all()


def test_levels_agree_on_inclusion_bit_for_bit() -> None:
    """IEEE operations in one order: fused multiply-adds or another order would show here."""
    weights = peaked(1, 71, 5000)
    expected = reference.inclusion(weights.long(), 4096, 1)[0, 0].int()
    for name in CPU_LEVELS:
        OPS.set_cpu_level(name)
        (rows, counts, num_rows), _ = draw_operator_only(weights, "shared", 4096)
        n = int(num_rows)
        assert n > 1000
        assert_equal(f"inclusion at {name}", counts[0, 0, :n], expected[rows[0, 0, :n]])
