"""What the support table asks of each model family: the columns of the table.

A check passes, fails with an AssertionError, or raises what the library or transformers raised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from cache_tools import CACHES, at, new_cache
from spies import Graphs, operator_calls
from tiny_models import DENSE, SAMPLED, generate, tokens
from transformers.cache_utils import StaticSlidingWindowLayer

from santa_torch import SantaConfig, hf
from santa_torch.hf.wrappers import inner_model

EVERY_ROW = SantaConfig("shared", samples=4, seed=5, query_rows="all")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 6e-2}
PROMPT, STEPS = 21, 4  # longer than the windows of ``families``


@dataclass(frozen=True)
class Mode:
    """A column of the support table.

    Attributes
    ----------
    name : str
        As the table calls it.
    run : callable
        ``run(model)`` gives a tensor; called for the model as it is, and enabled with "dense".
    check : callable, optional
        ``check(model)``, in place of comparing the two results of ``run``.
    """

    name: str
    run: Callable[[Any], torch.Tensor]
    check: Callable[[Any], None] | None = None

    def __call__(self, model: Any) -> None:
        """Check ``model``, not enabled, and leave it so."""
        if self.check is not None:
            self.check(model)
            return
        exact = self.run(model)
        with hf.use(model, DENSE), hf.record(model) as traffic:
            ours = self.run(model)
        assert traffic.calls > 0, "nothing went to the operator"
        assert_close(ours, exact)


def assert_close(ours: torch.Tensor, exact: torch.Tensor) -> None:
    """Equal tokens, or logits equal to what the dtype rounds."""
    if not exact.is_floating_point():
        assert torch.equal(ours, exact)
        return
    scale = float(exact.abs().max())
    error = float((ours.double() - exact.double()).abs().max())
    assert error <= TOLERANCE[exact.dtype] * scale, f"off by {error} of {scale}"


def steps(model: Any, kind: str, prompt: int, run: Any = None, batch: int = 2) -> torch.Tensor:
    """Logits of a prompt and of steps after it, in a cache of that kind.

    ``run`` is what answers the steps, by default the model itself.
    """
    inner = inner_model(model)
    ids, cache = tokens(batch, PROMPT + STEPS), new_cache(inner, kind)
    logits = [model(ids[:, :prompt], **cache).logits]
    for place in range(prompt, PROMPT + STEPS):
        where = at(inner, place)
        if run is not None:  # else models find it themselves
            where["position_ids"] = torch.tensor([[place]])
        answer = model if run is None else run  # no truth value: compiled modules have a length
        logits.append(answer(ids[:, place : place + 1], **cache, **where).logits)
    return torch.cat(logits, dim=1)


def prompt_and_steps(kind: str) -> Callable[[Any], torch.Tensor]:
    """``steps`` after the usual prompt."""
    return lambda model: steps(model, kind, PROMPT)


def left_padding(model: Any) -> torch.Tensor:
    """Tokens of two prompts of different length; the padding itself is nobody's business."""
    ids, mask = tokens(2, PROMPT), torch.ones(2, PROMPT, dtype=torch.int64)
    mask[1, :5] = 0
    return generate(model, ids, new=STEPS, attention_mask=mask)


def beams(model: Any) -> torch.Tensor:
    """Tokens of beam search in a ``SantaCache``."""
    cache = new_cache(inner_model(model), "santa")
    return generate(model, tokens(2, PROMPT), new=STEPS, num_beams=3, **cache)


def every_row(model: Any) -> torch.Tensor:
    """Logits of a whole text in one forward."""
    return model(tokens(2, PROMPT + STEPS), use_cache=False).logits


def token_by_token(model: Any) -> torch.Tensor:
    """Logits of the same text, all of it steps."""
    return steps(model, "dynamic", prompt=1)


def check_every_row(model: Any) -> None:
    exact = every_row(model)
    with hf.use(model, SantaConfig("dense", query_rows="all")):
        assert_close(every_row(model), exact)
    with hf.use(model, EVERY_ROW):
        together, alone = every_row(model), token_by_token(model)
    assert not torch.allclose(together, exact, atol=1e-3)
    assert_close(alone, together)


def drafts(model: Any, assisted: bool = True) -> torch.Tensor:
    """Tokens of prompt lookup: drafts from the prompt, verified several rows at a time."""
    ids = tokens(1, 8).repeat(1, 4)
    extra = {"prompt_lookup_num_tokens": 4} if assisted else {}
    return generate(model, ids, new=16, **extra)[:, :16]  # on 4.57 the last draft may go beyond


def check_drafts(model: Any) -> None:
    with hf.use(model, EVERY_ROW):
        with operator_calls() as calls:
            drafted = drafts(model)
        assert_close(drafted, drafts(model, assisted=False))
    rows = {len(call["q"]) for call in calls}  # of forwards: the prompt has 32, a step has 1
    assert rows & {2, 3, 4, 5}, f"no draft went to the operator, only {rows} rows at a time"


def compiled_steps(model: Any, graphs: Any = "aot_eager") -> torch.Tensor:
    """Logits of steps in a static ``SantaCache``, through graphs of the whole model."""
    torch._dynamo.reset()
    graph = torch.compile(model, backend=graphs, fullgraph=True)
    return steps(model, "santa static", PROMPT, graph, batch=1)


def check_compiled_steps(model: Any) -> None:
    graphs = Graphs()
    with hf.use(model, SAMPLED):
        expected = steps(model, "santa static", PROMPT, model, batch=1)
        assert_close(compiled_steps(model, graphs), expected)
    # transformers' sliding layers count rows in a Python number: the first, then any other.
    inner = inner_model(model)
    allowed = 2 if any(map(_is_sliding, CACHES["santa static"](inner).layers)) else 1
    assert graphs.frame_count == allowed, f"{graphs.frame_count} graphs, expected {allowed}"


def _is_sliding(layer: Any) -> bool:
    return isinstance(layer, StaticSlidingWindowLayer)


MODES = [
    Mode("DynamicCache", prompt_and_steps("dynamic")),
    Mode("SantaCache", prompt_and_steps("santa")),
    Mode("StaticCache", prompt_and_steps("static")),
    Mode("static SantaCache", prompt_and_steps("santa static")),
    Mode("left padding", left_padding),
    Mode("beams", beams),
    Mode("drafts", drafts, check_drafts),
    Mode("every row", token_by_token, check_every_row),
    Mode("compiled step", compiled_steps, check_compiled_steps),
]
