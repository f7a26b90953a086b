"""Sampled attention and its cache are for inference: a backward pass must fail, not lie.

Called outside ``torch.no_grad()``, a model's activations require gradients. Returning a detached
result would drop the gradient of the queries, keys and values in silence, and refusing the forward
would refuse people who merely forgot ``no_grad``. So the forward works and the backward raises.
"""

from __future__ import annotations

from typing import Any

import torch


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> None:
        raise RuntimeError(
            "santa_torch: sampled attention and SantaCache are for inference and have no backward "
            "pass; train with the model disabled (santa_torch.hf.disable) and a DynamicCache"
        )


def gradients_asked(*sources: torch.Tensor | None) -> bool:
    """Whether autograd would follow what is computed from ``sources``."""
    if torch.is_grad_enabled():
        for source in sources:  # any() over a generator takes twice as long
            if source is not None and source.requires_grad:
                return True
    return False


def inference_only(result: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
    """Tie ``result`` to ``sources`` so that a backward pass through it raises.

    Parameters
    ----------
    result : Tensor
        Computed from ``sources`` without autograd; any shape and dtype.
    *sources : Tensor
        What ``result`` depends on.

    Returns
    -------
    Tensor
        ``result`` itself where no gradient is asked for, else a view of it.
    """
    if gradients_asked(*sources):
        guarded: torch.Tensor = _NoBackward.apply(result, *sources)
        return guarded
    return result
