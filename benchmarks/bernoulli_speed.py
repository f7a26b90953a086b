"""Time of a decode step against the key features that a Bernoulli query reads.

    python benchmarks/bernoulli_speed.py [--rows 32768] [--draws 1 2 4 8 16 32 64] [--samples 128]
        [--rounds 30] [--quick] [--out DIR]

The shape of Llama-3.1-8B: 32 query heads on 8 KV heads of 128 features, bfloat16, one sequence.
Queries are synthetic ones that read as many features as the paper says of that model
(``bernoulli_access.py``); keys and values are random. All variants take turns in one process, and
every call takes the next set of keys and values, so that none comes from the cache.

On a machine that others use ``--clock cpu`` counts the time that the one thread ran rather than the
time that passed; others still take their share of the memory's bandwidth.

The floor of a step is the bytes that it must read over the bandwidth at which the same threads read
all of K and V in this run. Times are lower quartiles, as in the suite (docs/benchmarks.md); the
medians are in the CSV file.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from bernoulli_queries import Queries
from bernoulli_report import Row, StudyError, axes, table, write_csv

import santa_torch
from santa_torch import BernoulliConfig, KeySketch
from santa_torch.bench import machine
from santa_torch.bench.cases import Case
from santa_torch.bench.inputs import DTYPES, PEAK, DoesNotFitError, Inputs, plan, size
from santa_torch.bench.options import usable_cores
from santa_torch.bench.timing import Schedule, Times, Variant, measure, ratio
from santa_torch.files import make_directory

FLOOR = "read K and V once"

#: Of the synthetic queries: what bernoulli_access.py finds for Llama with log-normal scales.
SPREAD, ALIKE = 0.76, 0.55

CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}

#: Largest relative RMS difference of outputs that differ in the order of additions alone.
TOLERANCE = 0.01


@dataclass(frozen=True)
class Step:
    """One way to run the step.

    Parameters
    ----------
    method : str
        "dense", or "shared" over sampled rows of V.
    sketch : bool
        Score from a ``KeySketch`` rather than from the keys.
    bernoulli : BernoulliConfig or None
        Score with a stochastic query.
    level : str or None
        Instruction set, where it is not the one in use.
    """

    method: str
    sketch: bool
    bernoulli: BernoulliConfig | None = None
    level: str | None = None

    @property
    def form(self) -> str:
        """What the table calls the scores."""
        if self.bernoulli is None:
            return "exact"
        return "one sample" if self.bernoulli.shared else "by head"

    @property
    def name(self) -> str:
        """Unique within a run."""
        keys = "sketch" if self.sketch else "row-major"
        draws = f" {self.bernoulli.draws}" if self.bernoulli else ""
        return f"{self.method}, {keys}, {self.form}{draws}" + (
            f" ({self.level})" * bool(self.level)
        )


class Bench:
    """Sets of keys, values and sketches, and calls that use them."""

    def __init__(self, case: Case, sets: int, samples: int) -> None:
        self.inputs, self.samples = Inputs(case, sets), samples
        made = Queries("log-normal", case.kv_heads, case.group, case.head_dim)(SPREAD, ALIKE)
        unit = made / made.square().mean(-1, keepdim=True).sqrt()
        q = (PEAK * unit).view(1, case.heads, case.head_dim)
        self.q = q.to(DTYPES[case.dtype])
        self.sketches = [KeySketch(k) for k in self.inputs.keys]
        self.level = torch.ops.santa.cpu_level()

    def call(self, step: Step, index: int, stats: bool = False) -> santa_torch.DecodeOutput:
        """The step on one set."""
        out = santa_torch.decode(
            self.q,
            self.inputs.keys[index],
            self.inputs.values[index],
            samples=None if step.method == "dense" else self.samples,
            method=step.method,
            sketch=self.sketches[index] if step.sketch else None,
            bernoulli=step.bernoulli,
            position=index,
            return_lse=True,
            return_stats=stats,
        )
        assert isinstance(out, santa_torch.DecodeOutput)
        return out

    def variant(self, step: Step) -> Variant:
        """What is timed."""
        set_level: Callable[[str], None] = torch.ops.santa.set_cpu_level
        return Variant(
            step.name,
            "santa",
            lambda index: self.call(step, index),
            lambda: set_level(step.level or self.level),
            lambda: set_level(self.level),
        )

    def check(self, step: Step) -> None:
        """A dense step from a sketch gives what the same step gives from the keys themselves."""
        if step.method != "dense" or not step.sketch:
            return
        last = len(self.sketches) - 1
        plain = Step(step.method, False, step.bernoulli)
        found, wanted = (self.call(each, last).out.double() for each in (step, plain))
        error = float((found - wanted).norm() / wanted.norm())
        if not error <= TOLERANCE:
            raise StudyError(
                f"{step.name}: differs from row-major keys by {error:.3g} of the output, at most "
                f"{TOLERANCE}"
            )

    def reads(self, step: Step) -> tuple[float, float]:
        """Share of the key features and bytes of K and V that a call reads, means over sets."""
        found = [self.call(step, index, stats=True).stats for index in range(len(self.sketches))]
        shares, counts = [], []
        for stats in found:
            assert stats is not None
            shares.append(float(stats.key_features.double().mean()) / self.q.shape[-1])
            counts.append(float(stats.bytes_read.sum()))
        return sum(shares) / len(shares), sum(counts) / len(counts)


def steps(draws: Sequence[int], level: str) -> Iterator[Step]:
    """Everything that is timed, for both methods."""
    for method in ("dense", "shared"):
        yield Step(method, sketch=False)
        if level == "amx":  # sketches are scored by the vector kernels: compare with those too
            yield Step(method, sketch=False, level="avx512")
        yield Step(method, sketch=True)
        for shared in (False, True):
            for count in draws:
                yield Step(method, sketch=True, bernoulli=BernoulliConfig(count, shared))


def rows_of(bench: Bench, todo: Sequence[Step], times: dict[str, Times]) -> list[Row]:
    """What is shown and written of each step."""
    floor = times[FLOOR]
    speed = bench.inputs.case.kv_bytes / floor.lower_quartile  # bytes a second
    found: list[Row] = []
    for step in todo:
        own = times[step.name]
        if own.error:
            raise StudyError(f"{step.name}: {own.error}")
        share, count = bench.reads(step)
        against = ratio(own, times[Step(step.method, sketch=False).name])
        assert against is not None
        found.append(
            {
                "method": step.method,
                "keys": "sketch" if step.sketch else "row-major",
                "level": step.level or bench.level,
                "form": step.form,
                "draws": step.bernoulli.draws if step.bernoulli else None,
                "features": 100 * share,
                "mbytes": count / 1e6,
                "ms": 1e3 * own.lower_quartile,
                "median_ms": 1e3 * own.median,
                "floor_ms": 1e3 * count / speed,
                "ratio": against.value,
                "ratio_low": against.low,
                "ratio_high": against.high,
            }
        )
    return found


def show(rows: Sequence[Row]) -> str:
    """The table."""
    lines = [
        [
            row["method"],
            row["keys"] + (f" ({row['level']})" if row["keys"] == "row-major" else ""),
            row["form"],
            "" if row["draws"] is None else str(row["draws"]),
            f"{row['features']:.1f}",
            f"{row['mbytes']:.1f}",
            f"{row['ms']:.2f}",
            f"{row['floor_ms']:.2f}",
            f"{row['ratio']:.2f} [{row['ratio_low']:.2f}, {row['ratio_high']:.2f}]",
        ]
        for row in rows
    ]
    head = ("method", "keys", "scores", "draws", "features %", "MB read", "ms", "floor ms")
    return table([*head, "time / row-major"], lines)


def draw(rows: Sequence[Row], title: str, path: Path) -> bool:
    """Time against features read, the floor drawn in; False without matplotlib."""
    figure, panels = axes(2, ["dense over V", "shared sample of V"])
    if figure is None:
        return False
    for method, panel in zip(("dense", "shared"), panels, strict=True):
        own = [row for row in rows if row["method"] == method]
        for form, colour in (("by head", "#e45756"), ("one sample", "#b279a2")):
            points = sorted((r["features"], r["ms"]) for r in own if r["form"] == form)
            panel.plot(*zip(*points, strict=True), marker="o", color=colour, label=form)
        exact = [row for row in own if row["form"] == "exact"]
        for row, marker in zip(exact, "s^D", strict=False):
            keys = row["keys"] + (f", {row['level']}" if row["keys"] == "row-major" else "")
            panel.plot(100, row["ms"], marker, color="#4c78a8", label=f"exact, {keys}")
        floor = sorted((row["features"], row["floor_ms"]) for row in own)
        panel.plot(*zip(*floor, strict=True), "--", color="black", label="reading those bytes")
        panel.set(xlabel="% of the key features read", ylabel="ms per step", xlim=0, ylim=0)
        panel.legend(fontsize=7, frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)
    return True


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, help="of the KV cache (default: 32768)")
    parser.add_argument("--draws", type=int, nargs="+", help="default: 1 2 4 8 16 32 64")
    parser.add_argument("--samples", type=int, default=128, help="S of the shared sample of V")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: with one thread")
    parser.add_argument("--rounds", type=int, help="turns of each variant (default: 30)")
    parser.add_argument("--sets", type=int, help="of K and V (default: 24 or what fits)")
    parser.add_argument("--wait", type=float, help="seconds, for a quiet machine (default: 30)")
    parser.add_argument("--quick", action="store_true", help="1,024 rows, two draws, three rounds")
    parser.add_argument("--out", type=Path, default=Path("out/bernoulli_speed"), help="folder")
    args = parser.parse_args(argv)
    usual = {"rows": 32768, "rounds": 30, "sets": 24, "wait": 30.0}
    quick = {"rows": 1024, "rounds": 3, "sets": 2, "wait": 0.0}
    for name, value in (quick if args.quick else usual).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    for name in ("rows", "rounds", "sets", "threads", "samples"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: must be positive, got {getattr(args, name)}")
    if args.clock == "cpu" and args.threads != 1:
        parser.error(f"--clock cpu: needs --threads 1, got {args.threads}")
    args.draws = args.draws or ([2, 16] if args.quick else [1, 2, 4, 8, 16, 32, 64])
    if not all(1 <= draws <= 1024 for draws in args.draws):
        parser.error(f"--draws: must be between 1 and 1024, got {args.draws}")
    return args


@torch.no_grad()
def run(args: argparse.Namespace) -> None:
    """Check, measure; print and write."""
    make_directory(args.out, StudyError)
    torch.set_num_threads(args.threads)
    case = Case(rows=args.rows, threads=args.threads)
    try:
        # A sketch is half as large as K and V together.
        memory = int(0.5 * machine.available_memory())
        fitting = plan(case, args.sets * case.kv_bytes, memory, copies=0.5)
    except DoesNotFitError as error:
        raise StudyError(str(error)) from None
    sets = min(args.sets, fitting.sets)
    bench = Bench(case, sets, args.samples)
    todo = list(steps(args.draws, bench.level))
    for step in todo:
        bench.check(step)
    read = torch.ops.santa.read_through
    variants = [Variant(FLOOR, "floor", lambda index: read(bench.inputs.flat[index]))]
    variants += [bench.variant(step) for step in todo]
    with machine.Watch().over(args.wait) as disturbance:
        schedule, clock = Schedule(args.rounds, 3, sets), CLOCKS[args.clock]
        times = measure(variants, schedule, lambda done: None, clock=clock)
    facts = machine.facts()
    title = f"{case}, S={args.samples}, {sets} sets of {size(3 * case.kv_bytes // 2)}"
    title += f", {args.clock} time, lower quartiles of {args.rounds} rounds"
    print(f"{title}; {facts['processor']}, {bench.level}")
    if not disturbance.quiet:
        title += " (not quiet)"
        print(f"not quiet: others used {disturbance.cores:.2f} cores meanwhile")
    floor = times[FLOOR].lower_quartile
    print(f"{FLOOR}: {1e3 * floor:.2f} ms, {case.kv_bytes / floor / 1e9:.1f} GB/s\n")
    rows = rows_of(bench, todo, times)
    print(show(rows))
    write_csv(args.out / "speed.csv", rows)
    draw(rows, title, args.out / "bernoulli_speed.png")
    print(f"\nwrote {args.out}")


def main(argv: list[str] | None = None) -> int:
    """Run; 1 where a result is wrong or nothing can be measured."""
    args = parse(argv)
    try:
        run(args)
    except StudyError as error:
        print(f"bernoulli_speed: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
