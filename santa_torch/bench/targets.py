"""The targets of the CPU backend as data: which case, which figure of it, and how much is wanted.

A target is met by the worst of the cases that it is about. Times are lower quartiles of interleaved
calls; a ratio is formed within one case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from santa_torch.bench.cases import Case
from santa_torch.bench.own import DENSE, FLOOR, label
from santa_torch.bench.results import CaseResult, ModelResult

#: Stages whose cost should follow S rather than the rows.
_DRAWING = ("draw", "gather")

Figure = Callable[[CaseResult, Sequence[CaseResult]], float | None]


@dataclass(frozen=True)
class Target:
    """One line of the table of targets.

    Parameters
    ----------
    text : str
        What is wanted.
    goal : float
        The figure to reach.
    at_least : bool
        Whether larger is better.
    where : callable
        Whether a case counts.
    figure : callable
        The figure of a case, given all cases; None where the run does not tell.
    unit : str
        "x", "%" (of a share) or "us".
    across : bool
        Whether the figure compares with another case of the run.
    """

    text: str
    goal: float
    at_least: bool
    where: Callable[[Case], bool]
    figure: Figure
    unit: str = "x"
    across: bool = False


@dataclass(frozen=True)
class Verdict:
    """A target and what a run measured of it.

    Parameters
    ----------
    text, unit : str
        The target's.
    goal, measured : float
        In the target's unit.
    at_least : bool
        Whether larger is better.
    case : str
        The case that the figure is from: the worst.
    quiet : bool
        Whether nobody else used the machine meanwhile; of figures across cases, in all of those
        that it may be compared with.
    """

    text: str
    unit: str
    goal: float
    measured: float
    at_least: bool
    case: str
    quiet: bool = True

    @property
    def met(self) -> bool:
        """Whether the target is reached."""
        return self.measured >= self.goal if self.at_least else self.measured <= self.goal

    @property
    def missed_by(self) -> float:
        """How much of the goal is missing or too much, as a share of it; 0 where met."""
        return 0.0 if self.met else abs(self.measured - self.goal) / abs(self.goal)

    def plain(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**vars(self), "met": self.met, "missed_by": self.missed_by}


def over(above: str, below: str) -> Figure:
    """Time of one variant over that of another."""

    def figure(result: CaseResult, _: Sequence[CaseResult]) -> float | None:
        found = result.ratio(above, below)
        return found.value if found else None

    return figure


def first_of(*figures: Figure) -> Figure:
    """The first that the run has."""

    def figure(result: CaseResult, results: Sequence[CaseResult]) -> float | None:
        found = (each(result, results) for each in figures)
        return next((value for value in found if value is not None), None)

    return figure


def over_strongest(below: str, *families: str) -> Figure:
    """Time of the fastest peer over that of a variant."""

    def figure(result: CaseResult, _: Sequence[CaseResult]) -> float | None:
        peer = result.strongest(*families)
        found = result.ratio(peer.name, below) if peer else None
        return found.value if found else None

    return figure


def microseconds(name: str) -> Figure:
    """Time of one call."""

    def figure(result: CaseResult, _: Sequence[CaseResult]) -> float | None:
        row = result.row(name)
        return 1e3 * row.ms if row and row.ms else None

    return figure


def share_kept(name: str) -> Figure:
    """Share of the bandwidth at this shape over the share at 32/8 heads, D = 128, bfloat16.

    With as many rows where the run has that, else with 32k.
    """

    def figure(result: CaseResult, results: Sequence[CaseResult]) -> float | None:
        own = result.ratio(FLOOR, name)
        for rows in (result.case.rows, 32768):
            for other in results:
                if _at(1, rows)(other.case) and other.case.threads == result.case.threads:
                    standard = other.ratio(FLOOR, name)
                    if own and standard:
                        return own.value / standard.value
        return None

    return figure


def _shorter(result: CaseResult, results: Sequence[CaseResult]) -> CaseResult | None:
    """The case with 8,192 rows that is like this one otherwise."""
    like = (other for other in results if _like(other.case, result.case))
    return next((other for other in like if other.case.rows == 8192), None)


def growth(name: str) -> Figure:
    """Time over that of reading K and V, at the longest cache over that at 8,192 rows.

    Both are ratios within one case: what the memory does at another size, or an hour later, drops
    out of them.
    """

    def figure(result: CaseResult, results: Sequence[CaseResult]) -> float | None:
        other = _shorter(result, results)
        long, short = result.ratio(name, FLOOR), other and other.ratio(name, FLOOR)
        return long.value / short.value if long and short else None

    return figure


def stage_growth(name: str) -> Figure:
    """Time of drawing and gathering at the longest cache over that at 8,192 rows, per row."""

    def spent(result: CaseResult | None) -> float:
        row = result and result.row(name)
        return sum(row.stages.get(stage, 0.0) for stage in _DRAWING) if row else 0.0

    def figure(result: CaseResult, results: Sequence[CaseResult]) -> float | None:
        long, short = spent(result), spent(_shorter(result, results))
        return long / short * 8192 / result.case.rows if long and short else None

    return figure


def scratch(method: str) -> Figure:
    """Scratch bytes of a method over (G + 2) / D of the KV bytes."""

    def figure(result: CaseResult, _: Sequence[CaseResult]) -> float | None:
        case = result.case
        limit = (case.group + 2) / case.head_dim * case.kv_bytes
        sizes = [
            row.scratch_bytes / limit
            for row in result.rows
            if row.method == method and row.scratch_bytes is not None
        ]
        return max(sizes, default=None)

    return figure


def _like(a: Case, b: Case) -> bool:
    keys = ("batch", "heads", "kv_heads", "head_dim", "dtype", "threads")
    return all(getattr(a, key) == getattr(b, key) for key in keys)


def _long(case: Case) -> bool:
    return case.standard and case.batch == 1 and case.rows >= 32768


def _at(batch: int, rows: int) -> Callable[[Case], bool]:
    return lambda case: case.standard and (case.batch, case.rows) == (batch, rows)


def _other_shape(case: Case) -> bool:
    return not (case.standard and case.batch == 1) and case.rows >= 8192 and case.batch != 4


def _targets() -> Iterator[Target]:
    yield Target("dense: share of bandwidth, L >= 32k", 0.9, True, _long, over(FLOOR, DENSE), "%")
    yield Target("dense: share of bandwidth, 8k", 0.8, True, _at(1, 8192), over(FLOOR, DENSE), "%")
    for method in ("systematic", "shared"):
        own = label(method, 128)
        read = f"{own}: reading all of K and V over own time"
        yield Target(f"{read}, L >= 32k", 1.7, True, _long, over(FLOOR, own))
        yield Target(f"{read}, 4 x 8k", 1.4, True, _at(4, 8192), over(FLOOR, own))
        dense = f"{own} against own dense"
        yield Target(f"{dense}, L >= 32k", 1.8, True, _long, over(DENSE, own))
        yield Target(f"{dense}, 4 x 8k", 1.5, True, _at(4, 8192), over(DENSE, own))
        yield Target(f"{dense}, 1 x 8k", 1.3, True, _at(1, 8192), over(DENSE, own))
        strongest = over_strongest(own, "torch", "library")
        yield Target(f"{own} against the strongest peer, L >= 32k", 4.0, True, _long, strongest)
    many = label("systematic", 1024)
    yield Target(f"{many} against own dense, 32k", 1.5, True, _at(1, 32768), over(DENSE, many))
    for name, method in ((DENSE, "dense"), (label("systematic", 128), "systematic")):
        avx2, avx512 = (
            label(method, None if method == "dense" else 128, level) for level in ("avx2", "avx512")
        )
        anywhere = lambda case: case.standard and case.rows >= 8192  # noqa: E731
        figure = first_of(over(avx2, avx512), over(avx2, name))
        yield Target(f"{name}: AVX2 against AVX-512", 1.5, False, anywhere, figure)
    small = lambda case: case.standard and case.batch == 1 and 128 <= case.rows <= 1024  # noqa: E731
    for own in (DENSE, label("systematic", 128), label("shared", 128)):
        best = over_strongest(own, "torch")
        text = f"{own}: best PyTorch expression over the whole call, L = 128 ... 1024"
        yield Target(text, 1.0, True, small, best)
    tiny = lambda case: case.standard and case.rows == 16  # noqa: E731
    yield Target("overhead of a call, L = 16", 8.0, False, tiny, microseconds(DENSE), "us")
    for own in (DENSE, label("systematic", 128), label("shared", 128)):
        text = f"{own}: share of bandwidth at other shapes over that at 32/8, D = 128, bf16"
        yield Target(text, 0.85, True, _other_shape, share_kept(own), "x", True)
    for method in ("dense", "systematic", "shared"):
        text = f"{method}: scratch bytes over (G + 2) / D of the KV bytes"
        large = lambda case: case.rows >= 8192  # noqa: E731
        yield Target(text, 1.0, False, large, scratch(method))
    for own in (DENSE, label("systematic", 128), label("shared", 128)):
        million = lambda case: case.standard and case.rows >= 2**20  # noqa: E731
        text = f"{own}: time over reading K and V, at 1M rows over that at 8k"
        yield Target(text, 1.1, False, million, growth(own), "x", True)
        if own != DENSE:
            text = f"{own}: draw and gather, time per row at 1M rows over that at 8k"
            yield Target(text, 0.5, False, million, stage_growth(own), "x", True)


TARGETS = tuple(_targets())


def judge(results: Sequence[CaseResult]) -> list[Verdict]:
    """What the run says about each target; targets that its sizes do not allow are left out."""
    verdicts = []
    for target in TARGETS:
        figures = [
            (value, str(result.case), _quiet(target, result, results))
            for result in results
            if target.where(result.case) and (value := target.figure(result, results)) is not None
        ]
        if figures:
            value, case, quiet = (min if target.at_least else max)(figures)
            verdicts.append(
                Verdict(target.text, target.unit, target.goal, value, target.at_least, case, quiet)
            )
    return verdicts


def _quiet(target: Target, result: CaseResult, results: Sequence[CaseResult]) -> bool:
    others = [r for r in results if target.across and r.case.rows in (8192, 32768)]
    return all(r.disturbance.quiet for r in (result, *others))


#: Model: goal, whether at least, and how the figure is formed from ms per token by contender.
MODEL_TARGETS: tuple[tuple[str, float, bool, str, str], ...] = (
    ("ms per token against a 64-token context", 1.2, False, "santa", "short"),
    ("HF SDPA against ours", 4.0, True, "sdpa", "santa"),
    ("HF eager against ours", 2.2, True, "eager", "santa"),
)


def judge_model(result: ModelResult) -> list[Verdict]:
    """The targets of a model's steps; only SmolLM2's are judged, others are reported alone."""
    verdicts = []
    for text, goal, at_least, above, below in MODEL_TARGETS if result.judged else ():
        found = result.ratio(above, below)
        if found is not None:
            quiet = result.disturbance.quiet
            verdicts.append(Verdict(text, "x", goal, found.value, at_least, result.name, quiet))
    return verdicts
