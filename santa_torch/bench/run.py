"""The suite from start to end."""

from __future__ import annotations

import gc
import sys
import textwrap
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from santa_torch.bench import machine, plots, report, targets
from santa_torch.bench.cases import Case
from santa_torch.bench.check import WrongResultError
from santa_torch.bench.operators import Settings, run_case
from santa_torch.bench.options import BenchError, Options, usable_cores
from santa_torch.bench.results import CaseResult, ModelResult
from santa_torch.files import make_directory


def run(options: Options, watch: machine.Watch | None = None) -> dict[str, Any]:
    """Measure what the options ask for, print it, and write the files after each step.

    Returns
    -------
    dict
        What ``results.json`` holds.

    Raises
    ------
    BenchError
        A folder, a level or a model is not there, an output is wrong, or no shape fits.
    KeyboardInterrupt
        Ctrl-C; what was measured until then is in the files.
    """
    make_directory(options.out, BenchError)
    _warn(options)
    session = _Session(options, watch or machine.Watch())
    print(report.heading(session.facts), flush=True)
    try:
        session.measure()
    except WrongResultError as error:
        raise BenchError(f"wrong result: {error}") from None
    finally:
        written = session.write()
    reasons = [result.skipped for result in session.results]
    if reasons and all(reasons):
        raise BenchError(
            f"nothing was measured: every shape was skipped, the first because it {reasons[0]}"
        )
    print(session.closing())
    for path in written:
        print(f"wrote {path}")
    return session.document()


class _Session:
    """The results of one run."""

    def __init__(self, options: Options, watch: machine.Watch) -> None:
        self.options, self.watch = options, watch
        self.facts = machine.facts()
        self.results: list[CaseResult] = []
        self.models: list[ModelResult] = []

    def measure(self) -> None:
        """All cases, or the model; prints each table as soon as it is there."""
        options = self.options
        if options.model:
            self._measure_model()
            return
        settings = Settings(
            options.peers,
            options.rounds,
            options.calls,
            options.wait,
            options.seed,
            options.memory,
        )
        for case in options.cases:
            self.results.append(CaseResult(self._with_levels(case)))
            run_case(self.results[-1], settings, self.watch)
            print(self._table(self.results[-1]), end="\n\n", flush=True)
            self.write()
            gc.collect()  # sets and sessions of this case before the next one is planned

    def _measure_model(self) -> None:
        try:
            from santa_torch.bench.model import run_model
        except ImportError as error:
            raise BenchError(
                f"argument --model: {error} (pip install 'santa-torch[bench]')"
            ) from None
        self.models.append(ModelResult())
        run_model(self.models[-1], self.options, self.watch)
        print(report.model_table(self.models[-1]), end="\n\n", flush=True)

    def verdicts(self) -> list[targets.Verdict]:
        """Targets of everything measured."""
        models = [verdict for model in self.models for verdict in targets.judge_model(model)]
        return targets.judge(self.results) + models

    def document(self) -> dict[str, Any]:
        """Everything as plain values."""
        settings = {**asdict(self.options), "out": str(self.options.out)}
        del settings["cases"]
        if not self.options.model:  # what the cases ask for, rather than what a model would get
            counts = {count for case in self.options.cases for count in case.samples}
            settings["samples"] = sorted(counts)
        return report.document(self.facts, settings, self.results, self.models, self.verdicts())

    def closing(self) -> str:
        """Notes, and the targets."""
        chosen = report.MODEL_NOTES if self.options.model else report.NOTES
        notes = "\n".join(textwrap.fill(n, 100, subsequent_indent="  ") for n in chosen)
        verdicts = self.verdicts()
        return notes + (f"\n\n{report.targets_table(verdicts)}\n" if verdicts else "\n")

    def write(self) -> list[Any]:
        """Write all files as they stand."""
        document = self.document()
        tables = [self._table(result) for result in self.results]
        tables += [report.model_table(model) for model in self.models]
        table = "\n\n".join([report.heading(self.facts).strip(), *tables, self.closing()])
        files: dict[str, str | Callable[..., bool]] = {
            "table.txt": table,
            "table.md": report.markdown(self.results),
            "results.csv": report.rows_csv(document),
            "results.json": report.dumps(document),
        }
        draw = partial(plots.draw, self.results)
        files |= {"bench.png": draw, "bench.svg": draw}
        return report.write(self.options.out, files)

    def _table(self, result: CaseResult) -> str:
        stages = report.stages_table(result) if self.options.stages else ""
        return report.case_table(result) + (f"\n{stages}" if stages else "")

    def _with_levels(self, case: Case) -> Case:
        """Levels to compare: those of the full suite where there are any, given ones as given."""
        supported, used = self.facts["cpu_levels"], self.facts["cpu_level"]
        if self.options.suite != "full":
            for level in case.levels:
                if level not in supported:
                    raise BenchError(
                        f"argument --levels: {level!r} is not one of this processor's: "
                        f"{', '.join(supported)}"
                    )
        below = supported[: supported.index(used)]
        levels = case.levels if self.options.suite != "full" else below
        return replace(case, levels=tuple(level for level in case.levels if level in levels))


def _warn(options: Options) -> None:
    """Say what makes figures less than they could be."""
    cores = usable_cores()
    if max(options.threads) > cores:
        print(
            f"bench: warning: argument --threads: {max(options.threads)} threads take turns on "
            f"{cores} cores, which measures the scheduler",
            file=sys.stderr,
        )
    if not plots.available():
        print("bench: no plots, matplotlib is not installed", file=sys.stderr)
