"""What a decode step read, and how far off it estimates itself to be."""

from __future__ import annotations

from typing import NamedTuple

import torch


class DecodeStats(NamedTuple):
    """Statistics of one decode step, on the device of its tensors; reading them is the first sync.

    Attributes
    ----------
    key_rows : Tensor
        int64 ``[B, Hkv]``: K rows scored, those that some head of the group attends.
    key_features : Tensor
        int64 ``[B, Hkv]``: features of K that the query uses: D, or with Bernoulli scores those
        that were drawn for some head of the group. Of rows in a ``KeySketch`` only these are
        loaded.
    value_rows : Tensor
        int64 ``[B, Hkv]``: distinct V rows loaded for the heads of the group together.
    bytes_read : Tensor
        int64 ``[B, Hkv]``: bytes loaded of K and V. A ``KeySketch`` is loaded in runs of 64 rows of
        a feature, attended or not.
    bytes_total : Tensor
        int64 ``[B, Hkv]``: bytes of K and V that exact attention reads for the same rows.
    squared_error : Tensor
        float32 ``[B, Hq]``: estimate of ``|out - exact|^2``, summed over the ``Dv`` features, made
        from the rows that were read anyway. 0 for ``"dense"``, NaN for ``"multinomial"`` with one
        sample, whose variance one draw cannot tell.

    Notes
    -----
    With ``a_i`` the slack of drawn row i, ``y_i`` its contribution and ``b`` the a-weighted mean of
    the ``y_i``, the estimate is ``sum_i a_i |y_i - b|^2``. For ``"shared"`` ``a = 1 - pi`` and
    ``y = p v / pi``: the variance estimator of a fixed-size design with unequal
    probabilities (Hájek 1964). The per-head methods have ``y = v / S`` and: systematic,
    ``a = 1 - frac(S p)`` for rows drawn once more than ``floor(S p)``; stratified, the part of each
    drawing stratum that the row does not cover; multinomial, ``a = c S / (S - 1)``, unbiased.
    """

    key_rows: torch.Tensor
    key_features: torch.Tensor
    value_rows: torch.Tensor
    bytes_read: torch.Tensor
    bytes_total: torch.Tensor
    squared_error: torch.Tensor


def decode_stats(
    keys_read: torch.Tensor,
    value_rows: torch.Tensor,
    squared_error: torch.Tensor,
    *,
    key_bytes: int,
    value_bytes: int,
) -> DecodeStats:
    """Complete the operator's counts with bytes.

    Parameters
    ----------
    keys_read : Tensor
        int64 ``[B, Hkv, 3]``: rows scored, features used and bytes loaded of K.
    value_rows : Tensor
        int64 ``[B, Hkv]``: rows loaded of V.
    squared_error : Tensor
        float32 ``[B, Hq]``.
    key_bytes, value_bytes : int
        Bytes of one row of K and of V.

    Returns
    -------
    DecodeStats
    """
    key_rows, key_features, key_bytes_read = keys_read.unbind(-1)
    return DecodeStats(
        key_rows=key_rows,
        key_features=key_features,
        value_rows=value_rows,
        bytes_read=key_bytes_read + value_rows * value_bytes,
        bytes_total=key_rows * (key_bytes + value_bytes),
        squared_error=squared_error,
    )
