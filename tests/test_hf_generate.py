"""Generation with every kind of cache: greedy, sampling, beams, chunks, turns, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from cache_tools import CACHES, new_cache
from tiny_models import DENSE, SAMPLED, generate, tokens, with_cache
from transformers import LlamaForCausalLM

from santa_torch import SantaConfig, hf

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
]

every_cache = pytest.mark.parametrize("kind", CACHES)
santa_caches = pytest.mark.parametrize("kind", ["santa", "santa static"])

PADDED = tokens(2, 21)
MASK = torch.ones_like(PADDED)
MASK[0, :9] = 0


def seeds(calls: list[dict[str, Any]]) -> list[list[int]]:
    """Seeds of the rows at every call of the operator."""
    return [call["seed"].tolist() for call in calls]


@every_cache
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"attention_mask": MASK},
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2, "attention_mask": MASK},
        {"do_sample": True},
        {"do_sample": True, "num_return_sequences": 3, "attention_mask": MASK},
        {"prefill_chunk_size": 8},
        {"prefill_chunk_size": 8, "attention_mask": MASK},
    ],
    ids=lambda settings: "-".join(settings) or "greedy",
)
def test_rule44_dense_text_is_that_of_sdpa(
    model: LlamaForCausalLM, kind: str, settings: dict[str, Any]
) -> None:
    def text(cache: str) -> torch.Tensor:
        torch.manual_seed(3)
        return generate(model, PADDED, **settings, **new_cache(model, cache))

    exact = text("dynamic")
    with hf.use(model, DENSE):
        assert torch.equal(text(kind), exact)


@every_cache
@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "num_return_sequences": 2}])
def test_sampled_text_does_not_depend_on_the_cache(
    model: LlamaForCausalLM, kind: str, settings: dict[str, Any]
) -> None:
    def text(cache: str) -> torch.Tensor:
        torch.manual_seed(3)
        return generate(model, PADDED, **settings, **new_cache(model, cache))

    with hf.use(model, SAMPLED):
        drawn = text(kind)
        assert torch.equal(drawn, text("dynamic"))
        assert torch.equal(drawn, text(kind))
    with hf.use(model, DENSE):
        assert not torch.equal(drawn, text(kind))


@every_cache
def test_returned_sequences_have_seeds_of_their_own(
    model: LlamaForCausalLM, calls: list[dict[str, Any]], kind: str
) -> None:
    with hf.use(model, SAMPLED):
        sampling = {"do_sample": True, "num_return_sequences": 3}
        generate(model, PADDED, new=3, **sampling, **new_cache(model, kind))
    assert {len(set(row)) for row in seeds(calls)} == {6}
    assert {row[0] for row in seeds(calls)} == {SAMPLED.seed}
    assert len({tuple(row) for row in seeds(calls)}) == 1  # the same at every step


@santa_caches
def test_beams_share_the_seed(
    model: LlamaForCausalLM, calls: list[dict[str, Any]], kind: str
) -> None:
    with hf.use(model, SAMPLED):
        generate(model, PADDED, new=4, num_beams=3, **new_cache(model, kind))
    assert len(calls) == 3 * 3
    assert {tuple(row) for row in seeds(calls)} == {(SAMPLED.seed,)}


@every_cache
@pytest.mark.parametrize("config", [DENSE, SAMPLED], ids=["dense", "sampled"])
def test_turns_of_a_chat(model: LlamaForCausalLM, kind: str, config: SantaConfig) -> None:
    """The next turn continues the cache of the last; its text is that of a fresh cache.

    A fresh cache prefills the earlier answers, exactly, while a used one holds what decoding left:
    with samples, those differ. There a used cache is held against a used DynamicCache.
    """

    def conversation(fresh: bool, cache: str) -> torch.Tensor:
        kept = new_cache(model, cache)
        ids = tokens(1, 20)
        for turn in range(3):
            answer = generate(model, ids, new=5, **(new_cache(model, cache) if fresh else kept))
            ids = torch.cat([ids, answer, tokens(1, 8, seed=turn + 1)], dim=1)
        return ids

    with hf.use(model, config):
        other = conversation(config is DENSE, kind if config is DENSE else "dynamic")
        assert torch.equal(conversation(False, kind), other)


def run_alone(model: Any, kind: str, turn: int) -> list[torch.Tensor]:
    """Logits of six steps of the conversation with this number."""
    return list(steps(model, kind, turn))


@torch.no_grad()
def steps(model: Any, kind: str, turn: int) -> Iterator[torch.Tensor]:
    cache = CACHES[kind](model)
    model(tokens(1, 20 + turn, seed=turn), **with_cache(model, cache))
    for token in tokens(1, 6, seed=turn + 10).split(1, dim=1):
        yield model(token, **with_cache(model, cache)).logits


@every_cache
def test_rule44_two_caches_interleaved_draw_what_they_draw_apart(
    model: LlamaForCausalLM, kind: str
) -> None:
    with hf.use(model, SAMPLED):
        apart = [run_alone(model, kind, turn) for turn in (1, 2)]
        together = list(zip(*(steps(model, kind, turn) for turn in (1, 2)), strict=True))
    for turn in range(2):
        assert all(map(torch.equal, apart[turn], [pair[turn] for pair in together]))
    assert not torch.equal(apart[0][0], apart[1][0])


@every_cache
def test_rule44_two_caches_in_two_threads_draw_what_they_draw_apart(
    model: LlamaForCausalLM, kind: str
) -> None:
    turns = [1, 2, 3, 4]
    with hf.use(model, SAMPLED):
        apart = [run_alone(model, kind, turn) for turn in turns]
        with ThreadPoolExecutor(2) as pool:
            for _ in range(3):
                together = list(pool.map(lambda turn: run_alone(model, kind, turn), turns))
                for alone, other in zip(apart, together, strict=True):
                    assert all(map(torch.equal, alone, other))


@pytest.mark.parametrize("kind", ["dynamic", "santa", "santa static"])
def test_rule44_prompt_lookup_crops_what_it_rejects(model: LlamaForCausalLM, kind: str) -> None:
    ids = tokens(1, 8).repeat(1, 4)
    with hf.use(model, DENSE):
        exact = generate(model, ids, new=16)
        arguments = {"new": 16, "prompt_lookup_num_tokens": 4, **new_cache(model, kind)}
        if kind == "santa static" and not hasattr(hf.SantaCache, "get_max_length"):
            with pytest.raises(ValueError, match="not supported with Static cache"):
                generate(model, ids, **arguments)  # transformers 4 says so
        else:
            assert torch.equal(generate(model, ids, **arguments), exact)
