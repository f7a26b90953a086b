"""torch.export of an enabled model: exported, saved and loaded, it draws what it drew before."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import DENSE, SAMPLED, tiny_llama, tokens, with_cache
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

from santa_torch import BernoulliConfig, SantaConfig, hf

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects"),
]

ROOM = 80  # rows 64 on find a whole block before them
SKETCHED = replace(SAMPLED, sketch_bits=32, bernoulli=BernoulliConfig(4))


class Step(torch.nn.Module):
    """One step of a model with a static ``SantaCache``, which is part of its state."""

    def __init__(self, model: Any, config: SantaConfig | None = None) -> None:
        super().__init__()
        self.model = model
        self.cache = hf.SantaCache(model.config, config, max_cache_len=ROOM)
        self.cache.early_initialization(1, 2, 16, torch.float32, torch.device("cpu"))
        for index, layer in enumerate(self.cache.layers):
            for name in ("keys", "values", "length"):
                self.register_buffer(f"{name}_{index}", getattr(layer, name), persistent=False)
            if layer.sketch is not None:
                for name in ("blocks", "open_rows", "rows"):
                    held = getattr(layer.sketch, name)
                    self.register_buffer(f"sketch_{name}_{index}", held, persistent=False)

    def forward(self, input_ids: torch.Tensor, cache_position: torch.Tensor) -> torch.Tensor:
        """Logits ``[1, 1, vocabulary]`` of the token ``[1, 1]`` at this position ``[1]``."""
        for layer in self.cache.layers:  # tracing may have advanced the length
            layer.length.copy_(cache_position[0])
            if layer.sketch is not None:
                layer.sketch.rows.copy_(cache_position)
        where = {"position_ids": cache_position[None]}
        if "cache_position" in inspect.signature(self.model.forward).parameters:
            where["cache_position"] = cache_position
        return self.model(input_ids, **with_cache(self.model, self.cache), **where).logits


def with_static_cache(model: Any) -> torch.nn.Module:
    """The module that transformers exports."""
    model.generation_config.cache_implementation = "static"
    model.generation_config.cache_config = {"batch_size": 1, "max_cache_len": ROOM}
    return TorchExportableModuleWithStaticCache(model)


@torch.no_grad()
def run(module: Any) -> torch.Tensor:
    """Logits of seventy steps from an empty cache."""
    return torch.cat(
        [
            module(input_ids=token, cache_position=torch.tensor([step]))
            for step, token in enumerate(tokens(70, 1, 1))
        ]
    )


@pytest.mark.parametrize(
    ("wrap", "config"),
    [(with_static_cache, SAMPLED), (Step, SAMPLED), (partial(Step, config=SKETCHED), SKETCHED)],
    ids=["static", "santa", "sketch"],
)
@pytest.mark.parametrize("strict", [False, True])
def test_export_round_trip_of_a_model(
    wrap: Any, config: SantaConfig, strict: bool, tmp_path: Path
) -> None:
    model = tiny_llama(num_hidden_layers=2)
    model.requires_grad_(False)
    example = {"input_ids": tokens(1, 1), "cache_position": torch.tensor([0])}
    with hf.use(model, config):
        expected = run(wrap(model))
        program = torch.export.export(wrap(model), (), example, strict=strict)
    torch.export.save(program, tmp_path / "step.pt2")
    loaded = torch.export.load(tmp_path / "step.pt2").module()
    assert torch.equal(run(loaded), expected)
    for name, buffer in loaded.named_buffers():  # the seed is not part of the program
        if name.endswith("santa_seed"):
            buffer.fill_(6)
    with hf.use(model, replace(config, seed=6)):
        assert torch.equal(run(loaded), run(wrap(model)))
    with hf.use(model, DENSE):
        assert not torch.equal(run(wrap(model)), expected)
