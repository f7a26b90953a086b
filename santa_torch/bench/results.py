"""What a run measured, as plain data: rows of cases, ready for tables, JSON and targets."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from santa_torch.bench.cases import Case
from santa_torch.bench.machine import Disturbance
from santa_torch.bench.timing import Ratio, Times, ratio


@dataclass
class Row:
    """A variant of a case.

    Parameters
    ----------
    name, family : str
        As in ``timing.Variant``.
    times : Times
        What was measured.
    dtype : str
        Of the K and V that it reads.
    method, samples
        Of ours: the method ("" for others) and S.
    error : float or None
        Relative RMS error of one output against float64.
    note : str
        Versions, or why there are no times.
    scratch_bytes : int or None
        Of ours, where the build tells.
    stages : dict of str to float
        Of ours: milliseconds of a call in each stage, of all threads together over their number.
    """

    name: str
    family: str
    times: Times = field(default_factory=Times)
    dtype: str = ""
    method: str = ""
    samples: int | None = None
    error: float | None = None
    note: str = ""
    scratch_bytes: int | None = None
    stages: dict[str, float] = field(default_factory=dict)

    @property
    def ms(self) -> float | None:
        """Lower quartile in milliseconds; None where nothing was measured."""
        return 1e3 * self.times.lower_quartile if self.times.seconds else None


@dataclass
class CaseResult:
    """A case and its rows.

    Parameters
    ----------
    case : Case
        The shape.
    sets : str
        What the buffers rotated through, in words.
    rotated_bytes : int
        The same as a number.
    rows : list of Row
        The floor first.
    disturbance : Disturbance
        Whether others used the machine meanwhile.
    skipped : str
        Why nothing was measured, where nothing was.
    """

    case: Case
    sets: str = ""
    rotated_bytes: int = 0
    rows: list[Row] = field(default_factory=list)
    disturbance: Disturbance = field(default_factory=Disturbance)
    skipped: str = ""

    def row(self, name: str) -> Row | None:
        """A row with times."""
        return next((r for r in self.rows if r.name == name and r.times.seconds), None)

    def measured(self, *families: str) -> list[Row]:
        """Rows of these families that have times."""
        return [row for row in self.rows if row.family in families and row.times.seconds]

    @property
    def measured_any(self) -> bool:
        """Whether there are times; without, nobody knows whether the machine was quiet."""
        return any(row.times.seconds for row in self.rows)

    def strongest(self, *families: str) -> Row | None:
        """The fastest of these families, by its lower quartile."""
        return min(self.measured(*families), key=lambda row: row.ms or 0.0, default=None)

    def ratio(self, above: str, below: str) -> Ratio | None:
        """Time of one row over that of another."""
        a, b = self.row(above), self.row(below)
        return ratio(a.times, b.times) if a and b else None

    def plain(self, floor: str, dense: str) -> dict[str, Any]:
        """Plain values for JSON, with ratios to the floor, to dense and to the strongest peer."""
        peer = self.strongest("torch", "library")
        return {
            "case": asdict(self.case),
            "name": str(self.case),
            "kv_bytes": self.case.kv_bytes,
            "rotated_bytes": self.rotated_bytes,
            "sets": self.sets,
            "skipped": self.skipped,
            "quiet": self.disturbance.quiet if self.measured_any else None,
            "cores_of_others": self.disturbance.cores,
            "seconds_waited": self.disturbance.waited,
            "strongest_peer": peer.name if peer else None,
            "variants": [
                {
                    "name": row.name,
                    "family": row.family,
                    "method": row.method,
                    "samples": row.samples,
                    "dtype": row.dtype,
                    "ms": row.ms,
                    "ms_median": 1e3 * row.times.median if row.times.seconds else None,
                    "gigabytes_per_second": self._bandwidth(row),
                    "over_floor": _plain(self.ratio(floor, row.name)),
                    "speed_up": _plain(self.ratio(dense, row.name)),
                    "speed_up_over_peer": _plain(self.ratio(peer.name, row.name) if peer else None),
                    "relative_rms_error": row.error,
                    "stages_ms": row.stages,
                    "scratch_bytes": row.scratch_bytes,
                    "note": row.note,
                    "error": row.times.error,
                    "seconds": row.times.rounds,
                }
                for row in self.rows
            ],
        }

    def _bandwidth(self, row: Row) -> float | None:
        return self.case.kv_bytes / row.ms / 1e6 if row.ms and row.family == "floor" else None


def _plain(value: Ratio | None) -> dict[str, float] | None:
    return asdict(value) if value else None


@dataclass
class ModelResult:
    """What was measured of a model's steps.

    Parameters
    ----------
    name : str
        The model and its setting.
    context : int
        Rows in the long caches.
    judged : bool
        Whether the targets are about it.
    labels : dict
        By key of contender, its name in the table.
    times : dict
        By key, seconds per step.
    notes : list of str
        How the caches were filled, and what else a reader should know.
    disturbance : Disturbance
        Whether others used the machine meanwhile.
    """

    name: str = ""
    context: int = 0
    judged: bool = False
    labels: dict[str, str] = field(default_factory=dict)
    times: dict[str, Times] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    disturbance: Disturbance = field(default_factory=Disturbance)

    def ratio(self, above: str, below: str) -> Ratio | None:
        """Time of one contender over that of another; None where one was not measured.

        "short" is the fastest of those with hardly any context.
        """
        below = self._fastest_short() if below == "short" else below
        empty = Times()
        return ratio(self.times.get(above, empty), self.times.get(below, empty))

    def _fastest_short(self) -> str:
        measured = {
            key: times.lower_quartile
            for key, times in self.times.items()
            if key.startswith("short") and times.seconds
        }
        return min(measured, key=lambda key: measured[key], default="")

    def plain(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "name": self.name,
            "context": self.context,
            "notes": self.notes,
            "quiet": self.disturbance.quiet
            if any(t.seconds for t in self.times.values())
            else None,
            "cores_of_others": self.disturbance.cores,
            "contenders": [
                {
                    "key": key,
                    "label": label,
                    "ms": 1e3 * times.lower_quartile if times.seconds else None,
                    "ms_median": 1e3 * times.median if times.seconds else None,
                    "over_short": _plain(self.ratio(key, "short")),
                    "over_ours": _plain(self.ratio(key, "santa")),
                    "error": times.error,
                    "seconds": times.rounds,
                }
                for key, label in self.labels.items()
                if (times := self.times.get(key)) is not None
            ],
        }
