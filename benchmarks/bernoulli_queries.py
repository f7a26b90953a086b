"""Synthetic queries of a given kurtosis, and how many key features Bernoulli draws touch of them.

A group of query heads is ``q_hd = s_d (sqrt(a) z_d + sqrt(1 - a) z_hd)`` with normal z. The channel
scales s are the group's own, as outlier channels are; how far they spread sets the kurtosis.
a says how alike the heads are: 0 for independent ones, 1 for one query repeated.

The same kurtosis may come from many scales that differ a little or from few that differ much. So
there are four shapes of s, and what is predicted with them is a range.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

_Noise = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _outliers(u: torch.Tensor, spread: float) -> torch.Tensor:
    """One rotary pair of features is larger, by a factor of its own in each group."""
    pairs = u.shape[-1] // 2
    largest = u[..., :pairs] == u[..., :pairs].amax(-1, keepdim=True)
    factor = 1 + spread * u[..., -1:]
    pair = torch.where(largest, factor, torch.ones_like(factor))
    return torch.cat([pair, pair], -1)


#: Scales from uniform random numbers and a spread, with the largest spread to look at.
SHAPES: dict[str, tuple[Callable[[torch.Tensor, float], torch.Tensor], float]] = {
    "log-normal": (lambda u, spread: torch.exp(spread * torch.special.ndtri(u)), 2.0),
    "power law": (lambda u, spread: u**-spread, 1.0),
    "stretched": (lambda u, spread: (-torch.log(u)) ** spread, 4.0),
    "outlier pair": (_outliers, 60.0),
}


class Queries:
    """Groups of queries from fixed random numbers: what differs between two spreads is the spread.

    Parameters
    ----------
    shape : str
        Key of ``SHAPES``.
    groups, heads, dim : int
        How many groups, query heads of each, and features.
    seed : int
        Of the random numbers.
    """

    def __init__(self, shape: str, groups: int, heads: int, dim: int, seed: int = 0) -> None:
        self._scale, self.widest = SHAPES[shape]
        source = torch.Generator().manual_seed(seed)
        self._uniform = torch.rand(groups, 1, dim, generator=source).clamp_(1e-7, 1 - 1e-7)
        self._common = torch.randn(groups, 1, dim, generator=source)
        self._own = torch.randn(groups, heads, dim, generator=source)

    def __call__(self, spread: float, alike: float = 0.0) -> torch.Tensor:
        """float32 ``[groups, heads, dim]``."""
        z = math.sqrt(alike) * self._common + math.sqrt(1 - alike) * self._own
        return self._scale(self._uniform, spread) * z


def kurtosis(q: torch.Tensor) -> float:
    """Mean over queries of ``mean(q^4) / mean(q^2)^2`` over features; 3 for normal ones."""
    q = q.double()
    return float(((q**4).mean(-1) / (q**2).mean(-1) ** 2).mean())


# ---- which features are touched ------------------------------------------------------------------


def stratified(p: torch.Tensor, draws: int) -> torch.Tensor:
    """Chance that n draws touch a feature whose chance in one draw is p: ``min(1, n p)``.

    That of one uniform number in each of n equal slices of [0, 1), as in the paper's tables.
    """
    return (p * draws).clamp(max=1)


def chances(q: torch.Tensor) -> torch.Tensor:
    """``|q_d| / max |q|``, the shape of ``q``."""
    size = q.abs()
    return size / size.amax(-1, keepdim=True)


@dataclass(frozen=True)
class Access:
    """Shares of a group's key features that are touched, means over groups.

    Parameters
    ----------
    head, union, mean : float
        By one head, by any head of the group, and by the query whose features are the means of
        ``|q|`` over the group.
    """

    head: float
    union: float
    mean: float


def access(q: torch.Tensor, draws: int) -> Access:
    """What ``draws`` draws touch of queries ``[..., heads, dim]`` on average."""
    head = stratified(chances(q), draws)
    union = 1 - (1 - head).prod(-2)
    mean = stratified(chances(q.abs().mean(-2)), draws)
    return Access(*(float(part.double().mean()) for part in (head, union, mean)))


def most_at_twice(share: float) -> float:
    """The most that twice as many independent draws could touch, whatever the queries are.

    With x the chance that n of them miss a feature, ``2 n`` miss it with ``x^2``, and a mean of
    squares is no smaller than the square of the mean (Jensen). Who reads more has not drawn so.
    """
    return 1 - (1 - share) ** 2


def match(figure: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Where a falling function takes a value, by bisection.

    Raises
    ------
    ValueError
        The value lies outside of what the function takes between ``low`` and ``high``.
    """
    first, last = figure(low), figure(high)
    if not last <= target <= first:
        raise ValueError(f"no match: {target:.4g} is not within {last:.4g} and {first:.4g}")
    for _ in range(16):
        middle = (low + high) / 2
        low, high = (middle, high) if figure(middle) > target else (low, middle)
    return (low + high) / 2


# ---- the paper's figures -------------------------------------------------------------------------


@dataclass(frozen=True)
class Paper:
    """Key features read during decoding, in per cent, by number of draws (arXiv 2605.01910v2).

    Parameters
    ----------
    name, source : str
        The model, and where the figures stand.
    heads, dim : int
        Query heads of a group, and features.
    head, union, mean : dict
        As in ``Access``; empty where the paper has none.
    """

    name: str
    source: str
    heads: int
    dim: int
    head: dict[int, float]
    union: dict[int, float]
    mean: dict[int, float]


BITNET = Paper(
    "BitNet b1.58 2B",
    "Table 7, GSM8K",
    heads=4,
    dim=128,
    head={1: 25.6, 2: 46.3, 4: 67.5, 8: 82.6, 16: 91.1},
    union={1: 65.8, 2: 88.0, 4: 97.9, 8: 99.8, 16: 100.0},
    mean={2: 57.9, 4: 84.7, 8: 97.1, 16: 99.7},
)
LLAMA = Paper(
    "Llama-3.1-8B",
    "Table 8, prompts of 4,096 tokens",
    heads=4,
    dim=128,
    head={},
    union={},
    mean={4: 47.3, 8: 72.8, 16: 92.1},
)


@dataclass(frozen=True)
class Fitted:
    """Synthetic queries in the place of a model's.

    Parameters
    ----------
    shape : str
        Key of ``SHAPES``.
    spread, alike, kurtosis : float
        What was found.
    queries : Tensor
        float32 ``[groups, heads, dim]``.
    """

    shape: str
    spread: float
    alike: float
    kurtosis: float
    queries: torch.Tensor


def fit_bitnet(shape: str, groups: int, seed: int = 0) -> Fitted:
    """Match what one draw touches: by a head (the spread), by the group (how alike heads are)."""
    queries = Queries(shape, groups, BITNET.heads, BITNET.dim, seed)
    spread = match(
        lambda spread: access(queries(spread), 1).head,
        BITNET.head[1] / 100,
        0.0,
        queries.widest,
    )
    alike = match(
        lambda alike: access(queries(spread, alike), 1).union,
        BITNET.union[1] / 100,
        0.0,
        0.99,
    )
    q = queries(spread, alike)
    return Fitted(shape, spread, alike, kurtosis(q), q)


def fit_llama(shape: str, groups: int, alike: float, seed: int = 0) -> Fitted:
    """Match what four draws of the mean query touch."""
    queries = Queries(shape, groups, LLAMA.heads, LLAMA.dim, seed)
    spread = match(
        lambda spread: access(queries(spread, alike), 4).mean,
        LLAMA.mean[4] / 100,
        0.0,
        queries.widest,
    )
    q = queries(spread, alike)
    return Fitted(shape, spread, alike, kurtosis(q), q)
