"""What the commands about Bernoulli queries share: tables, CSV files and a figure."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class StudyError(RuntimeError):
    """What makes a command fail; the message is a line for the user."""


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write rows with the same keys; floats with six digits."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({key: _cell(value) for key, value in row.items()})


def _cell(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for pages and terminals: pipes, the columns aligned."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    rule = ["-" * width for width in widths]
    lines.insert(1, rule)
    return "\n".join(
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in lines
    )


def axes(panels: int, titles: Sequence[str]) -> tuple[Any, list[Any]]:
    """A figure and its axes in a row; None without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None, []
    figure = Figure(figsize=(5.6 * panels, 4.8), layout="constrained")  # no pyplot
    FigureCanvasAgg(figure)
    found = list(figure.subplots(1, panels, squeeze=False)[0])
    for each, title in zip(found, titles, strict=True):
        each.set_title(title, fontsize=10)
        each.grid(alpha=0.3)
        each.spines[["top", "right"]].set_visible(False)
    return figure, found
