"""Sampled attention in Hugging Face models: exactness, draws, and what is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
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
from transformers import LlamaConfig, LlamaForCausalLM

from santa_torch import SantaConfig, hf

# --- exactness -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_logits_equal_sdpa(dtype: torch.dtype) -> None:
    model = tiny_llama().to(dtype)
    exact = last_logits(model, batch=2)
    with hf.use(model, DENSE):
        ours = last_logits(model, batch=2)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(ours, exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", ["decode", "all"])
def test_autocast(calls: list[dict[str, Any]], rows: str) -> None:
    """Under autocast, rotated queries and keys are float32 and values bfloat16."""
    model = tiny_llama()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        exact = last_logits(model, batch=2)
        with hf.use(model, SantaConfig("dense", query_rows=rows)):
            ours = last_logits(model, batch=2)
    assert len(calls) == (3 if rows == "decode" else 3 + 2 * 3)
    torch.testing.assert_close(ours, exact, rtol=3e-2, atol=3e-2)


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
    assert {tuple(call["q"].shape) for call in calls} == {(3, 6, 16)}
    assert {tuple(call["seed"].tolist()) for call in calls} == {(5,)}


def test_beams_of_several_prompts_share_the_seed_too(
    model: LlamaForCausalLM, calls: list[dict[str, Any]]
) -> None:
    with hf.use(model, SAMPLED):
        cache = with_cache(model, hf.SantaCache(model.config))
        generate(model, tokens(2, 20), new=4, num_beams=3, **cache)
    assert {tuple(call["q"].shape) for call in calls} == {(6, 6, 16)}
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
