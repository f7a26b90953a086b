"""Turning a model's attention to sampling, and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from santa_torch.config import SantaConfig
from santa_torch.hf import holds
from santa_torch.hf.attention import (
    BINDING,
    NAME,
    SEED,
    Binding,
    attention_forward,
    refuse_weights,
)
from santa_torch.hf.cache import SantaCache
from santa_torch.hf.sketches import check_cache
from santa_torch.hf.wrappers import inner_model

_SWITCH = "_santa_switch"

_Model = TypeVar("_Model", bound=torch.nn.Module)


@dataclass
class _Switch:
    """What an enabled model remembers: its settings, and how to go back."""

    config: SantaConfig
    shared_rows: bool
    text_config: Any
    implementation: str | None
    hook: RemovableHandle

    def __setstate__(self, state: dict[str, Any]) -> None:
        register()  # an enabled model that was pickled may come to a process that never did
        self.__dict__.update(state)


def register() -> None:
    """Make the attention implementation ``"santa"`` known to transformers.

    Registers the attention function and, under the same name, transformers' own SDPA mask function:
    without the latter masks would silently be None. Changes no model, may be called again;
    ``enable`` calls it.
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, AttentionMaskInterface()["sdpa"])


def enable(
    model: torch.nn.Module, config: SantaConfig | None = None, *, shared_rows: bool = False
) -> None:
    """Answer the decoding forwards of ``model`` with sampled attention, until ``disable``.

    Enabling an enabled model changes its settings; ``disable`` still returns to the implementation
    found by the first call. One model is to be switched by one thread at a time; once enabled it
    may run in several.

    Parameters
    ----------
    model : torch.nn.Module
        A transformers decoder whose attention goes through ``AttentionInterface``, or a module
        around one (PEFT, ``torch.compile``, ``DistributedDataParallel``). Of a multi-modal model,
        the text part is switched.
    config : SantaConfig, optional
        Default ``SantaConfig()``.
    shared_rows : bool
        Whether all rows of a batch draw with the seed itself. By default row 0 does and each
        further row has a seed derived from it, so that ``num_return_sequences`` gives independent
        estimates. In beam search with a ``SantaCache`` all rows share the seed either way, the
        beams of different prompts in one batch too: common random numbers compare beams fairly,
        and the cache cannot tell whose beams they are. Sliding-window layers, and other caches,
        do not tell that there are beams at all.

    Raises
    ------
    ValueError
        Something about the model or the settings cannot be honoured; the model is left as it was.
    """
    config = SantaConfig() if config is None else config
    if not isinstance(config, SantaConfig):
        raise ValueError(f"config must be a SantaConfig, got {type(config).__name__}")
    model = inner_model(model)
    text_config = model.config.get_text_config(decoder=True)
    modules = _attention_modules(model, text_config)
    _check_supported(model, text_config, modules, config)
    rank = _tensor_parallel_rank(model)  # may fail, so before anything is switched

    implementation = _switch_implementation(model, text_config)
    before: _Switch | None = model.__dict__.get(_SWITCH)
    hook = (
        model.register_forward_pre_hook(_before_forward, with_kwargs=True)
        if before is None
        else before.hook
    )
    model.__dict__[_SWITCH] = _Switch(config, shared_rows, text_config, implementation, hook)
    for module in modules:
        _bind(module, config, shared_rows, rank)


def disable(model: torch.nn.Module) -> None:
    """Return ``model`` to the attention implementation that it had before ``enable``.

    Parameters
    ----------
    model : torch.nn.Module
        What was enabled, or a module around it.

    Raises
    ------
    ValueError
        The model is not enabled.
    """
    model = inner_model(model)
    switch: _Switch | None = model.__dict__.get(_SWITCH)
    if switch is None:
        raise ValueError(f"model: {type(model).__name__} is not enabled; nothing to disable")
    for module in model.modules():
        if BINDING in module.__dict__:
            delattr(module, BINDING)
            delattr(module, SEED)
    switch.hook.remove()
    del model.__dict__[_SWITCH]
    holds.release(switch.text_config, model, switch.implementation)


@contextmanager
def use(
    model: _Model, config: SantaConfig | None = None, *, shared_rows: bool = False
) -> Iterator[_Model]:
    """``enable`` inside a ``with`` block; afterwards the model is as it was before.

    May be nested: leaving an inner block returns to the settings of the outer one.

    Parameters
    ----------
    model, config, shared_rows
        As for ``enable``.

    Yields
    ------
    torch.nn.Module
        ``model``, the wrapper if it is one.
    """
    inner = inner_model(model)
    outer: _Switch | None = inner.__dict__.get(_SWITCH)
    before = None if outer is None else (outer.config, outer.shared_rows)
    enable(inner, config, shared_rows=shared_rows)
    try:
        yield model
    finally:
        if before is not None:
            enable(inner, before[0], shared_rows=before[1])
        elif _SWITCH in inner.__dict__:  # the block may have disabled the model itself
            disable(inner)


def _before_forward(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse what the attention function would not hear of.

    Some models (GPT-2, OPT) do not pass on that weights are asked for.
    """
    switch: _Switch = getattr(model, _SWITCH)
    found = switch.text_config._attn_implementation
    if found != NAME:
        raise ValueError(
            f"{type(model).__name__}: the attention implementation was changed to {found!r} while "
            "santa_torch is enabled; call santa_torch.hf.disable(model) before"
        )
    refuse_weights(kwargs)
    for name in ("past_key_values", "cache"):  # before and since transformers 5
        check_cache(switch.config, kwargs.get(name), SantaCache)


def _attention_modules(model: PreTrainedModel, text_config: Any) -> list[torch.nn.Module]:
    """Attention modules of the text decoder: those that know their layer and its configuration."""
    return [
        module
        for module in model.modules()
        if isinstance(getattr(module, "layer_idx", None), int)
        and getattr(module, "config", None) is text_config
    ]


def _check_supported(
    model: PreTrainedModel,
    text_config: Any,
    modules: list[torch.nn.Module],
    config: SantaConfig,
) -> None:
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"model: {name} is an encoder-decoder; only decoders are supported")
    # Mamba's mixers know their layer too, and would be enabled without a row ever being sampled.
    exchangeable = ("_supports_sdpa", "_supports_attention_backend")
    if not any(getattr(model, flag, False) for flag in exchangeable):
        raise ValueError(
            f"model: {name} does not declare to transformers that its attention can be exchanged"
        )
    if not modules:
        raise ValueError(f"model: {name} has no attention layers that santa_torch recognises")
    bound_elsewhere = _SWITCH not in model.__dict__ and any(
        BINDING in module.__dict__ for module in modules
    )
    if bound_elsewhere:
        raise ValueError(f"model: {name} is part of a model that is already enabled; use that one")
    heads = getattr(text_config, "num_attention_heads", None)
    kv_heads = getattr(text_config, "num_key_value_heads", None) or heads
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        raise ValueError(
            f"model: {heads} query heads are not a multiple of {kv_heads} key/value heads"
        )
    if getattr(model.config, "output_attentions", False):
        raise ValueError("model: config.output_attentions=True; there are no weights to return")
    if not any(getattr(module, "is_causal", True) for module in modules):
        raise ValueError(f"model: {name} attends in both directions; there is nothing to decode")
    _check_independent_of_the_name(name, text_config)
    negative = sorted({m.layer_idx for m in modules if m.layer_idx < 0})  # type: ignore[operator, type-var]
    if negative:
        raise ValueError(f"model: {name} has attention layers without an index, got {negative[0]}")
    known = sorted({int(module.layer_idx) for module in modules})  # type: ignore[arg-type]
    unknown = sorted(set(config.layers or ()) - set(known))
    if unknown:
        raise ValueError(f"layers: {name} has layers {known[0]} to {known[-1]}, got {unknown}")
    _check_sketches(model, config)


def _check_sketches(model: PreTrainedModel, config: SantaConfig) -> None:
    """Refuse sketches where no cache could keep one: every forward would be refused."""
    if config.sketch_bits is None:
        return
    try:
        SantaCache(model.config, config)  # takes no memory yet
    except ValueError as error:
        raise ValueError(
            f"model: {type(model).__name__} has no SantaCache that keeps sketches: {error}"
        ) from error


def _check_independent_of_the_name(name: str, text_config: Any) -> None:
    """Refuse models that attend otherwise under a name that they do not know.

    They compare the name of the attention implementation with "sdpa", and leave out a mask, or the
    rows that go with it, under any other.
    """
    for key in ("index_topk", "index_topk_blocks"):
        if getattr(text_config, key, None) is not None:
            raise ValueError(
                f"model: {name} chooses rows by an indexer ({key}={getattr(text_config, key)}), "
                "and shows its choice to transformers' own attention only"
            )
    shared = getattr(text_config, "num_kv_shared_layers", 0)
    if shared and str(text_config.model_type).startswith("gemma4"):
        raise ValueError(
            f"model: {name} drops query rows before its num_kv_shared_layers={shared} layers "
            "with shared keys, unless attention is transformers' own"
        )


def _switch_implementation(model: PreTrainedModel, text_config: Any) -> str | None:
    """Set ``"santa"`` on the text configuration and on nothing else; returns what was there."""
    register()
    others = [
        (config, config._attn_implementation)
        for config in _configurations(model)
        if config is not text_config
    ]
    before = holds.acquire(text_config, model)
    try:
        model.set_attn_implementation(_request(model, text_config))
    except Exception:
        holds.release(text_config, model, before)
        raise
    finally:
        for config, implementation in others:
            if config._attn_implementation != implementation:
                holds.set_implementation(config, implementation)
    # transformers only warns about classes that bring their own attention, and ignores unknown
    # sub-configurations, so what it did is checked rather than trusted.
    found = text_config._attn_implementation
    if found != NAME:
        holds.release(text_config, model, before)
        raise ValueError(
            f"model: {type(model).__name__} does not take its attention from transformers' "
            f'AttentionInterface: asked for "{NAME}", its configuration says {found!r}'
        )
    return before


def _request(model: PreTrainedModel, text_config: Any) -> str | dict[str, str]:
    """Phrase the request to ``set_attn_implementation``: the text part, nothing else."""
    if text_config is model.config:
        return NAME
    for key in model.config.sub_configs:
        if getattr(model.config, key, None) is text_config:
            return {key: NAME}
    raise ValueError(
        f"model: the text configuration of {type(model).__name__} is none of its "
        f"sub-configurations {sorted(model.config.sub_configs)}"
    )


def _configurations(model: PreTrainedModel) -> list[Any]:
    """Every configuration object of the model, its submodules and their parts, each one once."""
    found: dict[int, Any] = {}
    waiting: list[Any] = [
        part.config for part in model.modules() if isinstance(part, PreTrainedModel)
    ]
    while waiting:
        config = waiting.pop()
        if config is not None and id(config) not in found:
            found[id(config)] = config
            waiting.extend(getattr(config, key, None) for key in config.sub_configs)
    return list(found.values())


def _bind(module: torch.nn.Module, config: SantaConfig, shared_rows: bool, rank: int) -> None:
    """Give one attention module its settings; a seed already there is filled in place."""
    binding = module.__dict__.get(BINDING)
    if binding is None:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        setattr(module, BINDING, Binding(config, layer, shared_rows, rank))
        with torch.inference_mode(False):  # else it could only be filled in inference mode
            seed = torch.zeros(1, dtype=torch.int64, device=_device(module))
        # A buffer follows the module to another device and into copies, and is not saved.
        module.register_buffer(SEED, seed, persistent=False)
    else:
        binding.config, binding.shared_rows, binding.rank = config, shared_rows, rank
    getattr(module, SEED).fill_(config.seed)


def _device(module: torch.nn.Module) -> torch.device:
    """Device of the module's weights; offloading hooks keep theirs on ``meta`` between forwards."""
    device = next((weight.device for weight in module.parameters()), torch.device("cpu"))
    return torch.device("cpu") if device.type == "meta" else device


def _tensor_parallel_rank(model: PreTrainedModel) -> int:
    """Rank within the tensor-parallel group, 0 without one.

    transformers 4.57 has a mesh of one dimension, later ones name theirs.
    """
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None:
        return 0
    names = getattr(mesh, "mesh_dim_names", None) or ()
    return int((mesh["tp"] if "tp" in names else mesh).get_local_rank())
