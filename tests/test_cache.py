"""SantaCache: the same rows as DynamicCache, appended in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from cache_tools import rows
from tiny_models import TINY, generate, prompt_and_cache, tokens, with_cache
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer

from santa_torch import SantaConfig, hf
from santa_torch.hf.layer_growing import SantaLayer
from santa_torch.hf.layer_static import SantaStaticLayer

CONFIG = LlamaConfig(**TINY)


def pair(*counts: int) -> tuple[SantaLayer, DynamicLayer]:
    """The two kinds of layer with the same rows."""
    ours, theirs = SantaLayer(), DynamicLayer()
    for index, count in enumerate(counts):
        for layer in (ours, theirs):
            layer.update(*rows(count, seed=index))
    return ours, theirs


def assert_same(ours: SantaLayer, theirs: DynamicLayer) -> None:
    assert torch.equal(ours.keys, theirs.keys)
    assert torch.equal(ours.values, theirs.values)
    assert ours.get_seq_length() == theirs.get_seq_length()


@pytest.mark.parametrize("counts", [(1,), (5, 1, 1), (255, 1, 1), (256, 1), (300, 200, 1), (0, 3)])
def test_rows_equal_those_of_a_dynamic_cache(counts: tuple[int, ...]) -> None:
    ours, theirs = SantaLayer(), DynamicLayer()
    for index, count in enumerate(counts):
        got = ours.update(*rows(count, seed=index), {"cache_position": None})  # 4.57's way
        want = theirs.update(*rows(count, seed=index))
        assert all(map(torch.equal, got, want))
    assert_same(ours, theirs)
    assert ours.get_mask_sizes(3) == (sum(counts) + 3, 0)
    assert ours.get_mask_sizes(torch.arange(3)) == (sum(counts) + 3, 0)


def test_appends_in_place_and_grows_seldom() -> None:
    layer = SantaLayer()
    layer.update(*rows(10))
    addresses, capacities = set(), set()
    for step in range(2000):
        layer.update(*rows(1, seed=step))
        addresses.add(layer.keys.data_ptr())
        capacities.add(layer.capacity)
    assert len(addresses) <= len(capacities) <= 6
    assert max(capacities) <= 1.5 * 2010 + 256


@pytest.mark.parametrize("static", [False, True])
def test_an_append_costs_the_same_at_any_length(static: bool) -> None:
    # Counted, not timed: elements written by the profiler's copies, bytes that it saw allocated.
    def cost(length: int) -> tuple[int, int]:
        layer = SantaStaticLayer(length + 8) if static else SantaLayer(reserve=length + 8)
        layer.update(*rows(length))
        new, address = rows(1), layer.keys.data_ptr()
        with torch.profiler.profile(record_shapes=True, profile_memory=True) as profile:
            layer.update(*new)
        assert layer.keys.data_ptr() == address
        events = profile.events()
        name, source = ("aten::index_copy_", 3) if static else ("aten::copy_", 1)
        shapes = [event.input_shapes[source] for event in events if event.name == name]
        written = sum(torch.Size(shape).numel() for shape in shapes)
        allocated = sum(max(event.self_cpu_memory_usage, 0) for event in events)
        return written, allocated

    assert cost(8) == cost(5000)
    assert cost(8)[0] == 2 * 2 * (16 + 24)
    assert cost(8)[1] < 256  # positions


def test_reserve_makes_room_once() -> None:
    layer = SantaLayer(reserve=1000)
    layer.update(*rows(1))
    before = layer.keys.data_ptr()
    layer.update(*rows(999))
    assert layer.capacity == 1024
    assert layer.keys.data_ptr() == before


def test_bytes_used_and_reserved(model: LlamaForCausalLM) -> None:
    cache = hf.SantaCache(model.config)
    assert cache.nbytes == cache.nbytes_reserved == 0
    prompt_and_cache(model, 40, batch=2, cache=cache)
    row = 3 * 2 * 2 * 2 * 16 * 4  # layers, K and V, batch, KV heads, D, float32
    assert cache.nbytes == 40 * row
    assert cache.nbytes_reserved == 256 * row
    assert [layer.nbytes for layer in cache.layers] == [40 * row / 3] * 3
    assert [layer.nbytes_reserved for layer in cache.layers] == [256 * row / 3] * 3
    assert "40 rows" in repr(cache)
    assert str(cache.nbytes) in repr(cache)


def test_rule01_spare_rows_are_never_read(model: LlamaForCausalLM) -> None:
    token, cache = prompt_and_cache(model, 40, cache=hf.SantaCache(model.config))
    with torch.no_grad(), hf.use(model, SantaConfig(samples=8)):
        clean = model(token, **with_cache(model, cache)).logits
        cache.crop(-1)
        for layer in cache.layers:
            for buffer in layer._buffers:
                buffer[:, :, 40:] = torch.nan
        assert torch.equal(model(token, **with_cache(model, cache)).logits, clean)


def test_a_second_turn_continues_the_cache(model: LlamaForCausalLM) -> None:
    first, second = tokens(1, 20), tokens(1, 8, seed=1)
    with hf.use(model, SantaConfig("dense")):
        ours = with_cache(model, hf.SantaCache(model.config))
        theirs = with_cache(model, DynamicCache(config=model.config))
        texts = []
        for cache in (ours, theirs):
            ids = torch.cat([first, generate(model, first, new=5, **cache), second], dim=1)
            texts.append(torch.cat([ids, generate(model, ids, new=5, **cache)], dim=1))
    assert torch.equal(*texts)


def test_crop_both_ways() -> None:
    for amount in (-3, -1, 7, 100):
        ours, theirs = pair(10, 2)
        ours.crop(amount)
        length = 12 + amount if amount < 0 else min(amount, 12)
        assert ours.get_seq_length() == length
        assert torch.equal(ours.keys, theirs.keys[:, :, :length])
        got = ours.update(*rows(4, seed=9))[1]
        assert torch.equal(got, torch.cat([theirs.values[:, :, :length], rows(4, seed=9)[1]], 2))
    SantaLayer().crop(-1)  # nothing there yet


def test_crop_beyond_the_start_leaves_nothing() -> None:
    ours, _ = pair(10)
    ours.crop(-11)
    assert ours.get_seq_length() == 0


def test_croppable_is_what_transformers_says_of_each_layer() -> None:
    assert hf.SantaCache(CONFIG).is_croppable
    cache = hf.SantaCache(transformers.MistralConfig(**TINY, sliding_window=8))
    for count, kept in ((5, True), (9, False)):
        for layer in range(3):
            cache.update(*rows(count), layer)
        layer = cache.layers[0]
        assert cache.is_croppable == getattr(layer, "is_croppable", kept)  # 5 crops what it records


def test_reset_keeps_the_memory_and_takes_another_batch() -> None:
    layer, _ = pair(10)
    layer.reorder_cache(torch.tensor([0, 1]))
    layer.update(*rows(1))
    assert layer.has_beams
    layer.reorder_cache(torch.tensor([0, 1]))
    address = layer.keys.data_ptr()
    layer.reset()
    assert layer.get_seq_length() == 0
    assert not layer.has_beams
    layer.update(*rows(3))
    assert not layer.has_beams
    assert layer.keys.data_ptr() == address
    layer.reset()
    layer.update(*rows(3, batch=5))
    assert layer.keys.shape == (5, 2, 3, 16)


def test_sliding_layers_keep_the_window_only() -> None:
    mixed = ["sliding_attention", "full_attention", "sliding_attention"]
    window = {"sliding_window": 8, "use_sliding_window": True, "layer_types": mixed}
    config = transformers.Qwen2Config(**TINY, **window)
    cache = hf.SantaCache(config)
    assert [isinstance(layer, SantaLayer) for layer in cache.layers] == [False, True, False]
    for step in range(20):
        for layer in range(3):
            keys, values = rows(1, seed=step)
            cache.update(keys, values, layer)
    assert cache.layers[0].keys.shape[2] == 7
    assert cache.get_seq_length(1) == 20
    assert cache.nbytes == 2 * 2 * (16 + 24) * 4 * (7 + 20 + 7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model_config": "llama"}, "model_config must be .* got str"),
        ({"config": 3}, "config must be a SantaConfig, got int"),
        ({"reserve": -1}, "reserve must be a number of rows >= 0, got -1"),
        ({"reserve": 1.0}, "reserve must be a number of rows >= 0, got 1.0"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hf.SantaCache(**{"model_config": CONFIG, **arguments})


def test_other_kinds_of_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="use a DynamicCache"):
        hf.SantaCache(transformers.Gemma3nTextConfig())  # later layers share keys of earlier ones


def test_transformers_own_caches_are_left_alone() -> None:
    assert all(type(layer) is DynamicLayer for layer in DynamicCache(config=CONFIG).layers)
    assert hf.SantaCache(CONFIG, SantaConfig(samples=8)).santa_config == SantaConfig(samples=8)
