"""The demo from start to end."""

from __future__ import annotations

import platform
import time
from dataclasses import asdict
from typing import Any

import torch
import transformers

from santa_torch import hf
from santa_torch.config import SantaConfig
from santa_torch.demo import report
from santa_torch.demo.measure import Bench, Contender
from santa_torch.demo.options import DemoError, Options
from santa_torch.demo.subject import Subject, load
from santa_torch.files import make_directory
from santa_torch.progress import bar, status


def run(options: Options) -> dict[str, Any]:
    """Measure what the options ask for, print it and write the files.

    Returns
    -------
    dict
        What the JSON file holds.
    """
    started = time.perf_counter()
    make_directory(options.out, DemoError)
    try:
        return _run(options, started)
    except (MemoryError, RuntimeError) as error:
        if not _is_about_memory(error):
            raise
        raise DemoError(
            f"not enough memory for {options.context} tokens of context on {options.device}; try "
            "fewer (--context) or a smaller --model"
        ) from None


def _run(options: Options, started: float) -> dict[str, Any]:
    with status(f"loading {options.model or 'SmolLM2-135M-Instruct'}"):
        subject = load(options)
    _check_supported(subject, options.config)
    facts = _facts(options, subject)
    contenders = _contenders(options, subject.attention)
    facts["memory"] = _memory(subject, contenders, facts)
    print(report.heading(facts), flush=True)

    # Probabilities first, in float32: 16 bits alone move them by more than good sampling does.
    bench = _prefilled(subject, options, contenders)
    with bar("comparing probabilities (float32)", bench.steps, "tokens") as progress:
        bench.teacher_force(progress)
    if options.dtype != "float32":
        del bench  # its caches
        cast(subject.model, getattr(torch, options.dtype))
        bench = _prefilled(subject, options, contenders)
        with bar(f"comparing probabilities ({options.dtype})", bench.steps, "tokens") as progress:
            bench.teacher_force(progress)
    with bar("continuing the text, timed", bench.steps, "tokens") as progress:
        bench.generate(progress)

    facts["seconds"] = round(time.perf_counter() - started, 1)
    results = report.collect(facts, contenders, subject.tokenizer)
    print(report.texts(results), report.table(results), report.notes(results), sep="\n\n")
    for path in report.write(results, options.out):
        print(f"wrote {path}")
    return results


def cast(model: Any, dtype: torch.dtype) -> None:
    """Round the weights in place to what ``from_pretrained(dtype=dtype)`` gives.

    That leaves alone the buffers which are computed rather than saved, such as the frequencies of
    rotary embeddings, and the modules that a model keeps in float32. ``model.to`` rounds them all.
    """
    kept = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and not kept & set(name.split(".")):
            tensor.data = tensor.data.to(dtype)
    model.config.dtype = dtype


def _is_about_memory(error: BaseException) -> bool:
    """Whether torch, on the CPU or a GPU, or Python ran out of memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return "out of memory" in text or "can't allocate memory" in text or "bad_alloc" in text


def _check_supported(subject: Subject, config: SantaConfig) -> None:
    """Refuse models that santa_torch refuses before time is spent on them."""
    try:
        hf.SantaCache(subject.model.config, config)
        with hf.use(subject.model, config):
            pass
    except ValueError as error:
        raise DemoError(f"argument --model: {str(error).removeprefix('model: ')}") from None


def _memory(subject: Subject, contenders: list[Contender], facts: dict[str, Any]) -> dict[str, int]:
    """Bytes at the peak, all in float32: weights, a cache for each contender, and the sketch."""
    weights = sum(weight.numel() for weight in subject.model.parameters())  # tied ones once
    length = subject.tokens.shape[1]
    layers: list[Any] = hf.SantaCache(subject.model.config).layers
    full = sum(0 if layer.is_sliding else length for layer in layers)
    rows = full + sum(min(length, layer.sliding_window) for layer in layers if layer.is_sliding)
    row = facts["kv_heads"] * facts["head_dim"] * 4
    return {
        "weights": weights * 4,
        "cache": rows * 2 * row,
        "caches": len(contenders),
        "sketch": 0 if facts["sketch_bits"] is None else full * row,
    }


def _contenders(options: Options, attention: str) -> list[Contender]:
    own = "SDPA" if attention == "sdpa" else attention
    contenders = [
        Contender(attention, f"HF {own}, DynamicCache", None),
        Contender("dense", "santa dense, SantaCache", SantaConfig("dense")),
    ]
    if (options.method, options.bernoulli, options.sketch_bits) != ("dense", None, None):
        contenders.append(Contender("santa", _label(options), options.config))
    return contenders


def _label(options: Options) -> str:
    parts = [f"santa {options.method}"]
    if options.method != "dense":
        parts.append(f"S={options.samples}")
    if options.bernoulli is not None:
        parts.append(f"B={options.bernoulli.draws}" + ("" if options.bernoulli.shared else "/head"))
    sketch = "" if options.sketch_bits is None else " with sketch"
    return " ".join(parts) + ", SantaCache" + sketch


def _prefilled(subject: Subject, options: Options, contenders: list[Contender]) -> Bench:
    bench = Bench(
        subject.model, subject.tokens, options.context, contenders, patience=options.patience
    )
    with bar(f"prefill ({bench.dtype})", options.context, "tokens") as progress:
        bench.prefill(progress)
    return bench


def _facts(options: Options, subject: Subject) -> dict[str, Any]:
    config = subject.model.config.get_text_config()
    heads = config.num_attention_heads
    return {
        "model": subject.name,
        "layers": config.num_hidden_layers,
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "text": subject.text_name,
        "context": options.context,
        "tokens": options.tokens,
        "method": options.method,
        "samples": options.samples,
        "bernoulli": None if options.bernoulli is None else asdict(options.bernoulli),
        "sketch_bits": options.sketch_bits,
        "seed": options.seed,
        "dtype": options.dtype,
        "device": str(subject.tokens.device),
        "processor": _processor(subject.tokens.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {torch.ops.santa.cpu_level()} kernels"
