"""Layers of SantaCache that keep a sketch of their keys: it follows whatever happens to them."""

from __future__ import annotations

import copy
import pickle
import weakref
from typing import Any

import pytest
import torch
from cache_tools import rows
from tiny_models import TINY
from transformers import LlamaConfig, MistralConfig, Qwen2Config

from santa_torch import SantaConfig, hf
from santa_torch.hf.layer_growing import SantaLayer
from santa_torch.hf.layer_static import SantaStaticLayer

pytestmark = pytest.mark.usefixtures("one_thread")

ROOM = 400
FORMS: dict[str, dict[str, int]] = {"growing": {}, "static": {"max_cache_len": ROOM}}
each_form = pytest.mark.parametrize("form", FORMS)


def empty(form: str, bits: int = 32) -> Any:
    """A layer without rows."""
    if form == "growing":
        return SantaLayer(sketch_bits=bits)
    return SantaStaticLayer(ROOM, sketch_bits=bits)


def assert_follows(layer: Any) -> None:
    """The sketch holds the layer's rows: blocks of 64, then those of the open block."""
    length, sketch = int(layer.get_seq_length()), layer.sketch
    batch = layer.keys.shape[0]
    assert sketch.rows.tolist() == [length] * batch
    packed = length // 64 * 64
    blocks = sketch.blocks.transpose(3, 4).flatten(2, 3)  # [B, Hkv, C * 64, D]
    assert torch.equal(blocks[:, :, :packed], layer.keys[:, :, :packed])
    rest = layer.keys[:, :, packed:length]
    assert torch.equal(sketch.open_rows[:, :, : length - packed], rest)


@each_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sketch_follows_every_change_of_the_rows(form: str, dtype: torch.dtype) -> None:
    layer = empty(form, 32 if dtype == torch.float32 else 16)
    for step, count in enumerate((70, 1, 57, 1, 1, 0, 100)):  # to 128 exactly, and beyond
        layer.update(*rows(count, seed=step, dtype=dtype))
        assert_follows(layer)
    changes = [
        lambda: layer.crop(-3),
        lambda: layer.crop(200),  # into a block that was whole
        lambda: layer.crop(-9),
        lambda: layer.reorder_cache(torch.tensor([1, 0])),
        lambda: layer.reorder_cache(torch.tensor([1, 1])),
        lambda: layer.batch_repeat_interleave(2),
        lambda: layer.batch_select_indices(torch.tensor([0, 3, 2])),
        lambda: layer.batch_select_indices(torch.tensor([True, False, True])),
        lambda: layer.crop(128),
        lambda: layer.crop(1),
        lambda: layer.reset(),
    ]
    for step, change in enumerate(changes):
        change()
        assert_follows(layer)
        layer.update(*rows(2, batch=layer.keys.shape[0], seed=50 + step, dtype=dtype))
        assert_follows(layer)
    layer.reset()
    layer.update(*rows(65, batch=5, seed=99, dtype=dtype))
    assert_follows(layer)


def test_the_sketch_grows_with_the_layer() -> None:
    layer = SantaLayer(reserve=10, sketch_bits=32)
    layer.update(*rows(250))
    capacities = set()
    for step in range(300):
        layer.update(*rows(1, seed=step))
        capacities.add((layer.capacity, layer.sketch.blocks.shape[2]))
    assert_follows(layer)
    assert capacities == {(256, 4), (512, 8), (768, 12)}


def test_it_grows_outside_of_graphs() -> None:
    torch._dynamo.reset()
    layer = SantaLayer(sketch_bits=32)
    layer.update(*rows(255))
    step = torch.compile(lambda *new: layer.update(*new)[0].sum(), backend="eager")
    for seed in range(3):
        step(*rows(1, seed=seed))
        assert_follows(layer)
    assert layer.sketch.capacity == 512
    torch._dynamo.reset()


@each_form
@pytest.mark.parametrize("through", [pickle.dumps, copy.deepcopy])
def test_copies_have_sketches_of_their_own(form: str, through: Any) -> None:
    layer = empty(form)
    layer.update(*rows(130))
    twin = through(layer)
    twin = pickle.loads(twin) if isinstance(twin, bytes) else twin
    layer.update(*rows(70, seed=1))
    twin.update(*rows(3, seed=2))
    for each, length in ((layer, 200), (twin, 133)):
        assert each.get_seq_length() == length
        assert_follows(each)


@each_form
def test_inference_mode_and_normal_mode_mix(form: str) -> None:
    layer = empty(form)
    with torch.inference_mode():
        layer.update(*rows(130))
    layer.update(*rows(1))
    with torch.inference_mode():
        layer.update(*rows(200))
        layer.crop(-50)
        layer.reorder_cache(torch.tensor([1, 0]))
    layer.update(*(row.requires_grad_() for row in rows(1)))
    layer.crop(-1)
    layer.reorder_cache(torch.tensor([1, 0]))
    assert_follows(layer)


def test_nothing_of_a_static_sketch_moves() -> None:
    layer = empty("static")
    layer.update(*rows(100))
    held = (layer.sketch.blocks, layer.sketch.open_rows, layer.sketch.rows)
    start = [tensor.data_ptr() for tensor in held]
    for change in (
        lambda: layer.update(*rows(100)),
        lambda: layer.crop(-80),
        lambda: layer.reorder_cache(torch.tensor([1, 0])),
        lambda: layer.batch_select_indices(torch.tensor([1, 1])),
        lambda: layer.reset(),
        lambda: layer.update(*rows(4)),
    ):
        change()
        held = (layer.sketch.blocks, layer.sketch.open_rows, layer.sketch.rows)
        assert [tensor.data_ptr() for tensor in held] == start


@each_form
def test_memory_goes_with_the_cache(form: str) -> None:
    layer = empty(form)
    keys, _ = layer.update(*rows(100))
    sketch = weakref.ref(layer.sketch)
    assert keys.santa_layer.sketch is sketch()
    del layer, keys, _
    assert sketch() is None


@each_form
def test_bytes_count_the_sketch(form: str) -> None:
    layer = empty(form)
    assert layer.nbytes == layer.nbytes_reserved == 0
    layer.update(*rows(100))
    assert layer.nbytes == 2 * 2 * 100 * (16 + 24 + 16) * 4
    buffers = sum(buffer.nbytes for buffer in layer._buffers)
    assert layer.nbytes_reserved == buffers + layer.sketch.nbytes
    assert layer.sketch.blocks.shape == (2, 2, 4 if form == "growing" else 6, 16, 64)
    assert layer.sketch.nbytes > layer.sketch.blocks.nbytes


@each_form
def test_bits_that_do_not_fit_the_keys_are_refused_before_anything_is_kept(form: str) -> None:
    for bits, dtype in ((16, torch.float32), (32, torch.bfloat16)):
        layer = empty(form, bits)
        with pytest.raises(ValueError, match=f"{bits}"):
            layer.update(*rows(3, dtype=dtype))
        assert layer._buffers is None
        assert layer.get_seq_length() == 0
    layer = empty(form)
    layer.update(*rows(3))
    layer.reset()
    with pytest.raises(ValueError, match="32"):
        layer.update(*rows(3, dtype=torch.bfloat16))
    assert layer.sketch is None


@each_form
def test_layers_that_are_not_selected_keep_none(form: str) -> None:
    config = SantaConfig(samples=4, layers=[0, 2], sketch_bits=32)
    cache = hf.SantaCache(LlamaConfig(**TINY), config, **FORMS[form])
    for layer in range(3):
        cache.update(*rows(70), layer)
    assert [layer.sketch is not None for layer in cache.layers] == [True, False, True]
    used = [layer.nbytes for layer in cache.layers]
    assert used[1] == 2 * 2 * 70 * (16 + 24) * 4
    assert cache.nbytes == sum(used)


@pytest.mark.parametrize("form", FORMS)
def test_windows_keep_none_and_a_model_of_windows_alone_is_refused(form: str) -> None:
    mixed = ["sliding_attention", "full_attention", "sliding_attention"]
    window = {"sliding_window": 8, "use_sliding_window": True, "layer_types": mixed}
    config = SantaConfig(samples=4, sketch_bits=32)
    cache = hf.SantaCache(Qwen2Config(**TINY, **window), config, **FORMS[form])
    for layer in range(3):
        cache.update(*(2 * [rows(70)[0]]), layer)
    assert [hasattr(layer, "sketch") for layer in cache.layers] == [False, True, False]
    assert_follows(cache.layers[1])
    with pytest.raises(ValueError, match=r"sketch_bits=32: no layer of MistralConfig that config"):
        hf.SantaCache(MistralConfig(**TINY, sliding_window=8), config, **FORMS[form])
    with pytest.raises(ValueError, match=r"sketch_bits=32: no layer of Qwen2Config that config"):
        hf.SantaCache(
            Qwen2Config(**TINY, **window),
            SantaConfig(samples=4, sketch_bits=32, layers=[0, 2]),
            **FORMS[form],
        )
