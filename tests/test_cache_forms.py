"""What holds of SantaCache in both of its forms, the growing and the static one."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from cache_tools import rows
from tiny_models import TINY, prompt_and_cache, tokens, with_cache
from transformers import LlamaForCausalLM, Qwen2Config
from transformers.cache_utils import DynamicLayer

from santa_torch import hf
from santa_torch.hf.layer_growing import SantaLayer
from santa_torch.hf.layer_static import SantaStaticLayer

ROOM = 64
FORMS: dict[str, dict[str, int]] = {"growing": {}, "static": {"max_cache_len": ROOM}}

each_form = pytest.mark.parametrize("form", FORMS)


def empty(form: str) -> Any:
    """A layer without rows."""
    return SantaLayer() if form == "growing" else SantaStaticLayer(ROOM)


def filled(form: str, count: int = 10) -> Any:
    """A layer that holds ``count`` rows."""
    layer = empty(form)
    layer.update(*rows(count))
    return layer


def assert_shows(form: str, shown: Any, theirs: DynamicLayer) -> None:
    """Keys and values of a layer, or that it returned, begin with the rows of a DynamicLayer.

    Those of the growing form are those rows, those of the static one have room after them.
    """
    length = theirs.get_seq_length()
    for got, want in zip(shown, (theirs.keys, theirs.values), strict=True):
        assert torch.equal(got[:, :, :length], want)
        assert got.shape[2] == (length if form == "growing" else ROOM)


def new(model: LlamaForCausalLM, form: str) -> hf.SantaCache:
    return hf.SantaCache(model.config, **FORMS[form])


@each_form
def test_crop_zero_means_what_it_means_to_transformers(form: str) -> None:
    ours, theirs = filled(form), DynamicLayer()
    theirs.update(*rows(10))
    ours.crop(0)
    theirs.crop(0)
    assert ours.get_seq_length() == theirs.get_seq_length()


@each_form
@pytest.mark.parametrize(
    ("method", "argument"),
    [
        ("reorder_cache", torch.tensor([1, 1])),
        ("batch_repeat_interleave", 3),
        ("batch_select_indices", torch.tensor([1])),
    ],
)
def test_batch_changes_equal_those_of_a_dynamic_cache(
    form: str, method: str, argument: Any
) -> None:
    ours, theirs = empty(form), DynamicLayer()
    for layer in (ours, theirs):
        layer.update(*rows(10))
        layer.update(*rows(1, seed=1))
        getattr(layer, method)(argument)
    assert ours.get_seq_length() == theirs.get_seq_length()
    assert_shows(form, (ours.keys, ours.values), theirs)
    new_rows = rows(1, batch=theirs.keys.shape[0], seed=5)
    shown = ours.update(*new_rows)
    theirs.update(*new_rows)
    assert ours.get_seq_length() == theirs.get_seq_length()
    assert_shows(form, shown, theirs)
    assert_shows(form, (ours.keys, ours.values), theirs)
    getattr(empty(form), method)(argument)  # nothing there yet


@each_form
def test_copies_are_independent(form: str) -> None:
    layer, (keys, values) = filled(form), rows(10)
    twin = copy.deepcopy(layer)
    layer.update(*rows(1, seed=1))
    assert twin.get_seq_length() == 10
    twin.update(*rows(1, seed=2))
    for each, seed in ((layer, 1), (twin, 2)):
        for got, old, more in zip(
            (each.keys, each.values), (keys, values), rows(1, seed=seed), strict=True
        ):
            assert torch.equal(got[:, :, :11], torch.cat([old, more], 2))


@each_form
def test_memory_goes_with_the_cache(form: str) -> None:
    gc.disable()  # without help from the cycle collector
    try:
        layer = filled(form)
        buffer = weakref.ref(layer._buffers[0])
        keys, values = layer.update(*rows(1))
        assert keys.santa_layer is layer
        del layer, keys, values
        assert buffer() is None
    finally:
        gc.enable()


@each_form
def test_rows_of_another_kind_are_refused(form: str) -> None:
    layer = filled(form)
    for other in (rows(1, batch=3), rows(1, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"do not fit the cache of \(2, 2, \d+, 16\)"):
            layer.update(*other)
    keys, values = rows(2)
    with pytest.raises(ValueError, match="differ in batch, heads or rows"):
        layer.update(keys, values[:, :, :1])
    assert layer.get_seq_length() == 10


@each_form
@pytest.mark.parametrize("name", ["keys", "values"])
def test_replaced_tensors_are_refused(form: str, name: str) -> None:
    layer = filled(form)
    setattr(layer, name, getattr(layer, name).clone())
    with pytest.raises(RuntimeError, match="replaced from outside"):
        layer.update(*rows(1))
    with pytest.raises(NotImplementedError, match="offloading"):
        layer.offload()


@each_form
def test_inference_mode_and_normal_mode_mix(model: LlamaForCausalLM, form: str) -> None:
    cache, same = new(model, form), torch.tensor([0])
    with torch.inference_mode():
        token, cache = prompt_and_cache(model, 12, cache=cache)
    with torch.no_grad():
        model(tokens(1, 1), **with_cache(model, cache))
    with torch.inference_mode():
        model(token, **with_cache(model, cache))
        cache.reorder_cache(same)
    model(tokens(1, 1), **with_cache(model, cache))
    cache.crop(-1)
    cache.reorder_cache(same)
    assert cache.get_seq_length() == 14


@each_form
def test_backward_through_the_cache_raises(model: LlamaForCausalLM, form: str) -> None:
    logits = model(tokens(1, 5), **with_cache(model, new(model, form))).logits
    with pytest.raises(RuntimeError, match="backward"):
        logits.sum().backward()
    for index in (0, 1):
        got = filled(form).update(*(row.requires_grad_() for row in rows(1)))[index]
        with pytest.raises(RuntimeError, match="backward"):
            got.sum().backward()


@each_form
@pytest.mark.parametrize("chunks", [(37,), (16, 16, 5), (1,) * 37])
def test_chunked_prefill(model: LlamaForCausalLM, form: str, chunks: tuple[int, ...]) -> None:
    ids, cache = tokens(2, 37), new(model, form)
    with torch.no_grad():
        exact = model(ids).logits[:, -1]
        for part in ids.split(chunks, dim=1):
            logits = model(part, **with_cache(model, cache)).logits[:, -1]
    torch.testing.assert_close(logits, exact, rtol=1e-4, atol=1e-4)
    assert cache.get_seq_length() == 37


@each_form
@pytest.mark.parametrize("through", [pickle.dumps, copy.deepcopy])
def test_copies_of_every_kind_go_on(model: LlamaForCausalLM, form: str, through: Any) -> None:
    """Keys and values stay views of the memory that grows, also where pickle cuts the tie."""
    token, cache = prompt_and_cache(model, 12, batch=2, cache=new(model, form))
    twin = through(cache)
    twin = pickle.loads(twin) if isinstance(twin, bytes) else twin
    logits = []
    for each in (cache, twin):
        each.reorder_cache(torch.tensor([1, 0]))
        each.crop(-2)
        with torch.no_grad():
            logits.append(model(token, **with_cache(model, each)).logits)
    assert torch.equal(*logits)


MIXED = {
    "sliding_window": 8,
    "use_sliding_window": True,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
}


def mixed(form: str, count: int) -> Any:
    """A cache of which one layer has a window of 8, after ``count`` rows."""
    cache = hf.SantaCache(Qwen2Config(**TINY, **MIXED), **FORMS[form])
    feed(cache, count)
    return cache


def feed(cache: Any, count: int) -> None:
    start = int(cache.layers[0].get_seq_length())
    for layer in range(3):
        where = {"cache_position": torch.arange(start, start + count)}
        keys, _ = rows(count, seed=start)
        cache.update(keys, keys + 1, layer, where)  # one size: static windows of 4.57 want that


def lengths(cache: Any) -> list[int]:
    return [int(layer.get_seq_length()) for layer in cache.layers]


@pytest.mark.parametrize("crop", [10, -1])
@each_form
def test_a_crop_that_a_window_cannot_follow_changes_nothing(form: str, crop: int) -> None:
    cache = mixed(form, 12)
    feed(cache, 1)
    before = lengths(cache)
    with pytest.raises((ValueError, NotImplementedError), match=r"layer 1, a .*SlidingWindow"):
        cache.crop(crop)
    assert lengths(cache) == before


@pytest.mark.parametrize(("crop", "left"), [(3, 3), (-2, 3), (50, 5)])
def test_a_crop_within_the_window(crop: int, left: int) -> None:
    cache = mixed("growing", 5)
    cache.crop(crop)
    assert lengths(cache) == [left] * 3
    assert [layer.keys.shape[2] for layer in cache.layers] == [left] * 3


@each_form
@pytest.mark.parametrize("before", [5, 20])
def test_reset_forgets_windows_too(form: str, before: int) -> None:
    cache, fresh = mixed(form, before), mixed(form, 0)
    cache.reset()
    assert lengths(cache) == [0, 0, 0]
    for each in (cache, fresh):
        feed(each, 6)
        feed(each, 1)
    for old, young in zip(cache.layers, fresh.layers, strict=True):
        assert int(old.get_seq_length()) == int(young.get_seq_length()) == 7
        assert torch.equal(old.keys, young.keys)
        assert torch.equal(old.values, young.values)
