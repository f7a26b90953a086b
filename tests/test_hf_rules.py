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

from santa_torch import SantaConfig, hf, ops

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


def test_rule41_left_padded_rows_draw_what_they_draw_alone(model: LlamaForCausalLM) -> None:
    # Counters hold the position in the sequence, not in the padded batch.
    prompt, other = tokens(1, 19, seed=3), tokens(1, 30, seed=4)
    ids = torch.cat([torch.nn.functional.pad(prompt, (11, 0)), other])
    mask = torch.ones_like(ids)
    mask[0, :11] = 0
    with hf.use(model, SantaConfig("multinomial", samples=3)):
        positions = []
        original = ops.decode
        try:
            ops.decode = lambda *a, **k: positions.append(k["position"]) or original(*a, **k)
            generate(model, prompt, new=3)
            generate(model, ids, new=3, attention_mask=mask)
        finally:
            ops.decode = original
    assert [int(p[0]) for p in positions[:6]] == [int(p[0]) for p in positions[6:]]


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
    assert max(call["shapes"][1][2] for call in calls) == 8
    # The number of attended rows stands still; the position must not.
    assert len({int(call["position"][0]) for call in calls}) == 15


# --- rules 44 and 45 -----------------------------------------------------------------------------


def test_rule44_two_caches_interleaved(model: LlamaForCausalLM) -> None:
    def run(token: torch.Tensor, cache: Any, out: list[torch.Tensor]) -> None:
        out.append(model(token, **with_cache(model, cache)).logits)

    def start(seed: int) -> tuple[torch.Tensor, Any]:
        cache = hf.SantaCache(model.config)
        model(tokens(1, 20 + seed, seed=seed), **with_cache(model, cache))
        return tokens(1, 6, seed=seed + 10), cache

    with torch.no_grad(), hf.use(model, SAMPLED):
        apart: dict[int, list[torch.Tensor]] = {1: [], 2: []}
        together: dict[int, list[torch.Tensor]] = {1: [], 2: []}
        for seed, out in apart.items():
            ids, cache = start(seed)
            for step in range(6):
                run(ids[:, step : step + 1], cache, out)
        states = {seed: start(seed) for seed in together}
        for step in range(6):
            for seed, (ids, cache) in states.items():
                run(ids[:, step : step + 1], cache, together[seed])
    for seed, logits in apart.items():
        assert all(map(torch.equal, logits, together[seed]))


def test_rule44_beam_search_equals_sdpa(model: LlamaForCausalLM) -> None:
    ids = tokens(2, 15)
    exact = generate(model, ids, num_beams=3)
    with hf.use(model, DENSE):
        assert torch.equal(generate(model, ids, num_beams=3), exact)
        cache = with_cache(model, hf.SantaCache(model.config))
        assert torch.equal(generate(model, ids, num_beams=3, **cache), exact)


def test_rule44_prompt_lookup_equals_sdpa(model: LlamaForCausalLM) -> None:
    # Verification rows are several per forward, and rejected ones are cropped.
    ids = tokens(1, 8).repeat(1, 4)
    exact = generate(model, ids, new=16)
    with hf.use(model, DENSE):
        cache = with_cache(model, hf.SantaCache(model.config))
        assert torch.equal(generate(model, ids, new=16, prompt_lookup_num_tokens=4, **cache), exact)


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
