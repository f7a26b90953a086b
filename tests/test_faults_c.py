"""Faults that the CPU pipeline could have: work that threads share, chunks without weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import METHODS
from compare import assert_equal

import santa_torch

NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def threads() -> Any:
    """Whatever a test sets is undone."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def inputs(rows: int, heads: int = 2, dim: int = 8) -> tuple[torch.Tensor, ...]:
    """One group; all scores alike: k is zero."""
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(1, heads, dim, generator=generator)
    v = torch.randn(1, 1, rows, dim, generator=generator)
    return q, torch.zeros(1, 1, rows, dim), v


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("clean", [0, 1, 2])
def test_rule01_a_drawn_row_that_one_head_does_not_attend(
    level: str, method: str, clean: int
) -> None:
    """V of a row is NaN and surely drawn; the head that is masked off it must not see it."""
    q, k, v = inputs(600, heads=3)
    mask = torch.ones(1, 3, 600, dtype=torch.bool)
    mask[0, clean, 5] = False
    given: dict[str, Any] = {"samples": 2400, "method": method, "mask": mask, "return_stats": True}
    first = santa_torch.decode(q, k, v, **given)
    v[0, 0, 5] = NAN
    got = santa_torch.decode(q, k, v, **given)
    assert_equal("out", got.out[:, clean], first.out[:, clean])
    assert got.out[0, [h for h in range(3) if h != clean]].isnan().all()


def test_rule01_a_chunk_that_counts_for_nothing_passes_nan_on(level: str) -> None:
    """Scores far lower: its share of the softmax is 0 in fp64, and 0 * NaN is NaN all the same."""
    q, k, v = inputs(600)
    q[:], k[:, :, 300:] = 1.0, 2000.0
    expected = santa_torch.decode(q, k, v, method="dense")
    assert expected.isfinite().all()
    v[0, 0, 5, 3] = NAN
    got = santa_torch.decode(q, k, v, method="dense")
    assert got[..., 3].isnan().all()
    kept = [d for d in range(8) if d != 3]
    assert_equal("out", got[..., kept], expected[..., kept])


def test_rule07_a_chunk_that_counts_for_nothing_may_overflow(level: str) -> None:
    """Its fp32 sum runs to infinity, its share is 0: nothing of it is left."""
    q, k, v = inputs(600)
    q[:], k[:, :, 300:] = 1.0, 2000.0
    v[:, :, :256], v[:, :, 256:] = 3e38, 1.0
    got = santa_torch.decode(q, k, v, method="dense")
    torch.testing.assert_close(got, torch.ones_like(got))


def test_rule01_a_fully_attended_chunk_beside_a_masked_one(level: str) -> None:
    """NaN in a chunk without holes: all attend it, whatever the list of another chunk says."""
    q, k, v = inputs(600)
    mask = torch.ones(600, dtype=torch.bool)
    mask[:100] = False
    v[0, 0, 300] = NAN
    got = santa_torch.decode(q, k, v, method="dense", mask=mask)
    assert got.isnan().all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("extra", ["sinks", "mask", "softcap", "stats"])
def test_rule37_groups_that_threads_share(method: str, extra: str) -> None:
    """One KV head, cut between threads: totals, row mass and maxima are those of one thread."""
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(2, 4, 16, generator=generator)
    k = torch.randn(2, 1, 5000, 16, generator=generator)
    v = torch.randn(2, 1, 5000, 16, generator=generator)
    given: dict[str, Any] = {
        "sinks": {"sinks": torch.tensor([9.0, -1.0, 3.0, 12.0])},
        "mask": {"mask": torch.rand(2, 4, 5000, generator=generator) < 0.5},
        "softcap": {"softcap": 1.5},
        "stats": {},
    }[extra]
    results = []
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        results.append(
            santa_torch.decode(
                q, k, v, samples=40, method=method, return_lse=True, return_stats=True, **given
            )
        )
    for got in results[1:]:
        assert_equal("out", got.out, results[0].out)
        assert_equal("lse", got.lse, results[0].lse)
        assert_equal("error", got.stats.squared_error, results[0].stats.squared_error)
        assert_equal("rows", got.stats.value_rows, results[0].stats.value_rows)
