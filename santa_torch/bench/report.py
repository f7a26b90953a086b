"""What the suite shows and writes: aligned tables, CSV, JSON."""

from __future__ import annotations

import csv
import io
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from santa_torch.bench.machine import Disturbance
from santa_torch.bench.own import DENSE, FLOOR
from santa_torch.bench.results import CaseResult, ModelResult, Row
from santa_torch.bench.targets import Verdict
from santa_torch.bench.timing import Ratio

_HEADER = ("", "ms", "median", "of floor", "vs dense", "spread", "vs peer", "error", "")


def heading(facts: dict[str, Any]) -> str:
    """Say what the figures are from."""
    caches = ", ".join(
        f"{name} {count / 2**10:.4g} KiB" if count < 2**20 else f"{name} {count / 2**20:.4g} MiB"
        for name, count in (facts["caches"] or {}).items()
    )
    memory = facts["memory_bytes"]
    return "\n".join(
        (
            "",
            f"machine   {facts['processor']}, {facts['cores']} cores, {caches}, "
            f"{memory / 2**30:.0f} GiB" if memory else f"machine   {facts['processor']}",
            f"software  santa_torch {facts['santa_torch']} ({facts['cpu_level']} kernels), torch "
            f"{facts['torch']}, transparent huge pages: {facts['transparent_huge_pages']}",
            "",
        )
    )  # fmt: skip


def case_table(result: CaseResult) -> str:
    """One case: its title, how its buffers rotated, and a line for each variant."""
    if result.skipped:
        return f"{result.case}\n  skipped: {result.skipped}"
    peer = result.strongest("torch", "library")
    lines = [list(_HEADER)]
    for row in result.rows:
        lines.append(_line(result, row, peer))
    title = f"{result.case}: {result.sets}"
    strongest = [f"  strongest peer: {peer.name}"] if peer else []
    return "\n".join([title, aligned(lines), *strongest, *disturbed(result.disturbance)])


def stages_table(result: CaseResult) -> str:
    """Where our variants of a case spend their time; "" where none was measured."""
    rows = [row for row in result.rows if row.stages]
    if not rows:
        return ""
    names = list(dict.fromkeys(name for row in rows for name in row.stages))
    lines = [["", *names]]
    for row in rows:
        cells = [milliseconds(row.stages[name]) if name in row.stages else "" for name in names]
        lines.append([row.name, *cells])
    return "\n".join(["  stages, ms of all threads over their number", aligned(lines)])


def _line(result: CaseResult, row: Row, peer: Row | None) -> list[str]:
    if not row.times.seconds:
        return [row.name, "-", "", "", "", "", "", "", row.note]
    speed = result.ratio(DENSE, row.name)
    share = result.ratio(FLOOR, row.name)
    versus = result.ratio(peer.name, row.name) if peer and row.family == "santa" else None
    return [
        row.name,
        milliseconds(row.ms or 0.0),
        milliseconds(1e3 * row.times.median),
        f"{100 * share.value:.0f} %" if share else "",
        f"{speed.value:.2f}x" if speed else "",
        f"{speed.low:.2f}-{speed.high:.2f}" if speed and row.name != DENSE else "",
        f"{versus.value:.2f}x" if versus else "",
        "" if row.error is None else f"{row.error:.1e}",
        row.note,
    ]


def milliseconds(value: float) -> str:
    """Three digits or more."""
    return f"{value:.4f}" if value < 0.1 else f"{value:.3f}" if value < 1 else f"{value:.2f}"


def disturbed(seen: Disturbance) -> list[str]:
    """A line where the machine was not quiet."""
    if seen.quiet:
        return []
    return [f"  not quiet: others used {seen.cores:.2f} cores meanwhile"]


def model_table(result: ModelResult) -> str:
    """Steps of a model, a line for each contender."""
    lines = [["", "ms/token", "median", "of 64 tokens", "of ours", "spread"]]
    for key, label in result.labels.items():
        times = result.times.get(key)
        if times is None or not times.seconds:
            lines.append([label, "-", "", "", "", times.error or "" if times else ""])
            continue
        lines.append(
            [
                label,
                milliseconds(1e3 * times.lower_quartile),
                milliseconds(1e3 * times.median),
                _times(result.ratio(key, "short")),
                _times(result.ratio(key, "santa")),
                _spread(result.ratio(key, "santa")),
            ]
        )
    notes = [f"  {note}" for note in result.notes]
    return "\n".join([result.name, aligned(lines), *notes, *disturbed(result.disturbance)])


def _times(value: Ratio | None) -> str:
    return f"{value.value:.2f}x" if value else ""


def _spread(value: Ratio | None) -> str:
    return f"{value.low:.2f}-{value.high:.2f}" if value else ""


def targets_table(verdicts: Sequence[Verdict]) -> str:
    """Each target that the run's sizes allow."""
    lines = [["target", "goal", "measured", "", "worst case"]]
    for v in verdicts:
        sign = ">=" if v.at_least else "<="
        verdict = "met" if v.met else f"missed by {100 * v.missed_by:.0f} %"
        goal, measured = _figure(v.goal, v.unit), _figure(v.measured, v.unit)
        case = v.case if v.quiet else f"{v.case} (not quiet)"
        lines.append([v.text, f"{sign} {goal}", measured, verdict, case])
    return aligned(lines)


def _figure(value: float, unit: str) -> str:
    if unit == "%":
        return f"{100 * value:.0f} %"
    return f"{value:.1f} us" if unit == "us" else f"{value:.2f}x"


NOTES = (
    "ms: lower quartile of interleaved calls. of floor: time to read K and V once over own time; "
    "a method that reads less can pass 100 %.",
    "vs dense, vs peer: times as fast as our exact attention, and as the strongest peer of the "
    "case; spread: the middle 80 % of vs dense over redrawn rounds.",
    "error: relative RMS of one output against float64; of sampled methods it is the sampling.",
)

MODEL_NOTES = (
    "ms/token: lower quartile of whole steps, contenders taking turns. of 64 tokens, of ours: own "
    "time over that of the fastest step at 64 tokens, and over santa shared; spread: the middle "
    "80 % of the latter over redrawn rounds.",
    "Exact attention comes with transformers' default cache, which copies itself at every step.",
)


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Columns of text: the first and the last to the left, a rule under the first line."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    last = len(widths) - 1
    rendered = [
        "  ".join(
            cell.ljust(width) if index in (0, last) else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    rule = "-" * sum(widths[:-1], 2 * (last - 1))
    return "\n".join([rendered[0], rule, *rendered[1:]])


def markdown(results: Sequence[CaseResult]) -> str:
    """The same figures as Markdown tables, as the README shows them."""
    blocks = []
    for result in results:
        if result.skipped:
            blocks.append(f"{result.case}: skipped, {result.skipped}\n")
            continue
        lines = ["| | ms | of floor | against our dense |", "|---|---|---|---|"]
        for row in result.rows:
            name, ms, _, share, speed, *_, note = _line(result, row, None)
            name = name if row.dtype in ("", result.case.dtype) else f"{name} ({row.dtype})"
            lines.append(f"| {name} | {note if ms == '-' else ms} | {share} | {speed} |")
        noise = "".join(f"\n\n{line.strip()}" for line in disturbed(result.disturbance))
        blocks.append(f"{result.case}\n\n" + "\n".join(lines) + f"{noise}\n")
    return "\n".join(blocks)


def rows_csv(document: dict[str, Any]) -> str:
    """A line for each variant of each case, and for each contender of a model."""
    text = io.StringIO()
    axes = ("batch", "heads", "kv_heads", "head_dim", "rows", "dtype", "threads")
    columns = ("name", "family", "method", "samples", "ms", "ms_median")
    more = ("over_floor", "speed_up", "speed_up_over_peer")
    last = ("relative_rms_error", "scratch_bytes", "note")
    writer = csv.writer(text, lineterminator="\n")
    header = [*axes, "kv_bytes", "quiet", *columns, "variant_dtype", *more, *last]
    writer.writerow(header)
    for case in document["cases"]:
        for row in case["variants"]:
            ratios = [row[name] and row[name]["value"] for name in more]
            writer.writerow(
                [case["case"][axis] for axis in axes]
                + [case["kv_bytes"], case["quiet"]]
                + [row[name] for name in columns]
                + [row["dtype"], *ratios]
                + [row[name] for name in last]
            )
    for model in document["models"]:
        empty = [""] * (len(axes) + 1)
        for row in model["contenders"]:
            figures = [row["label"], "model", row["key"], "", row["ms"], row["ms_median"]]
            rest = ["bfloat16", "", "", "", "", "", model["name"]]
            writer.writerow([*empty, model["quiet"], *figures, *rest])
    return text.getvalue()


def document(
    facts: dict[str, Any],
    settings: dict[str, Any],
    results: Sequence[CaseResult],
    models: Sequence[ModelResult],
    verdicts: Sequence[Verdict],
) -> dict[str, Any]:
    """Everything as plain values."""
    return {
        "machine": facts,
        "settings": settings,
        "cases": [result.plain(FLOOR, DENSE) for result in results],
        "models": [model.plain() for model in models],
        "targets": [verdict.plain() for verdict in verdicts],
    }


def write(directory: Path, texts: dict[str, str | Callable[[Path], bool]]) -> list[Path]:
    """Write files, each whole or not at all.

    Parameters
    ----------
    directory : Path
        Exists.
    texts : dict
        By name of file its text, or a function that draws to a path and says whether it did. Where
        it did not, a file of that name is removed.

    Returns
    -------
    list of Path
        What was written.
    """
    written = []
    for name, content in texts.items():
        handle, temporary = tempfile.mkstemp(suffix=Path(name).suffix, dir=directory)
        os.close(handle)
        path = Path(temporary)
        try:
            if isinstance(content, str):
                path.write_text(content, encoding="utf-8")
            elif not content(path):
                (directory / name).unlink(missing_ok=True)  # of an earlier run, and not of this one
                continue
            path.chmod(0o644)
            path.replace(directory / name)
            written.append(directory / name)
        finally:
            path.unlink(missing_ok=True)
    return written


def dumps(document: dict[str, Any]) -> str:
    """The document as JSON."""
    return json.dumps(document, indent=1, allow_nan=False) + "\n"
