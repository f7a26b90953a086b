"""Switching models on and off, and what is refused: rules 42 and 43 of the known faults."""

from __future__ import annotations

import ast
import copy
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES
from tiny_models import (
    DENSE,
    SAMPLED,
    TINY,
    VOCABULARY,
    build,
    last_logits,
    prompt_and_cache,
    tiny_llama,
    tokens,
    with_cache,
)
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from santa_torch import SantaConfig, hf
from santa_torch.hf import attention
from santa_torch.hf.attention import attention_forward

# --- rule 42: what cannot be honoured -----------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(
    "argument", ["position_bias", "head_mask", "indices", "block_indices", "sinks"]
)
def test_rule42_unsupported_arguments_are_refused(
    model: LlamaForCausalLM, argument: str, rows: int
) -> None:
    q, kv = torch.randn(1, 6, rows, 16), torch.randn(1, 2, 9, 16)
    module = model.model.layers[0].self_attn
    with hf.use(model, SAMPLED), pytest.raises(ValueError, match=argument):
        AttentionInterface()["santa"](module, q, kv, kv, None, **{argument: torch.ones(6)})


@pytest.mark.long  # a matter of transformers' version more than of this code
def test_rule42_every_keyword_of_transformers_is_known() -> None:
    """What its models pass to attention functions beyond this is used, refused, or harmless."""
    harmless = {
        *("scaling", "dropout", "attention_mask", "query", "key", "value"),  # our own arguments
        *("is_causal", "sliding_window", "position_ids", "softcap", "s_aux"),  # used
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),  # of vision towers
        "deterministic",  # of a backward pass
    }
    used = set()
    for path in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "attention_interface":
                used |= {keyword.arg for keyword in node.keywords if keyword.arg}
    assert used - harmless <= {"output_attentions", *attention._UNSUPPORTED}


@pytest.mark.long
@pytest.mark.skipif(
    transformers.__version__.startswith("4."),
    reason="dozens of models there ask for it to make masks, and bring attention of their own",
)
def test_rule42_models_that_ask_for_the_name_sdpa_are_known() -> None:
    """They may attend otherwise under another name: seen to be harmless, or refused."""
    known = {"falcon", "diffusion_gemma", "gemma4", "gemma4_unified"}
    asked = re.compile(r"_attn_implementation (==|!=|in|not in)[^\n]*sdpa")
    for path in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        if asked.search(path.read_text()) and path.parent.name not in known:
            configuration = path.with_name(path.name.replace("modeling", "configuration"))
            assert "index_topk" in configuration.read_text(), path.parent.name


def test_rule42_models_that_attend_otherwise_under_another_name_are_refused() -> None:
    """Indexers choose rows, and models with shared keys drop them, for known names only."""
    model = tiny_llama(index_topk=4)
    with pytest.raises(ValueError, match=r"chooses rows by an indexer \(index_topk=4\)"):
        hf.enable(model, SAMPLED)
    model = tiny_llama(num_kv_shared_layers=1)
    hf.enable(model, SAMPLED)
    hf.disable(model)
    model.config.model_type = "gemma4_text"
    with pytest.raises(ValueError, match="num_kv_shared_layers=1"):
        hf.enable(model, SAMPLED)
    assert model.config._attn_implementation == "sdpa"


def test_rule42_encoders_are_refused() -> None:
    model = tiny_llama()
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(ValueError, match="attends in both directions"):
        hf.enable(model, SAMPLED)


def test_rule42_layers_without_an_index_are_refused() -> None:
    model = tiny_llama()
    model.model.layers[1].self_attn.layer_idx = -1
    with pytest.raises(ValueError, match="layers without an index, got -1"):
        hf.enable(model, SAMPLED)


def test_other_dtypes_are_refused_before_a_long_prefill() -> None:
    model = tiny_llama().double()
    with (
        hf.use(model, SAMPLED),
        pytest.raises(ValueError, match=r"query must be .* torch\.float64"),
    ):
        model(tokens(1, 5))


@pytest.mark.parametrize("family", ["Llama", "GPT-2", "OPT"])
def test_rule42_output_attentions_is_refused(family: str) -> None:
    """Not all models pass the request on to their attention."""
    (model,) = (each.build() for each in FAMILIES if each.name == family)
    with hf.use(model, SAMPLED), pytest.raises(ValueError, match="output_attentions=True"):
        model(tokens(1, 5), output_attentions=True)
    model(tokens(1, 5), output_attentions=True)


def test_rule42_weights_asked_for_by_the_configuration_are_refused() -> None:
    eager = tiny_llama(attn_implementation="eager", output_attentions=True)
    with pytest.raises(ValueError, match="output_attentions=True"):
        hf.enable(eager, SAMPLED)


def test_rule42_dropout_in_training_is_refused() -> None:
    model = tiny_llama(attention_dropout=0.1)
    token, cache = prompt_and_cache(model, 9)
    with hf.use(model, SAMPLED), torch.no_grad():
        model.train()
        with pytest.raises(ValueError, match=r"dropout=0\.1"):
            model(token, **with_cache(model, cache))


@pytest.mark.parametrize("rows", [1, 5])
def test_rule42_sliding_layers_without_a_position_are_refused(
    model: LlamaForCausalLM, rows: int
) -> None:
    """Of several rows too: said before a long prefill rather than after it."""
    q, kv = torch.randn(1, 6, rows, 16), torch.randn(1, 2, 9, 16)
    module = model.model.layers[0].self_attn
    three = torch.zeros(3, 1, rows, dtype=torch.int64)
    with hf.use(model, SAMPLED):
        for where in (None, three):
            options = {"position_ids": where, "sliding_window": 8}
            with pytest.raises(ValueError, match=r"position_ids=None: .*sliding_window=8"):
                attention_forward(module, q, kv, kv, None, **options)
        with pytest.raises(ValueError, match=r"position_ids .*\(1, 1, 3, 1\)"):
            attention_forward(module, q, kv, kv, None, position_ids=torch.zeros(1, 1, 3, 1))


@torch.no_grad()
def test_layers_that_keep_every_row_need_no_position() -> None:
    """Llama-4 tells no positions: its chunked layers are refused, the others can be sampled."""
    (family,) = (family for family in FAMILIES if family.name == "Llama-4, chunks")
    llama4 = family.build()
    exact = last_logits(llama4)
    with hf.use(llama4, SantaConfig("dense", layers=[1])), hf.record(llama4) as traffic:
        torch.testing.assert_close(last_logits(llama4), exact, rtol=1e-4, atol=1e-4)
    assert traffic.value_rows == 41
    with hf.use(llama4, DENSE), pytest.raises(ValueError, match=r"chunked_attention.*layers="):
        last_logits(llama4)


def test_positions_that_models_tell_in_other_ways(model: LlamaForCausalLM) -> None:
    """Not at all, as ``cache_position``, or before the three of multi-modal rotary positions."""
    q, kv = torch.randn(1, 6, 1, 16), torch.randn(1, 2, 9, 16)
    module = model.model.layers[0].self_attn

    def run(**where: torch.Tensor) -> torch.Tensor:
        return attention_forward(module, q, kv, kv, None, **where)[0]

    with hf.use(model, SAMPLED):
        expected = run(position_ids=torch.tensor([[8]]))
        assert not torch.equal(run(position_ids=torch.tensor([[7]])), expected)
        assert torch.equal(run(), expected)  # the operator counts nine rows
        assert torch.equal(run(cache_position=torch.tensor([8])), expected)
        three = torch.full((3, 1, 1), 4)
        assert torch.equal(run(position_ids=three), expected)
        text = torch.full((1, 1, 1), 7)
        four = run(position_ids=torch.cat([text, three]))
        assert torch.equal(four, run(position_ids=text[0]))


def test_backward_raises_and_training_forward_does_not_sample(model: LlamaForCausalLM) -> None:
    token, cache = prompt_and_cache(model, 9)
    with hf.use(model, SAMPLED):
        logits = model(token, **with_cache(model, cache)).logits
        with pytest.raises(RuntimeError, match="backward"):
            logits.sum().backward()
        model(tokens(1, 9), use_cache=False).logits.sum().backward()  # SDPA's own gradient
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0
    model.zero_grad()


# --- rule 43: switching -------------------------------------------------------------------------


def implementation(model: Any) -> str:
    return model.config._attn_implementation


def test_rule43_enable_and_disable(model: LlamaForCausalLM) -> None:
    hf.enable(model, SAMPLED)
    assert implementation(model) == implementation(model.model) == "santa"
    hf.enable(model, DENSE)  # again: new settings, same way back
    assert implementation(model) == "santa"
    hf.disable(model)
    assert implementation(model) == "sdpa"
    with pytest.raises(ValueError, match="LlamaForCausalLM is not enabled"):
        hf.disable(model)


def test_rule43_use_restores_after_an_exception(model: LlamaForCausalLM) -> None:
    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), hf.use(model, SAMPLED):
        fail()
    assert implementation(model) == "sdpa"
    with hf.use(model, SAMPLED):
        hf.disable(model)
    assert implementation(model) == "sdpa"


def test_rule43_use_restores_whatever_was_there() -> None:
    model = tiny_llama(attn_implementation="eager")
    with hf.use(model, SAMPLED):
        assert implementation(model) == "santa"
    assert implementation(model) == "eager"


def test_rule43_nested_use_returns_to_the_outer_settings(model: LlamaForCausalLM) -> None:
    with hf.use(model, SAMPLED):
        outer = last_logits(model)
        with hf.use(model, DENSE):
            assert not torch.equal(last_logits(model), outer)
        assert torch.equal(last_logits(model), outer)
        with pytest.raises(ValueError, match="layers"), hf.use(model, SantaConfig(layers=[7])):
            pass
        assert torch.equal(last_logits(model), outer)
    assert implementation(model) == "sdpa"


@pytest.mark.parametrize("first_leaves_first", [True, False])
def test_rule43_two_models_share_a_configuration(first_leaves_first: bool) -> None:
    config = LlamaConfig(**TINY)
    one, two = (build(LlamaForCausalLM, config) for _ in range(2))
    assert one.config is two.config
    exact = last_logits(two)
    hf.enable(one, SAMPLED)
    assert not torch.equal(last_logits(one), exact)
    torch.testing.assert_close(last_logits(two), exact)  # not enabled: exact attention
    hf.enable(two, SantaConfig("systematic", samples=4))
    sampled = last_logits(two)
    first, last = (one, two) if first_leaves_first else (two, one)
    expected = last_logits(last)
    hf.disable(first)
    assert implementation(last) == "santa"
    assert torch.equal(last_logits(last), expected)
    torch.testing.assert_close(last_logits(first), exact)
    hf.disable(last)
    assert config._attn_implementation == "sdpa"
    assert not torch.equal(sampled, exact)


def test_rule43_copies_of_enabled_models_are_enabled(model: LlamaForCausalLM) -> None:
    with hf.use(model, SAMPLED):
        twin = copy.deepcopy(model)
        expected = last_logits(model)
    assert torch.equal(last_logits(twin), expected)
    hf.disable(twin)
    assert implementation(twin) == "sdpa"


def test_rule43_switching_leaves_nothing_behind(model: LlamaForCausalLM) -> None:
    import weakref

    from santa_torch.hf import holds

    before = dict(vars(model)), len(weakref.finalize._registry)
    for _ in range(20):
        with hf.use(model, SAMPLED):
            assert holds.is_held(model.config)
    assert (dict(vars(model)), len(weakref.finalize._registry)) == before
    assert not holds.is_held(model.config)


def test_rule43_an_implementation_changed_meanwhile_is_an_error() -> None:
    model = tiny_llama()
    hf.enable(model, SAMPLED)
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="was changed to 'eager'"):
        model(tokens(1, 5))
    hf.disable(model)
    assert model.config._attn_implementation == "sdpa"
    model(tokens(1, 5), output_attentions=False)


def test_rule43_pickled_models_are_enabled_in_a_process_of_their_own(
    model: LlamaForCausalLM, tmp_path: Path
) -> None:
    with hf.use(model, SAMPLED):
        torch.save(model, tmp_path / "model.pt")
    code = (
        "import sys, torch\n"
        "model = torch.load(sys.argv[1], weights_only=False)\n"
        "with torch.no_grad(): model(torch.ones(1, 5, dtype=torch.int64))\n"
        "from santa_torch import hf\n"
        "hf.disable(model)\n"
        "print(model.config._attn_implementation)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "model.pt")], capture_output=True, text=True
    )
    assert result.stdout.strip() == "sdpa", result.stderr


def test_rule43_the_name_without_settings_raises() -> None:
    hf.register()
    model = tiny_llama(attn_implementation="santa")
    with pytest.raises(ValueError, match=r"santa_torch\.hf\.enable"):
        model(tokens(1, 5))
    with hf.use(model, DENSE):
        model(tokens(1, 5))


def test_rule43_models_without_attention_are_refused() -> None:
    """Mamba's mixers have a layer index and a configuration, as attention has."""
    config = transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1)
    mamba = transformers.MambaForCausalLM(config)
    before = mamba.config._attn_implementation
    with pytest.raises(ValueError, match="MambaForCausalLM"):
        hf.enable(mamba)
    assert mamba.config._attn_implementation == before


def test_rule43_the_configuration_is_read_back() -> None:
    config = transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=2)
    bloom = transformers.BloomForCausalLM(config)
    before = implementation(bloom)
    with pytest.raises(ValueError, match="BloomForCausalLM"):
        hf.enable(bloom, SAMPLED)
    assert implementation(bloom) == before


def test_rule43_a_class_that_ignores_the_request_is_refused(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(model), "set_attn_implementation", lambda *a, **k: None)
    with pytest.raises(ValueError, match="its configuration says 'sdpa'"):
        hf.enable(model, SAMPLED)
    assert implementation(model) == "sdpa"
    assert not hasattr(model.model.layers[0].self_attn, "santa_binding")


def test_rule43_an_unreadable_mesh_leaves_the_model_as_it_was(model: LlamaForCausalLM) -> None:
    class Mesh:
        mesh_dim_names = None

        def get_local_rank(self) -> int:
            raise RuntimeError("no process group")

    before = getattr(model, "_device_mesh", None)
    model._device_mesh = Mesh()
    try:
        with pytest.raises(RuntimeError, match="no process group"):
            hf.enable(model, SAMPLED)
    finally:
        model._device_mesh = before
    assert implementation(model) == "sdpa"
    with pytest.raises(ValueError, match="is not enabled"):
        hf.disable(model)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            {"model": torch.nn.Linear(2, 2)},
            "model must be a transformers PreTrainedModel .* Linear",
        ),
        ({"model": "llama"}, "model must be a transformers PreTrainedModel .* str"),
        ({"config": {"samples": 3}}, "config must be a SantaConfig, got dict"),
        ({"config": SantaConfig(layers=[1, 3, 9])}, r"layers: .* layers 0 to 2, got \[3, 9\]"),
    ],
)
def test_rule43_wrong_arguments(model: LlamaForCausalLM, bad: dict[str, Any], message: str) -> None:
    arguments = {"model": model, "config": SAMPLED} | bad
    with pytest.raises(ValueError, match=message):
        hf.enable(**arguments)
    assert implementation(model) == "sdpa"


def test_rule43_encoder_decoders_and_odd_heads_are_refused(model: LlamaForCausalLM) -> None:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4
    )
    with pytest.raises(ValueError, match="encoder-decoder"):
        hf.enable(transformers.T5ForConditionalGeneration(config), SAMPLED)
    odd = tiny_llama()
    odd.config.num_key_value_heads = 4
    with pytest.raises(ValueError, match="6 query heads are not a multiple of 4"):
        hf.enable(odd, SAMPLED)


def test_rule43_part_of_an_enabled_model_is_refused(model: LlamaForCausalLM) -> None:
    with hf.use(model, SAMPLED), pytest.raises(ValueError, match="part of a model"):
        hf.enable(model.model, SAMPLED)
    with hf.use(model.model, DENSE):
        last_logits(model)
    assert implementation(model) == "sdpa"


def test_rule43_importing_patches_nothing() -> None:
    script = (
        "import sys, santa_torch; assert 'transformers' not in sys.modules\n"
        "import santa_torch.hf\n"
        "from transformers import AttentionInterface\n"
        "assert 'santa' not in AttentionInterface().valid_keys()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
