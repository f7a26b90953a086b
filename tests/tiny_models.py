"""Tiny random models of real architectures, and a rival that attends exactly."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from santa_torch import SantaConfig

VOCABULARY = 97

# Exact attention through the operator, and so few samples that their noise shows.
DENSE = SantaConfig("dense")
SAMPLED = SantaConfig("shared", samples=4, seed=5)

TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "attn_implementation": "sdpa",
}


def tiny_llama(**overrides: Any) -> LlamaForCausalLM:
    """Three layers, 6/2 heads, D 16; the same weights for the same settings."""
    return build(LlamaForCausalLM, LlamaConfig(**{**TINY, **overrides}))


def build(model_class: Any, config: Any) -> Any:
    """A model with weights that make its attention peaked, so that sampling noise shows."""
    torch.manual_seed(20)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight", "qkv_proj.weight")):
                weight.mul_(8.0)
    return model


def with_cache(model: Any, cache: Any) -> dict[str, Any]:
    """The keyword argument for ``cache``; transformers 5 renamed it."""
    new = "cache" in inspect.signature(model.forward).parameters
    return {"cache" if new else "past_key_values": cache, "use_cache": True}


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random token numbers, int64, none of them special."""
    return torch.randint(5, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def prompt_and_cache(model: Any, rows: int, batch: int = 1, cache: Any = None) -> tuple[Any, Any]:
    """A cache holding ``rows`` random tokens, and the next token ``[batch, 1]``."""
    ids = tokens(batch, rows + 1)
    cache = transformers.DynamicCache(config=model.config) if cache is None else cache
    with torch.no_grad():
        model(ids[:, :-1], **with_cache(model, cache))
    return ids[:, -1:], cache


@torch.no_grad()
def last_logits(model: Any, rows: int = 40, batch: int = 1, **arguments: Any) -> torch.Tensor:
    """Logits ``[batch, vocabulary]`` of one decoding step after ``rows`` tokens."""
    token, cache = prompt_and_cache(model, rows, batch)
    return model(token, **with_cache(model, cache), **arguments).logits[:, -1]


def generate(model: Any, ids: torch.Tensor, new: int = 12, **arguments: Any) -> torch.Tensor:
    """Exactly ``new`` tokens ``[batch, new]``; greedy unless told otherwise."""
    settings = {"do_sample": False, "pad_token_id": 0, "min_new_tokens": new} | arguments
    out = model.generate(ids, max_new_tokens=new, **settings)
    return out[:, ids.shape[1] :]
