"""Compiled decoding steps of whole models: rules 27 and 32 to 34 of the known faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cache_tools import CACHES, at, new_cache
from spies import Graphs, assert_memory_flat
from tiny_models import (
    TINY,
    build,
    generate,
    prompt_and_cache,
    tiny_llama,
    tokens,
    with_cache,
)
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.generation.configuration_utils import CompileConfig

from santa_torch import SantaConfig, hf

pytestmark = pytest.mark.usefixtures("one_thread")  # the same order of sums

every_cache = pytest.mark.parametrize("kind", CACHES)
static_caches = pytest.mark.parametrize("kind", ["static", "santa static"])

START = 20


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(num_hidden_layers=1)  # tracing takes nearly all of the time


def sampled(seed: int, samples: int = 4) -> SantaConfig:
    return SantaConfig("shared", samples=samples, seed=seed)


@torch.no_grad()
def decode(
    model: Any, run: Callable[..., Any], cache: Any, count: int, start: int = START
) -> torch.Tensor:
    """Tokens ``[1, count]`` of steps by ``run`` after an eager prefill of ``start`` tokens."""
    token, cache = prompt_and_cache(model, start, cache=cache)
    # Strides are guarded, and the cut-out token has those of the whole prompt.
    token, chosen = token.clone(memory_format=torch.contiguous_format), []
    for step in range(count):
        out = run(token, **with_cache(model, cache), **at(model, start + step))
        token = out.logits[:, -1:].argmax(-1)
        chosen.append(token)
    return torch.cat(chosen, dim=1)


# ---- by hand -------------------------------------------------------------------------------------


@every_cache
def test_rule32_sixty_four_steps_are_one_graph_or_two(model: LlamaForCausalLM, kind: str) -> None:
    """And no more with another seed: rule 27."""
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    expected = 1 if "static" in kind else 2  # of growing shapes: the first, and any other
    drawn = []
    with hf.use(model, sampled(1)):
        for seed, count in ((1, 64), (2, 5), (3, 5)):
            hf.enable(model, sampled(seed))
            drawn.append(decode(model, compiled, CACHES[kind](model), count))
            assert torch.equal(drawn[-1], decode(model, model, CACHES[kind](model), count))
    assert graphs.frame_count == expected
    assert not torch.equal(drawn[0][:, :5], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])


def test_another_number_of_samples_is_another_graph(model: LlamaForCausalLM) -> None:
    graphs, drawn = Graphs(), []
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    with hf.use(model, sampled(1)):
        for samples in (4, 2, 4):
            hf.enable(model, sampled(1, samples))
            logits = []
            for run in (model, compiled):
                token, cache = prompt_and_cache(model, START, cache=CACHES["santa static"](model))
                with torch.no_grad():
                    out = run(token, **with_cache(model, cache), **at(model, START))
                logits.append(out.logits)
            assert torch.equal(*logits)
            drawn.append(logits[0])
    assert graphs.frame_count == 2
    assert not torch.equal(drawn[0], drawn[1])


@static_caches
def test_rule33_neither_lengths_nor_caches_are_constants_of_the_graph(
    model: LlamaForCausalLM, kind: str
) -> None:
    """Conversations of several lengths, step by step in turns: rule 44 too."""
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    starts = (20, 3, 41)

    @torch.no_grad()
    def in_turns(run: Any) -> list[torch.Tensor]:
        caches = [prompt_and_cache(model, n, cache=CACHES[kind](model))[1] for n in starts]
        return [
            run(token, **with_cache(model, cache), **at(model, start + step)).logits
            for step, token in enumerate(tokens(4, 1, 1))
            for start, cache in zip(starts, caches, strict=True)
        ]

    with hf.use(model, sampled(5)):
        assert all(map(torch.equal, in_turns(compiled), in_turns(model)))
    assert graphs.frame_count == 1


@static_caches
@pytest.mark.parametrize(("start", "expected"), [(3, [0, 1, 5]), (START, [0, 1])])
@torch.no_grad()
def test_rule33_sliding_windows_are_two_graphs_or_three(
    kind: str, start: int, expected: list[int]
) -> None:
    """Not one: both caches have transformers' sliding layer, whose length is a Python number.

    A graph for the first length, one for any other, and one more once the window of 8 is full:
    from a prompt of 3 tokens, that is the step of index 5.
    """
    config = MistralConfig(**{**TINY, "num_hidden_layers": 1}, sliding_window=8)
    model, graphs = build(MistralForCausalLM, config), Graphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    ids, counts = tokens(1, start + 32), []
    with hf.use(model, sampled(5)):
        caches = [new_cache(model, kind) for _ in range(2)]
        for cache in caches:
            model(ids[:, :start], **cache)
        for place in range(start, start + 32):
            token, where = ids[:, place : place + 1], at(model, place)
            ours, eager = (
                run(token, **cache, **where).logits
                for run, cache in zip((compiled, model), caches, strict=True)
            )
            torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)
            counts.append(graphs.frame_count)
    assert [
        step for step in range(32) if counts[step] > (counts[step - 1] if step else 0)
    ] == expected
    assert graphs.frame_count == len(expected)


def test_compiled_steps_in_a_growing_cache_equal_eager(model: LlamaForCausalLM) -> None:
    @torch.no_grad()
    def steps(run: Any, start: int, count: int = 5, reserve: int = 300) -> torch.Tensor:
        cache = hf.SantaCache(model.config, reserve=reserve)
        model(tokens(1, start), **with_cache(model, cache))
        inputs = [tokens(1, 1, seed=step) for step in range(count)]
        return torch.stack([run(ids, **with_cache(model, cache)).logits for ids in inputs])

    graphs = Graphs()
    whole = torch.compile(model, backend=graphs, fullgraph=True)
    with hf.use(model, sampled(5)):
        for start in (20, 254, 41):
            assert torch.equal(steps(whole, start), steps(model, start))
        assert graphs.frame_count == 2  # one length, then any length
        with pytest.raises(torch._dynamo.exc.Unsupported, match="give it reserve="):
            steps(whole, 254, reserve=0)
        torch._dynamo.reset()
        pieces = torch.compile(model, backend="eager")
        assert torch.equal(steps(pieces, 254, reserve=0), steps(model, 254, reserve=0))


def test_a_prefill_can_be_compiled_too(model: LlamaForCausalLM) -> None:
    ids = tokens(2, START)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    where = at(model, 0) and {"cache_position": torch.arange(START)}
    with torch.no_grad(), hf.use(model, sampled(5)):
        logits = []
        for run in (model, compiled):
            cache = hf.SantaCache(model.config, max_cache_len=64)
            cache.early_initialization(2, 2, 16, torch.float32, torch.device("cpu"))
            run(ids, **with_cache(model, cache), **where)
            assert cache.get_seq_length() == START
            step = run(tokens(2, 1), **with_cache(model, cache), **at(model, START))
            logits.append(step.logits)
    torch.testing.assert_close(*logits)


def test_beams_and_other_steps_are_different_graphs(model: LlamaForCausalLM) -> None:
    """Right after a reordering all rows share one seed, in a graph as well."""
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    token = tokens(1, 1).repeat(3, 1)
    with torch.no_grad(), hf.use(model, sampled(5)):
        cache = hf.SantaCache(model.config, max_cache_len=64)
        model(tokens(1, START).repeat(3, 1), **with_cache(model, cache))
        for reordered in (False, True, False, True):
            if reordered:
                cache.reorder_cache(torch.tensor([0, 1, 2]))
            logits = compiled(token, **with_cache(model, cache), **at(model, START)).logits
            cache.crop(-1)
            spread = (logits - logits[:1]).abs().max()
            assert (spread < 1e-5) == reordered


# ---- by generate ---------------------------------------------------------------------------------


def compile_config(backend: Any) -> CompileConfig:
    """What makes ``generate`` compile its steps on a CPU as it does on a GPU."""
    config = CompileConfig(fullgraph=True, mode=None, backend=backend)
    config._compile_all_devices = True
    return config


@pytest.mark.parametrize("kind", ["santa static", "by name"])
def test_generate_with_a_compiled_step(kind: str) -> None:
    model = tiny_llama(num_hidden_layers=1)  # it keeps its compiled step
    ids, graphs = tokens(2, 21), Graphs()
    padded = torch.ones_like(ids)
    padded[0, :5] = 0

    def text(**more: Any) -> torch.Tensor:
        cache = {"cache_implementation": "static"} if kind == "by name" else new_cache(model, kind)
        return generate(model, ids, new=64, attention_mask=padded, **cache, **more)

    with hf.use(model, sampled(1)):
        for seed in (1, 2):
            hf.enable(model, sampled(seed))
            assert torch.equal(text(compile_config=compile_config(graphs)), text())
    assert graphs.frame_count == 1


@pytest.mark.long
def test_generate_with_compiled_chunks() -> None:
    """Where the first forward is a graph as well, and makes the buffers."""
    model = tiny_llama(num_hidden_layers=1)
    ids, kind = tokens(2, 33), "santa static"
    chunks = {"prefill_chunk_size": 8, "new": 5}
    with hf.use(model, sampled(1)):
        eager = generate(model, ids, **chunks, **new_cache(model, kind))
        chunks["compile_config"] = compile_config("aot_eager")
        assert torch.equal(generate(model, ids, **chunks, **new_cache(model, kind)), eager)


def test_inductor(model: LlamaForCausalLM) -> None:
    """Generated code around the operator and the cache: the same text, and the full cache fails."""
    compiled = torch.compile(model, fullgraph=True)
    with hf.use(model, sampled(5)):
        texts = []
        for run in (model, compiled):
            cache = hf.SantaCache(model.config, max_cache_len=START + 8)
            texts.append(decode(model, run, cache, 8))
        assert torch.equal(*texts)
        with torch.no_grad(), pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            compiled(tokens(1, 1), **with_cache(model, cache), **at(model, START + 8))


# ---- rule 34: memory -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("santa", "eager"), ("santa static", "eager"), ("santa static", "compiled")],
)
def test_rule34_a_thousand_steps_are_memory_flat(
    model: LlamaForCausalLM, kind: str, mode: str
) -> None:
    run = model if mode == "eager" else torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad(), hf.use(model, sampled(5)):
        token, cache = prompt_and_cache(model, START, cache=CACHES[kind](model))

        def calls(count: int) -> None:
            for step in range(count):
                hf.enable(model, sampled(step))
                length = int(cache.get_seq_length())
                run(token, **with_cache(model, cache), **at(model, length))
                if length > START + 8:
                    cache.crop(START - length)

        assert_memory_flat(calls)
