"""``query_rows="all"``: the rows of one forward draw what decoding steps at their places draw."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers
from tiny_models import (
    TINY,
    build,
    generate,
    prompt_and_cache,
    tiny_llama,
    tokens,
    with_cache,
)

from santa_torch import SantaConfig, hf
from santa_torch.config import METHODS
from santa_torch.hf import rows
from santa_torch.hf.attention import attention_forward

ROWS, LENGTH, DIM = 7, 301, 16


def settings(method: str = "shared", **overrides: Any) -> SantaConfig:
    return SantaConfig(
        **{"method": method, "samples": 5, "seed": 3, "query_rows": "all"} | overrides
    )


def inputs(batch: int, queries: int = ROWS, length: int = LENGTH, **options: Any) -> Any:
    """A random layer: q ``[batch, 6, queries, 16]``, k and v ``[batch, 2, length, 16]``."""
    q = 3 * torch.randn(batch, 6, queries, DIM, **options)
    k, v = torch.randn(2, batch, 2, length, DIM, **options)
    return q, k, v


def positions(queries: int = ROWS, length: int = LENGTH) -> torch.Tensor:
    return torch.arange(length - queries, length)[None]


def causal(queries: int = ROWS, length: int = LENGTH, window: int | None = None) -> torch.Tensor:
    """bool ``[1, 1, queries, length]``: the last row attends to everything, or its window."""
    here, there = positions(queries, length)[0][:, None], torch.arange(length)
    mask = there <= here
    if window is not None:
        mask &= there > here - window
    return mask[None, None]


def attend(model: Any, q: Any, k: Any, v: Any, mask: Any, where: Any, **options: Any) -> Any:
    module = model.model.layers[1].self_attn
    options = {"scaling": 0.3, "position_ids": where} | options
    return attention_forward(module, q, k, v, mask, **options)[0]


def steps(model: Any, q: Any, k: Any, v: Any, masks: list[Any], where: Any, **options: Any) -> Any:
    """The same rows one at a time, with the cache as it was then."""
    outs = []
    for i, mask in enumerate(masks):
        seen = k.shape[2] - q.shape[2] + i + 1 if mask is None else mask.shape[3]
        row = q[:, :, i : i + 1]
        at = where[:, i : i + 1]
        outs.append(attend(model, row, k[:, :, :seen], v[:, :, :seen], mask, at, **options))
    return torch.cat(outs, dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("method", METHODS)
def test_a_prompt_without_a_mask(model: Any, method: str, batch: int, dtype: torch.dtype) -> None:
    q, k, v = inputs(batch, LENGTH, dtype=dtype)
    where = torch.arange(LENGTH)[None]
    with hf.use(model, settings(method)):
        together = attend(model, q, k, v, None, where)
        alone = steps(model, q, k, v, [None] * LENGTH, where)
    assert together.shape == (batch, LENGTH, 6, DIM)
    assert together.is_contiguous()
    assert torch.equal(together, alone)


@pytest.mark.parametrize("method", METHODS)
def test_rows_after_a_context(model: Any, method: str) -> None:
    q, k, v = inputs(2)
    with hf.use(model, settings(method)):
        together = attend(model, q, k, v, causal().expand(2, -1, -1, -1), positions())
        assert torch.equal(together, steps(model, q, k, v, [None] * ROWS, positions()))


@pytest.mark.parametrize("method", METHODS)
def test_rule41_left_padded_rows(model: Any, method: str) -> None:
    q, k, v = inputs(2)
    padding = torch.tensor([0, 260])
    mask = causal() & (torch.arange(LENGTH) >= padding[:, None, None, None])
    where = positions() - padding[:, None]
    then = [mask[:, :, i : i + 1, : LENGTH - ROWS + i + 1] for i in range(ROWS)]
    with hf.use(model, settings(method)):
        together = attend(model, q, k, v, mask, where)
        assert torch.equal(together, steps(model, q, k, v, then, where))


@pytest.mark.parametrize("method", METHODS)
def test_rule41_static_caches(model: Any, method: str) -> None:
    q, k, v = inputs(2, length=LENGTH + 50)
    mask = torch.nn.functional.pad(causal(), (0, 50 + 9))  # longer than the cache, as on 4.57
    static = [mask[:, :, i : i + 1, : LENGTH + 50] for i in range(ROWS)]
    with hf.use(model, settings(method)):
        together = attend(model, q, k, v, mask, positions())
        assert torch.equal(together, steps(model, q, k, v, static, positions()))
        growing = steps(model, q, *(t[:, :, :LENGTH] for t in (k, v)), [None] * ROWS, positions())
        assert torch.equal(together, growing)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("window", [9, 280])
def test_rule41_sliding_windows(model: Any, method: str, window: int) -> None:
    q, k, v = inputs(2)
    mask = causal(window=window)
    masks = [mask[:, :, i : i + 1] for i in range(ROWS)]
    with hf.use(model, settings(method)):
        together = attend(model, q, k, v, mask, positions(), sliding_window=window)
        same = steps(model, q, k, v, masks, positions(), sliding_window=window)
        assert torch.equal(together, same)
        # A cache that has dropped the rows before the window: the same rows are drawn, and their
        # sum may be taken in another order.
        for i in range(ROWS):
            kept = slice(LENGTH - ROWS + i + 1 - window, LENGTH - ROWS + i + 1)
            out = attend(
                model, q[:, :, [i]], k[:, :, kept], v[:, :, kept], None, positions()[:, [i]]
            )
            torch.testing.assert_close(out[:, 0], together[:, i], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [1, 6])
def test_rule41_additive_masks_for_each_head(model: Any, heads: int) -> None:
    q, k, v = inputs(2)
    mask = torch.randn(2, heads, ROWS, LENGTH).where(causal(), -torch.inf)
    masks = [mask[:, :, i : i + 1] for i in range(ROWS)]
    with hf.use(model, settings()):
        together = attend(model, q, k, v, mask, positions())
        assert torch.equal(together, steps(model, q, k, v, masks, positions()))


def test_rows_that_attend_to_everything(model: Any) -> None:
    q, k, v = inputs(2, length=ROWS)
    with hf.use(model, settings("dense")):
        everything = attend(model, q, k, v, None, positions(), is_causal=False)
        masked = attend(model, q, k, v, torch.ones(1, 1, ROWS, ROWS).bool(), positions())
        assert torch.equal(everything, masked)
        assert not torch.equal(everything, attend(model, q, k, v, None, positions()))


def test_positions_of_each_sequence_and_of_none(model: Any) -> None:
    q, k, v = inputs(2)
    mask = causal().expand(2, -1, -1, -1)
    with hf.use(model, settings()):
        told = attend(model, q, k, v, mask, positions())
        assert torch.equal(told, attend(model, q, k, v, mask, positions().expand(2, -1)))
        assert torch.equal(told, attend(model, q, k, v, mask, None))
        assert not torch.equal(told, attend(model, q, k, v, mask, positions() + 1))
        with pytest.raises(ValueError, match=r"rows = 7, got \(1, 6\)"):
            attend(model, q, k, v, mask, positions()[:, 1:])


def test_blocks_bound_the_scratch_memory(
    model: Any, calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def counts() -> list[int]:
        return [len(call["q"]) for call in calls]

    q, k, v = inputs(2)
    with hf.use(model, settings()):
        whole = attend(model, q, k, v, causal(), positions())
        assert counts() == [ROWS, ROWS]
        monkeypatch.setattr(rows, "SCRATCH_BYTES", 3 * 4 * LENGTH * (6 + 2))
        assert torch.equal(attend(model, q, k, v, causal(), positions()), whole)
        monkeypatch.setattr(rows, "SCRATCH_BYTES", 1)
        assert torch.equal(attend(model, q, k, v, causal(), positions()), whole)
    assert counts() == [7, 7] + 2 * [3, 3, 1] + 14 * [1]


def test_rule45_heads_of_a_rank_are_counted_globally(
    model: Any, calls: list[dict[str, Any]]
) -> None:
    q, k, v = inputs(2)
    with hf.use(model, settings()):
        model.model.layers[1].self_attn.santa_binding.rank = 3
        attend(model, q, k, v, causal(), positions())
    assert [call["head_offset"] for call in calls] == [3 * 6] * 2


def test_keys_are_not_copied(model: Any, calls: list[dict[str, Any]]) -> None:
    q, k, v = inputs(1)
    with hf.use(model, settings()):
        attend(model, q, k, v, causal(), positions())
    (call,) = calls
    seen = call["k"], call["v"]
    assert [tensor.data_ptr() for tensor in seen] == [k.data_ptr(), v.data_ptr()]
    assert [tensor.stride(0) for tensor in seen] == [0, 0]


# --- whole models ----------------------------------------------------------------------------


class RowwiseLinear(torch.nn.Linear):
    """One row at a time: the rounding of a matrix product depends on the number of its rows."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = [
            torch.nn.functional.linear(row, self.weight, self.bias) for row in input.flatten(0, -2)
        ]
        return torch.stack(rows).unflatten(0, input.shape[:-1])


def rowwise(model: Any) -> Any:
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = RowwiseLinear
    return model


def caches(model: Any) -> dict[str, Any]:
    return {
        "dynamic": transformers.DynamicCache(config=model.config),
        "santa": hf.SantaCache(model.config),
        "static": transformers.StaticCache(config=model.config, max_cache_len=64),
    }


@pytest.mark.parametrize("kind", ["dynamic", "santa", "static"])
@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_a_teacher_forced_forward_draws_what_decoding_draws(method: str, kind: str) -> None:
    model = rowwise(tiny_llama(num_hidden_layers=2))
    ids = tokens(1, 24)

    def forward(*sizes: int) -> torch.Tensor:
        cache = with_cache(model, caches(model)[kind])
        return torch.cat([model(part, **cache).logits for part in ids.split(sizes, 1)], dim=1)

    with hf.use(model, settings(method, samples=3)):
        assert torch.equal(forward(24), forward(*[1] * 24))
        assert torch.equal(forward(10, 1, 6, 7), forward(24))


@torch.no_grad()
def test_a_teacher_forced_forward_with_a_sliding_window() -> None:
    config = transformers.MistralConfig(**TINY, sliding_window=8)
    model = rowwise(build(transformers.MistralForCausalLM, config))
    ids = tokens(1, 24)
    with hf.use(model, settings(samples=3)):
        together = model(ids, use_cache=False).logits
        cache = with_cache(model, hf.SantaCache(model.config))
        alone = torch.cat([model(part, **cache).logits for part in ids.split(1, 1)], dim=1)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["dense", "systematic", "shared"])
def test_rule44_assisted_decoding_writes_the_same_text(model: Any, method: str) -> None:
    ids = tokens(1, 8).repeat(1, 4)
    assistant = tiny_llama(num_hidden_layers=1)
    free = {"new": 24, "min_new_tokens": None}  # which assisted decoding refuses on 4.57
    accepted = []
    with hf.use(model, settings(method)):
        expected = generate(model, ids, **free)
        for extra in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": assistant}):
            for cache in (None, hf.SantaCache(model.config)):
                given = {} if cache is None else with_cache(model, cache)
                text = generate(model, ids, **free, **extra, **given)
                accepted.append(torch.equal(text, expected))
    assert accepted == [True] * 4
    if method != "dense":  # under the default, drafts change the text
        with hf.use(model, settings(method, query_rows="decode")):
            plain = generate(model, ids, **free)
            drafted = generate(model, ids, **free, prompt_lookup_num_tokens=4)
        assert not torch.equal(plain, drafted)


def test_generation_without_a_cache_writes_the_same_text(model: Any) -> None:
    """Each step computes the whole text anew, and draws for every row what it drew before."""
    ids = tokens(1, 20)
    with hf.use(model, settings()):
        assert torch.equal(generate(model, ids, use_cache=False), generate(model, ids))


@torch.no_grad()
def test_compiled_rows_equal_eager_ones() -> None:
    """The rows that verify a draft, in a cache of a fixed size: one graph, any seed."""
    from torch._dynamo.testing import CompileCounterWithBackend

    model = tiny_llama(num_hidden_layers=2)
    torch._dynamo.reset()
    torch.set_num_threads(1)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)

    def verify(run: Any) -> torch.Tensor:
        cache = with_cache(model, hf.SantaCache(model.config, max_cache_len=64))
        model(tokens(1, 20), **cache)
        where = {"position_ids": torch.arange(20, 25)[None]}
        if "cache_position" in inspect.signature(model.forward).parameters:
            where["cache_position"] = where["position_ids"][0]
        return run(tokens(1, 5, seed=1), **cache, **where).logits

    for seed in (1, 2):
        with hf.use(model, settings(samples=3, seed=seed)):
            assert torch.equal(verify(compiled), verify(model))
    assert counter.frame_count == 1


def test_rows_of_decode_stay_exact(model: Any) -> None:
    ids = tokens(2, 20)
    exact = model(ids).logits
    with hf.use(model, settings()):
        assert not torch.allclose(model(ids).logits, exact, atol=1e-3)
    with hf.use(model, settings(query_rows="decode")):
        assert torch.equal(model(ids).logits, exact)
    with hf.use(model, settings("dense")):
        torch.testing.assert_close(model(ids).logits, exact, rtol=1e-4, atol=1e-4)


def test_record_counts_each_row_as_a_step(model: Any) -> None:
    ids = tokens(1, 20)
    row_bytes = 2 * DIM * 4
    with hf.use(model, settings("dense", layers=[0, 2])), hf.record(model) as traffic:
        model(ids)
    assert traffic.calls == 3 * 20  # the layer left out counts in the same way
    assert traffic.bytes_read == traffic.bytes_total == 3 * 2 * sum(range(1, 21)) * row_bytes
    assert traffic.value_rows == sum(range(1, 21)) / 20
    with hf.use(model, settings(query_rows="decode")), hf.record(model) as traffic:
        model(ids)
    assert traffic.calls == traffic.bytes_read == traffic.value_rows == 0


def test_a_backward_pass_raises(model: Any) -> None:
    with hf.use(model, settings()), pytest.raises(RuntimeError, match="backward"):
        model(tokens(1, 9), use_cache=False).logits.sum().backward()


# --- dense_below -----------------------------------------------------------------------------


@torch.no_grad()
def test_short_contexts_are_exact(model: Any) -> None:
    def step(rows: int, below: int, cache: Any = None) -> torch.Tensor:
        with hf.use(model, SantaConfig(samples=2, dense_below=below)):
            token, cache = prompt_and_cache(model, rows, cache=cache)
            return model(token, **with_cache(model, cache)).logits

    token, cache = prompt_and_cache(model, 30)
    exact = model(token, **with_cache(model, cache)).logits
    assert torch.equal(step(30, below=32), exact)  # 31 rows with the new one
    sampled = step(30, below=31)
    assert not torch.equal(sampled, exact)
    assert torch.equal(sampled, step(30, below=0))
    for capacity, samples in ((48, False), (49, True)):
        static = transformers.StaticCache(config=model.config, max_cache_len=capacity)
        out = step(30, below=49, cache=static)
        assert torch.allclose(out, exact, atol=1e-4) is not samples


@torch.no_grad()
def test_a_compiled_step_compiles_once_more_at_the_limit() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    model = tiny_llama(num_hidden_layers=1)
    torch._dynamo.reset()
    torch.set_num_threads(1)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)

    def steps(run: Any) -> torch.Tensor:
        cache = hf.SantaCache(model.config, reserve=300)
        model(tokens(1, 20), **with_cache(model, cache))
        inputs = [tokens(1, 1, seed=step) for step in range(12)]
        return torch.cat([run(ids, **with_cache(model, cache)).logits for ids in inputs])

    graphs = []
    for below in (0, 26):
        with hf.use(model, SantaConfig(samples=2, dense_below=below)):
            torch._dynamo.reset()
            counter.clear()
            torch.testing.assert_close(steps(compiled), steps(model), rtol=1e-4, atol=1e-4)
            graphs.append(counter.frame_count)
    assert graphs == [1, 2]
