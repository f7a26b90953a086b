"""Counting the bytes that attention reads, outside of timed runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from santa_torch.hf.attention import BINDING
from santa_torch.hf.wrappers import inner_model
from santa_torch.stats import DecodeStats


class Traffic:
    """KV bytes of the decoding steps seen by ``santa_torch.hf.record``.

    A forward of one query row per sequence is one step. Under ``query_rows="all"`` a forward of Q
    rows counts as the Q steps that it stands for, each with the rows it attends to, although the
    caches of the processor may serve several of them at once; where attention is exact behind a
    mask, each with all rows. Other forwards of several rows (prefill) are not counted.

    Numbers are summed as tensors on the model's device; only the properties read them.
    """

    def __init__(self) -> None:
        self._read: list[torch.Tensor] = []
        self._total: list[torch.Tensor] = []
        self._value_rows: list[torch.Tensor] = []
        self._key_features: list[torch.Tensor] = []
        self._calls = 0
        self._groups = 0

    def add(self, stats: list[DecodeStats | None], *, steps: int) -> None:
        """Count one forward of one layer: the statistics of its calls of the operator."""
        self._calls += steps
        for part in stats:
            assert part is not None, "recording asks every call for its statistics"
            self._read.append(part.bytes_read.sum())
            self._total.append(part.bytes_total.sum())
            self._value_rows.append(part.value_rows.sum())
            self._key_features.append(part.key_features.sum())
            self._groups += part.value_rows.numel()

    def add_exact(
        self, key: torch.Tensor, value: torch.Tensor, *, steps: int, causal: bool
    ) -> None:
        """Count one forward of a layer with exact attention.

        Parameters
        ----------
        key, value : Tensor
            ``[B, Hkv, L, D]``, ``[B, Hkv, L, Dv]``. SDPA reads all rows, the masked ones too.
        steps : int
            Query rows per sequence.
        causal : bool
            Row i stands for a step that had rows 0 to i.
        """
        self._calls += steps
        row_bytes = (key.nbytes + value.nbytes) // max(key.shape[2], 1)
        rows = steps * (steps + 1) // 2 if causal else steps * key.shape[2]
        everything = torch.tensor(rows * row_bytes, device=key.device)
        self._read.append(everything)
        self._total.append(everything)

    def __repr__(self) -> str:
        return (
            f"Traffic({self.calls} calls, {self.bytes_read} of {self.bytes_total} bytes read, "
            f"{self.value_rows:.1f} value rows)"
        )

    @property
    def calls(self) -> int:
        """Layers times steps counted."""
        return self._calls

    @property
    def bytes_read(self) -> int:
        """Bytes of keys and values loaded, all layers, sequences and steps together."""
        return sum(int(count) for count in self._read)

    @property
    def bytes_total(self) -> int:
        """Bytes that exact attention has to load in the same forwards."""
        return sum(int(count) for count in self._total)

    @property
    def value_rows(self) -> float:
        """Mean number of value rows loaded per step, sequence, key/value head and sampled layer."""
        return sum(int(count) for count in self._value_rows) / max(self._groups, 1)

    @property
    def key_features(self) -> float:
        """Mean number of key features that the query uses, counted like ``value_rows``."""
        return sum(int(count) for count in self._key_features) / max(self._groups, 1)


@contextmanager
def record(model: torch.nn.Module) -> Iterator[Traffic]:
    """Count the KV bytes of every decoding forward of an enabled model.

    Asks the operator for its statistics, which costs time: keep it out of timed runs. Disabling the
    model inside of the block ends the counting.

    Parameters
    ----------
    model : torch.nn.Module
        A model enabled by ``santa_torch.hf.enable`` or ``use``, or a module around it.

    Yields
    ------
    Traffic
        Filled while the context is open.

    Raises
    ------
    ValueError
        The model is not enabled.
    """
    inner = inner_model(model)
    bound = [getattr(module, BINDING) for module in inner.modules() if hasattr(module, BINDING)]
    if not bound:
        raise ValueError(f"model: {type(inner).__name__} is not enabled; nothing to record")
    previous = [binding.traffic for binding in bound]
    traffic = Traffic()
    for binding in bound:
        binding.traffic = traffic
    try:
        yield traffic
    finally:
        for binding, before in zip(bound, previous, strict=True):
            binding.traffic = before
