"""The benchmark suite: options, rivals, what it refuses, and what it writes. Asserts no time."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from santa_torch.bench import check, inputs, machine, main, operators, own, report, timing
from santa_torch.bench.cases import Case
from santa_torch.bench.options import PEERS
from santa_torch.bench.peers import PEERS as BUILT_PEERS
from santa_torch.bench.peers import ggml
from santa_torch.bench.timing import Schedule, Variant

ARGUMENTS = "--rows 64 256 --heads 8/2 --head-dim 16 --threads 1 --rounds 3 --wait 0".split()  # noqa: SIM905


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    return [*ARGUMENTS, "--samples", "16", "--out", str(tmp_path / "out")]


# --- the command line


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--out /proc/nowhere", "argument --out: '/proc/nowhere'"),
        ("--levels generic", "'generic' is not one of this processor's"),
        ("--model llama-layers --memory 0.01", "rows need about"),
    ],
)
def test_what_is_not_there_is_one_line(
    given: str,
    message: str,
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = machine.facts()
    monkeypatch.setattr(machine, "facts", lambda: {**facts, "cpu_levels": [facts["cpu_level"]]})
    given_arguments = given.split()
    if "--model" not in given_arguments:
        given_arguments = arguments + given_arguments
    elif "--out" not in given_arguments:
        given_arguments += arguments[-2:]
    assert main(given_arguments) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("bench: error: ")
    assert message in error


# --- memory


def test_a_case_that_does_not_fit_is_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--rows", "100000", "--memory", "0.1", "--peers", "none", "--wait", "0"]
    assert main([*given, "--out", str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert "skipped: needs" in shown.out
    assert "wrote" not in shown.out
    last = shown.err.splitlines()[-1]
    assert last.startswith("bench: error: nothing was measured: every shape was skipped, ")
    assert "first because it needs" in last
    (case,) = json.loads((tmp_path / "results.json").read_text())["cases"]
    assert "of memory for two sets" in case["skipped"]
    assert case["variants"] == []
    assert case["quiet"] is None
    assert main([*given, "--rows", "64", "100000", "--out", str(tmp_path)]) == 0


def test_peers_that_need_too_much_are_left_out_first(tmp_path: Path) -> None:
    given = ["--rows", "8192", "--memory", "0.16", "--peers", "grouped", "sdpa-repeated"]
    options = ["--wait", "0", "--rounds", "1", "--threads", "1", "--out", str(tmp_path)]
    assert main(given + options) == 0
    (case,) = json.loads((tmp_path / "results.json").read_text())["cases"]
    notes = {row["name"]: row for row in case["variants"]}
    assert "more memory" in notes["SDPA, KV repeated"]["note"]
    assert notes["grouped matmul"]["ms"] is not None


# --- wrong results


def test_a_planted_wrong_method_stops_the_run_by_name(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import santa_torch

    honest = santa_torch.decode

    def wrong(*tensors: Any, method: str, **more: Any) -> Any:
        out: Any = honest(*tensors, method=method, **more)
        return 1.5 * out if method == "shared" else out

    monkeypatch.setattr(own.santa_torch, "decode", wrong)
    assert main([*arguments, "--peers", "none"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("bench: error: wrong result: santa shared S=16, mean of 16 seeds")


def test_a_planted_wrong_peer_is_reported_and_the_run_goes_on(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(peer: Any, case: Case, tensors: inputs.Inputs) -> Any:
        built = BUILT_PEERS["grouped"].build(peer, case, tensors)
        good = built.out
        built.out = lambda i: 1.5 * good(i)
        return built

    planted = type(BUILT_PEERS["grouped"])("grouped", "SDPA, wrong", "torch", wrong)
    monkeypatch.setitem(BUILT_PEERS, "sdpa-folded", planted)
    assert main([*arguments, "--peers", "grouped", "sdpa-folded"]) == 0
    for case in json.loads(Path(arguments[-1], "results.json").read_text())["cases"]:
        rows = {row["name"]: row for row in case["variants"]}
        assert rows["SDPA, wrong"]["ms"] is None
        assert "failed: WrongResultError: SDPA, wrong" in rows["SDPA, wrong"]["note"]
        assert case["strongest_peer"] == "grouped matmul"


# --- peers


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "key",
    [
        pytest.param(key, marks=pytest.mark.long if BUILT_PEERS[key].compiled else ())
        for key in PEERS
    ],
)
def test_peers_attend(key: str, dtype: str, one_thread: None) -> None:
    case = Case(2, 6, 2, 32, 96, dtype, 1)
    tensors, peer = inputs.Inputs(case, 3), BUILT_PEERS[key]
    try:
        built = peer.build(peer, case, tensors)
    except Exception as error:
        if type(error).__name__ != "AbsentError":
            raise
        pytest.skip(str(error))
    try:
        built.variant.prepare()
        for i in (2, 0):
            exact = check.Exact(tensors.q, tensors.keys[i], tensors.values[i])
            assert not exact.check_peer(peer.label, built.out(i), built.dtype)[1]
        built.variant.run(1)
        built.variant.rest()
    finally:
        built.close()
    assert built.dtype == getattr(torch, peer.dtype(dtype))


@pytest.mark.parametrize(
    ("key", "modules"),
    [
        ("onnxruntime", ["onnxruntime"]),
        ("onnxruntime", ["onnx"]),
        ("openvino", ["openvino"]),
        ("llama.cpp", []),
    ],
)
def test_absent_peers_are_listed_with_the_reason(
    key: str,
    modules: list[str],
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(ggml, "PACKAGES", (("no_such_package", "lib"),))
    ggml._libraries.cache_clear()
    assert main([*arguments, "--peers", key]) == 0
    ggml._libraries.cache_clear()
    label = BUILT_PEERS[key].label
    assert re.search(rf"{re.escape(label)} +- +absent: .*pip install", capsys.readouterr().out)
    document = json.loads(Path(arguments[-1], "results.json").read_text())
    for case in document["cases"]:
        (row,) = [row for row in case["variants"] if row["name"] == label]
        assert row["ms"] is None
        assert row["note"].startswith("absent: ")
        assert case["strongest_peer"] is None


# --- what a run writes


def test_results(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    given = [*arguments, "--methods", "systematic", "shared", "--samples", "8", "64"]
    assert main([*given, "--peers", "grouped", "sdpa-folded"]) == 0
    out = Path(arguments[-1])
    document = json.loads((out / "results.json").read_text())
    assert [case["case"]["rows"] for case in document["cases"]] == [64, 256]
    names = ["read K and V once", "santa dense"]
    names += [f"santa {method} S={s}" for method in ("systematic", "shared") for s in (8, 64)]
    small = ["santa dense, bare operator"]
    for case in document["cases"]:
        rows = {row["name"]: row for row in case["variants"]}
        assert list(rows) == names + small + ["grouped matmul", "SDPA, group folded"]
        seconds = {n: [s for r in row["seconds"].values() for s in r] for n, row in rows.items()}
        for name, row in rows.items():
            assert set(row["seconds"]) == {"0", "1", "2"}
            assert row["ms"] == pytest.approx(1e3 * timing.lower_quartile(seconds[name]))
            dense = rows["santa dense"]["ms"] / row["ms"]
            assert row["speed_up"]["value"] == pytest.approx(dense)
            floor = rows["read K and V once"]["ms"] / row["ms"]
            assert row["over_floor"]["value"] == pytest.approx(floor)
        peers = [rows[name] for name in ("grouped matmul", "SDPA, group folded")]
        assert case["strongest_peer"] == min(peers, key=lambda row: row["ms"])["name"]
        assert rows["santa shared S=8"]["relative_rms_error"] > 0.01
        assert rows["santa dense"]["relative_rms_error"] < 0.03
        assert case["rotated_bytes"] % case["kv_bytes"] == 0

    lines = list(csv.DictReader(io.StringIO((out / "results.csv").read_text())))
    flat = [(case, row) for case in document["cases"] for row in case["variants"]]
    assert len(lines) == len(flat)
    for line, (case, row) in zip(lines, flat, strict=True):
        assert (line["name"], int(line["rows"])) == (row["name"], case["case"]["rows"])
        assert float(line["ms"]) == row["ms"]
        assert float(line["over_floor"]) == row["over_floor"]["value"]

    shown = capsys.readouterr()
    saved = (out / "table.txt").read_text()
    for line in saved.splitlines():
        assert line in shown.out
    assert saved.count("strongest peer: ") == 2
    markdown = (out / "table.md").read_text()
    assert markdown.count("| santa shared S=64 |") == 2
    assert (out / "bench.png").read_bytes().startswith(b"\x89PNG")
    svg = (out / "bench.svg").read_text()
    for text in ("rows of the KV cache", "samples S", "share of the read bandwidth"):
        assert text in svg
    assert sorted(path.name for path in out.iterdir()) == [
        "bench.png", "bench.svg", "results.csv", "results.json", "table.md", "table.txt",
    ]  # fmt: skip
    assert "\r" not in shown.out + shown.err


def test_stages(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--stages"]) == 0
    out = capsys.readouterr().out
    header = out.split("  stages, ms of all threads over their number\n")[1].splitlines()[0]
    assert {"score", "softmax", "draw", "gather"} < set(header.split())
    result = json.loads((Path(arguments[-1]) / "results.json").read_text())
    ours = [row for row in result["cases"][0]["variants"] if row["method"]]
    assert ours
    for row in ours:
        known = {"score", "softmax"} | (
            {"accumulate", "merge"} if row["method"] == "dense" else {"draw", "gather"}
        )
        assert known <= set(row["stages_ms"]), row["name"]
        assert all(ms > 0 for ms in row["stages_ms"].values())


def test_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "santa_torch", "bench", *ARGUMENTS, "--peers", "grouped"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "strongest peer: grouped matmul" in done.stdout
    assert json.loads((tmp_path / "results.json").read_text())["settings"]["suite"] == "by hand"


def test_interrupted_runs_leave_what_they_measured(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = operators.measure

    def stop(variants: list[Variant], schedule: Schedule, *more: Any) -> Any:
        if variants[0].name == own.FLOOR and schedule.sets and seen:
            good, count = variants[1].run, 0

            def later(i: int) -> Any:
                nonlocal count
                count += 1
                if count > 9:
                    raise KeyboardInterrupt
                return good(i)

            variants = [variants[0], Variant("santa dense", "santa", later)]
        seen.append(schedule)
        return honest(variants, schedule, *more)

    seen: list[Schedule] = []
    monkeypatch.setattr(operators, "measure", stop)
    monkeypatch.setattr(timing, "RESOLUTION", 0.0)
    assert main([*arguments, "--peers", "none"]) == 130
    assert "interrupted" in capsys.readouterr().err
    first, second = json.loads(Path(arguments[-1], "results.json").read_text())["cases"]
    assert all(len(row["seconds"]) == 3 for row in first["variants"])
    dense = next(row for row in second["variants"] if row["name"] == "santa dense")
    assert len(dense["seconds"]) == 1


def test_files_are_whole_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old")

    def fail(path: Path) -> bool:
        path.write_text("half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        report.write(tmp_path, {"a.txt": fail})
    assert report.write(tmp_path, {"b.png": lambda path: False}) == []
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.txt", "old")]


def test_without_matplotlib_there_are_no_plots(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*arguments, "--peers", "none"]) == 0
    assert "no plots, matplotlib is not installed" in capsys.readouterr().err
    assert not Path(arguments[-1], "bench.png").exists()
    assert Path(arguments[-1], "results.json").exists()


def test_the_script_sets_up_and_passes_arguments_on(root: Path, tmp_path: Path) -> None:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    for name in ("bench.sh", "environment.sh"):
        (scripts / name).write_text((root / "scripts" / name).read_text())
    (scripts / "setup.sh").write_text('echo "set up $*"\n')
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "ran $*"\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", str(scripts / "bench.sh"), "--quick", "--out", "a b"],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "SANTA_PYTHON": str(python)},
    )
    wanted = ["set up bench", "ran -m santa_torch bench --quick --out a b"]
    assert done.stdout.splitlines() == wanted


def test_requirement_file_and_extra_agree(root: Path) -> None:
    extra = re.search(
        r'^bench = \["santa-torch\[demo\]", (.*)\]$', (root / "pyproject.toml").read_text(), re.M
    )
    assert extra is not None
    lines = (root / "requirements/bench.txt").read_text().splitlines()
    assert set(re.findall(r'"([^"]+)"', extra[1])) == {li for li in lines if li[:1] not in "-#"}
    assert "-r demo.txt" in lines
