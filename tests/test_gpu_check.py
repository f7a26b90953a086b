"""The check for a machine with a GPU, as far as it goes without one.

Its rehearsal runs the real parts on the CPU. The form that a GPU gets is run with stand-ins for the
driver's tool, the sanitizer and Python: what is tested there is that no part can fail unnoticed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sanitizer_steps
import torch
from cases import Case
from packaging_tools import ROOT, copy_checkout, run

SCRIPT = ROOT / "scripts/gpu_check.sh"
BENCHMARK = ROOT / "benchmarks/cuda_decode.py"
AS_EXPECTED = "240 operator calls on cuda: as expected"
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
PARTS = ("device", "tests", "benchmark", *TOOLS)


def summary(folder: Path) -> dict[str, Any]:
    """``summary.json``, with the status of each part under its name."""
    found = json.loads((folder / "summary.json").read_text())
    return found | {part["part"]: part["status"] for part in found["parts"]}


def rehearse(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return run("bash", SCRIPT, *options, "--out", folder, check=False, SANTA_PYTHON=sys.executable)


# ---- the real parts, on the CPU ------------------------------------------------------------------


def test_a_rehearsal_runs_the_real_parts(tmp_path: Path) -> None:
    done = rehearse(tmp_path, "--rehearse", "--quick", "--parts", "tests,memcheck,benchmark")
    assert done.returncode == 0, done.stdout
    found = summary(tmp_path)
    assert found["rehearsal"] is True
    assert [found[name] for name in ("tests", "memcheck", "benchmark")] == ["rehearsed"] * 3
    assert "REHEARSAL" in (tmp_path / "summary.txt").read_text()
    assert "skipped" in (tmp_path / "tests.log").read_text()
    assert "operator calls on cpu: as expected" in (tmp_path / "memcheck.log").read_text()
    results = json.loads((tmp_path / "benchmark/results.json").read_text())
    assert results["rehearsal"] is True
    assert "REHEARSAL" in results["device"]
    names = {line["name"] for line in results["results"][0]["lines"]}
    for rival in ("SDPA cuDNN, enable_gqa", "FlashInfer", "FlashAttention-2", "FlashAttention-3"):
        assert rival in names
    for result in results["results"]:
        for line in result["lines"]:
            assert (line["absent"] is None) == (len(line["microseconds"]) == results["rounds"])
    assert (tmp_path / "benchmark/cuda_decode.png").stat().st_size > 10_000


@pytest.mark.long
def test_a_whole_rehearsal_in_a_clean_clone(tmp_path: Path) -> None:
    clone = copy_checkout(tmp_path / "clone")
    done = run("bash", "scripts/gpu_check.sh", "--rehearse", cwd=clone, check=False)
    assert done.returncode == 0, done.stdout
    found = summary(clone / "out/gpu_check")
    assert {part["status"] for part in found["parts"]} == {"rehearsed"}
    assert [part["part"] for part in found["parts"]] == ["environment", "setup", "rivals", *PARTS]


def test_the_benchmark_wants_a_gpu_unless_it_rehearses(tmp_path: Path) -> None:
    command = (sys.executable, BENCHMARK, "--out", tmp_path)
    done = run(*command, check=False, PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "torch finds no GPU" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stage", ["decode", "draw", "gather"])
def test_the_sanitizers_steps_see_a_wrong_result(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second call of a stage, which stands for the other device's, is off in one element."""
    calls = 0

    class Off:
        def __getattr__(self, name: str) -> Any:
            return wrong if name == stage else getattr(torch.ops.santa, name)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        results = getattr(torch.ops.santa, stage)(*args, **kwargs)
        if calls == 2:
            first = results if isinstance(results, torch.Tensor) else results[0]
            first.view(-1)[0] += 1
        return results

    sanitizer_steps.check(Case(), "cpu")
    monkeypatch.setattr(sanitizer_steps, "OPS", Off())
    with pytest.raises(AssertionError):
        sanitizer_steps.check(Case(), "cpu")


# ---- the form for a GPU, with stand-ins ----------------------------------------------------------


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    """A folder with an nvidia-smi that knows a GPU, a sanitizer, and a Python that takes notes."""
    folder = tmp_path / "bin"
    folder.mkdir()
    programs = {
        "nvidia-smi": '[ -z "$NO_GPU" ] || exit 9; echo "GPU 0: stand-in"',
        "compute-sanitizer": (
            'while [[ $1 == --* ]]; do case "$1" in --tool) tool=$2 ;; esac; shift 2; done\n'
            '"$@"\n[ "$tool" != "$FOUND" ] || { echo "ERROR SUMMARY: 3 errors"; exit 9; }\n'
            '[ "$tool" = "$SILENT" ] || echo "========= ERROR SUMMARY: 0 errors"'
        ),
        "python": (
            f'echo "gpu=$SANTA_REQUIRE_GPU $*" >>{tmp_path / "notes"}\n'
            '[ -z "$FAILS" ] || case "$*" in *"$FAILS"*) echo broken; exit 1 ;; esac\n'
            '[ -z "$STOPS" ] || case "$*" in *"$STOPS"*) exit 0 ;; esac\n'
            f'case "$*" in *sanitizer_steps*) echo "{AS_EXPECTED}" ;; esac'
        ),
    }
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


def check(stand_ins: Path, *options: str, **environment: str) -> tuple[int, dict[str, Any]]:
    out = stand_ins.parent / "out"
    environment = {
        "PATH": f"{stand_ins}:/usr/bin:/bin",
        "SANTA_PYTHON": str(stand_ins / "python"),
        "CUDA_HOME": str(stand_ins),
        **dict.fromkeys(("NO_GPU", "FAILS", "STOPS", "FOUND", "SILENT"), ""),
        **environment,
    }
    parts = () if "--parts" in options else ("--parts", " ".join(PARTS))
    command = ("bash", SCRIPT, *options, *parts, "--out", out)
    done = run(*command, check=False, **environment)
    assert (out / "summary.json").exists(), done.stdout
    return done.returncode, summary(out)


def test_on_a_gpu_every_part_runs_and_may_not_skip(stand_ins: Path) -> None:
    code, found = check(stand_ins)
    assert code == 0, found
    assert found["rehearsal"] is False
    assert [found[part] for part in PARTS] == ["passed"] * len(PARTS)
    notes = (stand_ins.parent / "notes").read_text()
    assert "gpu=1 -m pytest" in notes
    assert notes.count("tests/sanitizer_steps.py\n") == len(TOOLS)
    assert "--device cpu" not in notes
    assert "--rehearse" not in notes


@pytest.mark.parametrize(
    ("fails", "failed"),
    [
        ("-m pytest", ["tests"]),
        ("plan --device this", ["device"]),
        ("cuda_decode", ["benchmark"]),
        ("sanitizer_steps", list(TOOLS)),
    ],
)
def test_a_failing_part_fails_the_check_and_stops_no_other(
    stand_ins: Path, fails: str, failed: list[str]
) -> None:
    code, found = check(stand_ins, FAILS=fails)
    assert code == 1
    assert found["failures"] == len(failed)
    assert [part for part in PARTS if found[part] == "failed"] == failed
    assert [part for part in PARTS if found[part] == "passed"] == [
        part for part in PARTS if part not in failed
    ]
    if failed == ["tests"]:
        assert "broken" in (stand_ins.parent / "out/tests.log").read_text()


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("how", ["FOUND", "SILENT"])
def test_what_a_sanitizer_finds_and_one_that_says_nothing(
    stand_ins: Path, tool: str, how: str
) -> None:
    code, found = check(stand_ins, "--parts", " ".join(TOOLS), **{how: tool})
    assert code == 1
    assert [part for part in TOOLS if found[part] == "failed"] == [tool]


def test_a_sanitized_program_that_stops_early(stand_ins: Path) -> None:
    code, found = check(stand_ins, "--parts", "memcheck", STOPS="sanitizer_steps")
    assert (code, found["memcheck"]) == (1, "failed")


def test_a_missing_sanitizer_is_a_failure(stand_ins: Path) -> None:
    (stand_ins / "compute-sanitizer").unlink()
    code, found = check(stand_ins, "--parts", "racecheck")
    assert (code, found["racecheck"]) == (1, "failed")
    assert "neither on the path" in (stand_ins.parent / "out/racecheck.log").read_text()


def test_without_a_gpu_it_says_so_and_fails(stand_ins: Path) -> None:
    code, found = check(stand_ins, NO_GPU="1")
    assert code == 3
    assert found["rehearsal"] is True
    assert {found[part] for part in PARTS} == {"rehearsed"}
    assert (stand_ins.parent / "out/summary.txt").read_text().startswith("NO GPU")
    assert check(stand_ins, "--rehearse", NO_GPU="1")[0] == 0
    assert check(stand_ins, NO_GPU="1", FAILS="-m pytest")[0] == 1


# ---- options -------------------------------------------------------------------------------------


def test_help_lists_parts_and_statuses() -> None:
    text = run("bash", SCRIPT, "--help").stdout
    for word in ("--rehearse", "--quick", "--parts", "--out", "Exit status", *PARTS):
        assert word in text
    assert "source" not in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--fast", "no such option: --fast"),
        ("--parts", "--parts needs a value"),
        ("--parts tests,testz", "no such part: testz"),
        ("--out /proc/nowhere", "/proc/nowhere cannot be written to"),
    ],
)
def test_wrong_options_are_named(options: str, said: str) -> None:
    done = run("bash", SCRIPT, *options.split(), check=False)
    assert done.returncode == 2
    assert said in done.stdout
