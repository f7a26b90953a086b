"""Rows to put into cache layers, and the caches that generation is tried with."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from tiny_models import with_cache
from transformers import DynamicCache, StaticCache

from santa_torch import hf

#: Rows that the caches of a fixed size have room for.
ROOM = 96

CACHES = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=ROOM),
    "santa": lambda model: hf.SantaCache(model.config),
    "santa static": lambda model: hf.SantaCache(model.config, max_cache_len=ROOM),
}


def rows(count: int, batch: int = 2, seed: int = 0, **options: Any) -> tuple[Any, Any]:
    """Keys ``[batch, 2, count, 16]`` and values ``[batch, 2, count, 24]``: Dv is not D."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(batch, 2, count, 16, generator=generator).to(**options)
    return keys, torch.randn(batch, 2, count, 24, generator=generator).to(**options)


def new_cache(model: Any, kind: str) -> dict[str, Any]:
    """The keyword argument for a new cache of ``CACHES``."""
    return with_cache(model, CACHES[kind](model))


def at(model: Any, position: int) -> dict[str, Any]:
    """Where one query row stands, for forwards that are compiled by hand.

    transformers 4 would read it from the cache, which splits the graph.
    """
    if "cache_position" not in inspect.signature(model.forward).parameters:
        return {}
    return {"cache_position": torch.tensor([position])}
