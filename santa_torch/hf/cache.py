"""A transformers cache that appends in place.

``DynamicCache`` concatenates the whole cache at every step, which costs as much memory traffic as
exact attention itself. Here each layer owns its memory: appending copies the new rows and nothing
else, and attention reads views. ``layer_growing.py`` has the layer that grows, ``layer_static.py``
the one of a fixed size.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from santa_torch.config import SantaConfig
from santa_torch.hf.layer_common import CROP_ZERO_KEEPS_ALL, SantaLayerBase
from santa_torch.hf.layer_growing import SantaLayer
from santa_torch.hf.layer_static import SantaStaticLayer


class SantaCache(Cache):
    """A cache for ``model.generate(past_key_values=...)`` that appends without copying itself.

    For inference: a backward pass through it raises. Sliding-window layers keep transformers' own
    layers, whose rows are bounded by the window.

    Without ``max_cache_len`` it grows. Under ``torch.compile`` give ``reserve``: steps then compile
    twice for a capacity, for the first length and for all others (once more for a buffer that is
    full to the last row). Growing beyond the reserve happens outside of graphs. Without
    ``fullgraph=True`` the results stay the same, but torch compiles anew and may give up and run
    eagerly; with it, torch raises and names ``reserve``.

    With ``max_cache_len`` its shapes never change and lengths live in tensors: compiled steps and
    ``torch.export`` use one graph for all lengths. Attention sees the whole capacity behind a mask.
    A full cache raises a ``ValueError``, and the ``IndexError`` or ``RuntimeError`` of torch's
    ``index_copy`` where the length cannot be read beforehand (in a graph, on a GPU). Nothing is
    written past the end, but such a graph may have advanced some layers: ``reset`` the cache then.
    To compile the first forward too, call ``early_initialization``. A module for ``torch.export``
    does that, registers ``keys``, ``values`` and ``length`` of the layers as buffers, and begins by
    copying the position that it is given into each ``length``, which tracing may have advanced.
    With sketches, ``blocks``, ``open_rows`` and ``rows`` of each ``sketch`` are registered too, and
    ``rows`` gets the position as well.

    Parameters
    ----------
    model_config : transformers.PretrainedConfig
        ``model.config``.
    config : SantaConfig, optional
        Kept as ``santa_config``. With ``sketch_bits``, each full-attention layer that it selects
        keeps a ``KeySketch`` of its keys, half as much memory again. Sliding-window layers keep
        none: their rows are few, and are scored from the keys.
    max_cache_len : int, optional
        Rows to hold at most: the static form.
    reserve : int
        Rows of the growing form to make room for at the first append, where the final length is
        known.

    Raises
    ------
    ValueError
        An argument has the wrong type or value, or the model has layers of another kind (linear
        attention, shared keys), or none that could keep the sketch that ``config`` asks for.

    Examples
    --------
    >>> cache = SantaCache(model.config)                                   # doctest: +SKIP
    >>> model.generate(**inputs, past_key_values=cache)                    # doctest: +SKIP
    """

    def __init__(
        self,
        model_config: PretrainedConfig,
        config: SantaConfig | None = None,
        *,
        max_cache_len: int | None = None,
        reserve: int = 0,
    ) -> None:
        if not isinstance(model_config, PretrainedConfig):
            raise ValueError(
                "model_config must be a transformers configuration (model.config), got "
                f"{type(model_config).__name__}"
            )
        if config is not None and not isinstance(config, SantaConfig):
            raise ValueError(f"config must be a SantaConfig, got {type(config).__name__}")
        _check_rows("reserve", reserve, 0)
        if max_cache_len is not None:
            _check_rows("max_cache_len", max_cache_len, 1)
            if reserve:
                raise ValueError(
                    f"reserve={reserve} is for a cache that grows; max_cache_len={max_cache_len} "
                    "fixes its size"
                )
        self.santa_config = config
        super().__init__(layers=_make_layers(model_config, config, reserve, max_cache_len))

    def crop(self, max_length: int) -> None:
        """Keep the first ``max_length`` rows of each layer, or drop the last ``-max_length``.

        0 keeps nothing on transformers 4 and everything on transformers 5.

        Raises
        ------
        ValueError
            A sliding-window layer has dropped rows that it would need again. No layer has changed.
        """
        self._require("crop")
        for index, layer in enumerate(self.layers):
            if not _can_go_back(layer):
                raise ValueError(
                    f"SantaCache: layer {index}, a {type(layer).__name__}, cannot be cropped: rows "
                    "that it would need again have left its window"
                )
        layers: list[Any] = self.layers
        for layer in layers:
            layer.crop(max_length if _counts_rows_kept(layer) else _rows_to_drop(layer, max_length))

    def reset(self) -> None:
        """Forget all rows; full-attention layers keep their memory."""
        for index, layer in enumerate(self.layers):
            if type(layer) is DynamicSlidingWindowLayer:  # that of transformers 4 keeps its rows
                self.layers[index] = DynamicSlidingWindowLayer(layer.sliding_window)
            else:
                layer.reset()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row of the batch becomes ``repeats`` rows next to each other."""
        self._require("batch_repeat_interleave")
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows ``indices`` of the batch."""
        self._require("batch_select_indices")
        super().batch_select_indices(indices)

    @property
    def is_croppable(self) -> bool:
        """Whether ``crop`` can take back rows of every layer, as far as transformers tells.

        transformers 4 does not; there sliding layers can until they drop rows.
        """
        return all(map(_is_croppable, self.layers))

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and sketches in use; of a static sliding layer, the window's."""
        return sum(map(_bytes_in_use, self.layers))

    @property
    def nbytes_reserved(self) -> int:
        """Bytes allocated, rows not in use included."""
        return sum(
            layer.nbytes_reserved if isinstance(layer, SantaLayerBase) else _bytes_in_use(layer)
            for layer in self.layers
        )

    def __repr__(self) -> str:
        return (
            f"SantaCache({len(self.layers)} layers, {int(self.get_seq_length())} rows, "
            f"{self.nbytes} bytes in use of {self.nbytes_reserved})"
        )

    def _require(self, method: str) -> None:
        """Refuse before any layer has changed what transformers' sliding layers cannot do."""
        for index, layer in enumerate(self.layers):
            if not hasattr(layer, method):
                raise NotImplementedError(
                    f"SantaCache: {method} of layer {index}, a {type(layer).__name__} of "
                    "transformers, which has no such method"
                )


def _check_rows(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name} must be a number of rows >= {low}, got {value!r}")


def _make_layers(
    model_config: PretrainedConfig,
    config: SantaConfig | None,
    reserve: int,
    max_cache_len: int | None,
) -> list[Any]:
    """One layer per model layer, of the kind that transformers itself would choose."""
    standard: Cache
    kinds: tuple[type, type]
    if max_cache_len is None:
        standard = DynamicCache(config=model_config)
        kinds = DynamicLayer, DynamicSlidingWindowLayer
    else:
        standard = StaticCache(config=model_config, max_cache_len=max_cache_len)
        kinds = StaticLayer, StaticSlidingWindowLayer
    full, sliding = kinds
    layers: list[Any] = []
    for index, layer in enumerate(standard.layers):
        if type(layer) is full:
            bits = config.sketch_bits if config is not None and config.selects(index) else None
            layers.append(
                SantaLayer(reserve, bits)
                if max_cache_len is None
                else SantaStaticLayer(max_cache_len, bits)
            )
        elif type(layer) is sliding:
            layers.append(layer)
        else:
            raise ValueError(
                f"model_config: layer {index} needs a {type(layer).__name__}, which SantaCache "
                f"does not have; use a {type(standard).__name__}"
            )
    expected = model_config.get_text_config(decoder=True).num_hidden_layers
    if len(layers) != expected:
        raise ValueError(
            f"model_config: {len(layers)} of {expected} layers have a cache of their own; "
            f"SantaCache does not support shared ones, use a {type(standard).__name__}"
        )
    if config is not None and config.sketch_bits is not None and not any(map(_sketches, layers)):
        raise ValueError(
            f"sketch_bits={config.sketch_bits}: no layer of {type(model_config).__name__} that "
            "config selects has full attention, so that none would keep a sketch"
        )
    return layers


def _sketches(layer: Any) -> bool:
    return isinstance(layer, SantaLayerBase) and layer.sketch_bits is not None


def _is_croppable(layer: Any) -> bool:
    if hasattr(layer, "is_croppable"):
        return bool(layer.is_croppable)
    # transformers 4: only growing layers, and sliding ones until they drop rows.
    return hasattr(layer, "crop") and int(layer.get_seq_length()) < layer.sliding_window


def _can_go_back(layer: Any) -> bool:
    """Whether ``crop`` will find the rows that it has to show again."""
    if isinstance(layer, DynamicSlidingWindowLayer):
        inside = int(layer.get_seq_length()) < layer.sliding_window
        return inside or getattr(layer, "record_past", False)  # kept for assisted decoding
    return _is_croppable(layer)


def _counts_rows_kept(layer: Any) -> bool:
    """Whether ``layer.crop`` takes the rows to keep; transformers 5 takes minus those to drop."""
    return isinstance(layer, SantaLayerBase) or not CROP_ZERO_KEEPS_ALL


def _rows_to_drop(layer: Any, max_length: int) -> int:
    """``max_length`` as minus the rows to drop."""
    return min(max_length, 0) if max_length <= 0 else min(max_length - layer.get_seq_length(), 0)


def _bytes_in_use(layer: Any) -> int:
    if isinstance(layer, SantaLayerBase):
        return int(layer.nbytes)
    return sum(tensor.nbytes for tensor in (layer.keys, layer.values) if tensor is not None)
