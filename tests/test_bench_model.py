"""The benchmark suite's whole steps of a model. Asserts no time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from santa_torch.bench import main


@pytest.fixture
def tiny_model(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A tiny Llama in place of the packaged model, and the bench that was made of it."""
    from tiny_models import tiny_llama, tokens

    from santa_torch.bench import model, steps

    llama = tiny_llama()

    def load(context: int, options: Any) -> model.Loaded:
        def fill(cache: Any, rows: int) -> None:
            steps.prefill(llama, tokens(1, rows), cache, lambda done: None)

        return model.Loaded(llama, "a tiny one", fill, ("a note",), True)

    made: list[Any] = []
    honest = model._Bench

    def bench(*given: Any) -> Any:
        made.append(honest(*given))
        return made[0]

    monkeypatch.setitem(model._LOADERS, "smollm2", load)
    monkeypatch.setattr(model, "_Bench", bench)
    return made


MODEL = "--model smollm2 --context 100 --samples 8 --threads 1 --rounds 2 --wait 0".split()  # noqa: SIM905


def test_model_steps(
    tiny_model: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*MODEL, "--out", str(tmp_path)]) == 0
    (model,) = json.loads((tmp_path / "results.json").read_text())["models"]
    keys = ["santa", "dense", "sdpa", "eager", "short-santa", "short-sdpa"]
    assert [row["key"] for row in model["contenders"]] == keys
    rows = {row["key"]: row for row in model["contenders"]}
    wanted = rows["sdpa"]["ms"] / rows["santa"]["ms"]
    assert rows["sdpa"]["over_ours"]["value"] == pytest.approx(wanted)
    lengths = {key: cache.get_seq_length() for key, cache in tiny_model[0]._caches.items()}
    assert lengths == {key: 64 if key.startswith("short") else 100 for key in keys}
    out = capsys.readouterr().out
    assert "a tiny one, bfloat16, 100 rows, S = 8, 1 thread" in out
    assert "a note" in out
    assert (tmp_path / "results.csv").read_text().count(",model,") == 6


def test_a_planted_wrong_attention_of_a_model_is_refused(
    tiny_model: list[Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = torch.ops.santa.decode

    def wrong(q: Any, k: Any, v: Any, **more: Any) -> Any:
        return honest(q, k, v.flip(2), **more)

    monkeypatch.setattr(torch.ops.santa, "decode", wrong)
    assert main([*MODEL, "--out", str(tmp_path)]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("bench: error: wrong result: HF SDPA, DynamicCache: logits are off by")
