"""A transformers cache that appends in place.

``DynamicCache`` concatenates the whole cache at every step, which costs as much memory traffic as
exact attention itself. Here each layer owns buffers with spare rows: appending copies the new rows
and nothing else, and attention reads views of the rows in use.

    keys    [B, Hkv, capacity, D]     rows [0, length) in use, the rest never read
    values  [B, Hkv, capacity, Dv]

Capacity grows by half when it is exceeded, so a row is copied about three times in its life.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from santa_torch.config import SantaConfig
from santa_torch.inference import inference_only

#: Capacities are multiples of this many rows.
_GRANULE = 256

#: ``crop(0)`` keeps nothing on transformers 4 (the argument is a length) and everything on
#: transformers 5 (it is minus the rows to drop). Nothing else about ``crop`` differs here.
_CROP_ZERO_KEEPS_ALL = hasattr(DynamicLayer, "get_max_length")


class SantaLayer(DynamicLayer):
    """Keys and values of one full-attention layer.

    Parameters
    ----------
    reserve : int
        Rows to make room for at the first append.

    Attributes
    ----------
    keys, values : Tensor
        Views ``[B, Hkv, length, D]`` and ``[B, Hkv, length, Dv]`` of the rows in use. To be read,
        not replaced.
    length : int
        Rows in use.
    has_beams : bool
        Whether the batch rows were reordered right before the last append. Beam search does that
        before every decoding step, so any other use of the same cache is told from it.
    """

    _layer_type = None  # or transformers would use this class in its own caches

    def __init__(self, reserve: int = 0) -> None:
        super().__init__()
        self.reserve = reserve
        self.length = 0
        self.has_beams = False
        self._reordered = False
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None
        self._views: tuple[torch.Tensor, torch.Tensor] | None = None

    def lazy_initialization(
        self, key_states: torch.Tensor, value_states: torch.Tensor | None = None
    ) -> None:
        """Note dtype and device; buffers wait for the first rows.

        transformers 4.57 passes no values here.
        """
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append rows.

        Parameters
        ----------
        key_states, value_states : Tensor
            ``[B, Hkv, new, D]`` and ``[B, Hkv, new, Dv]``.
        *args, **kwargs
            Whatever the transformers version at hand adds; not needed.

        Returns
        -------
        tuple of Tensor
            Views of all rows, ``[B, Hkv, length, D]`` and ``[B, Hkv, length, Dv]``. The keys carry
            this object as ``santa_layer``, which is how attention finds it.

        Raises
        ------
        ValueError
            Batch, heads, dimensions, dtype or device differ from the rows already there.
        RuntimeError
            Somebody replaced ``keys`` or ``values`` of this object.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._check(key_states, value_states)
        end = self.length + key_states.shape[2]
        if self._buffers is None:
            self._allocate(self._capacity_for(end), key_states, value_states)
        elif end > self.capacity:
            self._grow(end, key_states, value_states)
        self.has_beams, self._reordered = self._reordered, False
        for buffer, rows in zip(self._room(), (key_states, value_states), strict=True):
            buffer[:, :, self.length : end].copy_(rows.detach())
        self._set_length(end)
        key_buffer, value_buffer = self._room()
        # Fresh views: the stored ones must not refer to this object, or its memory would wait for
        # the cycle collector.
        keys = inference_only(key_buffer[:, :, :end], key_states)
        values = inference_only(value_buffer[:, :, :end], value_states)
        keys.santa_layer = self  # type: ignore[attr-defined]
        return keys, values

    def get_seq_length(self, *args: Any) -> int:
        """Rows in use."""
        return self.length

    def get_mask_sizes(self, query_length: int | torch.Tensor) -> tuple[int, int]:
        """Rows the next forward attends to, and the position of the first.

        ``query_length`` is a number on transformers 5, the vector of positions on 4.
        """
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.length + new, 0

    def crop(self, max_length: int) -> None:
        """Keep the first ``max_length`` rows, or drop the last ``-max_length``."""
        if max_length < 0:
            max_length += self.length
        elif max_length == 0 and _CROP_ZERO_KEEPS_ALL:
            return
        if self._buffers is not None:
            self._set_length(min(max(max_length, 0), self.length))

    def reset(self) -> None:
        """Forget all rows and keep the memory."""
        self.has_beams = self._reordered = False
        if self._buffers is not None:
            self._set_length(0)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row b of the batch becomes a copy of row ``beam_idx[b]``, int64 ``[B]``."""
        self._reordered = True
        self._rebatch(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row of the batch becomes ``repeats`` rows next to each other."""
        self._rebatch(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows ``indices`` of the batch."""
        self._rebatch(lambda rows: rows[indices])

    def offload(self) -> None:
        """Not supported: the buffers stay where they are."""
        raise NotImplementedError("SantaCache does not support offloading")

    prefetch = offload

    @property
    def capacity(self) -> int:
        """Rows that fit without growing."""
        return 0 if self._buffers is None else self._buffers[0].shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values in use."""
        return sum(view.nbytes for view in self._views or ())

    @property
    def nbytes_reserved(self) -> int:
        """Bytes allocated, spare rows included."""
        return sum(buffer.nbytes for buffer in self._buffers or ())

    def _room(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._buffers is not None
        return self._buffers

    def _set_length(self, length: int) -> None:
        keys, values = self._room()
        self.length = length
        self._views = keys[:, :, :length], values[:, :, :length]
        self.keys, self.values = self._views

    # Graphs that replace their own buffers meet assertions inside of torch's tracer, so growing
    # stays outside of them.
    @torch.compiler.disable(reason="a SantaCache grows outside of graphs; give it reserve=")
    def _grow(self, needed: int, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Move to buffers of at least ``needed`` rows, shaped like the new rows otherwise."""
        self._allocate(self._capacity_for(needed), key_states, value_states)

    def _capacity_for(self, needed: int) -> int:
        wanted = max(needed, self.reserve, self.capacity + self.capacity // 2)
        return -(-wanted // _GRANULE) * _GRANULE

    def _rebatch(self, select: Any) -> None:
        """Replace the batch rows by ``select`` of them."""
        if self._views is None:
            return
        self._check_untouched()
        keys, values = (select(view) for view in self._views)
        self._views = keys, values
        self._allocate(self.capacity, keys, values)
        self._set_length(self.length)

    def _allocate(self, capacity: int, like_keys: torch.Tensor, like_values: torch.Tensor) -> None:
        """Make new buffers and copy the rows of ``self._views`` into them."""
        buffers = []
        for index, like in enumerate((like_keys, like_values)):
            batch, heads, _, dim = like.shape
            # Tensors made in inference mode could not be appended to outside of it.
            with torch.inference_mode(False), torch.no_grad():
                buffer = like.new_empty(batch, heads, capacity, dim)
            # One set of graphs for each capacity: torch's tracer fails on aliased inputs of an
            # unknown size.
            torch._dynamo.mark_static(buffer, 2)
            if self.length and self._views is not None:
                buffer[:, :, : self.length].copy_(self._views[index])
            buffers.append(buffer)
        self._buffers = buffers[0], buffers[1]

    def _check(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self._check_untouched()
        if key_states.shape[:3] != value_states.shape[:3]:
            raise ValueError(
                f"SantaCache: keys {tuple(key_states.shape)} and values "
                f"{tuple(value_states.shape)} differ in batch, heads or rows"
            )
        if self._buffers is None:
            return
        same = all(
            new.shape[:2] == old.shape[:2]
            and new.shape[3] == old.shape[3]
            and new.dtype == old.dtype
            and new.device == old.device
            for new, old in zip((key_states, value_states), self._buffers, strict=True)
        )
        if same:
            return
        if self.length:
            raise ValueError(
                f"SantaCache: rows {tuple(key_states.shape)} {key_states.dtype} on "
                f"{key_states.device} do not fit the cache of {tuple(self._room()[0].shape)} "
                f"{self._room()[0].dtype} on {self._room()[0].device}; reset() it or use a new one"
            )
        self._buffers, self._views = None, None

    def _check_untouched(self) -> None:
        if self._views is not None and (
            self.keys is not self._views[0] or self.values is not self._views[1]
        ):
            raise RuntimeError(
                "SantaCache: keys or values of a layer were replaced from outside; "
                "use crop, reset, reorder_cache or the batch_* methods"
            )


class SantaCache(Cache):
    """A cache for ``model.generate(past_key_values=...)`` that grows without copying at each step.

    For inference: a backward pass through it raises. Sliding-window layers keep transformers' own
    ``DynamicSlidingWindowLayer``, whose rows are bounded by the window.

    Under ``torch.compile`` give ``reserve``: steps then compile twice for a capacity, for the first
    length and for all others (once more for a buffer that is full to the last row). Growing beyond
    the reserve happens outside of graphs. Without ``fullgraph=True`` the results stay the same, but
    torch compiles anew and may give up and run eagerly; with it, torch raises and names
    ``reserve``.

    Parameters
    ----------
    model_config : transformers.PretrainedConfig
        ``model.config``.
    config : SantaConfig, optional
        Kept as ``santa_config``. The settings available so far do not change what is stored.
    reserve : int
        Rows to make room for at the first append, where the final length is known.

    Raises
    ------
    ValueError
        An argument has the wrong type, or the model has layers of another kind (linear attention,
        shared keys).

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
        reserve: int = 0,
    ) -> None:
        if not isinstance(model_config, PretrainedConfig):
            raise ValueError(
                "model_config must be a transformers configuration (model.config), got "
                f"{type(model_config).__name__}"
            )
        if config is not None and not isinstance(config, SantaConfig):
            raise ValueError(f"config must be a SantaConfig, got {type(config).__name__}")
        if isinstance(reserve, bool) or not isinstance(reserve, int) or reserve < 0:
            raise ValueError(f"reserve must be a number of rows >= 0, got {reserve!r}")
        self.santa_config = config
        super().__init__(layers=_make_layers(model_config, reserve))

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values in use."""
        return sum(map(_bytes_in_use, self.layers))

    @property
    def nbytes_reserved(self) -> int:
        """Bytes allocated, spare rows included."""
        return sum(
            layer.nbytes_reserved if isinstance(layer, SantaLayer) else _bytes_in_use(layer)
            for layer in self.layers
        )

    def __repr__(self) -> str:
        return (
            f"SantaCache({len(self.layers)} layers, {self.get_seq_length()} rows, "
            f"{self.nbytes} bytes in use of {self.nbytes_reserved})"
        )


def _make_layers(model_config: PretrainedConfig, reserve: int) -> list[Any]:
    """One layer per model layer, of the kind that transformers itself would choose."""
    layers: list[Any] = []
    text_config = model_config.get_text_config(decoder=True)
    for index, standard in enumerate(DynamicCache(config=model_config).layers):
        if type(standard) is DynamicLayer:
            layers.append(SantaLayer(reserve))
        elif type(standard) is DynamicSlidingWindowLayer:
            layers.append(standard)
        else:
            raise ValueError(
                f"model_config: layer {index} needs a {type(standard).__name__}, which SantaCache "
                "does not have; use a DynamicCache"
            )
    if len(layers) != text_config.num_hidden_layers:
        raise ValueError(
            f"model_config: {len(layers)} of {text_config.num_hidden_layers} layers have a cache "
            "of their own; SantaCache does not support shared ones, use a DynamicCache"
        )
    return layers


def _bytes_in_use(layer: Any) -> int:
    if isinstance(layer, SantaLayer):
        return layer.nbytes
    return sum(tensor.nbytes for tensor in (layer.keys, layer.values) if tensor is not None)
