"""The commands about Bernoulli queries run, and what they write makes sense. Asserts no time."""

from __future__ import annotations

import csv
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from packaging_tools import ROOT
from tiny_models import tiny_llama

TEXT = "A feature that nobody drew is a feature that nobody reads. " * 30

Command = Callable[..., int]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Command]]:
    """``main`` of a file in ``benchmarks/``."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lambda name: importlib.import_module(name).main
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, its tokenizer and a text."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([TEXT], vocab_size=280, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer)
    tokenizer.save_pretrained(folder)
    tiny_llama(vocab_size=len(tokenizer)).save_pretrained(folder)
    (folder / "text.txt").write_text(TEXT)
    return folder


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_access(
    command: Callable[[str], Command], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--quick", "--groups", "60", "--draws", "2", "32", "--out", str(tmp_path)]
    assert command("bernoulli_access")(given) == 0
    rows = read(tmp_path / "access.csv")
    assert sum(row["matched"] == "True" for row in rows) == 3
    assert sum(row["beyond independent"] == "True" for row in rows) == 3
    for row in rows:
        low, value, high = (float(row[key]) for key in ("low", "predicted", "high"))
        assert low <= value <= high
    few, many = read(tmp_path / "counts.csv")[:2]
    for key in few:
        if key.endswith("read"):
            assert 0 < float(few[key]) < float(many[key]) <= 100
        if key.endswith("error"):
            assert 0 < float(many[key]) < float(few[key])
    assert float(few["shared read"]) < float(few["union read"])
    assert len(read(tmp_path / "queries.csv")) == 8
    assert (tmp_path / "bernoulli_access.png").stat().st_size > 10_000
    shown = capsys.readouterr().out
    assert "| BitNet b1.58 2B | one head   | 4     | 67.5  |" in shown
    assert "| Llama-3.1-8B    | mean query | 8     | 72.8  |" in shown


def test_model(
    command: Callable[[str], Command],
    tiny: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = ["--model", str(tiny), "--text", str(tiny / "text.txt")]
    given = [*model, "--quick", "--context", "100", "--tokens", "2", "--out", str(tmp_path)]
    assert command("bernoulli_model")(given) == 0
    rows = read(tmp_path / "errors.csv")
    assert [(row["form"], row["draws"]) for row in rows] == [
        (form, draws) for form in ("paper", "shared") for draws in ("4", "64")
    ]
    for few, many in (rows[:2], rows[2:]):  # of many draws, one sample may leave nothing to chance
        assert float(few["features"]) < float(many["features"]) <= 100
        assert 0 <= float(many["error"]) < float(few["error"])
        assert 0 <= float(many["tvd"]) < float(few["tvd"])
        assert 0 < float(few["left"]) <= float(few["noise"])
    assert float(rows[2]["features"]) < float(rows[0]["features"])
    assert "kurtosis of the queries" in capsys.readouterr().out
    assert (tmp_path / "bernoulli_model.png").stat().st_size > 10_000


def test_speed(command: Callable[[str], Command], tmp_path: Path) -> None:
    given = ["--quick", "--rows", "200", "--threads", "1", "--out", str(tmp_path)]
    assert command("bernoulli_speed")(given) == 0
    rows = read(tmp_path / "speed.csv")
    assert all(float(row["ms"]) > 0 for row in rows)
    dense = [row for row in rows if row["method"] == "dense"]
    exact = [row for row in dense if row["form"] == "exact"]
    cache = 2 * 8 * 200 * 128 * 2 / 1e6
    assert [float(row["mbytes"]) for row in exact] == pytest.approx([cache] * len(exact))
    packed, row_bytes = 8 * 192 * 2 / 1e6, 128  # rows in whole blocks; the last 8 are read whole
    for row in dense:
        saved = packed * row_bytes * (1 - float(row["features"]) / 100)
        assert float(row["mbytes"]) == pytest.approx(cache - saved, rel=1e-4)
        assert (float(row["features"]) < 100) == (row["form"] != "exact")
    assert (tmp_path / "bernoulli_speed.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", ["bernoulli_access", "bernoulli_model", "bernoulli_speed"])
def test_what_cannot_be_is_one_line(
    name: str, command: Callable[[str], Command], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(name)(["--quick", "--out", "/proc/nowhere"]) == 1
    assert f"{name}: error: argument --out: '/proc/nowhere'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command(name)(["--draws", "0"])
    assert "--draws: must be between 1 and 1024, got [0]" in capsys.readouterr().err


def test_a_wrong_sketch_is_not_timed(
    command: Callable[[str], Command],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    main = command("bernoulli_speed")
    module = importlib.import_module("bernoulli_speed")
    right = module.KeySketch
    monkeypatch.setattr(module, "KeySketch", lambda k: right(k.flip(2).contiguous()))
    given = ["--quick", "--rows", "200", "--threads", "1", "--out", str(tmp_path)]
    assert main(given) == 1
    assert "differs from row-major keys" in capsys.readouterr().err
    assert not (tmp_path / "speed.csv").exists()
