"""The pictures: time against L with the floor drawn in, speed-up against S, share of bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from santa_torch.bench.own import DENSE, FLOOR, label
from santa_torch.bench.results import CaseResult, Row

_OURS = ("#e45756", "#f58518", "#72b7b2", "#54a24b", "#b279a2")
#: A colour and a marker for each rival.
_PEERS = (
    "#1f4e79", "#7f7f7f", "#4c9be8", "#c9a227", "#4b3b2a",
    "#17becf", "#6b6ecf", "#bcbd22", "#e377c2", "#c49c94",
)  # fmt: skip
_MARKERS = "sv^<>DPX*d"


def available() -> bool:
    """Whether matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def draw(results: Sequence[CaseResult], path: Path) -> bool:
    """Draw what the results allow to ``path``, PNG or SVG by its suffix; False for nothing."""
    panels = [
        panel
        for panel in (_TimeByRows(results), _SpeedBySamples(results), _ShareByCase(results))
        if panel.data
    ]
    if not panels or not available():
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = max(4.8, 0.4 * len(panels[-1].data))  # the last panel has a pair of bars for each case
    figure = Figure(figsize=(6.2 * len(panels), height), layout="constrained")  # no pyplot
    FigureCanvasAgg(figure)
    for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        panel.draw(axes)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
    return True


class _TimeByRows:
    """Milliseconds against L, for the first batch, heads and dtype that have several lengths."""

    def __init__(self, results: Sequence[CaseResult]) -> None:
        by_shape: dict[tuple[Any, ...], list[CaseResult]] = {}
        for result in results:
            case = result.case
            key = (case.batch, case.heads, case.kv_heads, case.head_dim, case.dtype, case.threads)
            if result.measured("floor"):
                by_shape.setdefault(key, []).append(result)
        longest = max(by_shape.values(), key=len, default=[])
        self.data = sorted(longest, key=lambda r: r.case.rows) if len(longest) > 1 else []

    def draw(self, axes: Any) -> None:
        names = dict.fromkeys(
            row.name for result in self.data for row in result.rows if _usual(result, row)
        )
        ours, peers = iter(_OURS * 9), iter(tuple(zip(_PEERS, _MARKERS, strict=True)) * 9)
        for name in names:
            points = [
                (result.case.rows, row.ms) for result in self.data if (row := result.row(name))
            ]
            if not points:
                continue
            if name == FLOOR:
                style = {"color": "black", "linestyle": "--", "linewidth": 1.5}
            elif name.startswith("santa"):
                style = {"color": next(ours), "marker": "o", "linewidth": 2}
            else:
                colour, marker = next(peers)
                style = {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1}
            axes.plot(*zip(*points, strict=True), label=name, **style)
        rows = [result.case.rows for result in self.data]
        axes.set(xscale="log", yscale="log", xlabel="rows of the KV cache", ylabel="ms per call")
        axes.set_xticks(rows, [_short(count) for count in rows])
        axes.minorticks_off()
        case = self.data[0].case
        axes.set_title(
            f"B={case.batch}, {case.heads}/{case.kv_heads} heads, D={case.head_dim}, {case.dtype}"
            + _noise(*self.data),
            fontsize=10,
        )
        axes.grid(alpha=0.3)
        _legend(axes)


class _SpeedBySamples:
    """Times as fast as dense against S, at the case with the most S."""

    def __init__(self, results: Sequence[CaseResult]) -> None:
        best = max(results, key=lambda r: (len(r.case.samples), r.case.rows), default=None)
        self.data: dict[str, list[tuple[int, float]]] = {}
        self.title = f"{best.case}{_noise(best)}" if best else ""
        for row in best.measured("santa") if best and len(best.case.samples) > 1 else ():
            speed = best.ratio(DENSE, row.name) if best else None
            if row.samples is not None and speed is not None and "(" not in row.name:
                self.data.setdefault(row.method, []).append((row.samples, speed.value))

    def draw(self, axes: Any) -> None:
        for (method, points), colour in zip(self.data.items(), _OURS, strict=False):
            axes.plot(*zip(*sorted(points), strict=True), marker="o", color=colour, label=method)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set(xscale="log", xlabel="samples S", ylabel="times as fast as our dense")
        counts = sorted({samples for points in self.data.values() for samples, _ in points})
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
        axes.set_title(self.title, fontsize=9)
        axes.grid(alpha=0.3)
        _legend(axes)


class _ShareByCase:
    """Share of the read bandwidth of our dense, and of the strongest peer, by case."""

    def __init__(self, results: Sequence[CaseResult]) -> None:
        self.data: list[tuple[str, dict[str, float]]] = []
        self.measured: list[CaseResult] = []
        for result in results:
            peer = result.strongest("torch", "library")
            shares = {
                title: 100 * share.value
                for title, name in ((DENSE, DENSE), ("strongest peer", peer.name if peer else ""))
                if (share := result.ratio(FLOOR, name)) is not None
            }
            if shares:
                self.data.append((_name(result), shares))
                self.measured.append(result)

    def draw(self, axes: Any) -> None:
        for offset, (title, colour) in enumerate(
            ((DENSE, _OURS[0]), ("strongest peer", _PEERS[0]))
        ):
            places = [i + 0.4 * offset for i in range(len(self.data))]
            values = [shares.get(title, 0.0) for _, shares in self.data]
            drawn = axes.barh(places, values, 0.38, color=colour, label=title)
            # On white, so that the line at 100 % ends where a figure stands.
            paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
            axes.bar_label(drawn, fmt="%.0f", padding=2, fontsize=7, bbox=paper, zorder=5)
        axes.set_yticks([i + 0.2 for i in range(len(self.data))], [n for n, _ in self.data])
        axes.tick_params(axis="y", labelsize=7)
        axes.invert_yaxis()
        axes.axvline(100, color="black", linestyle="--", linewidth=0.8)
        title = f"share of the read bandwidth [%]{_noise(*self.measured)}"
        axes.set_title(title, fontsize=10)
        _legend(axes)


def _usual(result: CaseResult, row: Row) -> bool:
    """Whether a row belongs among few lines: one S, the level in use, the public function."""
    samples = 128 if 128 in result.case.samples else result.case.samples[0]
    if row.family != "santa":
        return True
    return row.samples in (None, samples) and row.name == label(row.method, row.samples)


def _legend(axes: Any) -> None:
    axes.legend(fontsize=7, frameon=False, loc="upper center", ncols=3, bbox_to_anchor=(0.5, -0.12))


def _noise(*results: CaseResult) -> str:
    """Say which of the results were taken while others used the machine."""
    loud = [result for result in results if not result.disturbance.quiet]
    if not loud:
        return ""
    if len(loud) == len(results):
        return " (not quiet)"
    return f" (not quiet: {', '.join(_short(result.case.rows) for result in loud)})"


def _name(result: CaseResult) -> str:
    case = result.case
    return (
        f"B={case.batch} {case.heads}/{case.kv_heads} D={case.head_dim}\n"
        f"L={_short(case.rows)} {case.dtype}"
    )


def _short(count: int) -> str:
    if count % 2**20 == 0:
        return f"{count // 2**20}M"
    return f"{count // 1024}k" if count % 1024 == 0 else str(count)
