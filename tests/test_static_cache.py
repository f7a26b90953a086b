"""The static form of SantaCache: fixed shapes, lengths in tensors, DynamicCache's rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from cache_tools import rows
from tiny_models import TINY, build, generate, prompt_and_cache, tokens, with_cache
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.cache_utils import DynamicLayer, StaticLayer, StaticSlidingWindowLayer

from santa_torch import SantaConfig, hf
from santa_torch.hf.layer_static import SantaStaticLayer

CONFIG = LlamaConfig(**TINY)
ROOM = 32


def pair(*counts: int) -> tuple[SantaStaticLayer, DynamicLayer]:
    """The two kinds of layer with the same rows."""
    ours, theirs = SantaStaticLayer(ROOM), DynamicLayer()
    for index, count in enumerate(counts):
        for layer in (ours, theirs):
            layer.update(*rows(count, seed=index))
    return ours, theirs


def assert_same(ours: SantaStaticLayer, theirs: DynamicLayer) -> None:
    length = theirs.get_seq_length()
    assert ours.get_seq_length() == length
    for got, want in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
        assert torch.equal(got[:, :, :length], want)


def addresses(layer: SantaStaticLayer) -> list[int]:
    return [tensor.data_ptr() for tensor in (layer.keys, layer.values, layer.length)]


@pytest.mark.parametrize("counts", [(1,), (5, 1, 1), (0, 3), (ROOM,), (ROOM - 1, 1)])
def test_rows_equal_those_of_a_dynamic_cache(counts: tuple[int, ...]) -> None:
    ours, theirs = SantaStaticLayer(ROOM), DynamicLayer()
    assert ours.get_seq_length() == 0
    for index, count in enumerate(counts):
        keys, values = ours.update(*rows(count, seed=index), {"cache_position": None})
        theirs.update(*rows(count, seed=index))
        assert keys.shape == (2, 2, ROOM, 16)
        assert values.shape == (2, 2, ROOM, 24)
        assert_same(ours, theirs)
    # SDPA reads these behind a mask.
    assert not ours.keys[:, :, sum(counts) :].any()
    assert not ours.values[:, :, sum(counts) :].any()


def test_what_transformers_asks_a_cache() -> None:
    cache = hf.SantaCache(CONFIG, max_cache_len=ROOM)
    layer, _ = pair(5)
    assert cache.is_compileable
    assert cache.is_croppable
    assert layer.get_mask_sizes(3) == layer.get_mask_sizes(torch.arange(3)) == (ROOM, 0)
    assert layer.get_max_length() == layer.get_max_cache_shape() == ROOM
    assert not hf.SantaCache(CONFIG).is_compileable
    assert layer.batch_size == layer.max_batch_size == 2
    assert SantaStaticLayer(ROOM).batch_size == -1


def test_lengths_are_tensors_and_those_given_out_are_copies() -> None:
    layer, _ = pair(5)
    before = layer.get_seq_length()
    assert before.dtype == torch.int64
    assert before.shape == ()
    layer.update(*rows(1))
    assert (before, layer.get_seq_length()) == (5, 6)


def test_nothing_moves() -> None:
    layer, _ = pair(10)
    start = addresses(layer)
    for change in (
        lambda: layer.update(*rows(1)),
        lambda: layer.crop(-3),
        lambda: layer.reorder_cache(torch.tensor([1, 0])),
        lambda: layer.batch_select_indices(torch.tensor([1, 1])),
        lambda: layer.batch_repeat_interleave(1),
        lambda: layer.reset(),
        lambda: layer.update(*rows(4)),
    ):
        change()
        assert addresses(layer) == start


def test_a_full_cache_says_so_and_keeps_what_it_has() -> None:
    layer, theirs = pair(ROOM - 1)
    with pytest.raises(ValueError, match=r"2 more rows after 31 are more than max_cache_len=32"):
        layer.update(*rows(2))
    assert_same(layer, theirs)
    layer.update(*rows(1))
    with pytest.raises(ValueError, match=r"1 more rows after 32"):
        layer.update(*rows(1))
    with pytest.raises(ValueError, match=r"33 more rows after 0"):
        SantaStaticLayer(ROOM).update(*rows(ROOM + 1))


def test_a_full_cache_tells_before_any_layer_changed(model: LlamaForCausalLM) -> None:
    token, cache = prompt_and_cache(model, 31, cache=hf.SantaCache(model.config, max_cache_len=31))
    with pytest.raises(ValueError, match="use a larger cache"):
        model(token, **with_cache(model, cache))
    assert [int(layer.length) for layer in cache.layers] == [31] * 3


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_full_cache_fails_in_graphs_too(backend: str) -> None:
    torch._dynamo.reset()
    layer, _ = pair(ROOM - 2)

    def step(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        stored, _ = layer.update(keys, values)
        return stored.sum()

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    for _ in range(2):
        compiled(*rows(1))
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        compiled(*rows(1))
    with pytest.raises(Exception, match="33 more rows"):  # as torch's tracer wraps it
        compiled(*rows(ROOM + 1))
    torch._dynamo.reset()


def test_crop_both_ways() -> None:
    for amount in (-3, -1, 7, 100, -100):
        ours, theirs = pair(10, 2)
        ours.crop(amount)
        length = max(12 + amount, 0) if amount < 0 else min(amount, 12)
        assert ours.get_seq_length() == length
        _, values = ours.update(*rows(4, seed=9))
        want = torch.cat([theirs.values[:, :, :length], rows(4, seed=9)[1]], 2)
        assert torch.equal(values[:, :, : length + 4], want)
    SantaStaticLayer(ROOM).crop(-1)  # nothing there yet


def test_beams_are_told_from_other_uses() -> None:
    layer, _ = pair(10)
    layer.reorder_cache(torch.tensor([0, 1]))
    layer.update(*rows(1))
    assert layer.has_beams
    layer.update(*rows(1))
    assert not layer.has_beams


def test_reset_forgets_everything_and_takes_another_batch() -> None:
    layer, _ = pair(10)
    layer.reorder_cache(torch.tensor([0, 1]))
    layer.update(*(torch.full_like(new, torch.nan) for new in rows(1)))
    layer.reset()
    assert layer.get_seq_length() == 0
    assert not layer.has_beams
    assert not layer.keys.any()
    assert not layer.values.any()
    layer.update(*rows(3, batch=5))
    assert layer.keys.shape == (5, 2, ROOM, 16)
    assert layer.get_seq_length() == 3


def test_early_initialization_makes_the_buffers() -> None:
    cache = hf.SantaCache(CONFIG, max_cache_len=ROOM)
    cache.early_initialization(2, 2, 16, torch.bfloat16, torch.device("cpu"))
    layer = cache.layers[2]
    assert layer.keys.shape == layer.values.shape == (2, 2, ROOM, 16)
    assert layer.keys.dtype == torch.bfloat16
    start = addresses(layer)
    new = rows(3)[0].bfloat16()
    cache.update(new, new, 2)
    assert addresses(layer) == start
    cache = hf.SantaCache(CONFIG, max_cache_len=ROOM)
    cache.early_initialization(2, 2, 16, torch.float32, torch.device("cpu"))
    cache.update(*rows(3), 2)  # values of another size than it was told
    assert cache.layers[2].values.shape == (2, 2, ROOM, 24)


def test_bytes_used_and_reserved(model: LlamaForCausalLM) -> None:
    cache = hf.SantaCache(model.config, max_cache_len=64)
    assert cache.nbytes == cache.nbytes_reserved == 0
    prompt_and_cache(model, 40, batch=2, cache=cache)
    row = 3 * 2 * 2 * 2 * 16 * 4  # layers, K and V, batch, KV heads, D, float32
    assert (cache.nbytes, cache.nbytes_reserved) == (40 * row, 64 * row)
    assert "40 rows" in repr(cache)


def test_rule01_free_rows_are_never_read_by_the_operator(model: LlamaForCausalLM) -> None:
    cache = hf.SantaCache(model.config, max_cache_len=64)
    token, cache = prompt_and_cache(model, 40, cache=cache)
    with torch.no_grad(), hf.use(model, SantaConfig(samples=8)):
        clean = model(token, **with_cache(model, cache)).logits
        cache.crop(-1)
        for layer in cache.layers:
            for buffer in (layer.keys, layer.values):
                buffer[:, :, 40:] = torch.nan
        assert torch.equal(model(token, **with_cache(model, cache)).logits, clean)


def test_sliding_layers_are_those_of_transformers() -> None:
    mixed = ["sliding_attention", "full_attention", "sliding_attention"]
    window = {"sliding_window": 8, "use_sliding_window": True, "layer_types": mixed}
    config = transformers.Qwen2Config(**TINY, **window)
    cache = hf.SantaCache(config, max_cache_len=ROOM)
    kinds = [StaticSlidingWindowLayer, SantaStaticLayer, StaticSlidingWindowLayer]
    assert [type(layer) for layer in cache.layers] == kinds
    for layer in range(3):
        cache.update(*(2 * [rows(5)[0]]), layer)
    assert cache.nbytes == 2 * 2 * (16 + 16) * 4 * (8 + 5 + 8)
    with pytest.raises(NotImplementedError, match="batch_repeat_interleave of layer 0, a Static"):
        cache.batch_repeat_interleave(2)
    assert cache.layers[1].keys.shape[0] == 2
    assert not cache.is_croppable


@pytest.mark.parametrize("batch", [1, 2])
def test_sliding_models_generate_the_same_text(batch: int) -> None:
    mixed = ["sliding_attention", "full_attention", "sliding_attention"]
    window = {"sliding_window": 8, "use_sliding_window": True, "layer_types": mixed}
    model = build(transformers.Qwen2ForCausalLM, transformers.Qwen2Config(**TINY, **window))
    ids = tokens(batch, 21)
    with hf.use(model, SantaConfig("dense")):
        dynamic = generate(model, ids, **with_cache(model, DynamicCache(config=model.config)))
        cache = hf.SantaCache(model.config, max_cache_len=64)
        assert torch.equal(generate(model, ids, **with_cache(model, cache)), dynamic)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_cache_len": 0}, "max_cache_len must be a number of rows >= 1, got 0"),
        ({"max_cache_len": 2.0}, "max_cache_len must be a number of rows >= 1, got 2.0"),
        ({"max_cache_len": True}, "max_cache_len must be a number of rows >= 1, got True"),
        (
            {"max_cache_len": 8, "reserve": 4},
            "reserve=4 is for a cache that grows; max_cache_len=8",
        ),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hf.SantaCache(CONFIG, **arguments)


def test_other_kinds_of_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="use a StaticCache"):
        hf.SantaCache(transformers.Gemma3nTextConfig(), max_cache_len=8)


def test_transformers_own_caches_are_left_alone() -> None:
    cache = StaticCache(config=CONFIG, max_cache_len=8)
    assert all(type(layer) is StaticLayer for layer in cache.layers)
