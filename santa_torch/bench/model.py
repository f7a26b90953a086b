"""Whole steps of a model: not yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from santa_torch.bench.machine import Disturbance
from santa_torch.bench.timing import Ratio, Times, ratio


@dataclass
class ModelResult:
    """What was measured of a model's steps.

    Parameters
    ----------
    name : str
        The model and its setting.
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

    name: str
    judged: bool = False
    labels: dict[str, str] = field(default_factory=dict)
    times: dict[str, Times] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    disturbance: Disturbance = field(default_factory=Disturbance)

    def ratio(self, above: str, below: str) -> Ratio | None:
        """Time of one contender over that of another; None where one was not measured."""
        empty = Times()
        return ratio(self.times.get(above, empty), self.times.get(below, empty))

    def plain(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {}
