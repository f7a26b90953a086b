"""What the demo shows: texts, one table, a JSON file and a plot."""

from __future__ import annotations

import json
import shutil
import statistics
import textwrap
from pathlib import Path
from typing import Any

from santa_torch.demo.measure import Contender
from santa_torch.demo.plot import plot


def collect(facts: dict[str, Any], contenders: list[Contender], tokenizer: Any) -> dict[str, Any]:
    """All results as plain values, ready for JSON.

    Returns
    -------
    dict
        ``facts``; ``tokens_compared`` and ``tokens_timed``, which are below ``tokens`` where the
        machine was too slow; of the last contender ``tvd`` (mean, float32), ``bytes`` and
        ``ms_per_token``; and under ``"contenders"`` one dict each: ``ms_per_token`` (median),
        ``tokens_per_second``, ``bytes`` (KV bytes read per token), ``bytes_fraction`` (of the
        reference), ``tvd`` and ``top1`` (means per dtype), ``tvd_steps``, ``text``, ``same_tokens``
        (length of the common prefix with the reference's continuation).
    """
    reference = contenders[0]
    rows = []
    facts["tokens_compared"] = min(map(len, reference.tvd.values()))
    facts["tokens_timed"] = len(reference.seconds)
    for contender in contenders:
        seconds = statistics.median(contender.seconds)
        rows.append(
            {
                "key": contender.key,
                "label": contender.label,
                "ms_per_token": 1e3 * seconds,
                "tokens_per_second": 1 / seconds,
                "bytes": contender.bytes_read,
                "bytes_fraction": contender.bytes_read / reference.bytes_read,
                "tvd": {dtype: statistics.fmean(s) for dtype, s in contender.tvd.items()},
                "top1": {d: statistics.fmean(s) for d, s in contender.agreement.items()},
                "tvd_steps": contender.tvd,
                "text": tokenizer.decode(contender.generated, skip_special_tokens=True),
                "same_tokens": _common_prefix(contender.generated, reference.generated),
                "generated": contender.generated,
            }
        )
    last = rows[-1]
    headline = {
        "tvd": last["tvd"]["float32"],
        "bytes": last["bytes"],
        "ms_per_token": last["ms_per_token"],
    }
    return {**facts, **headline, "contenders": rows}


def heading(facts: dict[str, Any]) -> str:
    """Say what is about to be compared, and what it takes."""
    memory = facts["memory"]
    needed = memory["weights"] + memory["caches"] * memory["cache"] + memory["sketch"]
    caches = f"{memory['caches']} caches of {memory['cache'] / 1e9:.2f} GB"
    if memory["sketch"]:
        caches += f" and a sketch of {memory['sketch'] / 1e9:.2f} GB"
    sampling = f"{facts['method']}, S = {facts['samples']}, seed {facts['seed']}"
    if facts["method"] == "dense":
        sampling = "none (dense)"
    bernoulli = facts["bernoulli"]
    scores = "exact"
    if bernoulli is not None:
        each = "KV" if bernoulli["shared"] else "query"
        scores = f"Bernoulli, {bernoulli['draws']} draws, features drawn for each {each} head"
    return "\n".join(
        (
            "",
            f"model     {facts['model']}: {facts['layers']} layers, {facts['heads']} query and "
            f"{facts['kv_heads']} KV heads, D = {facts['head_dim']}, {facts['dtype']}",
            f"machine   {facts['device']} ({facts['processor']}), {facts['threads']} threads, "
            f"torch {facts['torch']}, transformers {facts['transformers']}",
            f"text      {facts['context']} tokens of {facts['text']}, then {facts['tokens']} more",
            f"sampling  {sampling}",
            f"scores    {scores}",
            f"memory    about {needed / 1e9:.2f} GB: weights {memory['weights'] / 1e9:.2f} GB, "
            f"{caches}, in float32",
            "",
        )
    )


def texts(results: dict[str, Any]) -> str:
    """The greedy continuations, each one under the name of who wrote it."""
    width = min(100, shutil.get_terminal_size((100, 24)).columns) - 4
    blocks = ["Greedy continuations of the same context:"]
    reference = results["contenders"][0]
    for row in results["contenders"]:
        count = len(row["generated"])
        verdict = ""
        if row is not reference:
            same = row["same_tokens"]
            verdict = " (the same text)" if same == count else f" (first {same} tokens the same)"
        lines = [
            piece
            for line in row["text"].strip("\n").splitlines()
            for piece in (textwrap.wrap(line, width, drop_whitespace=False) or [""])
        ]
        blocks.append("\n  | ".join([f"{row['label']}{verdict}", *lines]))
    return "\n\n".join(blocks)


def table(results: dict[str, Any]) -> str:
    """One aligned table, a line per contender."""
    dtypes = list(results["contenders"][0]["tvd"])
    header = ["", "ms/token", "tokens/s", "KV MB/token", "of exact"]
    for dtype in dtypes:
        header += [f"TVD {dtype}", "top-1"]
    lines = [header]
    for row in results["contenders"]:
        line = [
            row["label"],
            f"{row['ms_per_token']:.1f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['bytes'] / 1e6:.2f}",
            f"{100 * row['bytes_fraction']:.1f} %",
        ]
        for dtype in dtypes:
            if row is results["contenders"][0]:
                line += ["reference", ""]
            else:
                line += [_distance(row["tvd"][dtype]), f"{100 * row['top1'][dtype]:.0f} %"]
        lines.append(line)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rendered = [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join([rendered[0], "-" * max(map(len, rendered)), *rendered[1:]])


def notes(results: dict[str, Any]) -> str:
    """How to read the table."""
    dtype = results["dtype"]
    lines = [
        "ms/token: median of whole model steps, greedy, contenders taking turns.",
        f"KV MB/token: keys and values read per step, in {dtype}, as the operator counts them.",
        "TVD: total variation distance of the next-token probabilities to those of the first line, "
        "mean over the text's own next tokens; top-1: how often the likeliest token is the same.",
        "Baselines: transformers' default (its DynamicCache copies the whole cache at every step), "
        "and our own exact attention with the same in-place cache.",
    ]
    bernoulli, sketch = results["bernoulli"], results["sketch_bits"]
    if bernoulli is not None:
        lines.append(
            f"B={bernoulli['draws']}: scores from a stochastic query. They are unbiased, attention "
            "made from them is not: no number of samples takes their error away."
        )
        if sketch is None:
            lines.append("Features that were left out are read all the same without --sketch-bits.")
    if sketch is not None:
        lines.append(
            "The sketch holds the keys once more, feature by feature, without loss. Blocks of 64 "
            "rows are scored from it, the rows after them from the keys."
        )
    if dtype != "float32":
        floor = results["contenders"][1]["tvd"][dtype]
        lines.append(
            f"In {dtype} two exact kernels already differ by {_distance(floor)} (second line): a "
            "floor under every figure of that column. The float32 column has none."
        )
    done = min(results["tokens_compared"], results["tokens_timed"])
    if done < results["tokens"]:
        lines.append(
            f"Only {done} of {results['tokens']} tokens: the machine is slow or busy, and so are "
            "the times. --tokens N takes the time it needs."
        )
    return "\n".join(textwrap.fill(line, 100, subsequent_indent="  ") for line in lines)


def write(results: dict[str, Any], directory: Path) -> list[Path]:
    """Write ``demo.json`` and, where matplotlib is installed, ``demo.png``."""
    written = [directory / "demo.json"]
    written[0].write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    picture = directory / "demo.png"
    if plot(results, picture):
        written.append(picture)
    return written


def _distance(value: float) -> str:
    return "0" if value == 0 else f"{value:.4f}" if value >= 5e-5 else f"{value:.0e}"


def _common_prefix(first: list[int], second: list[int]) -> int:
    for index, (a, b) in enumerate(zip(first, second, strict=True)):
        if a != b:
            return index
    return len(first)
