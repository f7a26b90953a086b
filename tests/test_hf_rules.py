"""Masks, caches and ranks in Hugging Face models: rules 40, 41, 44, 45 of the known faults."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tiny_models import (
    DENSE,
    SAMPLED,
    TINY,
    build,
    generate,
    last_logits,
    tiny_llama,
    tokens,
    with_cache,
)
from transformers import AttentionInterface, LlamaForCausalLM
from transformers.masking_utils import AttentionMaskInterface

from santa_torch import SantaConfig, hf

# --- rule 40: the mask function ----------------------------------------------------------------


def test_rule40_mask_function_is_registered_under_the_same_name() -> None:
    hf.register()
    hf.register()
    assert AttentionMaskInterface()["santa"] is AttentionMaskInterface()["sdpa"]
    assert AttentionInterface()["santa"] is hf.attention.attention_forward


def test_rule40_static_cache_is_not_attended_whole(model: LlamaForCausalLM) -> None:
    ids = tokens(2, 21)
    exact = generate(model, ids)
    with hf.use(model, DENSE):
        assert torch.equal(generate(model, ids, cache_implementation="static"), exact)


# --- rule 41: masks ----------------------------------------------------------------------------


def test_rule41_left_padding_equals_unbatched(model: LlamaForCausalLM) -> None:
    prompts = [tokens(1, length, seed=length) for length in (30, 7, 19)]
    width = 30
    ids = torch.cat([torch.nn.functional.pad(p, (width - p.shape[1], 0)) for p in prompts])
    mask = torch.stack([(torch.arange(width) >= width - p.shape[1]).long() for p in prompts])
    with hf.use(model, DENSE):
        alone = torch.cat([generate(model, prompt) for prompt in prompts])
        for cache in (None, hf.SantaCache(model.config)):
            extra = {} if cache is None else with_cache(model, cache)
            assert torch.equal(generate(model, ids, attention_mask=mask, **extra), alone)


@pytest.mark.parametrize("method", ["multinomial", "systematic"])
def test_rule41_left_padded_rows_draw_what_they_draw_alone(
    model: LlamaForCausalLM, calls: list[dict[str, Any]], method: str
) -> None:
    # Counters hold the position in the sequence, not in the padded batch.
    prompt, other = tokens(1, 19, seed=3), tokens(1, 30, seed=4)
    ids = torch.cat([torch.nn.functional.pad(prompt, (11, 0)), other])
    mask = torch.ones_like(ids)
    mask[0, :11] = 0

    def drawn(seed: int, ids: torch.Tensor, **extra: Any) -> torch.Tensor:
        """What the operator gave for the first row: [steps * layers, Hq, Dv]."""
        del calls[:]
        with hf.use(model, SantaConfig(method, samples=3, seed=seed)):
            generate(model, ids, new=4, **extra)
        return torch.stack([call["out"][0] for call in calls])

    alone = drawn(7, prompt)
    assert len(alone) == 3 * 3
    torch.testing.assert_close(drawn(7, ids, attention_mask=mask), alone, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(drawn(8, prompt)[0], alone[0], atol=1e-2)


@pytest.mark.parametrize("heads", [1, 6])
@pytest.mark.parametrize("additive", [False, True])
def test_rule41_user_masks_of_four_dimensions(
    model: LlamaForCausalLM, additive: bool, heads: int
) -> None:
    mask = torch.rand(1, heads, 1, 41) < 0.6
    mask[..., -1] = True
    if additive:
        mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    exact = last_logits(model, attention_mask=mask)
    assert not torch.allclose(exact, last_logits(model), atol=1e-3)
    with hf.use(model, DENSE):
        torch.testing.assert_close(last_logits(model, attention_mask=mask), exact)


def test_rule41_sliding_layers(calls: list[dict[str, Any]]) -> None:
    config = transformers.MistralConfig(**TINY, sliding_window=8)
    model = build(transformers.MistralForCausalLM, config)
    ids = tokens(2, 21)
    exact = generate(model, ids, new=16)
    with hf.use(model, DENSE):
        assert torch.equal(generate(model, ids, new=16), exact)
        del calls[:]
        cache = with_cache(model, hf.SantaCache(model.config))
        assert torch.equal(generate(model, ids, new=16, **cache), exact)
    assert max(call["k"].shape[2] for call in calls) == 8
    # The number of attended rows stands still; the position must not.
    assert len({int(call["position"][0]) for call in calls}) == 15


# --- rules 44 (more of it in test_hf_generate.py) and 45 -----------------------------------------


def test_rule44_sampling_is_reproducible(model: LlamaForCausalLM) -> None:
    def sample() -> torch.Tensor:
        torch.manual_seed(3)
        cache = with_cache(model, hf.SantaCache(model.config))
        ids = tokens(2, 15)
        return generate(model, ids, do_sample=True, num_return_sequences=2, **cache)

    with hf.use(model, SAMPLED):
        first = sample()
        assert first.shape == (4, 12)
        assert torch.equal(first, sample())


@pytest.mark.parametrize("names", [None, ("dp", "tp")])
def test_rule45_tensor_parallel_heads_are_counted_globally(
    model: LlamaForCausalLM, calls: list[dict[str, Any]], names: tuple[str, ...] | None
) -> None:
    class Mesh(SimpleNamespace):
        mesh_dim_names = names

        def __getitem__(self, name: str) -> Mesh:
            return Mesh(rank={"dp": 0, "tp": 2}[name])

        def get_local_rank(self) -> int:
            return self.rank

    before = getattr(model, "_device_mesh", None)
    model._device_mesh = Mesh(rank=2 if names is None else 9)
    try:
        with hf.use(model, SAMPLED):
            last_logits(model)
    finally:
        model._device_mesh = before
    # Each rank sees its own heads only, six of them here.
    assert {call["head_offset"] for call in calls} == {2 * 6}


def test_threads_do_not_mix_models() -> None:
    from concurrent.futures import ThreadPoolExecutor

    one, two = tiny_llama(), tiny_llama()
    torch.set_num_threads(1)
    with hf.use(one, SAMPLED), hf.use(two, SantaConfig("systematic", samples=3, seed=9)):
        expected = [last_logits(one), last_logits(two)]
        assert not torch.equal(*expected)
        with ThreadPoolExecutor(2) as pool:
            for _ in range(5):
                assert all(map(torch.equal, pool.map(last_logits, (one, two)), expected))
