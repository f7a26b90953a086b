"""What the benchmark suite makes of its measurements: rivals' errors, spreads, targets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from santa_torch.bench import check, inputs, main
from santa_torch.bench.cases import Case
from santa_torch.bench.peers import PEERS, build_peers

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
    assert row["note"] == f"over its tolerance: {why or 'more than 0.03'}"
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
