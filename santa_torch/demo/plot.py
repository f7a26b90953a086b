"""The demo's picture: bytes, time and error of each contender."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

_COLOURS = ("#8a8f98", "#4c78a8", "#e45756")


def plot(results: dict[str, Any], path: Path) -> bool:
    """Draw to ``path`` (PNG); False, with a line on standard error, without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        print("demo: no plot, matplotlib is not installed", file=sys.stderr)
        return False
    rows = results["contenders"]
    figure = Figure(figsize=(13, 4.2), layout="constrained")  # no pyplot: no global state
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1, 1.5))
    names = [row["label"].replace(", ", "\n") for row in rows]
    _bars(left, names, [row["bytes"] / 1e6 for row in rows], "KV bytes read per token [MB]")
    _bars(middle, names, [row["ms_per_token"] for row in rows], "time per token [ms, median]")
    middle.set_yticklabels([])
    for row, colour in list(zip(rows, _COLOURS, strict=False))[1:]:
        for dtype, style in zip(row["tvd_steps"], ("-", ":"), strict=False):
            steps = row["tvd_steps"][dtype]
            label = f"{row['label'].split(',')[0].removeprefix('santa ')}, {dtype}"
            right.plot(range(1, len(steps) + 1), steps, style, color=colour, label=label)
    right.set_yscale("log")
    right.set_title("next-token total variation distance", fontsize=10)
    right.set_xlabel("token")
    right.grid(alpha=0.3)
    right.legend(fontsize=8, frameon=False)
    figure.suptitle(
        f"{results['model']}, {results['context']} tokens of context, {results['dtype']}",
        fontsize=12,
    )
    figure.savefig(path, dpi=130)
    return True


def _bars(axes: Any, names: list[str], values: list[float], title: str) -> None:
    positions = range(len(names))
    drawn = axes.barh(positions, values, color=_COLOURS[: len(names)])
    axes.bar_label(drawn, fmt="%.4g", padding=3, fontsize=9)
    axes.set_yticks(positions, names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18 * max(values))
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
