"""Counting the bytes that attention reads, outside of timed runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from santa_torch.hf.attention import BINDING
from santa_torch.stats import DecodeStats


class Traffic:
    """KV bytes of the single-row forwards seen by ``santa_torch.hf.record``.

    Numbers are summed as tensors on the model's device; only the properties read them.
    """

    def __init__(self) -> None:
        self._read: list[torch.Tensor] = []
        self._total: list[torch.Tensor] = []
        self._value_rows: list[torch.Tensor] = []

    def add(self, stats: DecodeStats) -> None:
        """Count one call of the operator, by the statistics that it returned."""
        self._read.append(stats.bytes_read.sum())
        self._total.append(stats.bytes_total.sum())
        self._value_rows.append(stats.value_rows.double().mean())

    def add_exact(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Count a layer with exact attention; forwards of several rows are not decoding.

        Parameters
        ----------
        query, key, value : Tensor
            ``[B, Hq, Q, D]``, ``[B, Hkv, L, D]``, ``[B, Hkv, L, Dv]``. SDPA reads all rows, the
            masked ones too.
        """
        if query.shape[2] != 1:
            return
        everything = torch.tensor(
            key.numel() * key.element_size() + value.numel() * value.element_size(),
            device=key.device,
        )
        self._read.append(everything)
        self._total.append(everything)

    @property
    def calls(self) -> int:
        """Layers times steps counted."""
        return len(self._read)

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
        """Mean number of value rows loaded per sequence, key/value head and layer."""
        counts = [float(count) for count in self._value_rows]
        return sum(counts) / len(counts) if counts else 0.0


@contextmanager
def record(model: torch.nn.Module) -> Iterator[Traffic]:
    """Count the KV bytes of every decoding forward of an enabled model.

    Asks the operator for its statistics, which costs time: keep it out of timed runs.

    Parameters
    ----------
    model : torch.nn.Module
        A model enabled by ``santa_torch.hf.enable`` or ``use``.

    Yields
    ------
    Traffic
        Filled while the context is open.

    Raises
    ------
    ValueError
        The model is not enabled.
    """
    bound = [getattr(module, BINDING) for module in model.modules() if hasattr(module, BINDING)]
    if not bound:
        raise ValueError(f"model: {type(model).__name__} is not enabled; nothing to record")
    previous = [binding.traffic for binding in bound]
    traffic = Traffic()
    for binding in bound:
        binding.traffic = traffic
    try:
        yield traffic
    finally:
        for binding, before in zip(bound, previous, strict=True):
            binding.traffic = before
