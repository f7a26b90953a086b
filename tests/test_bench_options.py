"""The benchmark suite's command line, and the suites that it names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from santa_torch.bench import main, targets, timing
from santa_torch.bench.cases import full_suite
from santa_torch.bench.options import PEERS, parse


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--rows 0", "argument --rows: must be a positive integer, got '0'"),
        ("--rows x", "argument --rows: must be a positive integer, got 'x'"),
        ("--heads 32", "argument --heads: must be query heads/KV heads, as 32/8, got '32'"),
        ("--heads 9/2", "argument --heads: 9 query heads are no multiple of 2"),
        ("--dtype int8", "argument --dtype: invalid choice: 'int8'"),
        ("--methods topk", "argument --methods: invalid choice: 'topk'"),
        ("--samples 99999999", "argument --samples: must be between 1 and 16777216, got"),
        ("--peers none grouped", "argument --peers: 'none' stands alone, got 'none grouped'"),
        ("--peers grouped all", "argument --peers: 'all' stands alone, got 'grouped all'"),
        ("--peers numpy", "argument --peers: invalid choice: 'numpy'"),
        ("--wait -1", "argument --wait: must be seconds, 0 or more, got '-1'"),
        ("--wait inf", "argument --wait: must be seconds, 0 or more, got 'inf'"),
        ("--memory none", "argument --memory: must be more than 0 GiB, got 'none'"),
        ("--quick --full", "argument --full: not allowed with argument --quick"),
        ("--full --rows 16", "argument --full: lists its own shapes"),
        ("--model gpt2", "argument --model: invalid choice: 'gpt2'"),
        ("--model smollm2 --rows 16", "argument --model: shapes are the model's"),
        ("--context 16", "argument --context: is for --model"),
        (f"--out {__file__}", "is not a directory"),
        ("--unknown", "unrecognized arguments: --unknown"),
    ],
)
def test_wrong_options_are_one_line(
    given: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(given.split())
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert message in error
    assert error.startswith("bench: error: ")
    assert error.count("\n") == 1


def test_axes_given_by_hand_are_multiplied() -> None:
    given = "--rows 16 32 --batch 1 2 --dtype float32 --methods shared --threads 1"
    options = parse(given.split())
    assert [(case.rows, case.batch) for case in options.cases] == [
        (16, 1),
        (32, 1),
        (16, 2),
        (32, 2),
    ]
    assert {case.dtype for case in options.cases} == {"float32"}
    assert {case.methods for case in options.cases} == {("dense", "shared")}
    assert {(case.heads, case.kv_heads) for case in options.cases} == {(32, 8)}


def test_suites() -> None:
    default, quick, full = (
        parse([*flags, "--threads", "2"]) for flags in ([], ["--quick"], ["--full"])
    )
    assert {(case.batch, case.rows) for case in default.cases} == {
        (1, 8192), (4, 8192), (1, 32768), (1, 131072),
    }  # fmt: skip
    assert set(default.peers) == set(PEERS) == set(quick.peers) | {"compiled", "flex"}
    assert len(full.cases) == len(set(full.cases)) == 20
    assert set(full_suite(2)) == set(full.cases)
    assert parse(["--peers", "none"]).peers == ()


def test_every_target_has_a_case_in_the_full_suite() -> None:
    for target in targets.TARGETS:
        assert any(target.where(case) for case in full_suite(2)), target.text


def test_help_needs_no_torch() -> None:
    script = (
        "import sys, types\n"
        "sys.modules['santa_torch'] = package = types.ModuleType('santa_torch')\n"
        f"package.__path__ = [{str(Path(timing.__file__).parent.parent)!r}]\n"
        "from santa_torch.bench.options import parse\n"
        "try: parse(['--help'])\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    for option in ("rows", "heads", "peers", "model", "quick", "full", "wait", "out"):
        assert f"--{option}" in done.stdout
