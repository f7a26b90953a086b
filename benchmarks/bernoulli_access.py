"""How many key features Bernoulli queries read: the paper's figures, predicted and counted.

    python benchmarks/bernoulli_access.py [--groups 2000] [--repeats 3] [--quick] [--out DIR]

Synthetic queries stand in for those of the paper's models, which are not to be had here. Their few
parameters are matched to a figure each, and everything else is predicted: for BitNet the spread of
the channel scales and the likeness of the heads to what one draw reads, by head and by group; for
Llama the spread to what four draws of the mean query read. Ranges are those over four shapes of the
channel scales and over ``--repeats`` sets of random numbers.

Then the operators themselves: features counted by ``DecodeStats.key_features`` beside what is
predicted, and the squared error of the scores for keys whose features are uncorrelated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from bernoulli_queries import (
    BITNET,
    LLAMA,
    SHAPES,
    Fitted,
    Paper,
    access,
    fit_bitnet,
    fit_llama,
    most_at_twice,
)
from bernoulli_report import Row, StudyError, axes, table, write_csv

import santa_torch
from santa_torch.files import make_directory

DRAWS = (1, 2, 4, 8, 16, 32, 64)
KINDS = ("head", "union", "mean")

#: Groups of a call; bounds its memory.
BATCH = 1024


def fit(groups: int, repeats: int) -> dict[str, list[Fitted]]:
    """Synthetic queries of every shape and set of random numbers, by model."""
    found: dict[str, list[Fitted]] = {BITNET.name: [], LLAMA.name: []}
    for seed in range(repeats):
        for shape in SHAPES:
            bitnet = fit_bitnet(shape, groups, seed)
            # The paper says nothing of how alike Llama's heads are; it hardly matters there.
            found[BITNET.name].append(bitnet)
            found[LLAMA.name].append(fit_llama(shape, groups, bitnet.alike, seed))
    return found


def matched(paper: Paper, kind: str, draws: int) -> bool:
    """Whether a figure was used to find the queries rather than predicted from them."""
    if paper is LLAMA:
        return (kind, draws) == ("mean", 4)
    return (kind, draws) in (("head", 1), ("union", 1))


def compare(paper: Paper, fitted: Sequence[Fitted]) -> list[Row]:
    """The paper's figures beside what is predicted, in per cent."""
    rows = []
    for kind in KINDS:
        for draws, share in getattr(paper, kind).items():
            shares = [100 * getattr(access(f.queries, draws), kind) for f in fitted]
            logs = [s for f, s in zip(fitted, shares, strict=True) if f.shape == "log-normal"]
            row: Row = {"model": paper.name, "query": kind, "draws": draws, "paper": share}
            row["predicted"] = sum(logs) / len(logs)
            row["low"], row["high"] = min(shares), max(shares)
            half = getattr(paper, kind).get(draws // 2) if draws > 1 else None
            # The paper rounds to tenths; half of one in favour of independent draws.
            bound = None if half is None else 100 * most_at_twice((half + 0.05) / 100)
            row["most of independent"] = bound
            row["beyond independent"] = bound is not None and share - 0.05 > bound
            row["matched"] = matched(paper, kind, draws)
            rows.append(row)
    return rows


def key_features(q: torch.Tensor, kv_heads: int, draws: int, shared: bool) -> torch.Tensor:
    """Features that ``decode`` uses of each KV head's keys, int64 ``[groups, kv_heads]``."""
    kv = torch.zeros(len(q), kv_heads, 1, q.shape[-1])
    out = santa_torch.decode(
        q,
        kv,
        kv,
        method="dense",
        bernoulli=santa_torch.BernoulliConfig(draws, shared),
        position=torch.arange(len(q)),
        return_stats=True,
    )
    assert isinstance(out, santa_torch.DecodeOutput)
    assert out.stats is not None
    return out.stats.key_features


def squared_error(q: torch.Tensor, draws: int, form: str) -> float:
    """Mean over groups of ``sum_h |q^_h - q_h|^2 / sum_h |q_h|^2``.

    For keys whose features are uncorrelated and of one size it is the squared error of the scores.
    """
    shared, where = form == "shared", torch.arange(len(q))
    if form == "mean":
        mean = q.abs().mean(1, keepdim=True)
        drawn = santa_torch.bernoulli_query(
            mean, draws=draws, shared=False, kv_heads=1, position=where
        )
        stochastic = drawn * q / mean  # equation 6 of the paper
    else:
        stochastic = santa_torch.bernoulli_query(
            q, draws=draws, shared=shared, kv_heads=1, position=where
        )
    wrong = (stochastic - q).double().square().sum((1, 2))
    return float((wrong / q.double().square().sum((1, 2))).mean())


def count(name: str, fitted: Fitted, draws: int) -> Row:
    """Features counted, in per cent, beside those predicted; errors of the scores."""
    row: Row = {"model": name, "draws": draws}
    expected = access(fitted.queries, draws)
    totals: dict[str, list[tuple[float, int]]] = {}
    for q in fitted.queries.split(BATCH):
        mean, heads, dim = q.abs().mean(1, keepdim=True), q.shape[1], q.shape[2]
        for kind, features in (
            ("head", key_features(q, heads, draws, False)),
            ("union", key_features(q, 1, draws, False)),
            ("mean", key_features(mean, 1, draws, False)),
            ("shared", key_features(q, 1, draws, True)),
        ):
            share = 100 * float(features.double().mean()) / dim
            totals.setdefault(f"{kind} read", []).append((share, len(q)))
        for form in ("union", "mean", "shared"):
            totals.setdefault(f"{form} error", []).append((squared_error(q, draws, form), len(q)))
    for key, parts in totals.items():
        row[key] = sum(value * size for value, size in parts) / len(fitted.queries)
    for kind in KINDS:
        row[f"{kind} predicted"] = 100 * getattr(expected, kind)
    return row


def show_comparison(rows: Sequence[Row]) -> str:
    """The table of ``compare``."""
    lines = []
    for row in rows:
        bound = row["most of independent"]
        note = " matched" if row["matched"] else ""
        lines.append(
            [
                row["model"],
                {"head": "one head", "union": "group", "mean": "mean query"}[row["query"]],
                str(row["draws"]),
                f"{row['paper']:.1f}",
                f"{row['predicted']:.1f} [{row['low']:.1f}, {row['high']:.1f}]{note}",
                "" if bound is None else f"{bound:.1f}" + " <" * row["beyond independent"],
            ]
        )
    head = ("model", "read by", "draws", "paper", "predicted", "independent: at most")
    return table(head, lines)


def show_counts(rows: Sequence[Row]) -> str:
    """The table of ``count``."""
    lines = [
        [
            row["model"],
            str(row["draws"]),
            *(f"{row[f'{kind} read']:.1f} ({row[f'{kind} predicted']:.1f})" for kind in KINDS),
            f"{row['shared read']:.1f}",
            *(f"{row[f'{form} error']:.3g}" for form in ("union", "mean", "shared")),
        ]
        for row in rows
    ]
    head = ("model", "draws", "one head", "group", "mean query", "shared")
    return table([*head, "error: paper", "mean", "shared"], lines)


def draw(comparison: Sequence[Row], counts: Sequence[Row], path: Path) -> bool:
    """Access against draws, and error against access; False without matplotlib."""
    titles = [f"{paper.name}: key features read" for paper in (BITNET, LLAMA)]
    figure, panels = axes(3, [*titles, "squared error of the scores"])
    if figure is None:
        return False
    colours = {"head": "#4c78a8", "union": "#e45756", "mean": "#54a24b"}
    for paper, panel in zip((BITNET, LLAMA), panels, strict=False):
        for kind, colour in colours.items():
            rows = [r for r in comparison if r["model"] == paper.name and r["query"] == kind]
            if not rows:
                continue
            x = [row["draws"] for row in rows]
            panel.plot(x, [row["paper"] for row in rows], "o", color=colour, label=f"paper, {kind}")
            panel.plot(x, [row["predicted"] for row in rows], color=colour, label="predicted")
            low, high = ([row[end] for row in rows] for end in ("low", "high"))
            panel.fill_between(x, low, high, color=colour, alpha=0.2)
        panel.set(xscale="log", xlabel="draws", ylabel="% of the features", ylim=(0, 102))
        panel.legend(fontsize=7, frameon=False)
    for name, style in ((BITNET.name, "-"), (LLAMA.name, "--")):
        for form, colour in (("union", "#e45756"), ("mean", "#54a24b"), ("shared", "#b279a2")):
            rows = [row for row in counts if row["model"] == name]
            panels[2].plot(
                [row[f"{form} read"] for row in rows],
                [row[f"{form} error"] for row in rows],
                style,
                marker="o",
                markersize=3,
                color=colour,
                label=f"{name}: {form}",
            )
    panels[2].set(yscale="log", xlabel="% of the features read", ylabel="of the squared scores")
    panels[2].legend(fontsize=7, frameon=False)
    figure.savefig(path, dpi=130)
    return True


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, help="groups of queries (default: 2000)")
    parser.add_argument("--repeats", type=int, help="sets of random numbers (default: 3)")
    parser.add_argument("--draws", type=int, nargs="+", help=f"that are counted (default: {DRAWS})")
    parser.add_argument("--quick", action="store_true", help="200 groups, once, 3 numbers of draws")
    parser.add_argument("--out", type=Path, default=Path("out/bernoulli_access"), help="folder")
    args = parser.parse_args(argv)
    args.groups = args.groups or (200 if args.quick else 2000)
    args.repeats = args.repeats or (1 if args.quick else 3)
    args.draws = args.draws or ([1, 4, 16] if args.quick else list(DRAWS))
    for name in ("groups", "repeats"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: must be positive, got {getattr(args, name)}")
    if not all(1 <= draws <= 1024 for draws in args.draws):
        parser.error(f"--draws: must be between 1 and 1024, got {args.draws}")
    return args


@torch.no_grad()
def run(args: argparse.Namespace) -> None:
    """Match, predict, count; print and write."""
    make_directory(args.out, StudyError)
    torch.set_num_threads(1)  # small tensors: on a busy machine more threads wait for each other
    fitted = fit(args.groups, args.repeats)
    queries: list[Row] = []
    for name, each in fitted.items():
        for found in each:
            part = ("shape", "spread", "alike", "kurtosis")
            queries.append({"model": name, **{key: getattr(found, key) for key in part}})
        values = [found.kurtosis for found in each]
        alike = [found.alike for found in each]
        print(
            f"{name}: kurtosis {each[0].kurtosis:.1f} [{min(values):.1f}, {max(values):.1f}], "
            f"heads alike {each[0].alike:.2f} [{min(alike):.2f}, {max(alike):.2f}]"
        )
    papers = (BITNET, LLAMA)
    comparison = [row for paper in papers for row in compare(paper, fitted[paper.name])]
    print(
        f"\nKey features read, %: log-normal scales [range over {len(SHAPES)} shapes and "
        f"{args.repeats} sets of random numbers]. 'at most': what\nindependent draws could read, "
        "given the paper's figure at half as many; '<' where the paper reads more.\n"
    )
    print(show_comparison(comparison), flush=True)
    counts = [count(name, each[0], draws) for name, each in fitted.items() for draws in args.draws]
    print(
        "\nCounted by the operators on the log-normal queries (in brackets what is predicted), %,"
        "\nand squared errors of the scores over the squared scores.\n"
    )
    print(show_counts(counts))
    for file, rows in (("queries", queries), ("access", comparison), ("counts", counts)):
        write_csv(args.out / f"{file}.csv", rows)
    draw(comparison, counts, args.out / "bernoulli_access.png")
    print(f"\nwrote {args.out}")


def main(argv: list[str] | None = None) -> int:
    """Run; 1 where the folder cannot be written to."""
    args = parse(argv)
    try:
        run(args)
    except StudyError as error:
        print(f"bernoulli_access: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
