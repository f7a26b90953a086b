"""One decoding step of a Hugging Face model, and how to take it back."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from functools import cache as cached
from typing import Any

import torch

from santa_torch import hf
from santa_torch.config import SantaConfig

#: Tokens of the prompt per forward while a cache is filled.
CHUNK = 512


@torch.no_grad()
def forward(model: Any, run: Any, token: torch.Tensor, position: int, cache: Any) -> torch.Tensor:
    """Logits ``[1, vocabulary]`` after one more token.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Tells the names of arguments.
    run : callable
        The model, or a compiled form of it.
    token : Tensor
        int64 ``[1, 1]``.
    position : int
        Where the token stands.
    cache : transformers.Cache
        Grows by a row.
    """
    where = torch.tensor([position])
    arguments = {**cache_argument(model, cache), "position_ids": where[None]}
    if "cache_position" in _parameters(type(model).forward):
        arguments["cache_position"] = where
    logits: torch.Tensor = run(token, **arguments).logits
    return logits[:, -1]


@torch.no_grad()
def prefill(model: Any, tokens: torch.Tensor, cache: Any, progress: Any) -> None:
    """Read tokens ``[1, n]`` into a cache with the model's own attention."""
    done = 0
    for part in tokens.split(CHUNK, dim=1):
        model.model(part, **cache_argument(model, cache))
        done += part.shape[1]
        progress(done)


def cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    """The keyword argument for a cache; transformers 5 renamed it."""
    new = "cache" in _parameters(type(model).forward)
    return {"cache" if new else "past_key_values": cache, "use_cache": True}


@cached
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Names of a function's arguments; looked up once, since steps are timed."""
    return frozenset(inspect.signature(function).parameters)


def undo(cache: Any, steps: int = 1) -> None:
    """Take the last rows back. StaticCache of transformers 4 goes by the position given."""
    if all(hasattr(layer, "crop") for layer in cache.layers):
        cache.crop(-steps)


@contextlib.contextmanager
def attention(model: Any, how: str | SantaConfig | None) -> Iterator[None]:
    """The model with sampled attention, or with another one of transformers; None leaves it."""
    if how is None:
        yield
    elif isinstance(how, SantaConfig):
        with hf.use(model, how):
            yield
    else:
        before = model.config._attn_implementation
        model.set_attn_implementation(how)
        try:
            yield
        finally:
            model.set_attn_implementation(before)
