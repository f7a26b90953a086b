"""How a model's attention is sampled: one frozen, validated value.

This file imports neither torch nor transformers, so that a command line can build and check a
configuration before it pays for either.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

#: Estimators of ``santa_torch.decode``, in the order of the table in ``docs/``.
METHODS = ("dense", "multinomial", "stratified", "systematic", "shared")

#: Largest S whose fp32 form is exact, which the inclusion probabilities need.
MAX_SAMPLES = 2**24

_QUERY_ROWS = ("decode", "all")


@dataclass(frozen=True)
class SantaConfig:
    """Settings of sampled attention for a whole model.

    Parameters
    ----------
    method : str
        ``"dense"`` (exact), ``"multinomial"``, ``"stratified"``, ``"systematic"`` (one sample per
        query head) or ``"shared"`` (one sample per key/value head).
    samples : int or None
        S: draws per query head, or for ``"shared"`` the factor in ``pi = min(1, S * w)``.
        ``None`` only with ``"dense"``, which ignores it.
    layers : iterable of int, optional
        Indices of the layers that sample; the others keep exact attention. ``None`` means all.
        Stored as a sorted tuple without repeats.
    seed : int
        Seed of every draw, a signed 64-bit number.
    dense_below : int
        Forwards that see fewer key rows than this use exact attention. A static cache counts with
        its capacity, a sliding-window layer with the rows that it keeps. Only with
        ``query_rows="decode"``.
    query_rows : str
        ``"decode"``: forwards of one query row per sequence are sampled, those of several (prefill,
        scoring, verification of drafts) are exact. ``"all"``: every row is sampled, and draws what
        a decoding step at its place draws. Prefill then costs a decoding step per token.
    sketch_bits, planes, bernoulli
        Low-precision keys and Bernoulli scores. Not available yet: only the defaults.

    Raises
    ------
    ValueError
        Names the argument and the value that cannot be used.
    NotImplementedError
        An argument of a later version has a value other than its default.

    Examples
    --------
    >>> SantaConfig(samples=128, layers=[3, 1, 3]).layers
    (1, 3)
    """

    method: str = "shared"
    samples: int | None = 256
    layers: Collection[int] | None = None
    seed: int = 0
    dense_below: int = 0
    query_rows: str = "decode"
    sketch_bits: int | None = None
    planes: bool = False
    bernoulli: Any = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {self.method!r}")
        if self.samples is None:
            if self.method != "dense":
                raise ValueError(f"samples must be given for method {self.method!r}, got None")
        else:
            self._normalise("samples", _integer("samples", self.samples, 1, MAX_SAMPLES))
        self._normalise("seed", _integer("seed", self.seed, -(2**63), 2**63 - 1))
        self._normalise("dense_below", _integer("dense_below", self.dense_below, 0, 2**63 - 1))
        if self.layers is not None:
            self._normalise("layers", _layer_tuple(self.layers))
        if self.query_rows not in _QUERY_ROWS:
            raise ValueError(
                f"query_rows must be one of {', '.join(_QUERY_ROWS)}, got {self.query_rows!r}"
            )
        if self.dense_below and self.query_rows == "all":
            raise ValueError(
                f"dense_below={self.dense_below} is for query_rows='decode': under 'all' the rows "
                "of one forward would lie on both sides of it"
            )
        self._refuse_later_arguments()

    def selects(self, layer: int) -> bool:
        """Whether attention of layer ``layer`` (0-based) is sampled."""
        return self.layers is None or layer in self.layers

    def _normalise(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the documented way to set a field of a frozen class

    def _refuse_later_arguments(self) -> None:
        for name, default in (
            ("sketch_bits", None),
            ("planes", False),
            ("bernoulli", None),
        ):
            value = getattr(self, name)
            if value != default:
                raise NotImplementedError(
                    f"{name}={value!r} is not available in this version, only {default!r}"
                )


def _integer(name: str, value: object, low: int, high: int) -> int:
    """``value`` as an int of ``[low, high]``; a bool is refused, since it is a slip."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {value!r}") from None
    if isinstance(value, bool):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if not low <= number <= high:
        raise ValueError(f"{name} must be between {low} and {high}, got {number}")
    return number


def _layer_tuple(layers: object) -> tuple[int, ...]:
    if isinstance(layers, (str, bytes)) or not isinstance(layers, Iterable):
        raise ValueError(f"layers must be None or an iterable of integers, got {layers!r}")
    indices = tuple(sorted({_integer("layers", layer, 0, 2**24 - 1) for layer in layers}))
    if not indices:
        raise ValueError("layers must name at least one layer (None means all), got none")
    return indices
