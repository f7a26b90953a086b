"""Table, JSON and picture of ``cuda_decode.py``, all from the document that it writes."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

#: Against whom the last columns compare.
OURS = "santa dense"


def figures(document: dict[str, Any], result: dict[str, Any]) -> list[dict[str, Any]]:
    """What the table shows of each contender that took part.

    Returns
    -------
    list of dict
        ``microseconds`` (median), ``gbytes`` (achieved, in 1e9 bytes a second), ``floors`` (time
        over the time that its bytes take), ``speedup`` (times as fast as our dense), ``rivals``
        (times as fast as the fastest rival; None where there is none).
    """
    lines = [line for line in result["lines"] if line["absent"] is None]
    times = {line["name"]: statistics.median(line["microseconds"]) for line in lines}
    rivals = [time for name, time in times.items() if not name.startswith("santa")]
    found = []
    for line in lines:
        time = times[line["name"]]
        floor = 1e6 * line["bytes_read"] / document["bytes_per_second"]
        found.append(
            {
                "name": line["name"],
                "microseconds": time,
                "gbytes": line["bytes_read"] / time / 1e3,
                "floors": time / floor,
                "speedup": times[OURS] / time,
                "rivals": min(rivals) / time if rivals else None,
                "error": line["error"],
            }
        )
    return found


def heading(document: dict[str, Any]) -> str:
    """What was measured where."""
    text = f"{document['device']}, torch {document['packages']['torch']}"
    if document["rehearsal"]:
        return f"{text}\nA rehearsal: the code runs, and no figure says anything of a GPU.\n"
    speed = document["bytes_per_second"] / 1e9
    return f"{text}: {speed:.0f} GB/s read or copied by torch; medians of {document['rounds']}\n"


def table(document: dict[str, Any], result: dict[str, Any]) -> str:
    """One shape, the contenders in their order, then those that are missing."""
    shape = document["shape"]
    lines = [
        f"B={result['batch']} {shape['heads']}/{shape['kv_heads']} heads D={shape['head_dim']} "
        f"L={result['rows']} {shape['dtype']}: {result['kv_bytes'] / 2**20:.1f} MiB of K and V",
        f"{'':28s}{'us':>10s}{'GB/s':>8s}"
        + "".join(f"{title:>9s}" for title in ("x floor", "x dense", "x rival", "error")),
    ]
    if document["rehearsal"]:
        lines[1] += "   (rehearsal)"
    for row in figures(document, result):
        rival = "" if row["rivals"] is None else f"{row['rivals']:.2f}"
        lines.append(
            f"{row['name']:28s}{row['microseconds']:10.1f}{row['gbytes']:8.0f}"
            f"{row['floors']:9.2f}{row['speedup']:9.2f}{rival:>9s}{row['error']:9.4f}"
        )
    for line in result["lines"]:
        if line["absent"] is not None:
            lines.append(f"{line['name']:28s} missing: {line['absent']}")
    return "\n".join(lines)


def write(folder: Path, document: dict[str, Any]) -> list[Path]:
    """Write everything as it stands; the paths."""
    tables = [table(document, result) for result in document["results"]]
    skipped = [f"B={s['batch']} L={s['rows']}: {s['reason']}" for s in document["skipped"]]
    text, data = folder / "table.txt", folder / "results.json"
    text.write_text("\n\n".join([heading(document).strip(), *tables, *skipped]) + "\n")
    summaries = [
        {"batch": r["batch"], "rows": r["rows"], "figures": figures(document, r)}
        for r in document["results"]
    ]
    data.write_text(json.dumps({**document, "summary": summaries}, indent=1) + "\n")
    written = [text, data]
    picture = folder / "cuda_decode.png"
    if draw(document, picture):
        written.append(picture)
    return written


def draw(document: dict[str, Any], path: Path) -> bool:
    """Time over floor and over rows, a panel for each batch; False without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    batches = sorted({result["batch"] for result in document["results"]})
    figure = Figure(figsize=(5.5 * len(batches), 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    for batch, axes in zip(
        batches, figure.subplots(1, len(batches), squeeze=False)[0], strict=True
    ):
        results = [result for result in document["results"] if result["batch"] == batch]
        _panel(document, sorted(results, key=lambda r: r["rows"]), axes)
    note = ": no figure of a GPU" if document["rehearsal"] else ""
    figure.suptitle(document["device"] + note)
    figure.savefig(path, dpi=130)
    return True


def _panel(document: dict[str, Any], results: list[dict[str, Any]], axes: Any) -> None:
    curves: dict[str, list[tuple[int, float]]] = {}
    for result in results:
        for row in figures(document, result):
            curves.setdefault(row["name"], []).append((result["rows"], row["microseconds"]))
    for name, points in curves.items():
        ours = name.startswith("santa")
        style = {"marker": "o", "linewidth": 2} if ours else {"marker": "x", "linestyle": ":"}
        axes.plot(*zip(*points, strict=True), label=name, **style)
    floor = [(r["rows"], 1e6 * r["kv_bytes"] / document["bytes_per_second"]) for r in results]
    axes.plot(*zip(*floor, strict=True), color="black", linestyle="--", label="K and V once")
    axes.set(xscale="log", yscale="log", xlabel="rows of the KV cache", ylabel="us per step")
    rows = [result["rows"] for result in results]
    axes.set_xticks(rows, [str(count) for count in rows])
    axes.minorticks_off()
    axes.set_title(f"B={results[0]['batch']}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=6, frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.1))
