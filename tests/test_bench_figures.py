"""What the benchmark suite makes of its measurements: rivals' errors, spreads, targets."""

from __future__ import annotations

import io
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from santa_torch import progress
from santa_torch.bench import check, inputs, main, own, plots, report, targets
from santa_torch.bench.cases import Case
from santa_torch.bench.machine import Disturbance
from santa_torch.bench.peers import PEERS, build_peers
from santa_torch.bench.results import CaseResult, Row
from santa_torch.bench.timing import Ratio, Schedule, Times, Variant, measure, ratio

SMALL = "--rows 64 --heads 8/2 --head-dim 16 --threads 1 --rounds 2 --wait 0 --samples 16"


def _run(out: Path, *more: str) -> dict[str, Any]:
    assert main([*SMALL.split(), "--out", str(out), *more]) == 0
    document: dict[str, Any] = json.loads((out / "results.json").read_text())
    return document


def _plant(monkeypatch: pytest.MonkeyPatch, key: str, factor: float, **more: Any) -> None:
    def build(peer: Any, case: Case, tensors: inputs.Inputs) -> Any:
        built = grouped(peer, case, tensors)
        good = built.out
        built.out = lambda i: factor * good(i)
        return built

    grouped = PEERS["grouped"].build
    monkeypatch.setitem(PEERS, key, type(PEERS[key])(key, "planted", "library", build, **more))


@pytest.mark.parametrize("why", ["", "sums in float16"])
def test_an_imprecise_peer_is_timed_and_noted(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    more: Any = {"imprecise": {"bfloat16": why}} if why else {}
    _plant(monkeypatch, "openvino", 1.1, **more)
    (case,) = _run(tmp_path, "--peers", "openvino")["cases"]
    row = case["variants"][-1]
    assert row["ms"] is not None
    assert row["relative_rms_error"] == pytest.approx(0.1, abs=0.01)
    # the rest is which form of the grouped expression was faster
    wanted = f"over its tolerance: {why or 'more than 0.03'}"
    assert row["note"].partition(";")[0] == wanted
    assert case["strongest_peer"] == "planted"
    assert f"1.0e-01  {row['note']}" in capsys.readouterr().out


@pytest.mark.parametrize("factor", [1.21, float("nan"), 0.0])
def test_a_gross_error_is_no_time(
    factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _plant(monkeypatch, "openvino", factor)
    (case,) = _run(tmp_path, "--peers", "openvino")["cases"]
    assert case["variants"][-1]["ms"] is None
    assert "failed: WrongResultError: planted" in case["variants"][-1]["note"]
    assert case["strongest_peer"] is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_llama_cpp_reads_bfloat16_beside_float16(dtype: str) -> None:
    case = Case(1, 8, 2, 32, 256, dtype, 1)
    tensors = inputs.Inputs(case, 2)
    built, reasons = build_peers(["llama.cpp-bfloat16"], case, tensors, lambda text: None)
    if reasons:
        pytest.skip(str(reasons))
    assert len(built) == (dtype == "bfloat16")
    for peer, made in built:
        assert made.dtype == torch.bfloat16
        exact = check.Exact(tensors.q, tensors.keys[0], tensors.values[0])
        error, over = exact.check_peer(peer.label, made.out(0), made.dtype)
        assert error < 5e-3
        assert not over
        made.close()


# --- spreads


def test_the_spread_is_that_of_the_value() -> None:
    """Over repeated runs the spread holds the value that many runs agree on, and no far-off one."""
    draw, inside, around = random.Random(1), 0, 0
    for _ in range(60):
        above, below = (
            Times({r: [base * (1 + draw.expovariate(4)) for _ in range(3)] for r in range(12)})
            for base in (2.0, 1.0)
        )
        found = ratio(above, below)
        assert found is not None
        inside += found.low <= found.value <= found.high
        around += found.low <= 2.0 <= found.high
        assert found.high / found.low < 1.4
    assert inside == 60
    assert 38 <= around <= 58  # four fifths


def test_drift_that_both_share_does_not_widen_the_spread() -> None:
    speeds = [1.0, 1.0, 1.0, 4.0, 4.0, 4.0, 4.0, 4.0]
    above, below = (Times({r: [b * s] * 2 for r, s in enumerate(speeds)}) for b in (3.0, 1.0))
    assert ratio(above, below) == Ratio(3.0, 3.0, 3.0)


# --- a machine that was not quiet


def _result(rows: int, cores: float) -> CaseResult:
    result = CaseResult(Case(rows=rows), disturbance=Disturbance(cores))
    for name, ms in ((own.FLOOR, 9.0), (own.DENSE, 10.0), ("grouped matmul", 20.0)):
        family = "floor" if name == own.FLOOR else "torch" if "matmul" in name else "santa"
        times = Times({r: [ms * rows / 8192e3] for r in range(3)})
        result.rows.append(Row(name, family, times))
    return result


def test_targets_say_where_the_machine_was_not_quiet(tmp_path: Path) -> None:
    results = [_result(8192, 0.5), _result(32768, 0.0), _result(2**20, 0.0)]
    found = {verdict.text: verdict for verdict in targets.judge(results)}
    assert not found["dense: share of bandwidth, 8k"].quiet
    assert found["dense: share of bandwidth, L >= 32k"].quiet
    growth = found["santa dense: time over reading K and V, at 1M rows over that at 8k"]
    assert not growth.quiet  # 8k was not
    assert growth.plain()["quiet"] is False
    lines = report.targets_table(list(found.values())).splitlines()
    assert next(line for line in lines if "share of bandwidth, 8k" in line).endswith("(not quiet)")
    assert not next(li for li in lines if "bandwidth, L >= 32k" in li).endswith("(not quiet)")
    blocks = report.markdown(results)
    assert blocks.count("not quiet: others used 0.50 cores meanwhile") == 1
    assert plots.draw(results, tmp_path / "a.svg")
    svg = (tmp_path / "a.svg").read_text()
    assert "share of the read bandwidth [%] (not quiet: 8k)" in svg
    assert "D=128, bfloat16 (not quiet: 8k)" in svg
    for result in results:
        result.disturbance = Disturbance(0.0)
    assert plots.draw(results, tmp_path / "b.svg")
    assert "not quiet" not in (tmp_path / "b.svg").read_text()
    assert "not quiet" not in report.targets_table(targets.judge(results))


# --- between turns


@pytest.mark.parametrize(("spins_for", "waited"), [(0.0, 0.005), (0.02, 0.025), (9.0, 0.05)])
def test_turns_wait_until_the_threads_of_the_last_one_rest(spins_for: float, waited: float) -> None:
    now = cpu = 0.0
    idle: list[float] = []

    def run(i: int) -> None:
        nonlocal now
        idle.append(now - since[-1])
        now += 1.0
        since.append(now)

    def sleep(seconds: float) -> None:
        nonlocal now, cpu
        if now - since[-1] < spins_for - 1e-9:
            cpu += seconds
        now += seconds

    since = [0.0]
    variant = Variant("a", "santa", run)
    schedule = Schedule(3, 1, 2)
    measure([variant], schedule, lambda done: None, lambda: now, sleep, lambda: cpu)
    assert idle[2::2] == [pytest.approx(waited)] * 3
    assert idle[1::2] == [0.0] * 4  # within a turn there is no waiting


# --- progress


class Terminal(io.StringIO):
    """Standard error as a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [10, 40, 80, 200])
def test_progress_fits_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", str(columns))
    label = str(Case(rows=131072))
    with progress.bar(label, 12, "rounds") as done:
        for count in range(13):
            done(count)
    with progress.status(f"{label}: peers") as say:
        say("FlexAttention, compiled")
    lines = re.split(r"[\r\n]|\x1b\[2K", terminal.getvalue())
    assert all(len(line) < columns for line in lines)
    if columns >= 40:
        assert any("12/12 rounds" in line for line in lines)
    if columns == 200:
        assert f"{label}: peers FlexAttention, compiled ..." in lines


@pytest.mark.parametrize("which", [progress.bar, progress.status])
def test_interrupted_progress_ends_its_line(
    which: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("label", 3, "rounds") if which is progress.bar else ("label",)
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        with pytest.raises(KeyboardInterrupt), which(*given):
            raise KeyboardInterrupt
        live = stream.isatty()
        assert stream.getvalue().endswith("\n") == live
        assert "in 0" not in stream.getvalue()
