"""A cache layer whose buffers have spare rows and grow when those are used up.

    keys    [B, Hkv, capacity, D]     rows [0, length) in use, the rest never read
    values  [B, Hkv, capacity, Dv]

Capacity grows by half when it is exceeded, so a row is copied about three times in its life.
"""

from __future__ import annotations

import torch

from santa_torch.hf.layer_common import CROP_ZERO_KEEPS_ALL, Pair, SantaLayerBase, new_buffer

#: Capacities are multiples of this many rows.
_GRANULE = 256


class SantaLayer(SantaLayerBase):
    """The layer of a ``SantaCache`` without ``max_cache_len``.

    ``keys`` and ``values`` are views of the rows in use, ``length`` is a number.

    Parameters
    ----------
    reserve : int
        Rows to make room for at the first append.
    sketch_bits : int or None
        Bits of the sketch; None keeps none.
    """

    def __init__(self, reserve: int = 0, sketch_bits: int | None = None) -> None:
        super().__init__(sketch_bits)
        self.reserve = reserve
        self.length: int = 0

    def lazy_initialization(
        self, key_states: torch.Tensor, value_states: torch.Tensor | None = None
    ) -> None:
        """Note dtype and device; buffers wait for the first rows.

        transformers 4.57 passes no values here.
        """
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def get_seq_length(self) -> int:
        """Rows in use."""
        return self.length

    def get_mask_sizes(self, query_length: int | torch.Tensor) -> tuple[int, int]:
        """Rows the next forward attends to, and the position of the first.

        ``query_length`` is a number on transformers 5, the vector of positions on 4.
        """
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.length + new, 0

    def get_max_length(self) -> int:
        """-1: there is no limit. transformers 4 calls it ``get_max_cache_shape``."""
        return -1

    get_max_cache_shape = get_max_length

    def crop(self, max_length: int) -> None:
        """Keep the first ``max_length`` rows, or drop the last ``-max_length``."""
        if max_length < 0:
            max_length += self.length
        elif max_length == 0 and CROP_ZERO_KEEPS_ALL:
            return
        if self._buffers is not None:
            self._set_length(min(max(max_length, 0), self.length))
        if self.sketch is not None:
            self.sketch.crop(self.length)

    def reset(self) -> None:
        """Forget all rows and keep the memory."""
        self.has_beams = self._reordered = False
        if self._buffers is not None:
            self._set_length(0)
        if self.sketch is not None:
            self.sketch.reset()

    @property
    def capacity(self) -> int:
        """Rows that fit without growing."""
        return 0 if self._buffers is None else self._buffers[0].shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of the keys, values and sketch in use."""
        return self._bytes(self._views)

    def _append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> Pair:
        end = self.length + key_states.shape[2]
        if self._buffers is None:
            self._make_sketch(key_states[:, :, :0], self._capacity_for(end))  # may refuse them
            self._allocate(self._capacity_for(end), key_states, value_states)
        elif end > self.capacity:
            self._grow(end, key_states, value_states)
        keys, values = self._room()
        for buffer, rows in ((keys, key_states), (values, value_states)):
            buffer[:, :, self.length : end].copy_(rows.detach())
        self._append_to_sketch(key_states)
        self._set_length(end)
        return keys[:, :, :end], values[:, :, :end]

    def _adopt(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._views = keys, values
        self._allocate(self.capacity, keys, values)
        self._set_length(self.length)

    def _show_again(self) -> None:
        if self._buffers is not None:
            self._set_length(self.length)

    def _set_length(self, length: int) -> None:
        keys, values = self._room()
        self.length = length
        self._show(keys[:, :, :length], values[:, :, :length])

    # Graphs that replace their own buffers meet assertions inside of torch's tracer, so growing
    # stays outside of them.
    @torch.compiler.disable(reason="a SantaCache grows outside of graphs; give it reserve=")
    def _grow(self, needed: int, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Move to buffers of at least ``needed`` rows, shaped like the new rows otherwise."""
        self._allocate(self._capacity_for(needed), key_states, value_states)
        self._make_sketch(self._room()[0][:, :, : self.length], self.capacity)

    def _capacity_for(self, needed: int) -> int:
        wanted = max(needed, self.reserve, self.capacity + self.capacity // 2)
        return -(-wanted // _GRANULE) * _GRANULE

    def _allocate(self, capacity: int, like_keys: torch.Tensor, like_values: torch.Tensor) -> None:
        """Make new buffers and copy the rows of ``self._views`` into them."""
        buffers = []
        for index, like in enumerate((like_keys, like_values)):
            buffer = new_buffer(like, capacity, zero=False)
            # One set of graphs for each capacity: torch's tracer fails on aliased inputs of an
            # unknown size.
            torch._dynamo.mark_static(buffer, 2)
            if self.length and self._views is not None:
                buffer[:, :, : self.length].copy_(self._views[index])
            buffers.append(buffer)
        self._buffers = buffers[0], buffers[1]
