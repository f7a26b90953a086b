"""The transformers model inside of PEFT models, compiled modules and the like."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel


def inner_model(model: torch.nn.Module) -> PreTrainedModel:
    """``model`` itself, or the one transformers model that it wraps.

    Parameters
    ----------
    model : torch.nn.Module
        A transformers model, or a module around one: of PEFT, ``torch.compile``,
        ``DistributedDataParallel`` or the caller's own.

    Returns
    -------
    transformers.PreTrainedModel
        The outermost one. Models inside of that one are its parts.

    Raises
    ------
    ValueError
        There is none, or there are several next to each other.
    """
    found: dict[int, tuple[str, PreTrainedModel]] = {}
    if isinstance(model, torch.nn.Module):
        for name, inner in _outermost(model, ""):
            found.setdefault(id(inner), (name, inner))
    if not found:
        raise ValueError(
            "model must be a transformers PreTrainedModel or a module around one, got "
            f"{type(model).__name__}"
        )
    if len(found) > 1:
        listed = ", ".join(f"{name} ({type(inner).__name__})" for name, inner in found.values())
        raise ValueError(f"model: {type(model).__name__} holds several models, pass one: {listed}")
    return next(iter(found.values()))[1]


def _outermost(module: torch.nn.Module, name: str) -> Iterator[tuple[str, PreTrainedModel]]:
    if isinstance(module, PreTrainedModel):
        yield name, module
        return
    for key, child in module.named_children():
        yield from _outermost(child, f"{name}.{key}" if name else key)
