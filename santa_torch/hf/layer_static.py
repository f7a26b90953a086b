"""A cache layer of a fixed size, for compiled steps and ``torch.export``.

    keys    [B, Hkv, max_cache_len, D]     rows [0, length) in use, behind a mask the rest
    values  [B, Hkv, max_cache_len, Dv]
    length  int64 []                       on the device, advanced in place
    sketch  KeySketch                      with room for as many rows, under ``sketch_bits``

No shape and no Python number changes from step to step, so that one graph serves them all. SDPA
reads every row behind the mask, where zero weights times NaN would be NaN: the buffers start as
zeros.
"""

from __future__ import annotations

from typing import Any

import torch

from santa_torch.hf.layer_common import CROP_ZERO_KEEPS_ALL, Pair, SantaLayerBase, new_buffer


class SantaStaticLayer(SantaLayerBase):
    """The layer of a ``SantaCache`` with ``max_cache_len``.

    ``keys`` and ``values`` are the whole buffers, ``length`` is an int64 tensor ``[]``.

    Parameters
    ----------
    max_cache_len : int
        Rows there is room for.
    sketch_bits : int or None
        Bits of the sketch; None keeps none.
    """

    is_compileable = True

    def __init__(self, max_cache_len: int, sketch_bits: int | None = None) -> None:
        super().__init__(sketch_bits)
        self.max_cache_len = max_cache_len
        self.length: torch.Tensor = torch.zeros((), dtype=torch.int64)

    def lazy_initialization(
        self, key_states: torch.Tensor, value_states: torch.Tensor | None = None
    ) -> None:
        """Make the buffers. Without values (transformers 4.57), those are like the keys.

        To compile the first forward too, call ``early_initialization`` of the cache before it.
        """
        self._make_sketch(key_states[:, :, :0], self.max_cache_len)  # may refuse them
        self.dtype, self.device = key_states.dtype, key_states.device
        with torch.inference_mode(False):
            self.length = torch.zeros((), dtype=torch.int64, device=self.device)
        _keep_address(self.length)
        if self.sketch is not None:
            for tensor in (self.sketch.blocks, self.sketch.open_rows, self.sketch.rows):
                _keep_address(tensor)
        self._allocate(key_states, key_states if value_states is None else value_states)
        self.is_initialized = True

    def get_seq_length(self) -> Any:
        """Rows in use: int64 ``[]``, a copy; the number 0 before the first append.

        Not a number, since reading one from a device would stall it, and split a graph.
        """
        return self.length.clone() if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int | torch.Tensor) -> tuple[int, int]:
        """Rows that masks cover, and the position of the first."""
        return self.max_cache_len, 0

    def get_max_length(self) -> int:
        """Rows there is room for. transformers 4 calls it ``get_max_cache_shape``."""
        return self.max_cache_len

    get_max_cache_shape = get_max_length

    def crop(self, max_length: int) -> None:
        """Keep the first ``max_length`` rows, or drop the last ``-max_length``."""
        if max_length < 0:
            self.length.add_(max_length).clamp_(min=0)
        elif max_length > 0 or not CROP_ZERO_KEEPS_ALL:
            self.length.clamp_(max=max_length)
        if self.sketch is not None:
            self.sketch.crop(self.length.expand(self.batch_size))

    def reset(self) -> None:
        """Forget all rows and keep the memory."""
        self.has_beams = self._reordered = False
        self.length.zero_()
        for buffer in self._buffers or ():
            buffer.zero_()
        if self.sketch is not None:
            self.sketch.reset()

    @property
    def batch_size(self) -> int:
        """Sequences there is room for, -1 before that is known."""
        return -1 if self._buffers is None else self._buffers[0].shape[0]

    max_batch_size = batch_size  # the name on transformers 4

    @property
    def nbytes(self) -> int:
        """Bytes of the keys, values and sketch in use. Reads ``length`` from the device."""
        return self._bytes(self._buffers) * int(self.length) // self.max_cache_len

    def _append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> Pair:
        new = key_states.shape[2]
        self._check_space(new)
        keys, values = self._room()
        places = torch.arange(new, device=self.device) + self.length
        keys.index_copy_(2, places, key_states.detach())
        values.index_copy_(2, places, value_states.detach())
        self._append_to_sketch(key_states)
        self.length.add_(new)
        return keys.view_as(keys), values.view_as(values)

    def _check_space(self, new: int) -> None:
        # A graph, or another device, must not be read here. There index_copy_ refuses places past
        # the end: in eager mode, in generated code, and by an assertion on the device.
        known = not torch.compiler.is_compiling() and self.length.device.type == "cpu"
        length = int(self.length) if known else 0
        if length + new > self.max_cache_len:
            raise ValueError(
                f"SantaCache: {new} more rows after {length} are more than "
                f"max_cache_len={self.max_cache_len}; use a larger cache, or crop() or reset() it"
            )

    def _adopt(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._allocate(keys, values)
        for buffer, rows in zip(self._room(), (keys, values), strict=True):
            buffer.copy_(rows)

    def _show_again(self) -> None:
        if self._buffers is not None:
            self._show(*self._buffers)

    def _allocate(self, like_keys: torch.Tensor, like_values: torch.Tensor) -> None:
        keys = new_buffer(like_keys, self.max_cache_len, zero=True)
        values = new_buffer(like_values, self.max_cache_len, zero=True)
        self._buffers = keys, values
        self._show(keys, values)
        _keep_address(keys)
        _keep_address(values)


def _keep_address(tensor: torch.Tensor) -> None:
    """Let CUDA graphs write to ``tensor`` where it is instead of to a copy."""
    if not torch.compiler.is_compiling():  # the tracer refuses the call
        torch._dynamo.mark_static_address(tensor)
