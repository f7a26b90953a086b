"""Interleaved timing: every variant takes a turn in each round, in a shuffled order.

A machine that is shared drifts by a fifth and more within minutes. Variants that take turns in one
process drift together, so that their ratios hold where their times do not.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

#: Between turns the thread pools of the last variant stop spinning and leave the cores: seconds of
#: a look, the share of a core in use at which they have, and seconds after which the next goes on.
REST, SETTLED, PATIENCE = 0.005, 0.2, 0.05

#: A variant this many times slower than the fastest, the floor aside, takes part in every third
#: round only.
SLOW, SLOW_EVERY = 10.0, 3

#: Calls shorter than this are timed several at once, in seconds.
RESOLUTION = 200e-6


def _nothing() -> None:
    """Nothing to be done before or after a turn."""


@dataclass
class Variant:
    """One way to compute a decode step.

    Parameters
    ----------
    name : str
        As the table shows it; unique within a run.
    family : str
        "floor", "santa", "torch" (plain PyTorch) or "library".
    run : callable
        Called with the index of a set of K and V; what is timed.
    prepare, rest : callable
        Called before and after each turn, outside of the timed part.
    """

    name: str
    family: str
    run: Callable[[int], Any]
    prepare: Callable[[], None] = _nothing
    rest: Callable[[], None] = _nothing


@dataclass
class Times:
    """What was measured of one variant.

    Parameters
    ----------
    rounds : dict of int to list of float
        Seconds per call of the counted calls, by round. Slow variants skip rounds.
    error : str or None
        Why it stopped, where it did.
    """

    rounds: dict[int, list[float]] = field(default_factory=dict)
    error: str | None = None

    @property
    def seconds(self) -> list[float]:
        """All counted calls."""
        return [second for calls in self.rounds.values() for second in calls]

    @property
    def lower_quartile(self) -> float:
        """What the machine does when nobody disturbs it much."""
        return lower_quartile(self.seconds)

    @property
    def median(self) -> float:
        """What it does typically."""
        return statistics.median(self.seconds)


def lower_quartile(values: Sequence[float]) -> float:
    """The value below which a quarter of the others lies."""
    return sorted(values)[len(values) // 4]


#: Draws of a bootstrap.
RESAMPLES = 200


@dataclass(frozen=True)
class Ratio:
    """How many times as long one variant takes as another.

    Parameters
    ----------
    value : float
        Ratio of the lower quartiles of all calls.
    low, high : float
        Where the middle 80 % of such ratios lie when the run's rounds are drawn anew.
    """

    value: float
    low: float
    high: float


def ratio(above: Times, below: Times) -> Ratio | None:
    """``above / below``; None where one of them has no times.

    The spread is a bootstrap of the value itself: rounds are drawn with replacement, those that
    both took part in for both at once, since their turns lie within a second or two of each other.
    """
    if not above.seconds or not below.seconds:
        return None
    value = above.lower_quartile / below.lower_quartile
    low, high = _spread(_frozen(above), _frozen(below))
    return Ratio(value, min(low, value), max(high, value))


_Rounds = tuple[tuple[int, tuple[float, ...]], ...]


def _frozen(times: Times) -> _Rounds:
    return tuple((number, tuple(calls)) for number, calls in sorted(times.rounds.items()))


@lru_cache(maxsize=4096)  # tables and files ask for the same ratios again and again
def _spread(above: _Rounds, below: _Rounds) -> tuple[float, float]:
    """Deciles of the ratio of lower quartiles over redrawn rounds; the same for the same times."""
    rounds, order = (dict(above), dict(below)), random.Random(0)
    common = sorted(rounds[0].keys() & rounds[1].keys())
    alone = [sorted(own.keys() - set(common)) for own in rounds]
    found = []
    for _ in range(RESAMPLES):
        shared = order.choices(common, k=len(common)) if common else []
        quartiles = []
        for own, rest in zip(rounds, alone, strict=True):
            drawn = shared + (order.choices(rest, k=len(rest)) if rest else [])
            quartiles.append(lower_quartile([s for number in drawn for s in own[number]]))
        found.append(quartiles[0] / quartiles[1])
    found.sort()
    return found[RESAMPLES // 10], found[-1 - RESAMPLES // 10]


@dataclass
class Schedule:
    """How often and in which order variants are called.

    Parameters
    ----------
    rounds : int
        Turns of each variant that count; one more warms up.
    calls : int
        Counted calls of a turn. One more comes first and does not count: it wakes the threads.
    sets : int
        Sets of K and V; every call of any variant takes the next one.
    seed : int
        Of the order within a round.
    """

    rounds: int
    calls: int
    sets: int
    seed: int = 0


def measure(
    variants: Sequence[Variant],
    schedule: Schedule,
    progress: Callable[[int], None],
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
    used: Callable[[], float] = time.process_time,
) -> dict[str, Times]:
    """Time all variants interleaved.

    A variant that raises keeps its times so far, gets the message as ``error`` and takes no further
    turns. On Ctrl-C the exception goes through with what was measured in its ``args``.

    Parameters
    ----------
    variants : sequence of Variant
        At least one.
    schedule : Schedule
        How often.
    progress : callable
        Called with the number of rounds done.
    clock, sleep, used : callable
        Seconds, how to wait, and CPU seconds of this process; tests pass their own.

    Returns
    -------
    dict
        ``Times`` by name of variant.
    """
    results = {variant.name: Times() for variant in variants}
    order, turns = random.Random(schedule.seed), _Turns(schedule, clock, sleep, used)
    pace: dict[str, float] = {}
    try:
        for number in range(-1, schedule.rounds):  # round -1 warms up and sets the pace
            shuffled = list(variants)
            order.shuffle(shuffled)
            # Reading is no computation: at small shapes everything is slow beside it.
            fastest = min((pace[v.name] for v in variants if _races(v, pace)), default=0.0)
            for variant in shuffled:
                times = results[variant.name]
                slow = pace.get(variant.name, 0.0) > SLOW * fastest
                if times.error or (number > 0 and slow and number % SLOW_EVERY):
                    continue
                try:
                    calls = turns.take(variant, pace.get(variant.name))
                except Exception as error:
                    times.error = describe(error)
                    continue
                if number < 0:
                    pace[variant.name] = min(calls)
                else:
                    times.rounds[number] = calls
            progress(number + 1)
    except KeyboardInterrupt as stop:
        raise Interrupted(results) from stop
    return results


def _races(variant: Variant, pace: dict[str, float]) -> bool:
    return variant.family != "floor" and variant.name in pace


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while measuring; ``results`` is what was measured until then."""

    def __init__(self, results: dict[str, Times]) -> None:
        super().__init__()
        self.results = results


def describe(error: BaseException) -> str:
    """An exception as one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


class _Turns:
    """Takes turns, each from where the last one left the sets."""

    def __init__(
        self,
        schedule: Schedule,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        used: Callable[[], float],
    ) -> None:
        self.schedule, self.clock, self.sleep, self.used = schedule, clock, sleep, used
        self.cursor = 0

    def take(self, variant: Variant, pace: float | None) -> list[float]:
        """Seconds per call of one turn's counted calls."""
        repeats = 1 if not pace else max(1, min(1000, round(RESOLUTION / pace)))
        self._settle()
        variant.prepare()
        try:
            return [self._time(variant, repeats) for _ in range(self.schedule.calls + 1)][1:]
        finally:
            variant.rest()

    def _settle(self) -> None:
        """Wait until hardly anything of this process runs, or patience ends."""
        start = self.clock()
        while True:
            before, began = self.used(), self.clock()
            self.sleep(REST)
            now = self.clock()
            passed = max(now - began, REST)
            if self.used() - before < SETTLED * passed or now - start + REST > PATIENCE:
                return

    def _time(self, variant: Variant, repeats: int) -> float:
        run, sets, cursor = variant.run, self.schedule.sets, self.cursor
        start = self.clock()
        for _ in range(repeats):
            run(cursor)
            cursor = (cursor + 1) % sets
        seconds = (self.clock() - start) / repeats
        self.cursor = cursor
        return seconds
