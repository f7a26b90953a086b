"""Tests of means whose variance is known, and the exact moments of the sampling designs.

The limits hold for bounded terms of any distribution (Bernstein's inequality), not for normal ones
only: a row that is drawn twice in 20,000 draws is as safe to test as one that is drawn always. All
sums are float64. ``FALSE_ALARM`` bounds the probability that one call fails for a correct sampler
and fresh seeds, whatever the number of means in the call (Bonferroni).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

FALSE_ALARM = 1e-9
ONE = 2**30


class Moments(NamedTuple):
    """Of ``T = sum_j c_j a_j`` over one sample, for each column of ``a``: float64 ``[F]``."""

    mean: torch.Tensor
    variance: torch.Tensor
    fourth: torch.Tensor  # fourth central moment
    bound: torch.Tensor  # of |T - mean|
    term_bound: torch.Tensor  # of the deviation of one independent term of T


def bernstein_limit(
    variance: torch.Tensor, bound: torch.Tensor, tests: int, alarm: float = FALSE_ALARM
) -> torch.Tensor:
    """What a sum of independent centred terms exceeds with probability ``alarm / tests`` at most.

    ``variance`` of the sum; ``bound`` of the absolute value of a term. From
    ``P(|X| >= t) <= 2 exp(-t^2 / (2 (variance + bound t / 3)))``.
    """
    log = math.log(2 * tests / alarm)
    third = bound * log / 3
    return third + (third.square() + 2 * variance * log).sqrt()


def assert_mean(
    total: torch.Tensor,
    n: int,
    mean: torch.Tensor,
    variance: torch.Tensor,
    bound: torch.Tensor,
    what: str,
) -> None:
    """``total`` is a sum of n independent terms of the given mean, variance and bound, elementwise.

    An element of variance 0 must have its mean exactly, up to the rounding of float64 sums.
    """
    deviation = total - n * mean
    rounding = 1e-11 * n * (mean.abs() + bound)
    limit = bernstein_limit(n * variance, bound, total.numel()) + rounding
    excess = deviation.abs() / torch.where(variance > 0, limit, rounding).clamp(min=1e-300)
    worst = int(excess.argmax())
    assert excess.flatten()[worst] <= 1, (
        f"{what}: element {worst} of {total.numel()} is {total.flatten()[worst]:.9g} "
        f"over {n} terms, expected {n * mean.flatten()[worst]:.9g}; "
        f"z = {deviation.flatten()[worst] / (n * variance.flatten()[worst]).sqrt():.3g}, "
        f"{excess.flatten()[worst]:.3g} times the limit"
    )


def assert_independent(a: torch.Tensor, b: torch.Tensor, bins: int, what: str) -> None:
    """Pairs of int64 in ``[0, bins)`` fill a ``bins x bins`` table evenly, by chi-square.

    The limit is the tail bound of Laurent and Massart (2000) for chi-square; with hundreds of
    pairs in each cell Pearson's statistic follows that distribution closely.
    """
    expected = a.numel() / bins**2
    assert expected >= 100, f"{what}: {expected} pairs in a cell are too few"
    table = torch.bincount(a.flatten() * bins + b.flatten(), minlength=bins**2).double()
    statistic = float(((table - expected).square() / expected).sum())
    degrees, log = bins**2 - 1, math.log(1 / FALSE_ALARM)
    limit = degrees + 2 * math.sqrt(degrees * log) + 2 * log
    assert statistic <= limit, (
        f"{what}: chi-square {statistic:.1f} of {degrees} degrees > {limit:.1f}"
    )


# ---- exact moments of the designs ----------------------------------------------------------------


def count_moments(
    method: str, weights: torch.Tensor, samples: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance of how often each row is drawn; ``weights`` int64 ``[L]``.

    For ``"shared"`` the weights are inclusion probabilities in units of 2^-30.
    """
    if method == "shared":
        pi = weights.double() / ONE
        return pi, pi * (1 - pi)
    total = int(weights.sum())
    mean = samples * weights.double() / total
    if method == "multinomial":
        return mean, mean * (1 - mean / samples)
    if method == "systematic":  # floor(mean) or one more; the remainder is an exact integer
        part = (weights * samples % total).double() / total
        return mean, part * (1 - part)
    # stratified: only the two strata at the row's ends are in doubt
    end = weights.cumsum(0) * samples
    start = end - weights * samples
    first, last = start // total, (end - 1).clamp(min=0) // total
    inside = (end - start).double() / total
    head = ((first + 1) * total - start).double() / total
    tail = (end - last * total).double() / total
    two = head * (1 - head) + tail * (1 - tail)
    variance = torch.where(first == last, inside * (1 - inside), two)
    return mean, torch.where(weights > 0, variance, 0.0)


def _central(raw: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Second and fourth central moments from the raw moments 1 to 4."""
    m1, m2, m3, m4 = raw
    second = (m2 - m1**2).clamp(min=0)
    return second, (m4 - 4 * m1 * m3 + 6 * m1**2 * m2 - 3 * m1**4).clamp(min=0)


def _independent_moments(
    method: str, weights: torch.Tensor, samples: int, a: torch.Tensor
) -> Moments:
    """S independent draws: from the whole distribution, or each from its own slice of it."""
    strata = 1 if method == "multinomial" else samples
    draws = samples // strata  # of one stratum
    # In units of 1/S of a weight: row j covers [end_j - S e_j, end_j).
    end = weights.cumsum(0) * samples
    edges = torch.arange(strata + 1) * (int(end[-1]) // strata)
    row = torch.searchsorted(end, edges.clamp(max=int(end[-1]) - 1), right=True)
    lengths = (weights * samples).double()[:, None]
    raw = []
    for power in range(1, 5):
        values = a**power
        integral = (values * lengths).cumsum(0)
        at_edges = integral[row] - values[row] * (end[row] - edges)[:, None]
        raw.append(at_edges.diff(dim=0) / float(edges[1]))
    second, fourth = _central(raw)
    variance = draws * second.sum(0)
    excess = draws * (fourth - 3 * second**2).sum(0)
    reach = torch.maximum(a.amax(0) - raw[0], raw[0] - a.amin(0)).amax(0)
    return Moments(
        draws * raw[0].sum(0), variance, excess + 3 * variance**2, samples * reach, reach
    )


def _systematic_moments(lengths: torch.Tensor, spacing: int, a: torch.Tensor) -> Moments:
    """Points ``r + k spacing`` on consecutive intervals of integer lengths, r uniform.

    T is piecewise constant in r and changes where a point passes from one interval to the next.
    """
    end = lengths.cumsum(0)
    total = int(end[-1])
    first = torch.searchsorted(end, torch.arange(0, total, spacing), right=True)
    step = torch.cat([a[1:] - a[:-1], -a[-1:]])
    at, order = (end % spacing).sort()
    order, at = order[at > 0], at[at > 0]
    values = a[first].sum(0) + torch.cat([torch.zeros_like(a[:1]), step[order].cumsum(0)])
    points = torch.cat([torch.tensor([0]), at, torch.tensor([spacing])])
    share = points.diff().double()[:, None] / spacing
    mean = (share * values).sum(0)
    centred = values - mean
    bound = torch.where(share > 0, centred.abs(), 0.0).amax(0)
    return Moments(mean, (share * centred**2).sum(0), (share * centred**4).sum(0), bound, bound)


def moments(method: str, weights: torch.Tensor, samples: int, a: torch.Tensor) -> Moments:
    """Exact moments of ``sum_j c_j a_j``: weights as in ``count_moments``, a ``[L, F]``."""
    drawn = weights > 0
    weights, a = weights[drawn], a[drawn].double()
    if method == "shared":
        return _systematic_moments(weights, ONE, a)
    if method == "systematic":
        return _systematic_moments(weights * samples, int(weights.sum()), a)
    return _independent_moments(method, weights, samples, a)


# ---- sums over draws -----------------------------------------------------------------------------


def tally(
    rows: torch.Tensor, counts: torch.Tensor, num_rows: torch.Tensor, length: int
) -> torch.Tensor:
    """How often each row was drawn in all lists together, float64 ``[length]``."""
    used = torch.arange(rows.shape[-1]) < num_rows[..., None]
    return torch.bincount(rows[used], counts[used].double(), minlength=length)


def weighted_sums(
    rows: torch.Tensor, counts: torch.Tensor, num_rows: torch.Tensor, a: torch.Tensor
) -> torch.Tensor:
    """``sum_i counts_i a[rows_i]`` of each list ``[n, C]``, float64 ``[n, F]``."""
    used = torch.arange(rows.shape[-1]) < num_rows[..., None]
    factor = torch.where(used, counts.double(), 0.0)
    return torch.nn.functional.embedding_bag(
        rows, a.double(), mode="sum", per_sample_weights=factor
    )
