"""How a model's attention is sampled: one frozen, validated value.

This file imports neither torch nor transformers, so that a command line can build and check a
configuration before it pays for either.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass

#: Estimators of ``santa_torch.decode``, in the order of the table in ``docs/``.
METHODS = ("dense", "multinomial", "stratified", "systematic", "shared")

#: Largest S whose fp32 form is exact, which the inclusion probabilities need.
MAX_SAMPLES = 2**24

#: Most draws of a Bernoulli query, of the operators too.
MAX_BERNOULLI_DRAWS = 1024

_QUERY_ROWS = ("decode", "all")
_SKETCH_BITS, _LATER_SKETCH_BITS = (16, 32), (8, 4, 2)


@dataclass(frozen=True)
class BernoulliConfig:
    """Settings of Bernoulli scores: a stochastic query that leaves out features of the keys.

    Parameters
    ----------
    draws : int
        n, 1 to 1024. A feature that is a share p of the largest one is used with probability
        ``min(1, n p)``: more draws use more features, with less noise.
    shared : bool
        True: one sample of features per key/value head, drawn from the query heads of its group
        together. False: one per query head, as in the SANTA paper; a group then reads the union.

    Raises
    ------
    ValueError
        Names the argument and the value that cannot be used.

    Examples
    --------
    >>> BernoulliConfig(draws=4)
    BernoulliConfig(draws=4, shared=True)
    """

    draws: int = 8
    shared: bool = True

    def __post_init__(self) -> None:
        draws = _integer("draws", self.draws, 1, MAX_BERNOULLI_DRAWS)
        object.__setattr__(self, "draws", draws)  # the documented way in a frozen class
        if not isinstance(self.shared, bool):
            raise ValueError(f"shared must be True or False, got {self.shared!r}")


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
    sketch_bits : int or None
        Keep the keys once more, feature by feature, in this many bits: 16 for models in float16 or
        bfloat16, 32 for float32. Needs ``SantaCache(model.config, config=...)``, which keeps them.
    planes : bool
        Keys in two 4-bit planes. Not available yet: only False.
    bernoulli : BernoulliConfig or None
        Score with a stochastic query. Bytes are saved only together with ``sketch_bits``: without,
        the result is the same and every feature is read.

    Raises
    ------
    ValueError
        Names the argument and the value that cannot be used.
    NotImplementedError
        An argument has a value of a later version.

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
    bernoulli: BernoulliConfig | None = None

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
        if self.sketch_bits is not None:
            self._normalise("sketch_bits", _sketch_bits(self.sketch_bits))
        if self.planes is not False:
            raise NotImplementedError(
                f"planes={self.planes!r} is not available in this version, only False"
            )
        if self.bernoulli is not None and not isinstance(self.bernoulli, BernoulliConfig):
            raise ValueError(f"bernoulli must be a BernoulliConfig or None, got {self.bernoulli!r}")

    def selects(self, layer: int) -> bool:
        """Whether attention of layer ``layer`` (0-based) is sampled."""
        return self.layers is None or layer in self.layers

    def _normalise(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the documented way to set a field of a frozen class


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


def _sketch_bits(value: object) -> int:
    bits = _integer("sketch_bits", value, 1, 32)
    if bits in _LATER_SKETCH_BITS:
        raise NotImplementedError(
            f"sketch_bits={bits} is not available in this version, only None, 16 and 32"
        )
    if bits not in _SKETCH_BITS:
        raise ValueError(f"sketch_bits must be None, 16 or 32, got {bits}")
    return bits


def _layer_tuple(layers: object) -> tuple[int, ...]:
    if isinstance(layers, (str, bytes)) or not isinstance(layers, Iterable):
        raise ValueError(f"layers must be None or an iterable of integers, got {layers!r}")
    indices = tuple(sorted({_integer("layers", layer, 0, 2**24 - 1) for layer in layers}))
    if not indices:
        raise ValueError("layers must name at least one layer (None means all), got none")
    return indices
