"""Where the hardware of the instruction-set levels differs: subnormals, infinities, gaps."""

from __future__ import annotations

import pytest
import torch
from compare import OPS, assert_equal

import santa_torch
from santa_torch import reference

BF16 = torch.bfloat16
HEADS = 8


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: object) -> torch.Tensor:
    return santa_torch.decode(q, k, v, method="dense", **arguments)  # type: ignore[arg-type,return-value]


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def near(level: str, got: torch.Tensor, exact: torch.Tensor) -> None:
    """Equal but for the output's rounding."""
    torch.testing.assert_close(
        got.double(),
        exact,
        rtol=1.01 * 2**-8,
        atol=0,
        equal_nan=True,
        msg=lambda text: f"{level}: {text}",
    )


@pytest.mark.parametrize("feature", [0, 1, 34, 77, 127])
@pytest.mark.parametrize("size", [2.0**-130, 2.0**-100])
@pytest.mark.parametrize("rows", [5, 16, 300])
def test_tiny_values_in_one_feature(level: str, feature: int, size: float, rows: int) -> None:
    """Whatever else the tile holds: zeros, or numbers of usual size."""
    for rest in (0.0, 1.0):
        v = (rest * noise(1, 1, rows, 128)).to(BF16)
        v[..., feature] = size
        zeros = torch.zeros(1, 1, rows, 128, dtype=BF16)
        out = dense(zeros[:, :, 0].expand(1, HEADS, 128), zeros, v)
        assert_equal(level, out[..., feature], torch.full((1, HEADS), size, dtype=BF16))


def test_many_subnormal_values_beside_a_normal_one(level: str) -> None:
    v = torch.full((1, 1, 256, 64), 1.5 * 2.0**-127, dtype=BF16)
    v[0, 0, 9] = 2.0**-117
    zeros = torch.zeros(1, 1, 256, 64, dtype=BF16)
    q = zeros[:, :, 0].expand(1, HEADS, 64)
    near(level, 256 * dense(q, zeros, v), 256 * reference.decode(q, zeros, v, method="dense"))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("feature", [0, 70, 127])
def test_the_features_beside_one_that_is_not_finite(level: str, value: float, feature: int) -> None:
    q, k, v = (
        noise(1, HEADS, 64).to(BF16),
        noise(1, 1, 300, 64).to(BF16),
        noise(1, 1, 300, 128).to(BF16),
    )
    v[0, 0, 20, feature] = value
    exact = reference.decode(q, k, v, method="dense")
    out = dense(q, k, v)
    assert_equal(level, out[..., feature].isfinite(), torch.zeros(1, HEADS, dtype=torch.bool))
    others = torch.arange(128) != feature
    torch.testing.assert_close(out[..., others].double(), exact[..., others], rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("gap", [60.0, *torch.arange(78.0, 87.0, 0.5).tolist()])
@pytest.mark.parametrize("size", [1.0, 2.0**30, 1.7e38])
def test_rows_far_below_the_largest_score(level: str, gap: float, size: float) -> None:
    """The row that has nearly all weight is zero, so that the others are all there is."""
    q = torch.zeros(1, HEADS, 32)
    q[..., 0] = 1.0
    k = torch.full((1, 1, 32, 32), 0.3)
    k[0, 0, 0] = gap
    v = torch.full((1, 1, 32, 32), size)
    v[0, 0, 0] = 0.0
    q, k, v = q.to(BF16), k.to(BF16), v.to(BF16)
    near(level, dense(q, k, v, scale=1.0), reference.decode(q, k, v, method="dense", scale=1.0))


@pytest.mark.parametrize(
    ("query", "key", "scale"),
    [
        (2.0**127, 2.0**-130, 1.0),
        (2.0**-70, 2.0**-62, 2.0**127),
        (2.0**-130, 2.0**127, 4.0),
        (2.0**-50, 2.0**-70, 2.0**119),
        (2.0**60, 2.0**-130, 2.0**66),
    ],
    ids=["large query", "large scale", "subnormal query", "large and small", "both large"],
)
def test_scores_of_subnormal_numbers_and_products(
    level: str, query: float, key: float, scale: float
) -> None:
    q = torch.full((1, HEADS, 32), query).to(BF16)
    k = (key * noise(1, 1, 40, 1).abs()).expand(1, 1, 40, 32).to(BF16)
    v = torch.zeros(1, 1, 40, 32, dtype=BF16)
    got = santa_torch.decode(q, k, v, method="dense", scale=scale, return_lse=True)
    exact = reference.decode(q, k, v, method="dense", scale=scale, return_lse=True)
    torch.testing.assert_close(got.lse.double(), exact.lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("query", [float("inf"), 2.0**-130])
def test_subnormal_times_infinity_is_not_zero_times_infinity(level: str, query: float) -> None:
    """One in the query, the other in a key: minus infinity, not NaN."""
    q, k = torch.ones(1, HEADS, 32), noise(1, 1, 40, 32)
    q[..., 0] = query
    k[..., 0] = -(2.0**-130) if query > 1 else 0.0
    if query < 1:
        k[0, 0, 7, 0] = -float("inf")
    q, k, v = q.to(BF16), k.to(BF16), noise(1, 1, 40, 32).to(BF16)
    got = santa_torch.decode(q, k, v, method="dense", return_lse=True)
    exact = reference.decode(q, k, v, method="dense", return_lse=True)
    assert not exact.lse.isnan().any()
    torch.testing.assert_close(got.lse.double(), exact.lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dropped", [1, 15, 16, 31, 47, 255])
@pytest.mark.parametrize("dim", [64, 128])
def test_one_row_left_out(level: str, dropped: int, dim: int) -> None:
    """Equal distances between rows but for one gap, wherever it falls; that row is poison."""
    q, k, v = (
        noise(1, HEADS, dim).to(BF16),
        noise(1, 1, 300, dim).to(BF16),
        noise(1, 1, 300, dim).to(BF16),
    )
    mask = torch.arange(300) != dropped
    exact = reference.decode(q, k, v, method="dense", mask=mask)
    k[0, 0, dropped], v[0, 0, dropped] = float("nan"), float("nan")
    torch.testing.assert_close(dense(q, k, v, mask=mask).double(), exact, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("rows", [1, 17])
def test_nothing_is_left_of_the_rows_before(level: str, rows: int) -> None:
    """A step over poison, then one over fewer rows that do not fill a tile."""
    q = noise(1, HEADS, 40).to(BF16)
    poison = torch.full((1, 1, 32, 40), float("nan"), dtype=BF16)
    k, v = noise(1, 1, rows, 40).to(BF16), noise(1, 1, rows, 40).to(BF16)
    clean = dense(q, k, v)
    dense(q, poison, poison)
    assert_equal(level, dense(q, k, v), clean)


def test_levels_are_in_order_and_the_last_is_used() -> None:
    info = santa_torch.build_info()
    assert list(info.cpu_levels) == [
        name for name in ("generic", "avx2", "avx512", "amx") if name in info.cpu_levels
    ]
    assert info.cpu_levels[0] == "generic"
    assert OPS.cpu_level() in info.cpu_levels
