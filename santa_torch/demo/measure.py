"""The runs: prefill once, then decode with each contender from the same rows.

Contenders take turns step by step, so that a busy machine slows all of them alike. Each needs a
cache of its own for that, and there are no others: after a run they return to the end of the
context instead of being copied from it.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import DynamicCache

from santa_torch import hf
from santa_torch.config import SantaConfig

#: Rows of the prompt per forward: bounds the memory of prefill.
CHUNK = 512

Progress = Callable[[int], None]


@dataclass
class Contender:
    """One way to attend, and what was measured of it.

    Parameters
    ----------
    key, label : str
        Name in the JSON file and in the table.
    config : SantaConfig or None
        Settings of santa_torch; ``None`` for transformers' own attention.
    seconds : list of float
        Wall time of each decoding step.
    generated : list of int
        Tokens of the greedy continuation.
    bytes_read : float
        KV bytes read per token, all layers.
    tvd, agreement : dict
        Per dtype, for each step: total variation distance to the reference's next-token
        distribution, and whether the most likely token is the same.
    """

    key: str
    label: str
    config: SantaConfig | None
    seconds: list[float] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)
    bytes_read: float = 0.0
    tvd: dict[str, list[float]] = field(default_factory=dict)
    agreement: dict[str, list[bool]] = field(default_factory=dict)


class Bench:
    """A model and, per contender, a cache that holds the same context.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        In the dtype to measure.
    tokens : Tensor
        int64 ``[1, context + steps]``: the context, and the text that follows.
    context : int
        Number of tokens to prefill.
    contenders : list of Contender
        The first one is the reference.
    patience : float
        Seconds after which a run of decoding steps stops early.
    """

    def __init__(
        self,
        model: Any,
        tokens: torch.Tensor,
        context: int,
        contenders: list[Contender],
        patience: float = float("inf"),
    ) -> None:
        self.model, self.tokens, self.context = model, tokens, context
        self.contenders, self.patience = contenders, patience
        self.dtype = str(model.dtype).removeprefix("torch.")
        self._configs = {each.key: _in_dtype(each.config, model.dtype) for each in contenders}
        self._caches: dict[str, Any] = {}
        self._marks: dict[str, list[dict[str, Any] | None]] = {}
        parameters = inspect.signature(model.forward).parameters
        # transformers 5 renamed the argument and warns about the old name.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

    @property
    def steps(self) -> int:
        """Decoding steps per run, unless patience ends first."""
        return self.tokens.shape[1] - self.context

    @torch.inference_mode()
    def prefill(self, progress: Progress) -> None:
        """Read the context once, in chunks and with exact attention; a cache for each contender."""
        last = self.contenders[-1].key
        cache = self._new_cache(last)
        for start in range(0, self.context, CHUNK):
            end = min(start + CHUNK, self.context)
            self._first = self._forward(self.tokens[:, start:end], cache)
            progress(end)
        for contender in self.contenders[:-1]:
            own = self._new_cache(contender.key)
            _copy_rows(cache, own)
            self._caches[contender.key] = own
        self._caches[last] = cache  # not copied: it would be one too many
        self._marks = {key: _mark(own) for key, own in self._caches.items()}

    @torch.inference_mode()
    def teacher_force(self, progress: Progress) -> None:
        """Feed the text itself and compare next-token distributions; count bytes on the way."""
        traffic = {contender.key: [0, 0] for contender in self.contenders}
        for contender in self.contenders:
            contender.tvd[self.dtype], contender.agreement[self.dtype] = [], []
        done = 0
        for step in self._patiently():
            token = self.tokens[:, self.context + step : self.context + step + 1]
            reference = None
            for contender in self.contenders:
                with self._attention(contender), self._record(contender, traffic):
                    logits = self._forward(token, self._caches[contender.key])
                probabilities = logits.double().softmax(-1)
                reference = probabilities if reference is None else reference
                distance = 0.5 * (probabilities - reference).abs().sum()
                contender.tvd[self.dtype].append(float(distance))
                contender.agreement[self.dtype].append(
                    bool(probabilities.argmax() == reference.argmax())
                )
            done = step + 1
            progress(done)
        total = max(total for _, total in traffic.values())
        for contender in self.contenders:
            read = (
                traffic[contender.key][0] if contender.config else total
            )  # exact attention reads all
            contender.bytes_read = read / done
        self._rewind(done)

    @torch.inference_mode()
    def generate(self, progress: Progress) -> None:
        """Continue greedily with each contender and time the steps."""
        for contender in self.contenders:
            contender.seconds.clear()
            contender.generated[:] = [int(self._first.argmax())]
        done = 0
        for step in self._patiently():
            for contender in self.contenders:
                token = self.tokens.new_tensor([[contender.generated[-1]]])
                with self._attention(contender):
                    self._synchronise()
                    start = time.perf_counter()
                    choice = self._forward(token, self._caches[contender.key]).argmax()
                    contender.generated.append(int(choice))  # waits for the device
                    contender.seconds.append(time.perf_counter() - start)
            done = step + 1
            progress(done)
        self._rewind(done)

    def _patiently(self) -> Iterator[int]:
        """Count the steps, and stop early when patience is at an end."""
        start = time.perf_counter()
        for step in range(self.steps):
            if step and time.perf_counter() - start > self.patience:
                return
            yield step

    def _forward(self, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
        """``[1, rows]`` tokens -> logits ``[vocabulary]`` after the last one."""
        arguments = {self._cache_name: cache, "use_cache": True, **self._last_only}
        logits: torch.Tensor = self.model(input_ids=tokens, **arguments).logits
        return logits[0, -1]

    def _attention(self, contender: Contender) -> contextlib.AbstractContextManager[Any]:
        config = self._configs[contender.key]
        return contextlib.nullcontext() if config is None else hf.use(self.model, config)

    @contextlib.contextmanager
    def _record(self, contender: Contender, traffic: dict[str, list[int]]) -> Iterator[None]:
        if contender.config is None:
            yield
            return
        with hf.record(self.model) as seen:
            yield
        traffic[contender.key][0] += seen.bytes_read
        traffic[contender.key][1] += seen.bytes_total

    def _new_cache(self, key: str) -> Any:
        """An empty cache for the contender of this name."""
        config = self._configs[key]
        if config is None:
            return DynamicCache(config=self.model.config)
        return hf.SantaCache(self.model.config, config, reserve=self.tokens.shape[1])

    def _rewind(self, steps: int) -> None:
        """Return to the end of the context, ``steps`` tokens back."""
        for key, cache in self._caches.items():
            for layer, mark in zip(cache.layers, self._marks[key], strict=True):
                if mark is None:
                    layer.crop(-steps)
                else:
                    vars(layer).update(mark)

    def _synchronise(self) -> None:
        if self.tokens.device.type == "cuda":
            torch.cuda.synchronize(self.tokens.device)


def _in_dtype(config: SantaConfig | None, dtype: torch.dtype) -> SantaConfig | None:
    """``config`` with a sketch, if it has one, as wide as keys of this dtype."""
    if config is None or config.sketch_bits is None:
        return config
    return replace(config, sketch_bits=32 if dtype == torch.float32 else 16)


def _copy_rows(filled: Any, empty: Any) -> None:
    """Give one cache the rows of another, layer by layer."""
    for layer, own in zip(filled.layers, empty.layers, strict=True):
        if layer.is_sliding:  # the same class, and its rows are never written in place
            vars(own).update(vars(layer))
        else:
            own.update(layer.keys, layer.values)


def _mark(cache: Any) -> list[dict[str, Any] | None]:
    """What it takes to bring each layer back to where it is now.

    Full layers drop their last rows. Sliding ones have dropped their first rows by then, so their
    state is kept; as they replace their rows rather than write to them, that copies nothing.
    """
    return [dict(vars(layer)) if layer.is_sliding else None for layer in cache.layers]
