"""Models inside of PEFT models, compiled modules and other wrappers, and models spread out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from tiny_models import (
    DENSE,
    SAMPLED,
    last_logits,
    prompt_and_cache,
    tiny_llama,
    tokens,
    with_cache,
)

from santa_torch import hf


class Wrapper(torch.nn.Module):
    """What ``DistributedDataParallel`` and its like look like from outside."""

    def __init__(self, **modules: torch.nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


def lora(model: Any) -> Any:
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    return wrapped.eval()


def adapted(model: Any) -> Any:
    """Adapters inside of the transformers model, which stays the outermost."""
    config = peft.LoraConfig(r=2, target_modules=["k_proj"], init_lora_weights=False)
    return peft.inject_adapter_in_model(config, model).eval()


WRAPPERS = {
    "lora": lora,
    "lora of lora": lambda model: Wrapper(module=lora(model)),
    "adapter": adapted,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "module": lambda model: Wrapper(module=model),
    "twice the same": lambda model: Wrapper(actor=Wrapper(module=model), critic=model),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_rule43_wrapped_models(name: str) -> None:
    model = tiny_llama()
    wrapped = WRAPPERS[name](model)
    exact = last_logits(model)
    with hf.use(wrapped, DENSE) as given, hf.record(wrapped) as traffic:
        assert given is wrapped
        assert model.config._attn_implementation == "santa"
        torch.testing.assert_close(last_logits(model), exact, rtol=1e-4, atol=1e-4)
    assert traffic.calls == 3
    assert model.config._attn_implementation == "sdpa"
    hf.enable(wrapped, SAMPLED)
    hf.enable(model, DENSE)  # the same switch
    torch.testing.assert_close(last_logits(model), exact, rtol=1e-4, atol=1e-4)
    hf.disable(wrapped)
    with pytest.raises(ValueError, match="LlamaForCausalLM is not enabled"):
        hf.disable(wrapped)
    with pytest.raises(ValueError, match="LlamaForCausalLM is not enabled"), hf.record(wrapped):
        pass


@torch.no_grad()
def test_lora_weights_take_part() -> None:
    model = tiny_llama()
    wrapped = lora(model)
    token, cache = prompt_and_cache(model, 40)
    with hf.use(wrapped, DENSE):
        with_lora = wrapped(token, **with_cache(model, cache)).logits
        cache.crop(40 if transformers.__version__ < "5" else -1)
        with wrapped.disable_adapter():
            without = wrapped(token, **with_cache(model, cache)).logits
    assert not torch.allclose(with_lora, without, atol=1e-2)


def test_rule43_several_models_are_named() -> None:
    pair = Wrapper(actor=tiny_llama(), critic=Wrapper(inner=tiny_llama()))
    expected = r"Wrapper holds several .*: actor \(Llama.*\), critic\.inner \(LlamaForCausalLM\)"
    for switch in (hf.enable, hf.disable):
        with pytest.raises(ValueError, match=expected):
            switch(pair)
    with pytest.raises(ValueError, match=expected), hf.use(pair):
        pass
    with pytest.raises(ValueError, match=expected), hf.record(pair):
        pass
    with hf.use(pair.critic, DENSE):
        assert pair.critic.inner.config._attn_implementation == "santa"
        assert pair.actor.config._attn_implementation == "sdpa"


# --- device_map ------------------------------------------------------------------------------

MAPS: dict[str, Any] = {
    "cpu": "cpu",
    "auto": "auto",
    "disk": {
        "model.embed_tokens": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.layers.2": "disk",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    },
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", MAPS)
def test_device_maps(name: str, saved: Path, tmp_path: Path) -> None:
    """Layers on disk have their weights on ``meta`` between forwards."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        saved, device_map=MAPS[name], offload_folder=tmp_path, attn_implementation="sdpa"
    ).eval()
    whole = tiny_llama()
    devices = {weight.device.type for weight in model.parameters()}
    assert ("meta" in devices) == (name == "disk")
    for config in (DENSE, SAMPLED):
        with hf.use(model, config), hf.use(whole, config):
            assert torch.equal(last_logits(model), last_logits(whole))
            seeds = [layer.self_attn.santa_seed for layer in model.model.layers]
            assert {seed.device.type for seed in seeds} == {"cpu"}
            cache = hf.SantaCache(model.config)
            model(tokens(1, 9), **with_cache(model, cache))
            assert cache.get_seq_length() == 9
    assert not any(hasattr(layer.self_attn, "santa_seed") for layer in model.model.layers)
