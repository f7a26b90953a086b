"""The demo from start to end."""

from __future__ import annotations

import platform
import time
from typing import Any

import torch
import transformers

from santa_torch.config import SantaConfig
from santa_torch.demo import report
from santa_torch.demo.measure import Bench, Contender
from santa_torch.demo.options import DemoError, Options
from santa_torch.demo.progress import bar, status
from santa_torch.demo.subject import Subject, load


def run(options: Options) -> dict[str, Any]:
    """Measure what the options ask for, print it and write the files.

    Returns
    -------
    dict
        What the JSON file holds.
    """
    started = time.perf_counter()
    _make_directory(options)
    with status(f"loading {options.model or 'SmolLM2-135M-Instruct'}"):
        subject = load(options)
    facts = _facts(options, subject)
    print(report.heading(facts), flush=True)
    contenders = _contenders(options)

    # Probabilities first, in float32: 16 bits alone move them by more than good sampling does.
    bench = _prefilled(subject, options, contenders)
    with bar("comparing probabilities (float32)", bench.steps, "tokens") as progress:
        bench.teacher_force(progress)
    if options.dtype != "float32":
        del bench  # its caches
        subject.model.to(getattr(torch, options.dtype))
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


def _make_directory(options: Options) -> None:
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(f"argument --out: {str(options.out)!r}: {error.strerror}") from None


def _contenders(options: Options) -> list[Contender]:
    contenders = [
        Contender("sdpa", "HF SDPA, DynamicCache", None),
        Contender("dense", "santa dense, SantaCache", SantaConfig("dense")),
    ]
    if options.method != "dense":
        config = SantaConfig(options.method, options.samples, seed=options.seed)
        label = f"santa {options.method} S={options.samples}, SantaCache"
        contenders.append(Contender("santa", label, config))
    return contenders


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
