"""Sampled KV-cache attention for long-context decoding.

`decode` is the operator, `SantaConfig` and `santa_torch.hf` put it into a Hugging Face model,
`reference` is the same computation in plain float64 PyTorch. Importing this package registers
``torch.ops.santa.*``; it imports no transformers and initialises no CUDA.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from santa_torch import _load, reference
from santa_torch.config import METHODS, BernoulliConfig, SantaConfig
from santa_torch.info import build_info
from santa_torch.ops import (
    DecodeOutput,
    bernoulli_query,
    decode,
    draw,
    gather,
    score,
    weigh,
)
from santa_torch.sketch import KeySketch
from santa_torch.stats import DecodeStats

if TYPE_CHECKING:
    from santa_torch import hf

__version__: str = _load.C.build_info()["version"]

__all__ = [
    "METHODS",
    "BernoulliConfig",
    "DecodeOutput",
    "DecodeStats",
    "KeySketch",
    "SantaConfig",
    "bernoulli_query",
    "build_info",
    "decode",
    "draw",
    "gather",
    "hf",
    "reference",
    "score",
    "weigh",
]


def __getattr__(name: str) -> Any:
    # hf imports transformers, which takes seconds and is optional: only on first use.
    if name == "hf":
        return import_module("santa_torch.hf")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
