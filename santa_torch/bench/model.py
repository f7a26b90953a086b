"""Whole steps of a model: what sampled attention brings where everything else is paid for too.

Contenders take turns step by step. Each has a cache of its own that holds the context; after a turn
its steps are taken back, outside of the timed part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import DynamicCache

from santa_torch import hf
from santa_torch.bench import machine, steps
from santa_torch.bench.inputs import size
from santa_torch.bench.options import BenchError, Options
from santa_torch.bench.results import ModelResult
from santa_torch.bench.timing import Interrupted, Schedule, Variant, measure
from santa_torch.config import SantaConfig
from santa_torch.demo import options as demo_options
from santa_torch.demo import subject
from santa_torch.demo.run import cast
from santa_torch.progress import bar, status

#: Tokens in the cache of the contenders that have hardly anything to attend to.
SHORT = 64

#: Contexts by model: usual, and with ``--quick``.
CONTEXTS = {"smollm2": (7168, 1024), "llama-layers": (32768, 4096)}

#: Largest deviation of exact contenders' logits, of the largest logit: 16 bits through all layers.
_LOGITS = 0.05

#: Shape of Llama-3.1-8B's layers; the vocabulary is small, so that attention weighs what it weighs
#: among 32 layers rather than beside one output projection.
_LLAMA: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 1024,
    "rope_theta": 500000.0,
    "attn_implementation": "sdpa",
    "dtype": torch.bfloat16,
}

Fill = Callable[[Any, int], None]


@dataclass(frozen=True)
class Contender:
    """One way to run a step.

    Parameters
    ----------
    key, label : str
        In the file, and in the table.
    attention : str or SantaConfig
        Of transformers, or ours.
    cache : callable
        Makes an empty cache for a number of rows.
    context : int
        Rows in it.
    """

    key: str
    label: str
    attention: str | SantaConfig
    cache: Callable[[int], Any]
    context: int


@dataclass(frozen=True)
class Loaded:
    """A model and how its caches are filled.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        In bfloat16.
    name : str
        What to call it.
    fill : callable
        Fills a cache with a number of rows.
    notes : tuple of str
        What a reader should know.
    judged : bool
        Whether the targets are about it.
    """

    model: Any
    name: str
    fill: Fill
    notes: tuple[str, ...]
    judged: bool


def run_model(result: ModelResult, options: Options, watch: machine.Watch) -> None:
    """Check and time the steps; ``result`` holds what was measured, whatever stops this.

    Raises
    ------
    BenchError
        There is no such model or not enough memory, or an exact contender's logits are off.
    """
    torch.set_num_threads(options.threads[0])
    usual, quick = CONTEXTS[str(options.model)]
    context = options.context or (quick if options.suite == "quick" else usual)
    with status(f"loading {options.model}"):
        loaded = _LOADERS[str(options.model)](context, options)
    _describe(result, loaded, context, options)
    contenders = list(_contenders(loaded.model, context, options.samples))
    result.labels = {contender.key: contender.label for contender in contenders}
    bench = _Bench(loaded, contenders)
    bench.check()
    schedule = Schedule(options.rounds, options.calls, 1, options.seed)
    with watch.over(options.wait) as result.disturbance:
        try:
            with bar("timing steps", options.rounds, "rounds") as progress:
                result.times = measure(bench.variants(), schedule, progress)
        except Interrupted as stop:
            result.times = stop.results
            raise


def _describe(result: ModelResult, loaded: Loaded, context: int, options: Options) -> None:
    threads = options.threads[0]
    result.name = (
        f"{loaded.name}, bfloat16, {context} rows, S = {options.samples}, "
        f"{threads} {'thread' if threads == 1 else 'threads'}"
    )
    result.notes = [*loaded.notes, f"transformers {transformers.__version__}"]
    result.judged = loaded.judged and context == CONTEXTS["smollm2"][0]
    result.context = context


def _contenders(model: Any, context: int, samples: int) -> Iterator[Contender]:
    def dynamic(rows: int) -> Any:
        return DynamicCache(config=model.config)

    def own(rows: int) -> Any:
        return hf.SantaCache(model.config, reserve=rows + 64)

    sampled = SantaConfig("shared", samples=samples)
    name = f"santa shared S={samples}"
    yield Contender("santa", f"{name}, SantaCache", sampled, own, context)
    yield Contender("dense", "santa dense, SantaCache", SantaConfig("dense"), own, context)
    yield Contender("sdpa", "HF SDPA, DynamicCache", "sdpa", dynamic, context)
    yield Contender("eager", "HF eager, DynamicCache", "eager", dynamic, context)
    yield Contender("short-santa", f"{name}, {SHORT} tokens", sampled, own, SHORT)
    yield Contender("short-sdpa", f"HF SDPA, {SHORT} tokens", "sdpa", dynamic, SHORT)


class _Bench:
    """The contenders with filled caches."""

    def __init__(self, loaded: Loaded, contenders: list[Contender]) -> None:
        self.model, self.contenders = loaded.model, contenders
        self._token = torch.tensor([[17]])
        self._caches, self._steps = {}, dict.fromkeys((c.key for c in contenders), 0)
        filled: dict[int, Any] = {}
        for contender in contenders:
            first = filled.get(contender.context)
            cache = contender.cache(contender.context)
            if first is None:
                loaded.fill(cache, contender.context)
                filled[contender.context] = cache
            else:
                for index, layer in enumerate(first.layers):
                    cache.update(layer.keys, layer.values, index)
            self._caches[contender.key] = cache

    def check(self) -> None:
        """Exact contenders of one context agree, and sampled ones give numbers."""
        exact: dict[int, torch.Tensor] = {}
        for contender in self.contenders:
            with steps.attention(self.model, contender.attention):
                logits = self._step(contender).float()
            self._undo(contender)
            if not bool(torch.isfinite(logits).all()):
                raise BenchError(f"wrong result: {contender.label}: logits are not finite")
            config = contender.attention
            if isinstance(config, SantaConfig) and config.method != "dense":
                continue
            other = exact.setdefault(contender.context, logits)
            error = float((logits - other).abs().max() / other.abs().max())
            if error > _LOGITS:
                raise BenchError(
                    f"wrong result: {contender.label}: logits are off by {error:.3g} of the "
                    f"largest, at most {_LOGITS}"
                )

    def variants(self) -> list[Variant]:
        """What to time."""
        return [self._variant(contender) for contender in self.contenders]

    def _variant(self, contender: Contender) -> Variant:
        stack = ExitStack()

        def prepare() -> None:
            stack.enter_context(steps.attention(self.model, contender.attention))

        def rest() -> None:
            stack.close()
            self._undo(contender)

        return Variant(contender.key, "model", lambda _: self._step(contender), prepare, rest)

    def _step(self, contender: Contender) -> torch.Tensor:
        position = contender.context + self._steps[contender.key]
        self._steps[contender.key] += 1
        cache = self._caches[contender.key]
        return steps.forward(self.model, self.model, self._token, position, cache)

    def _undo(self, contender: Contender) -> None:
        if self._steps[contender.key]:
            steps.undo(self._caches[contender.key], self._steps[contender.key])
            self._steps[contender.key] = 0


def _smollm2(context: int, options: Options) -> Loaded:
    """The packaged model; its caches hold a real text."""
    given = ["--context", str(context), "--tokens", "2"]
    try:
        loaded = subject.load(demo_options.parse(given))
    except demo_options.DemoError as error:
        prefix = "" if str(error).startswith("argument") else "argument --model: "
        raise BenchError(f"{prefix}{error}") from None
    cast(loaded.model, torch.bfloat16)

    def fill(cache: Any, rows: int) -> None:
        with bar("prefill", rows, "tokens") as progress:
            steps.prefill(loaded.model, loaded.tokens[:, :rows], cache, progress)

    note = f"context: {loaded.text_name}, prefilled with transformers' SDPA"
    return Loaded(loaded.model, loaded.name, fill, (note,), True)


def _llama_layers(context: int, options: Options, layers: int = 2) -> Loaded:
    """Two random layers of Llama-3.1-8B's shape; the caches hold random rows."""
    config = transformers.LlamaConfig(
        **_LLAMA, num_hidden_layers=layers, max_position_embeddings=2 * max(context, SHORT)
    )
    row = 2 * 8 * 128 * 2 * layers
    weights = 2 * layers * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    # Four caches, and what HF eager holds while it repeats keys and values for every query head.
    needed = 2 * weights + context * row * 4 + 2 * 4 * context * row // layers
    available = options.memory or machine.available_memory()
    if needed > available:
        raise BenchError(
            f"argument --context: {context} rows need about {size(needed)} of memory, and "
            f"{size(available)} may be used"
        )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()

    def fill(cache: Any, rows: int) -> None:
        for index in range(layers):
            shape = (1, 8, rows, 128)
            k, v = (torch.randn(shape).to(torch.bfloat16) for _ in range(2))
            cache.update(k, v, index)

    notes = (
        f"{layers} of Llama-3.1-8B's layers with random weights; a vocabulary of 1,024",
        "context: random keys and values, no prefill; attention is flat, so many rows are drawn",
    )
    return Loaded(model, "Llama-3.1-8B layers", fill, notes, False)


_LOADERS = {"smollm2": _smollm2, "llama-layers": _llama_layers}
