"""Compiled decoding steps of whole models: rules 27, 33 and 34 of the known faults."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from cache_tools import at
from tiny_models import SAMPLED, tiny_llama, tokens, with_cache
from transformers import LlamaForCausalLM

from santa_torch import SantaConfig, hf


def test_compiled_steps_equal_eager_and_a_new_seed_is_no_new_graph() -> None:
    from torch._dynamo.testing import CompileCounter

    model = tiny_llama()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)

    @torch.no_grad()
    def steps(run: Any) -> torch.Tensor:
        cache = transformers.StaticCache(config=model.config, max_cache_len=64)
        model(tokens(1, 20), **with_cache(model, cache))
        logits = []
        for step in range(4):
            where = at(model, 20 + step) | {"position_ids": torch.tensor([[20 + step]])}
            token = tokens(1, 1, seed=step)
            logits.append(run(token, **with_cache(model, cache), **where).logits)
        return torch.stack(logits)

    drawn = []
    with hf.use(model, SAMPLED):
        for seed in (1, 2):
            hf.enable(model, SantaConfig("shared", samples=4, seed=seed))
            drawn.append(steps(model))
            assert torch.equal(steps(compiled), drawn[-1])
    assert counter.frame_count == 1
    assert not torch.equal(*drawn)


def test_compiled_steps_in_a_growing_cache_equal_eager(model: LlamaForCausalLM) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    @torch.no_grad()
    def steps(run: Any, start: int, count: int = 5, reserve: int = 300) -> torch.Tensor:
        cache = hf.SantaCache(model.config, reserve=reserve)
        model(tokens(1, start), **with_cache(model, cache))
        inputs = [tokens(1, 1, seed=step) for step in range(count)]
        return torch.stack([run(ids, **with_cache(model, cache)).logits for ids in inputs])

    torch._dynamo.reset()
    torch.set_num_threads(1)  # the same order of sums
    counter = CompileCounterWithBackend("aot_eager")
    whole = torch.compile(model, backend=counter, fullgraph=True)
    with hf.use(model, SAMPLED):
        for start in (20, 254, 41):
            assert torch.equal(steps(whole, start), steps(model, start))
        assert counter.frame_count == 2  # one length, then any length
        with pytest.raises(torch._dynamo.exc.Unsupported, match="give it reserve="):
            steps(whole, 254, reserve=0)
        torch._dynamo.reset()
        pieces = torch.compile(model, backend="eager")
        assert torch.equal(steps(pieces, 254, reserve=0), steps(model, 254, reserve=0))
    torch._dynamo.reset()
