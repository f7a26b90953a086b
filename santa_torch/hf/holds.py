"""Who switched a configuration object, and what it said before.

Two models may share one configuration object, whose attention implementation is then switched for
both. The first model to switch it notes the implementation; the last one to leave puts it back, in
whatever order they leave. A sharing model that was never enabled meets the name ``"santa"`` too,
and keeps exact attention.

Configurations are not hashable and everything in them is saved with the model, so the notes are
kept here, by identity, and vanish with the configuration. No decoding step reads them.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class _Hold:
    implementation: str | None  # before the first model switched it
    forget: weakref.finalize[..., Any]  # drops these notes with the configuration
    owners: weakref.WeakSet[torch.nn.Module] = field(default_factory=weakref.WeakSet)


_HOLDS: dict[int, _Hold] = {}


def set_implementation(config: Any, implementation: str | None) -> None:
    """Set the attention implementation of ``config`` alone, not of its sub-configurations."""
    config._attn_implementation = {"": implementation}


def acquire(config: Any, owner: torch.nn.Module) -> str | None:
    """Note that ``owner`` is about to switch ``config``; returns what to go back to."""
    hold = _HOLDS.get(id(config))
    if hold is None:
        forget = weakref.finalize(config, _HOLDS.pop, id(config), None)
        hold = _HOLDS[id(config)] = _Hold(config._attn_implementation, forget)
    hold.owners.add(owner)
    return hold.implementation


def release(config: Any, owner: torch.nn.Module, implementation: str | None) -> None:
    """Put ``config`` back once its last owner leaves.

    ``implementation`` is what ``acquire`` returned; it counts where the notes do not know
    ``config``, which is a copy of a switched one (``copy.deepcopy`` of an enabled model).
    """
    hold = _HOLDS.get(id(config))
    if hold is None:
        set_implementation(config, implementation)
        return
    hold.owners.discard(owner)
    if not hold.owners:
        set_implementation(config, hold.implementation)
        hold.forget.detach()
        del _HOLDS[id(config)]


def is_held(config: Any) -> bool:
    """Whether ``config`` is switched by some model."""
    return id(config) in _HOLDS
