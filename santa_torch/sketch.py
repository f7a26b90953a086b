"""Keys once more, feature by feature, so that a feature can be left out.

    blocks     [B, Hkv, C, D, 64]   whole blocks of 64 rows; one feature of a block is one run
    open_rows  [B, Hkv, 64, D]      rows of the block that is not whole yet
    rows       [B]                  rows held

A row-major cache reads a key row as a whole whatever the query looks like. Here the 64 values that
a feature has in a block lie side by side, and a feature that the query does not use is not read.
Rows of the unfinished block are scored from the cache's own keys, hence appending a row rewrites
nothing.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from santa_torch import _load  # noqa: F401  registers the operators

#: Rows of a block.
BLOCK_ROWS = 64

_BITS = {torch.float32: 32, torch.float16: 16, torch.bfloat16: 16}
_LATER_BITS = (8, 4, 2)


class KeySketch:
    """A copy of the keys that ``decode`` scores feature by feature.

    It holds the first ``rows`` rows of each sequence of a key cache, in the numbers of the cache:
    scores from it have the bits of scores from row-major keys (at the level ``amx``, those of
    ``avx512``). It takes as much memory as the keys.

    Parameters
    ----------
    k : Tensor
        ``[B, Hkv, L, D]``, float32, float16 or bfloat16, last stride 1: the rows to begin with,
        possibly none. Copied.
    bits : int, optional
        Bits of a number: 16 for float16 and bfloat16, 32 for float32 keys, which is the default.
        Fewer are not available yet.
    seq_lens : Tensor, optional
        int64 ``[B]`` on the device of ``k``: rows of each sequence. Default L.
    capacity : int, optional
        Rows to make room for. With it the tensors do not move while the batch stays as large, as a
        compiled step wants it, and an append past it fails; without it they grow by half when they
        are full.

    Attributes
    ----------
    blocks : Tensor
        ``[B, Hkv, C, D, 64]`` in the dtype of ``k``.
    open_rows : Tensor
        ``[B, Hkv, 64, D]``, likewise.
    rows : Tensor
        int64 ``[B]``: rows held by each sequence; the first ``rows // 64 * 64`` lie in ``blocks``.
    bits : int
        Bits of a number.

    Raises
    ------
    ValueError
        An argument has a wrong shape, dtype or value; the message names it and the value.
    NotImplementedError
        ``bits`` of a later version.

    Notes
    -----
    On CUDA nothing but growing waits for the device: lengths are not checked there, and rows past
    ``capacity`` are dropped.

    Examples
    --------
    >>> k, v = torch.randn(1, 2, 1000, 64), torch.randn(1, 2, 1000, 64)
    >>> sketch = santa_torch.KeySketch(k)
    >>> sketch
    KeySketch(batch 1, 2 KV heads, 64 features of 32 bits, room for 960 rows)
    >>> q = torch.randn(1, 8, 64)
    >>> santa_torch.decode(q, k, v, samples=128, sketch=sketch).shape
    torch.Size([1, 8, 64])
    """

    def __init__(
        self,
        k: torch.Tensor,
        bits: int | None = None,
        *,
        seq_lens: torch.Tensor | None = None,
        capacity: int | None = None,
    ) -> None:
        if not isinstance(k, torch.Tensor) or k.ndim != 4 or k.dtype not in _BITS:
            raise ValueError(
                "k must be a float32, float16 or bfloat16 tensor [B, Hkv, L, D], got "
                f"{_describe(k)}"
            )
        self.bits = _check_bits(bits, k.dtype)
        self._fixed = capacity is not None
        room = k.shape[2] if capacity is None else _row_count("capacity", capacity)
        if room < k.shape[2] and seq_lens is None:
            raise ValueError(f"capacity must be at least the rows of k {list(k.shape)}, got {room}")
        batch, heads, _, dim = k.shape
        self.blocks = _new(k, batch, heads, room // BLOCK_ROWS, dim, BLOCK_ROWS)
        self.open_rows = _new(k, batch, heads, BLOCK_ROWS, dim)
        with torch.inference_mode(False):
            self.rows = torch.zeros(batch, dtype=torch.int64, device=k.device)
        self._most = 0  # no sequence holds more rows; known without asking the device
        self.append(k, seq_lens)

    def append(self, k: torch.Tensor, num_rows: torch.Tensor | None = None) -> None:
        """Append rows to each sequence, in place; only to grow it waits for the device.

        Parameters
        ----------
        k : Tensor
            ``[B, Hkv, n, D]``, dtype and device of the sketch, last stride 1.
        num_rows : Tensor, optional
            int64 ``[B]``: how many of the n rows a sequence gets, the first ones. Default n.

        Raises
        ------
        ValueError
            ``k`` or ``num_rows`` does not fit, or the capacity is exceeded. Nothing has changed.
        """
        if not isinstance(k, torch.Tensor) or k.ndim != 4:
            raise ValueError(f"k must be a tensor [B, Hkv, n, D], got {_describe(k)}")
        if num_rows is not None and not isinstance(num_rows, torch.Tensor):
            raise ValueError(f"num_rows must be an int64 tensor [B], got {num_rows!r}")
        if not self._fixed and self._blocks_for(k.shape[2]) > self.blocks.shape[2]:
            # Crops and ragged appends may have left less than that: only here the device is asked.
            self._most = int(self.rows.max()) if self.rows.numel() else 0
            if self._blocks_for(k.shape[2]) > self.blocks.shape[2]:
                self._grow(self._blocks_for(k.shape[2]))
        torch.ops.santa.sketch_append(
            self.blocks, self.open_rows, self.rows, k.detach(), num_rows=num_rows
        )
        if not self._fixed:
            self._most += k.shape[2]

    def crop(self, rows: int | torch.Tensor) -> None:
        """Keep at most the first ``rows`` rows of each sequence.

        Parameters
        ----------
        rows : int or Tensor
            One number, or int64 ``[B]`` on the device of the sketch.
        """
        if isinstance(rows, torch.Tensor):
            if rows.shape != self.rows.shape or rows.dtype != torch.int64:
                raise ValueError(
                    f"rows must be int64 {list(self.rows.shape)} or a number, got {_describe(rows)}"
                )
            kept = torch.minimum(self.rows, rows.clamp(min=0))
        else:
            number = _row_count("rows", rows)
            kept = self.rows.clamp(max=number)
            self._most = min(self._most, number)
        if self.blocks.shape[2] != 0:
            # A block that is not whole any more becomes the open one.
            block = kept // BLOCK_ROWS
            opened = (block < self.rows // BLOCK_ROWS).view(-1, 1, 1, 1)
            sequence = torch.arange(len(kept), device=kept.device)
            packed = self.blocks[sequence, :, block.clamp(max=self.blocks.shape[2] - 1)]
            self.open_rows.copy_(torch.where(opened, packed.transpose(-1, -2), self.open_rows))
        self.rows.copy_(kept)

    def reorder(self, indices: torch.Tensor) -> None:
        """Let the batch be its sequences ``indices``, int64 ``[B']``: beams, repeats, a choice.

        In the same memory where the batch stays as large.
        """
        if not isinstance(indices, torch.Tensor) or indices.ndim != 1:
            raise ValueError(f"indices must be an int64 tensor [B'], got {_describe(indices)}")
        with torch.inference_mode(False), torch.no_grad():
            for name in ("blocks", "open_rows", "rows"):
                old: torch.Tensor = getattr(self, name)
                new = old.index_select(0, indices)
                setattr(self, name, old.copy_(new) if new.shape == old.shape else new)

    def reset(self) -> None:
        """Forget all rows and keep the memory."""
        self.rows.zero_()
        self._most = 0

    @property
    def capacity(self) -> int:
        """Rows that blocks have room for."""
        return self.blocks.shape[2] * BLOCK_ROWS

    @property
    def shape(self) -> torch.Size:
        """``[B, Hkv, capacity, D]``."""
        batch, heads, _, dim, _ = self.blocks.shape
        return torch.Size((batch, heads, self.capacity, dim))

    @property
    def dtype(self) -> torch.dtype:
        """Of the keys."""
        return self.blocks.dtype

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.blocks.device

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.blocks.nbytes + self.open_rows.nbytes + self.rows.nbytes

    def __repr__(self) -> str:
        batch, heads, _, dim, _ = self.blocks.shape
        return (
            f"KeySketch(batch {batch}, {heads} KV heads, {dim} features of {self.bits} bits, "
            f"room for {self.capacity} rows)"
        )

    def _blocks_for(self, more: int) -> int:
        return (self._most + more) // BLOCK_ROWS

    def _grow(self, blocks: int) -> None:
        old = self.blocks
        room = max(blocks, old.shape[2] + old.shape[2] // 2)
        self.blocks = _new(old, *old.shape[:2], room, *old.shape[3:])
        self.blocks[:, :, : old.shape[2]].copy_(old)


def _new(like: torch.Tensor, *sizes: int) -> torch.Tensor:
    # Tensors made in inference mode could not be appended to outside of it.
    with torch.inference_mode(False), torch.no_grad():
        tensor = like.new_empty(sizes)
        if tensor.is_cpu and not torch.compiler.is_compiling():
            torch.ops.santa.prefer_huge_pages(tensor)
        return tensor


def _check_bits(bits: Any, dtype: torch.dtype) -> int:
    exact = _BITS[dtype]
    if bits is None or (type(bits) is int and bits == exact):
        return exact
    if type(bits) is int and bits in _LATER_BITS:
        raise NotImplementedError(f"bits={bits} is not available in this version, only {exact}")
    raise ValueError(f"bits must be {exact} for keys of {dtype}, got {bits!r}")


def _row_count(name: str, value: Any) -> int:
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"{name} must be a number of rows, got {value!r}")
    return number


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return repr(value)[:60]
