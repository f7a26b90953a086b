"""Sampled attention in Hugging Face models: rules 40, 41, 44, 45 of the known faults."""

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
    prompt_and_cache,
    tiny_llama,
    tokens,
    with_cache,
)
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import AttentionMaskInterface

from santa_torch import SantaConfig, hf, ops


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Keyword arguments, and shapes under "shapes", of every call of the operator."""
    seen: list[dict[str, Any]] = []
    original = ops.decode

    def spy(q: Any, k: Any, v: Any, **arguments: Any) -> Any:
        seen.append({**arguments, "shapes": (q.shape, k.shape, v.shape)})
        return original(q, k, v, **arguments)

    monkeypatch.setattr(ops, "decode", spy)
    return seen


# --- exactness -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_logits_equal_sdpa(dtype: torch.dtype) -> None:
    model = tiny_llama().to(dtype)
    exact = last_logits(model, batch=2)
    with hf.use(model, DENSE):
        ours = last_logits(model, batch=2)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(ours, exact, rtol=tolerance, atol=tolerance)


def test_autocast(calls: list[dict[str, Any]]) -> None:
    """Under autocast, rotated queries and keys are float32 and values bfloat16."""
    model = tiny_llama()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        exact = last_logits(model, batch=2)
        with hf.use(model, DENSE):
            ours = last_logits(model, batch=2)
    assert calls
    torch.testing.assert_close(ours, exact, rtol=3e-2, atol=3e-2)


def test_missing_positions_are_told_before_a_long_prefill() -> None:
    model = tiny_llama()
    attention = model.model.layers[0].self_attn
    q, kv = torch.randn(1, 4, 9, 16), torch.randn(1, 2, 9, 16)
    with hf.use(model, SAMPLED), pytest.raises(ValueError, match="position_ids=None"):
        hf.attention.attention_forward(attention, q, kv, kv, None, scaling=0.25)


def test_greedy_generation_equals_sdpa(model: LlamaForCausalLM) -> None:
    ids = tokens(2, 33)
    exact = generate(model, ids)
    with hf.use(model, DENSE):
        assert torch.equal(generate(model, ids), exact)
        cache = hf.SantaCache(model.config)
        assert torch.equal(generate(model, ids, **with_cache(model, cache)), exact)


def test_one_row_goes_to_the_operator_and_the_rest_to_sdpa(
    model: LlamaForCausalLM, calls: list[dict[str, Any]]
) -> None:
    ids = tokens(2, 20)
    exact = model(ids).logits
    with hf.use(model, SAMPLED):
        assert torch.equal(model(ids).logits, exact)
        assert not calls
        generate(model, ids, new=4)
    assert len(calls) == 3 * TINY["num_hidden_layers"]  # the first token comes from prefill
    assert {call["layer"] for call in calls} == {0, 1, 2}
    assert {call["method"] for call in calls} == {"shared"}
    assert all(call["scale"] == pytest.approx(16**-0.5) for call in calls)
    positions = [call["position"].tolist() for call in calls[::3]]
    assert positions == [[21, 21], [22, 22], [23, 23]] or positions == [[21], [22], [23]]


def test_llama_3_1_configuration() -> None:
    # Llama-3.1-8B-Instruct as published, but for two of its 32 layers and a vocabulary of 1,024
    # instead of 128,256 tokens: neither changes what attention sees.
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling={
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        attn_implementation="sdpa",
        tie_word_embeddings=False,
    )
    model = build(LlamaForCausalLM, config)  # 1.8 GB in float32
    exact = last_logits(model, rows=300)
    with hf.use(model, DENSE):
        dense = last_logits(model, rows=300)
    torch.testing.assert_close(dense, exact, rtol=1e-4, atol=1e-4)
    for method in ("systematic", "shared"):
        with hf.use(model, SantaConfig(method, samples=64)), hf.record(model) as traffic:
            sampled = last_logits(model, rows=300)
        assert torch.isfinite(sampled).all()
        assert not torch.equal(sampled, dense)
        assert traffic.bytes_read < traffic.bytes_total == 2 * 301 * 8 * 2 * 128 * 4


# --- draws -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["multinomial", "stratified", "systematic", "shared"])
def test_seed_reproduces_and_distinguishes(model: LlamaForCausalLM, method: str) -> None:
    def logits(seed: int) -> torch.Tensor:
        with hf.use(model, SantaConfig(method, samples=2, seed=seed)):
            return last_logits(model)

    assert torch.equal(logits(1), logits(1))
    assert not torch.equal(logits(1), logits(2))


def test_sampled_logits_are_unbiased_in_the_last_layer() -> None:
    # With one layer the logits are not linear in the attention output, its residual stream is:
    # read the attention module itself.
    model = tiny_llama(num_hidden_layers=1)
    outputs: list[torch.Tensor] = []
    hook = model.model.layers[0].self_attn.register_forward_hook(
        lambda module, inputs, output: outputs.append(output[0].double())
    )
    token, cache = prompt_and_cache(model, 30, cache=hf.SantaCache(model.config))
    outputs.clear()
    with torch.no_grad():
        model(token, **with_cache(model, cache))
        exact = outputs.pop()
        for seed in range(400):
            cache.crop(-1)
            with hf.use(model, SantaConfig("shared", samples=2, seed=seed)):
                model(token, **with_cache(model, cache))
    hook.remove()
    drawn = torch.stack(outputs)
    z = (drawn.mean(0) - exact) / (drawn.std(0) / len(drawn) ** 0.5)
    assert z.abs().max() < 5
    assert drawn.std(0).max() > 1e-4


def test_draws_differ_between_layers_and_steps(
    model: LlamaForCausalLM, calls: list[dict[str, Any]]
) -> None:
    with hf.use(model, SAMPLED):
        generate(model, tokens(1, 20), new=5)
    counters = {(int(call["position"]), call["layer"], int(call["seed"])) for call in calls}
    assert len(counters) == len(calls) == 4 * 3


def test_rows_of_num_return_sequences_have_their_own_seeds(model: LlamaForCausalLM) -> None:
    token, cache = prompt_and_cache(model, 40)
    cache.batch_repeat_interleave(3)
    with torch.no_grad(), hf.use(model, SAMPLED):
        rows = model(token.repeat(3, 1), **with_cache(model, cache)).logits[:, -1]
        alone = last_logits(model)[0]
    torch.testing.assert_close(rows[0], alone)  # row 0 draws what it draws alone
    assert (rows[1] - rows[0]).abs().max() > 1e-3
    assert (rows[2] - rows[1]).abs().max() > 1e-3


def test_shared_rows_have_one_seed(model: LlamaForCausalLM) -> None:
    token, cache = prompt_and_cache(model, 40)
    cache.batch_repeat_interleave(3)
    with torch.no_grad(), hf.use(model, SAMPLED, shared_rows=True):
        rows = model(token.repeat(3, 1), **with_cache(model, cache)).logits[:, -1]
    torch.testing.assert_close(rows[1:], rows[:1].expand(2, -1))


def test_beams_in_a_santa_cache_share_the_seed(
    model: LlamaForCausalLM, calls: list[dict[str, Any]]
) -> None:
    with hf.use(model, SAMPLED):
        cache = with_cache(model, hf.SantaCache(model.config))
        generate(model, tokens(1, 20), new=4, num_beams=3, **cache)
    assert {tuple(call["shapes"][0]) for call in calls} == {(3, 6, 16)}
    assert {tuple(call["seed"].tolist()) for call in calls} == {(5,)}


def test_beams_of_several_prompts_share_the_seed_too(
    model: LlamaForCausalLM, calls: list[dict[str, Any]]
) -> None:
    with hf.use(model, SAMPLED):
        cache = with_cache(model, hf.SantaCache(model.config))
        generate(model, tokens(2, 20), new=4, num_beams=3, **cache)
    assert {tuple(call["shapes"][0]) for call in calls} == {(6, 6, 16)}
    assert {tuple(call["seed"].tolist()) for call in calls} == {(5,)}


def test_a_cache_that_held_beams_gives_rows_their_own_seeds_again(
    model: LlamaForCausalLM, calls: list[dict[str, Any]]
) -> None:
    def seeds() -> list[int]:
        del calls[:]
        with torch.no_grad():
            model(tokens(3, 1), **with_cache(model, cache))
        return [call["seed"].shape[0] for call in calls]

    with hf.use(model, SAMPLED):
        cache = hf.SantaCache(model.config)
        generate(model, tokens(1, 20), new=4, num_beams=3, **with_cache(model, cache))
        cache.reorder_cache(torch.tensor([0, 0, 1]))
        assert seeds() == [1, 1, 1]
        assert seeds() == [3, 3, 3]  # no beam search steps without reordering
        cache.reorder_cache(torch.tensor([0, 0, 1]))
        for layer in cache.layers:
            layer.reset()
        assert seeds() == [3, 3, 3]


def test_seed_lives_in_one_tensor_that_is_filled_in_place(model: LlamaForCausalLM) -> None:
    attention = model.model.layers[1].self_attn
    with hf.use(model, SantaConfig(samples=4, seed=1)):
        seed = attention.santa_seed
        hf.enable(model, SantaConfig(samples=4, seed=2))
        assert attention.santa_seed is seed
        assert seed.tolist() == [2]
        assert not any("santa" in name for name in model.state_dict())
    assert not hasattr(attention, "santa_seed")
    assert not hasattr(attention, "santa_binding")


def test_layers_selects(model: LlamaForCausalLM, calls: list[dict[str, Any]]) -> None:
    with hf.use(model, SantaConfig(samples=4, layers=[2, 0])), hf.record(model) as traffic:
        last_logits(model)
    assert [call["layer"] for call in calls] == [0, 2]
    assert traffic.calls == 3  # the exact layer counts with all its bytes
    with hf.use(model, SantaConfig("dense", layers=[1])):
        torch.testing.assert_close(last_logits(model), last_logits(model))


def test_record_counts_what_the_operator_reads(model: LlamaForCausalLM) -> None:
    row_bytes = 2 * 16 * 4  # K and V of one row and KV head, float32
    with hf.use(model, DENSE), hf.record(model) as traffic:
        last_logits(model, rows=40)
    assert traffic.bytes_read == traffic.bytes_total == 3 * 2 * 41 * row_bytes
    with hf.use(model, SAMPLED):
        with hf.record(model) as traffic:
            last_logits(model, rows=40)
        total = traffic.bytes_total
        last_logits(model, rows=40)
        assert traffic.bytes_total == total  # nothing is counted outside
    assert total / 2 < traffic.bytes_read < total
    assert 0 < traffic.value_rows < 41
    with pytest.raises(ValueError, match="not enabled"), hf.record(model):
        pass


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
