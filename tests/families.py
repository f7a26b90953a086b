"""One tiny random model for each model family of transformers that the support table names."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from tiny_models import TINY, VOCABULARY, build

#: Where a family has windows, half of the layers keep this many rows: fewer than the tests feed.
WINDOW = 8

_SPECIAL = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
_SHAPE = {**TINY, "num_hidden_layers": 2, **_SPECIAL}
_KINDS = ["sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Family:
    """A row of the support table.

    Attributes
    ----------
    name : str
        As the table calls it.
    make : callable
        Builds the model for an attention implementation.
    exact : str
        The implementation that counts as exact attention.
    """

    name: str
    make: Callable[[str], Any]
    exact: str = "sdpa"

    def build(self) -> Any:
        return self.make(self.exact)


def _plain(name: str, **overrides: Any) -> Callable[[str], Any]:
    """``<name>Config`` and ``<name>ForCausalLM`` with the usual arguments."""

    def make(implementation: str) -> Any:
        text = getattr(transformers, f"{name}TextConfig", None)
        config_class = text or getattr(transformers, f"{name}Config")
        shape = {**_SHAPE, "attn_implementation": implementation, **overrides}
        return build(getattr(transformers, f"{name}ForCausalLM"), config_class(**shape))

    return make


_LLAMA4 = {
    "intermediate_size_mlp": 64,
    "num_local_experts": 2,
    "attention_chunk_size": WINDOW,
    "no_rope_layers": [1, 0],
}


def _deepseek(implementation: str) -> Any:
    """Latent attention: values are wider than a key's part without a position."""
    make = _plain(
        "DeepseekV3",
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        head_dim=8,
        v_head_dim=24,
        num_key_value_heads=6,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    )
    return make(implementation)


def _qwen3_next(implementation: str) -> Any:
    """A layer of linear attention, which has no rows to sample, and one of the usual kind."""
    make = _plain(
        "Qwen3Next",
        layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )
    return make(implementation)


def _gpt2(implementation: str) -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=48,
        n_layer=2,
        n_head=3,
        n_positions=512,
        attn_implementation=implementation,
        **_SPECIAL,
    )
    return build(transformers.GPT2LMHeadModel, config)


def _gpt_oss(implementation: str) -> Any:
    model = _plain("GptOss", num_local_experts=4, sliding_window=WINDOW)(implementation)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.copy_(torch.linspace(-1, 3, 6))
    return model


_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def _gemma3_images(implementation: str) -> Any:
    config = transformers.Gemma3Config(
        text_config={**_SHAPE, "sliding_window": WINDOW, "layer_types": _KINDS},
        vision_config=_VISION,
        mm_tokens_per_image=4,
        image_token_index=VOCABULARY - 1,
        **_SPECIAL,
    )
    config._attn_implementation = implementation
    return build(transformers.Gemma3ForConditionalGeneration, config)


def _llava(implementation: str) -> Any:
    config = transformers.LlavaConfig(
        text_config={**_SHAPE, "model_type": "llama"},
        vision_config={**_VISION, "model_type": "clip_vision_model", "projection_dim": 32},
        image_token_index=VOCABULARY - 1,
        **_SPECIAL,
    )
    config._attn_implementation = implementation
    return build(transformers.LlavaForConditionalGeneration, config)


def _qwen2_vl(implementation: str) -> Any:
    text = {key: value for key, value in _SHAPE.items() if key != "head_dim"}
    rope = {"type": "mrope", "rope_type": "default", "mrope_section": [4, 2, 2]}
    config = transformers.Qwen2VLConfig(
        text_config={**text, "hidden_size": 96, "rope_scaling": rope},
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 96, "num_heads": 2},
        image_token_id=VOCABULARY - 1,
        video_token_id=VOCABULARY - 2,
        vision_start_token_id=VOCABULARY - 3,
        vision_end_token_id=VOCABULARY - 4,
        **_SPECIAL,
    )
    config._attn_implementation = implementation
    return build(transformers.Qwen2VLForConditionalGeneration, config)


def _lora(implementation: str) -> Any:
    import peft

    adapters = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(_plain("Llama")(implementation), adapters).eval()


def _offloaded(implementation: str) -> Any:
    """Both layers on disk: their weights are there only during their forward."""
    import accelerate

    model = _plain("Llama")(implementation)
    where = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu"}
    where |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    return accelerate.dispatch_model(model, where, offload_dir=tempfile.mkdtemp())


FAMILIES = [
    Family("Llama", _plain("Llama")),
    Family("Qwen2", _plain("Qwen2")),
    Family("Qwen3", _plain("Qwen3")),
    Family("Mistral, sliding windows", _plain("Mistral", sliding_window=WINDOW)),
    Family("Mixtral", _plain("Mixtral", num_local_experts=2)),
    Family("Phi-3", _plain("Phi3", hidden_size=96)),
    Family("Gemma-2", _plain("Gemma2", sliding_window=WINDOW, attn_logit_softcapping=2.0), "eager"),
    Family("Gemma-3", _plain("Gemma3", sliding_window=WINDOW, layer_types=_KINDS)),
    Family("SmolLM3", _plain("SmolLM3", no_rope_layers=[1, 0])),
    Family("OLMo-2", _plain("Olmo2")),
    Family("Granite", _plain("Granite")),
    Family("GPT-2", _gpt2),
    Family("GPT-NeoX", _plain("GPTNeoX")),
    Family("gpt-oss", _gpt_oss, "eager"),
    Family("Cohere-2", _plain("Cohere2", sliding_window=WINDOW, layer_types=_KINDS)),
    Family("GLM-4", _plain("Glm4")),
    Family("Phi", _plain("Phi")),
    Family("OPT", _plain("OPT", word_embed_proj_dim=48, ffn_dim=64)),
    Family("DeepSeek-V3", _deepseek),
    Family("Llama-4, chunks", _plain("Llama4", **_LLAMA4)),
    Family("Qwen3-Next", _qwen3_next),
    Family("Gemma-3, with images", _gemma3_images),
    Family("LLaVA", _llava),
    Family("Qwen2-VL", _qwen2_vl),
    Family("Llama with LoRA", _lora),
    Family("Llama on disk (`device_map`)", _offloaded),
]
