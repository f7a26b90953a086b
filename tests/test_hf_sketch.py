"""Attention of models that is scored from sketches, and with Bernoulli queries."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from cache_tools import at
from families import FAMILIES
from spies import Graphs
from support import MAJOR
from tiny_models import TINY, build, generate, tiny_llama, tokens, with_cache
from transformers import (
    DynamicCache,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from santa_torch import BernoulliConfig, SantaConfig, hf
from santa_torch.hf.attention import attention_forward
from santa_torch.hf.wrappers import inner_model

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
]

FORMS: dict[str, dict[str, int]] = {"growing": {}, "static": {"max_cache_len": 320}}
PLAIN = SantaConfig("shared", samples=4, seed=5)
SKETCHED = replace(PLAIN, sketch_bits=32)
SHARED = replace(SKETCHED, bernoulli=BernoulliConfig(4))
PER_HEAD = replace(SKETCHED, bernoulli=BernoulliConfig(4, shared=False))

each_form = pytest.mark.parametrize("form", FORMS)
each_query = pytest.mark.parametrize("config", [SHARED, PER_HEAD], ids=["shared", "per head"])


def new(model: Any, form: str, config: SantaConfig, **more: int) -> dict[str, Any]:
    """The keyword argument for a cache that keeps what ``config`` asks for."""
    return with_cache(model, hf.SantaCache(model.config, config, **FORMS[form], **more))


def text(model: Any, form: str, config: SantaConfig, **settings: Any) -> torch.Tensor:
    """Tokens after two prompts of 120, the first of which begins with padding."""
    ids = tokens(2, 120)
    mask = torch.ones_like(ids)
    mask[0, :70] = 0
    torch.manual_seed(3)
    settings = {"attention_mask": mask, **settings}
    with hf.use(model, config):
        return generate(model, ids, **settings, **new(model, form, config))


@torch.no_grad()
def steps(model: Any, form: str, config: SantaConfig, run: Any = None) -> torch.Tensor:
    """Logits of steps from row 126 on, so that one of them completes a block."""
    with hf.use(model, config):
        cache = new(model, form, config)
        model(tokens(2, 126), **cache)
        ids = tokens(5, 2, 1, seed=1)
        answer = model if run is None else run  # no truth value: compiled modules have a length
        logits = [answer(row, **cache, **at(model, 126 + i)).logits for i, row in enumerate(ids)]
    return torch.cat(logits)


# --- a sketch changes costs, and nothing else ------------------------------------------------


@each_form
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_beams": 3},
        {"do_sample": True, "num_return_sequences": 2},
        {"prefill_chunk_size": 40},
    ],
    ids=lambda settings: "-".join(settings) or "greedy",
)
def test_a_sketch_changes_no_token(
    model: LlamaForCausalLM, calls: list[dict[str, Any]], form: str, settings: dict[str, Any]
) -> None:
    plain = text(model, form, PLAIN, **settings)
    assert all(call["sketch"] is None for call in calls)
    del calls[:]
    assert torch.equal(text(model, form, SKETCHED, **settings), plain)
    assert len(calls) >= 3 * 11  # the last chunk of a prompt may be one row
    assert all(call["sketch"].rows.min() >= 120 for call in calls)


@each_form
def test_a_sketch_changes_no_bit(cpu_level: str, form: str) -> None:
    model = tiny_llama().to(torch.bfloat16)
    sketched = steps(model, form, replace(PLAIN, sketch_bits=16))
    if cpu_level == "amx":  # its tiles add in an order of their own, and no sketch goes there
        torch.ops.santa.set_cpu_level("avx512")
    assert torch.equal(sketched, steps(model, form, PLAIN))


@torch.no_grad()
def test_whole_blocks_are_scored_from_the_sketch(model: LlamaForCausalLM) -> None:
    with hf.use(model, SKETCHED):
        cache = new(model, "growing", SKETCHED)
        model(tokens(1, 130), **cache)
        (layers,) = [value.layers for value in cache.values() if value is not True]
        step = tokens(1, 1, seed=1)
        right = model(step, **cache).logits
        for change, same in (("open_rows", True), ("blocks", False)):
            for layer in layers:
                layer.crop(130)
                getattr(layer.sketch, change).neg_()
            assert torch.equal(model(step, **cache).logits, right) == same


@each_form
def test_rejected_drafts_leave_the_sketch(form: str) -> None:
    model = tiny_llama()
    if form == "static" and not hasattr(hf.SantaCache, "get_max_length"):
        pytest.skip("transformers 4 assists no static cache")
    ids = tokens(1, 12).repeat(1, 10)
    texts = []
    for config in (PLAIN, SKETCHED, SHARED, replace(SHARED, sketch_bits=None)):
        every = replace(config, query_rows="all")
        with hf.use(model, every):
            cache = new(model, form, every)
            texts.append(generate(model, ids, new=24, prompt_lookup_num_tokens=4, **cache))
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[2], texts[3])
    assert not torch.equal(texts[0], texts[2])


def test_windows_are_scored_from_the_keys(calls: list[dict[str, Any]]) -> None:
    mixed = ["sliding_attention", "full_attention", "sliding_attention"]
    window = {"sliding_window": 80, "use_sliding_window": True, "layer_types": mixed}
    model = build(Qwen2ForCausalLM, Qwen2Config(**TINY, **window))
    without = replace(SHARED, sketch_bits=None)
    assert torch.equal(text(model, "growing", SHARED), text(model, "growing", without))
    sketched = {call["layer"] for call in calls if call["sketch"] is not None}
    assert sketched == {1}
    assert {call["layer"] for call in calls} == {0, 1, 2}


@pytest.mark.long
@pytest.mark.skipif(MAJOR == "4", reason="other families are refused by transformers itself")
def test_families(calls: list[dict[str, Any]]) -> None:
    """The same text with a sketch as without, or a refusal."""
    refused = []
    for family in FAMILIES:
        model = family.build()
        inner, texts = inner_model(model), []
        for config in (SHARED, replace(SHARED, sketch_bits=None)):
            del calls[:]
            try:
                with hf.use(model, config):
                    cache = new(inner, "growing", config)
                    texts.append(generate(model, tokens(2, 70), new=4, **cache))
            except ValueError:
                refused.append(family.name)
                break
            sketched = {call["layer"] for call in calls if call["sketch"] is not None}
            assert bool(sketched) == (config is SHARED), family.name
        else:
            assert torch.equal(*texts), family.name
    assert refused == ["Mistral, sliding windows", "DeepSeek-V3", "Llama-4, chunks", "Qwen3-Next"]


# --- Bernoulli queries -----------------------------------------------------------------------


@each_query
def test_bernoulli_text_does_not_depend_on_cache_or_sketch(
    model: LlamaForCausalLM, config: SantaConfig
) -> None:
    drawn = text(model, "growing", config)
    assert torch.equal(text(model, "static", config), drawn)
    assert torch.equal(text(model, "growing", replace(config, sketch_bits=None)), drawn)
    assert torch.equal(text(model, "growing", config), drawn)
    assert not torch.equal(text(model, "growing", SKETCHED), drawn)
    assert not torch.equal(text(model, "growing", replace(config, seed=6)), drawn)
    other = replace(config, bernoulli=replace(config.bernoulli, draws=16))  # type: ignore[type-var]
    assert not torch.equal(text(model, "growing", other), drawn)


def test_beams_and_returned_sequences(model: LlamaForCausalLM) -> None:
    for settings in ({"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}):
        drawn = text(model, "growing", SHARED, **settings)
        assert torch.equal(text(model, "static", SHARED, **settings), drawn)


@each_query
def test_every_row_draws_what_its_step_draws(
    model: LlamaForCausalLM, calls: list[dict[str, Any]], config: SantaConfig
) -> None:
    every = replace(config, query_rows="all")
    module = model.model.layers[1].self_attn
    cache = hf.SantaCache(model.config, every)
    q = 3 * torch.randn(2, 6, 7, 16)
    k, v = torch.randn(2, 2, 2, 150, 16)
    places = torch.arange(143, 150)[None]
    mask = (torch.arange(150) <= places[0][:, None])[None, None]
    options: dict[str, Any] = {"scaling": 0.3}
    with hf.use(model, every):
        cache.update(k[:, :, :143], v[:, :, :143], 1)
        alone = []
        for i in range(7):
            rows = cache.update(k[:, :, 143 + i : 144 + i], v[:, :, 143 + i : 144 + i], 1)
            row, at_row = q[:, :, i : i + 1], places[:, i : i + 1]
            alone.append(
                attention_forward(module, row, *rows, None, position_ids=at_row, **options)[0]
            )
        cache.crop(143)
        rows = cache.update(k[:, :, 143:], v[:, :, 143:], 1)
        together = attention_forward(module, q, *rows, mask, position_ids=places, **options)[0]
    assert torch.equal(together, torch.cat(alone, dim=1))
    assert [call["sketch"].rows.tolist() for call in calls[-2:]] == [[150] * 7] * 2


def test_bytes_are_what_the_sketch_saves(model: LlamaForCausalLM) -> None:
    config = replace(SHARED, bernoulli=BernoulliConfig(1))
    read = {}
    for name, settings in {
        "exact": SKETCHED,
        "drawn": config,
        "drawn, no sketch": replace(config, sketch_bits=None),
    }.items():
        with hf.use(model, settings), hf.record(model) as traffic, torch.no_grad():
            cache = new(model, "growing", settings)
            model(tokens(1, 200), **cache)
            model(tokens(1, 1, seed=1), **cache)
        assert traffic.bytes_total == 3 * 2 * 201 * 2 * 16 * 4
        values = round(traffic.value_rows * 3 * 2) * 16 * 4
        read[name] = traffic.bytes_read - values, traffic.key_features
    keys = 3 * 2 * 201 * 16 * 4
    assert read["exact"] == (keys, 16)
    assert read["drawn, no sketch"] == (keys, read["drawn"][1])
    features = round(read["drawn"][1] * 3 * 2)
    assert features < 3 * 2 * 16
    assert read["drawn"][0] == features * 192 * 4 + 3 * 2 * 9 * 16 * 4


def test_two_models_in_two_threads_draw_what_they_draw_apart() -> None:
    pairs = [(tiny_llama(), SHARED), (tiny_llama(), PER_HEAD)]
    for model, config in pairs:
        hf.enable(model, config)

    def logits(index: int) -> torch.Tensor:
        model, config = pairs[index % 2]
        cache = new(model, "growing", config)
        with torch.no_grad():
            model(tokens(1, 120 + index), **cache)
            rows = tokens(10, 1, 1, seed=index)
            return torch.cat([model(row, **cache).logits for row in rows])

    apart = [logits(index) for index in range(4)]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            together = list(pool.map(logits, range(4)))
            assert all(map(torch.equal, apart, together))
    assert not torch.equal(apart[0], apart[1])


# --- what is refused -------------------------------------------------------------------------


def caches_without(model: Any) -> dict[str, Any]:
    return {
        "a DynamicCache keeps no sketch": DynamicCache(config=model.config),
        "the keys of layer 0 come without a sketch": hf.SantaCache(model.config),
        "the keys of layer 1 come without": hf.SantaCache(
            model.config, replace(SKETCHED, layers=[0, 2])
        ),
    }


@pytest.mark.parametrize("which", range(3))
def test_caches_without_a_sketch_are_refused_before_the_prefill(
    model: LlamaForCausalLM, which: int
) -> None:
    message, cache = list(caches_without(model).items())[which]
    with (
        hf.use(model, SKETCHED),
        pytest.raises(ValueError, match=rf"sketch_bits=32: {message}.*SantaCache\(model.config, c"),
    ):
        model(tokens(1, 9), **with_cache(model, cache))


def test_a_row_without_a_cache_is_refused(model: LlamaForCausalLM) -> None:
    with hf.use(model, SKETCHED):
        model(tokens(1, 9), use_cache=False)  # exact
        with pytest.raises(ValueError, match="sketch_bits=32: the keys of layer 0 come without"):
            model(tokens(1, 1), use_cache=False)
    with (
        hf.use(model, replace(SKETCHED, query_rows="all")),
        pytest.raises(ValueError, match="sketch_bits=32: the keys of layer 0 come without"),
    ):
        model(tokens(1, 9), use_cache=False)
    with hf.use(model, replace(SKETCHED, layers=[2])):  # the others may have any cache
        text(model, "growing", replace(SKETCHED, layers=[2]))


def test_keys_that_lost_their_layer_are_refused(model: LlamaForCausalLM) -> None:
    module = model.model.layers[1].self_attn
    cache = hf.SantaCache(model.config, SKETCHED)
    k, v = cache.update(torch.randn(1, 2, 70, 16), torch.randn(1, 2, 70, 16), 1)
    q, place = torch.randn(1, 6, 1, 16), torch.tensor([[69]])
    with hf.use(model, SKETCHED):
        attention_forward(module, q, k, v, None, position_ids=place)
        for copied in (k.clone(), k.to(torch.float64).to(torch.float32), k[:, :, :69]):
            with pytest.raises(ValueError, match="the keys of layer 1 come without a sketch"):
                attention_forward(module, q, copied, v, None, position_ids=place)


def test_other_bits_than_those_of_the_cache_are_refused(model: LlamaForCausalLM) -> None:
    cache = hf.SantaCache(model.config, SKETCHED)
    with (
        hf.use(model, replace(SKETCHED, sketch_bits=16)),
        pytest.raises(ValueError, match="sketch_bits=16: the sketch of layer 0 has 32 bits"),
    ):
        model(tokens(1, 9), **with_cache(model, cache))
    cache = hf.SantaCache(model.config, replace(SKETCHED, sketch_bits=16))
    with pytest.raises(ValueError, match="bits must be 32 for"), torch.no_grad():
        model(tokens(1, 9), **with_cache(model, cache))


def test_autocast_of_keys_is_refused(model: LlamaForCausalLM) -> None:
    message = "layer 0 holds torch.float32, and autocast makes torch.bfloat16 of the keys"
    cache = new(model, "growing", SKETCHED)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), hf.use(model, SKETCHED):
        model(tokens(1, 70), **cache)
        with pytest.raises(ValueError, match=message):
            model(tokens(1, 1), **cache)


def test_models_of_windows_alone_are_refused() -> None:
    model = build(MistralForCausalLM, MistralConfig(**TINY, sliding_window=8))
    with pytest.raises(ValueError, match=r"model: Mistral.* has no SantaCache .*sketch_bits=32"):
        hf.enable(model, SKETCHED)
    assert model.config._attn_implementation == "sdpa"


# --- graphs ----------------------------------------------------------------------------------


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@each_query
@each_form
@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_steps(config: SantaConfig, form: str) -> None:
    model, graphs = tiny_llama(num_hidden_layers=1), Graphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    for seed in (5, 6):
        again = replace(config, seed=seed)
        assert torch.equal(steps(model, form, again, compiled), steps(model, form, again))
    assert graphs.frame_count == (1 if form == "static" else 2)
    assert not torch.equal(steps(model, form, config), steps(model, form, SKETCHED))


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_prefill_can_be_compiled_too() -> None:
    model = tiny_llama(num_hidden_layers=1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    where = at(model, 0) and {"cache_position": torch.arange(70)}
    logits = []
    with torch.no_grad(), hf.use(model, SHARED):
        for run in (model, compiled):
            cache = hf.SantaCache(model.config, SHARED, max_cache_len=130)
            cache.early_initialization(2, 2, 16, torch.float32, torch.device("cpu"))
            run(tokens(2, 70), **with_cache(model, cache), **where)
            step = run(tokens(2, 1), **with_cache(model, cache), **at(model, 70))
            assert cache.layers[0].sketch.rows.tolist() == [71, 71]
            logits.append(step.logits)
    torch.testing.assert_close(*logits)
