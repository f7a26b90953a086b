"""What a run of the benchmark suite leaves behind: files, facts, plots, warnings."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import torch

from santa_torch.bench import check, inputs, machine, main, operators, own, plots, report
from santa_torch.bench.cases import Case
from santa_torch.bench.options import usable_cores
from santa_torch.bench.peers import PEERS
from santa_torch.bench.results import CaseResult, Row
from santa_torch.bench.timing import Times

SMALL = "--rows 64 --heads 8/2 --head-dim 16 --rounds 2 --wait 0 --peers none".split()  # noqa: SIM905


def _run(out: Path, *more: str) -> dict[str, Any]:
    assert main([*SMALL, "--out", str(out), *more]) == 0
    document: dict[str, Any] = json.loads((out / "results.json").read_text())
    return document


# --- files


def test_plots_of_an_earlier_run_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("bench.png", "bench.svg")
    for name in names:
        (tmp_path / name).write_text("earlier")
    monkeypatch.setattr(plots, "available", lambda: False)
    _run(tmp_path, "--threads", "1")
    assert not [name for name in names if (tmp_path / name).exists()]
    assert (tmp_path / "table.txt").exists()


def test_what_was_not_measured_is_not_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*given: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(operators, "measure", stop)
    assert main([*SMALL, "--threads", "1", "--out", str(tmp_path)]) == 130
    lines = list(csv.DictReader(io.StringIO((tmp_path / "results.csv").read_text())))
    assert lines
    assert {(line["quiet"], line["ms"]) for line in lines} == {("", "")}
    (case,) = json.loads((tmp_path / "results.json").read_text())["cases"]
    assert case["quiet"] is None


def test_the_document_says_when_and_on_what(root: Path, tmp_path: Path) -> None:
    document = _run(tmp_path, "--threads", "1", "--samples", "64", "8")
    assert document["settings"]["samples"] == [8, 64]
    facts = document["machine"]
    age = datetime.now(timezone.utc) - datetime.fromisoformat(facts["date"])
    assert timedelta(0) <= age < timedelta(minutes=5)
    assert facts["kernel"]
    for name, text in (("processor_family", "cpu family"), ("processor_model", "model")):
        found = re.search(rf"^{text}\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
        assert facts[name] == (found[1].strip() if found else None)
    for name, version in facts["packages"].items():
        assert name in machine._PACKAGES
        assert version[0].isdigit()


def test_the_revision_is_that_of_the_files_own_checkout(tmp_path: Path) -> None:
    file = tmp_path / "package.py"
    file.write_text("1")
    assert machine._revision(file) is None

    def git(*words: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "one")
    assert machine._revision(file) is None  # a checkout of something else
    git("add", "package.py")
    git("commit", "-q", "-m", "two")
    assert machine._revision(file) == git("rev-parse", "--short=12", "HEAD")
    file.write_text("2")
    assert machine._revision(file) == git("rev-parse", "--short=12", "HEAD") + "-changed"


# --- what is said


def test_more_threads_than_cores_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], one_thread: None
) -> None:
    _run(tmp_path, "--threads", str(usable_cores() + 1))
    error = capsys.readouterr().err
    assert f"warning: argument --threads: {usable_cores() + 1} threads" in error
    _run(tmp_path, "--threads", "1")
    assert "warning" not in capsys.readouterr().err


def test_small_caches_are_in_kib() -> None:
    facts = {**machine.facts(), "caches": {"L1": 48 * 2**10, "L2": 2 * 2**20}}
    facts["memory_bytes"] = 2**34
    assert ", L1 48 KiB, L2 2 MiB, 16 GiB" in report.heading(facts)


# --- plots


def test_every_rival_has_a_colour_and_a_marker_of_its_own() -> None:
    assert len(PEERS) <= len(plots._PEERS) == len(plots._MARKERS)
    assert len({*plots._PEERS, *plots._OURS}) == len(plots._PEERS) + len(plots._OURS)
    assert len(set(plots._MARKERS)) == len(plots._MARKERS)


def test_lines_of_rivals_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    results = []
    for rows in (1024, 8192):
        names = [own.FLOOR, own.DENSE, *(peer.label for peer in PEERS.values())]
        case = CaseResult(Case(rows=rows))
        for place, name in enumerate(names):
            family = "floor" if not place else "santa" if place == 1 else "torch"
            method = "dense" if place == 1 else ""
            case.rows.append(Row(name, family, Times({0: [rows * (place + 9)]}), method=method))
        results.append(case)
    axes = Figure().subplots()
    plots._TimeByRows(results).draw(axes)
    styles = {(line.get_color(), line.get_marker()) for line in axes.lines}
    assert len(axes.lines) == len(styles) == len({colour for colour, _ in styles}) == 12
    shares = Figure().subplots()
    plots._ShareByCase(results).draw(shares)
    (line,) = shares.lines
    for text in shares.texts:
        assert text.get_zorder() > line.get_zorder()
        assert text.get_bbox_patch() is not None


# --- the grouped expression


@pytest.mark.parametrize("tall", [False, True])
def test_both_forms_of_the_grouped_expression_attend(
    tall: bool, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    from santa_torch.bench.peers import plain

    paces = iter([2.0, 1.0] if tall else [1.0, 2.0])
    monkeypatch.setattr(plain, "_pace", lambda run, sets: next(paces))
    case = Case(2, 6, 2, 32, 96, "float32", 1)
    tensors, peer = inputs.Inputs(case, 2), PEERS["grouped"]
    built = peer.build(peer, case, tensors)
    assert built.note == ("scores as K q^T" if tall else "")
    exact = check.Exact(tensors.q, tensors.keys[1], tensors.values[1])
    assert exact.check_exact("grouped", built.out(1), torch.float32) < 2e-5
