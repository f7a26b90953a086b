"""What the growing and the static cache layers share: checks of new rows, beams, batch changes.

A layer that is given ``sketch_bits`` keeps its keys once more, in a ``KeySketch`` of the same rows.
Every change of the rows is a change of the sketch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from santa_torch.inference import inference_only
from santa_torch.sketch import KeySketch

#: ``crop(0)`` keeps nothing on transformers 4 (the argument is a length) and everything on
#: transformers 5 (it is minus the rows to drop). Nothing else about ``crop`` differs here.
CROP_ZERO_KEEPS_ALL = hasattr(DynamicLayer, "get_max_length")

Pair = tuple[torch.Tensor, torch.Tensor]


class SantaLayerBase(CacheLayerMixin):
    """Keys and values of one full-attention layer, appended in place.

    Parameters
    ----------
    sketch_bits : int or None
        Bits of the sketch; None keeps none.

    Attributes
    ----------
    keys, values : Tensor or None
        ``[B, Hkv, rows, D]`` and ``[B, Hkv, rows, Dv]``. To be read, not replaced.
    length : int or Tensor
        Rows in use; a number in the growing layer, int64 ``[]`` on the device in the static one.
    sketch : KeySketch or None
        The same keys block by block; None without ``sketch_bits``, and before the first append.
    has_beams : bool
        Whether the batch rows were reordered right before the last append. Beam search does that
        before every decoding step, so any other use of the same cache is told from it.
    """

    _layer_type = None  # or transformers would use this class in its own caches
    is_sliding = False
    is_croppable = True
    length: Any

    def __init__(self, sketch_bits: int | None = None) -> None:
        super().__init__()
        self.sketch_bits = sketch_bits
        self.sketch: KeySketch | None = None
        self.has_beams = False
        self._reordered = False
        # The memory, and what ``keys`` and ``values`` show of it.
        self._buffers: Pair | None = None
        self._views: Pair | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Pair:
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
            All rows for attention to read, ``[B, Hkv, rows, D]`` and ``[B, Hkv, rows, Dv]``. The
            keys carry this object as ``santa_layer``, which is how attention finds it.

        Raises
        ------
        ValueError
            Batch, heads, dimensions, dtype or device differ from the rows already there, or a
            static layer is full.
        RuntimeError
            Somebody replaced ``keys`` or ``values`` of this object.
        """
        self._check(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        # Fresh views: the stored ones must not refer to this object, or its memory would wait for
        # the cycle collector.
        keys, values = self._append(key_states, value_states)
        self.has_beams, self._reordered = self._reordered, False
        keys = inference_only(keys, key_states)
        values = inference_only(values, value_states)
        keys.santa_layer = self  # type: ignore[attr-defined]
        return keys, values

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
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the keys, values and sketch in use."""

    @property
    def nbytes_reserved(self) -> int:
        """Bytes allocated, rows not in use included."""
        sketch = 0 if self.sketch is None else self.sketch.nbytes
        return sketch + sum(buffer.nbytes for buffer in self._buffers or ())

    @abstractmethod
    def reset(self) -> None:
        """Forget all rows and keep the memory."""

    @abstractmethod
    def crop(self, max_length: int) -> None:
        """Keep the first ``max_length`` rows, or drop the last ``-max_length``.

        0 keeps nothing on transformers 4 and everything on transformers 5.
        """

    @abstractmethod
    def _append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> Pair:
        """Store checked rows; returns fresh views of what attention is to read."""

    @abstractmethod
    def _show_again(self) -> None:
        """Make ``keys`` and ``values`` views of the buffers once more."""

    @abstractmethod
    def _adopt(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Go over to new buffers that hold these rows, whose batch is another."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._show_again()  # pickle makes tensors of their own from views

    def _room(self) -> Pair:
        assert self._buffers is not None
        return self._buffers

    def _show(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._views = keys, values
        self.keys, self.values = keys, values

    def _rebatch(self, select: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace the batch rows by ``select`` of them, in the same memory where they fit."""
        if self._views is None:
            return
        self._check_untouched()
        chosen = [select(view) for view in self._views]
        places = select(torch.arange(self._views[0].shape[0], device=chosen[0].device))
        if chosen[0].shape == self._views[0].shape:
            for view, rows in zip(self._views, chosen, strict=True):
                view.copy_(rows)
        else:
            self._adopt(*chosen)
        if self.sketch is not None:
            self.sketch.reorder(places)

    def _make_sketch(self, keys: torch.Tensor, capacity: int) -> None:
        """Start the sketch anew from ``keys`` ``[B, Hkv, rows, D]``, with room for ``capacity``."""
        if self.sketch_bits is None:
            return
        # Tensors made in inference mode could not be appended to outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self.sketch = KeySketch(keys.detach(), self.sketch_bits, capacity=capacity)
        torch._dynamo.mark_static(self.sketch.blocks, 2)  # as the growing layer says of its buffers

    def _append_to_sketch(self, keys: torch.Tensor) -> None:
        if self.sketch is not None:
            keys = keys.detach()
            self.sketch.append(keys if keys.stride(-1) == 1 else keys.contiguous())

    def _bytes(self, held: Pair | None) -> int:
        """Bytes of ``held`` keys and values, and of the same rows of the sketch."""
        if held is None:
            return 0
        keys, values = held
        return keys.nbytes + values.nbytes + (0 if self.sketch is None else keys.nbytes)

    def _check(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self._check_untouched()
        if key_states.shape[:3] != value_states.shape[:3]:
            raise ValueError(
                f"SantaCache: keys {tuple(key_states.shape)} and values "
                f"{tuple(value_states.shape)} differ in batch, heads or rows"
            )
        if self._buffers is None or all(map(_fits, (key_states, value_states), self._buffers)):
            return
        if self.length:
            raise ValueError(
                f"SantaCache: rows {tuple(key_states.shape)} {key_states.dtype} on "
                f"{key_states.device} do not fit the cache of {tuple(self._room()[0].shape)} "
                f"{self._room()[0].dtype} on {self._room()[0].device}; reset() it or use a new one"
            )
        self._buffers = self._views = self.keys = self.values = self.sketch = None
        self.is_initialized = False

    def _check_untouched(self) -> None:
        if self._views is not None and (
            self.keys is not self._views[0] or self.values is not self._views[1]
        ):
            raise RuntimeError(
                "SantaCache: keys or values of a layer were replaced from outside; "
                "use crop, reset, reorder_cache or the batch_* methods"
            )


def new_buffer(like: torch.Tensor, rows: int, *, zero: bool) -> torch.Tensor:
    """``[B, H, rows, D]`` with the other sizes, dtype and device of ``like`` ``[B, H, *, D]``."""
    batch, heads, _, dim = like.shape
    # Tensors made in inference mode could not be appended to outside of it.
    with torch.inference_mode(False), torch.no_grad():
        buffer = like.new_empty(batch, heads, rows, dim)
        if buffer.device.type == "cpu" and not torch.compiler.is_compiling():
            torch.ops.santa.prefer_huge_pages(buffer)
        return buffer.zero_() if zero else buffer


def _fits(new: torch.Tensor, old: torch.Tensor) -> bool:
    return (
        new.shape[:2] == old.shape[:2]
        and new.shape[3] == old.shape[3]
        and new.dtype == old.dtype
        and new.device == old.device
    )
