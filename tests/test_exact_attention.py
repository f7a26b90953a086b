"""Exact attention inside enabled models: SDPA, or the model's own eager function."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import transformers
from tiny_models import DENSE, SAMPLED, TINY, build, tokens, with_cache

from santa_torch import SantaConfig, hf
from santa_torch.config import METHODS
from santa_torch.hf import exact
from santa_torch.hf.attention import attention_forward

CAPPED = {**TINY, "attn_implementation": "eager", "attn_logit_softcapping": 1.5}


@pytest.fixture(scope="module")
def gemma() -> Any:
    """Gemma-2, with a soft cap that all scores meet, and sliding windows in every other layer."""
    config = transformers.Gemma2Config(**CAPPED, sliding_window=9)
    return build(transformers.Gemma2ForCausalLM, config)


@pytest.fixture(scope="module")
def gpt_oss() -> Any:
    """gpt-oss, with sinks that take a good part of the softmax."""
    config = transformers.GptOssConfig(
        **{**TINY, "attn_implementation": "eager"}, num_local_experts=4, sliding_window=9
    )
    model = build(transformers.GptOssForCausalLM, config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.copy_(torch.linspace(-1, 3, 6))
    return model


@pytest.fixture(params=["gemma", "gpt_oss"])
def eager_model(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def padded(width: int = 21, padding: int = 5) -> dict[str, torch.Tensor]:
    """Two prompts, the second of them left-padded."""
    mask = torch.ones(2, width, dtype=torch.int64)
    mask[1, :padding] = 0
    return {"input_ids": tokens(2, width), "attention_mask": mask}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_rule41_prefill_equals_the_models_own_eager_function(
    eager_model: Any, dtype: torch.dtype
) -> None:
    model = eager_model.to(dtype)
    try:
        for inputs in ({"input_ids": tokens(2, 21)}, padded()):
            attended = inputs.get("attention_mask", torch.ones(2, 21)).bool()
            expected = model(**inputs).logits[attended]
            with hf.use(model, SAMPLED):
                assert torch.equal(model(**inputs).logits[attended], expected)
    finally:
        model.to(torch.float32)


@torch.no_grad()
def test_layers_that_are_not_selected_equal_the_eager_function(eager_model: Any) -> None:
    """One row: still not SDPA."""
    cache = transformers.DynamicCache(config=eager_model.config)
    ids = tokens(2, 21)
    eager_model(ids[:, :20], past_key_values=cache)
    q, kv = torch.randn(2, 6, 1, 16), torch.randn(2, 2, 20, 16)
    module = eager_model.model.layers[1].self_attn
    extra = {"softcap": getattr(module, "attn_logit_softcapping", None)}
    extra["s_aux"] = getattr(module, "sinks", None)
    expected = exact._eager_function(module)(module, q, kv, kv, None, scaling=0.3, **extra)[0]
    sdpa = exact.sdpa_attention_forward(module, q, kv, kv, None, scaling=0.3)[0]
    assert not torch.allclose(sdpa, expected, atol=1e-2)
    for config in (SantaConfig(layers=[0]), SantaConfig(dense_below=21)):
        with hf.use(eager_model, config):
            out = attention_forward(
                module, q, kv, kv, None, scaling=0.3, position_ids=torch.tensor([[19]]), **extra
            )[0]
        assert torch.equal(out, expected)


@pytest.mark.parametrize("rows", [1, 4, 20])
@torch.no_grad()
def test_blocks_of_query_rows_equal_the_whole(
    eager_model: Any, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for inputs in ({"input_ids": tokens(2, 21)}, padded()):
        with hf.use(eager_model, SAMPLED):
            whole = eager_model(**inputs).logits
            with monkeypatch.context() as patch:
                patch.setattr(exact, "EAGER_WEIGHTS", rows * 2 * 6 * 21)
                parts = eager_model(**inputs).logits
        torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)


def test_masks_as_eager_functions_want_them(gemma: Any) -> None:
    """bool, additive with -inf, absent and causal, absent and not: one result for one meaning."""
    module = gemma.model.layers[1].self_attn
    q, kv = torch.randn(2, 6, 8, 16), torch.randn(2, 2, 8, 16)
    causal = torch.ones(8, 8, dtype=torch.bool).tril()[None, None]
    longer = torch.nn.functional.pad(causal, (0, 3))

    def run(mask: Any, **options: Any) -> torch.Tensor:
        options = {"dropout": 0.0, "scaling": 0.3, "softcap": 1.5} | options
        return exact.exact_attention(module, q, kv, kv, mask, **options)

    expected = run(causal)
    assert torch.equal(run(None), expected)
    assert torch.equal(run(None, is_causal=True), expected)
    assert torch.equal(run(longer), expected)
    assert torch.equal(run(torch.zeros(1, 1, 8, 8).masked_fill(~causal, -torch.inf)), expected)
    everything = run(torch.ones_like(causal))
    assert not torch.allclose(everything, expected, atol=1e-2)
    assert torch.equal(run(None, is_causal=False), everything)
    for nothing in (torch.zeros_like(causal), torch.full((1, 1, 8, 8), -torch.inf)):
        assert torch.isfinite(run(nothing)).all()  # a padding row: whatever it is, not NaN


def test_a_static_cache_ends_where_the_prompt_does(gemma: Any) -> None:
    """Without a mask, row i attends to rows 0 to i, also where the keys have spare rows."""
    module = gemma.model.layers[1].self_attn
    q, kv = torch.randn(1, 6, 8, 16), torch.randn(1, 2, 13, 16)
    options: dict[str, Any] = {"dropout": 0.0, "scaling": 0.3, "softcap": 1.5}
    spare = exact.exact_attention(module, q, kv, kv, None, **options)
    kv = kv[:, :, :8]
    torch.testing.assert_close(spare, exact.exact_attention(module, q, kv, kv, None, **options))


def test_rule41_sdpa_is_called_where_nothing_speaks_against_it(model: Any) -> None:
    module = model.model.layers[0].self_attn
    q, kv = torch.randn(2, 6, 8, 16), torch.randn(2, 2, 8, 16)
    ours = exact.exact_attention(module, q, kv, kv, None, dropout=0.0, scaling=0.3, softcap=None)
    assert torch.equal(ours, exact.sdpa_attention_forward(module, q, kv, kv, None, scaling=0.3)[0])


def test_rule42_a_soft_cap_without_an_eager_function_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Attention(torch.nn.Module):
        pass

    q, kv = torch.randn(1, 6, 8, 16), torch.randn(1, 2, 8, 16)
    with pytest.raises(ValueError, match=r"Attention: .* eager_attention_forward, and .* none"):
        exact.exact_attention(Attention(), q, kv, kv, None, dropout=0.0, scaling=1.0, softcap=2.0)


def test_the_eager_function_of_a_base_class_is_found(gemma: Any) -> None:
    base = type(gemma.model.layers[0].self_attn)
    derived = types.new_class("Derived", (base,))
    derived.__module__ = __name__
    module = object.__new__(derived)
    assert exact._eager_function(module) is exact._eager_function(gemma.model.layers[0].self_attn)


@torch.no_grad()
def test_rule42_soft_caps_and_sinks_reach_the_operator(
    eager_model: Any, calls: list[dict[str, Any]]
) -> None:
    with hf.use(eager_model, DENSE):
        eager_model(tokens(1, 1))
    modules = [layer.self_attn for layer in eager_model.model.layers]
    for call, module in zip(calls, modules, strict=True):
        assert call["softcap"] == getattr(module, "attn_logit_softcapping", None)
        assert call["sinks"] is getattr(module, "sinks", None)


@pytest.mark.parametrize("rows", ["decode", "all"])
@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_rule42_soft_caps_and_sinks_of_every_method(
    eager_model: Any, method: str, rows: str
) -> None:
    """With so many samples that the estimate is exact to some per cent."""

    def logits() -> torch.Tensor:
        cache = with_cache(eager_model, hf.SantaCache(eager_model.config))
        return torch.cat([eager_model(part, **cache).logits for part in ids.split([20, 1], 1)], 1)

    ids = tokens(2, 21)
    exact = logits()
    with hf.use(eager_model, SantaConfig(method, samples=2**14, query_rows=rows)):
        ours = logits()
    assert (ours - exact).abs().max() < 6e-2 * exact.abs().max()
    if rows == "decode":
        assert torch.equal(ours[:, :20], exact[:, :20])
