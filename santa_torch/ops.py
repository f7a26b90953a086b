"""The operators as Python functions: decode, and its stages score, weigh, draw and gather.

All of them are thin: checks of values live inside ``torch.ops.santa.*``, where a direct call meets
them too. What is done here is what a graph must not contain: Python numbers become tensors.
"""

from __future__ import annotations

import numbers
import operator
from typing import Any, NamedTuple

import torch

from santa_torch import _load
from santa_torch import fakes as _fakes  # noqa: F401  registers the operators' fakes
from santa_torch.config import METHODS, BernoulliConfig
from santa_torch.inference import gradients_asked, inference_only
from santa_torch.sketch import KeySketch
from santa_torch.stats import DecodeStats, decode_stats

__all__ = [
    "METHODS",
    "DecodeOutput",
    "bernoulli_query",
    "decode",
    "draw",
    "gather",
    "score",
    "weigh",
]

_CUDA = _load.CUDA_MODULE == "loaded"
_DEVICES = "'cpu' and 'cuda'" if _CUDA else "'cpu'"
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


class DecodeOutput(NamedTuple):
    """What ``decode`` returns when more than the output is asked for.

    Attributes
    ----------
    out : Tensor
        ``[B, Hq, Dv]`` in the dtype of ``q``, contiguous.
    lse : Tensor or None
        float32 ``[B, Hq]``: natural logarithm of the softmax denominator; ``return_lse=True``.
    stats : DecodeStats or None
        What was read and the estimated error; ``return_stats=True``.
    """

    out: torch.Tensor
    lse: torch.Tensor | None
    stats: DecodeStats | None


def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    samples: int | None = None,
    method: str = "shared",
    scale: float | None = None,
    mask: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    seed: int | torch.Tensor = 0,
    position: int | torch.Tensor | None = None,
    layer: int = 0,
    head_offset: int = 0,
    sketch: KeySketch | None = None,
    bernoulli: BernoulliConfig | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    target_error: float | None = None,
    return_lse: bool = False,
    return_stats: bool = False,
) -> torch.Tensor | DecodeOutput:
    """Attention of one query row per sequence, over sampled rows of V.

    An unbiased estimate of ``softmax(scale q K^T + mask) V``: every key is scored, and only the
    value rows that a sample of the softmax picks are read (SANTA and S2ANTA, arXiv 2605.01910).

    Parameters
    ----------
    q : Tensor
        ``[B, Hq, D]``, float32, float16 or bfloat16. Any strides with a last one of 1.
    k : Tensor
        ``[B, Hkv, L, D]``, dtype and device of ``q``; ``Hkv`` divides ``Hq``. Any strides with a
        last one of 1; never copied.
    v : Tensor
        ``[B, Hkv, L, Dv]``, likewise.
    samples : int
        S, between 1 and 2^24: draws per query head, or the factor of ``"shared"``. May be left out
        for ``"dense"`` only.
    method : str
        With ``p`` the softmax of a head and ``c_j`` how often row j was drawn:

        - ``"dense"``: every row, exact.
        - ``"multinomial"``: S independent draws per query head, ``sum_j c_j v_j / S`` (SANTA).
        - ``"stratified"``: one draw in each of S equal slices of the distribution function
          (S2ANTA).
        - ``"systematic"``: draws at ``(m + u) / S`` with one offset u (S2ANTA).
        - ``"shared"``: one sample per KV head for all heads of its group. Row j is included with
          probability ``pi_j = min(1, S sqrt(sum_h p_hj^2))``, and head h gets the Horvitz-Thompson
          sum ``sum_j p_hj v_j / pi_j`` (Horvitz and Thompson 1952).
    scale : float, optional
        Factor of the scores; default ``1 / sqrt(D)``.
    mask : Tensor, optional
        Broadcastable to ``[B, Hq, L]``. bool: True attends. Additive float32, float16 or bfloat16:
        added to the scores, where -inf and the dtype's lowest finite number mean "not attended". A
        row that is not attended is not read for that head.
    seq_lens : Tensor, optional
        int32 or int64 ``[B]``: rows of each sequence; those at and past it are never loaded.
        Default L.
    block_table : Tensor, optional
        Pages of a paged cache. Not available yet.
    seed : int or Tensor
        Key of the random numbers, int64 ``[1]`` or ``[B]`` on the device of ``q``. Sequences with
        one seed and one position draw with the same numbers. Use a tensor in compiled code: an int
        becomes a constant of the graph.
    position : int or Tensor, optional
        Where in its sequence the query stands, int64 ``[1]`` or ``[B]``; its low 32 bits enter the
        random counter. It must differ from step to step. Default: index of the last attended row
        plus one. It stands still when old rows are evicted, and counts local heads alone where
        masks differ by head and heads are spread over ranks: pass the true position then.
    layer : int
        Index of the layer, below 2^24; layers draw independently.
    head_offset : int
        Index of ``q``'s first head among the heads of all tensor-parallel ranks.
    softcap : float, optional
        c: scores become ``c tanh(score / c)`` before the mask (Gemma 2, arXiv 2408.00118).
    sinks : Tensor, optional
        float32, float16 or bfloat16 ``[Hq]``: a further logit of each head, after scale and cap,
        that takes its share of the softmax and has no value (attention sinks of gpt-oss). Rows are
        sampled among themselves and the result is multiplied by their share, so that no draw falls
        on a sink.
    sketch : KeySketch, optional
        The keys once more, feature by feature. Rows of its whole blocks are scored from it, all
        others from ``k``. It has to hold the first rows of ``k``; whether it does is not checked.
    bernoulli : BernoulliConfig, optional
        Score with the stochastic query of ``bernoulli_query`` in the place of ``q``. Of rows in a
        ``sketch`` only the features that it uses are loaded; without a sketch nothing is saved.
        Scores stay unbiased, attention does not: ``docs/bernoulli.md``.
    target_error
        Not available yet.
    return_lse, return_stats : bool
        Return a ``DecodeOutput`` with the log-sum-exp or with statistics.

    Returns
    -------
    Tensor or DecodeOutput
        ``[B, Hq, Dv]`` in the dtype of ``q``, contiguous. A head that attends nothing gets 0 and a
        log-sum-exp of -inf, or of its sink; one whose logits hold NaN or +inf gets NaN and leaves
        the other heads untouched. The log-sum-exp includes the sink.

    Raises
    ------
    ValueError
        An argument has a wrong shape, dtype, device or value; the message names it and the value.
    NotImplementedError
        An argument of a later version is not None, or the device has no kernels in this build.

    Notes
    -----
    Same inputs give the same bits, whatever the number of threads or the other sequences of the
    batch. Weights are rounded to multiples of 2^-30 of the largest, which moves the sampled
    distribution by at most ``L 2^-31`` in total variation; beyond that every method is unbiased.

    On CUDA nothing waits for the device, so what tensors hold is not checked: a length is cut to
    the rows of ``k``. Scores differ from the CPU's in their last bits; the draws from equal weights
    do not. No GPU has run these kernels yet: ``docs/cuda.md``.

    There is no backward pass: gradients through the output or the log-sum-exp raise. On the CPU
    every head dimension takes one path; of one that is no multiple of 8 the last features load
    singly.

    Examples
    --------
    >>> q, k, v = torch.randn(1, 8, 64), torch.randn(1, 2, 4096, 64), torch.randn(1, 2, 4096, 64)
    >>> santa_torch.decode(q, k, v, samples=128).shape
    torch.Size([1, 8, 64])
    """
    if not (block_table is target_error is None):
        _refuse_later_arguments(block_table=block_table, target_error=target_error)
    if samples is None:
        if method != "dense":
            raise ValueError(f"decode: samples must be given for method {method!r}, got None")
        samples = 1
    if not isinstance(method, str):
        raise ValueError(f"method must be a string, got {method!r}")
    # Defaults are left to the schema: every argument that is passed costs the call 0.3 us.
    given: dict[str, Any] = {}
    if mask is not None:
        given["mask"] = mask
    if seq_lens is not None:
        given["seq_lens"] = seq_lens
    if sinks is not None:
        given["sinks"] = sinks
    if sketch is not None:
        given["key_blocks"], given["block_rows"] = _sketch_tensors(sketch)
    _require_kernels(q=q, k=k, v=v, **given)
    sources: tuple[torch.Tensor, ...] | None = None
    if gradients_asked(q, k, v, mask, sinks):
        sources = tuple(tensor for tensor in (q, k, v, mask, sinks) if tensor is not None)
        q, k, v = q.detach(), k.detach(), v.detach()
        given = {name: tensor.detach() for name, tensor in given.items()}
    if scale is not None:
        given["scale"] = _number("scale", scale)
    if softcap is not None:
        given["softcap"] = _number("softcap", softcap)
    if position is not None:
        given["position"] = _as_tensor("position", position, q)
    if type(layer) is not int or layer != 0:
        given["layer"] = _integer("layer", layer)
    if type(head_offset) is not int or head_offset != 0:
        given["head_offset"] = _integer("head_offset", head_offset)
    if bernoulli is not None:
        if not isinstance(bernoulli, BernoulliConfig):
            raise ValueError(f"bernoulli must be a BernoulliConfig or None, got {bernoulli!r}")
        given["bernoulli_draws"] = bernoulli.draws
        given["bernoulli_shared"] = bernoulli.shared
    if return_stats is not False:
        given["return_stats"] = return_stats
    out, lse, keys_read, value_rows, squared_error = torch.ops.santa.decode(
        q,
        k,
        v,
        samples=_integer("samples", samples),
        method=method,
        seed=_as_tensor("seed", seed, q),
        **given,
    )
    if sources is not None:
        out, lse = inference_only(out, *sources), inference_only(lse, *sources)
    if not return_lse and not return_stats:
        return out
    stats = None
    if return_stats:
        stats = decode_stats(
            keys_read,
            value_rows,
            squared_error,
            key_bytes=k.shape[3] * k.element_size(),
            value_bytes=v.shape[3] * v.element_size(),
        )
    return DecodeOutput(out, lse if return_lse else None, stats)


def bernoulli_query(
    q: torch.Tensor,
    *,
    draws: int,
    shared: bool = True,
    kv_heads: int,
    seed: int | torch.Tensor = 0,
    position: int | torch.Tensor,
    layer: int = 0,
    head_offset: int = 0,
) -> torch.Tensor:
    """A stochastic query with the expectation ``q``, many of whose features are 0.

    What ``decode(bernoulli=...)`` scores with. A feature that is 0 for all query heads of a group
    need not be loaded of the group's keys.

    Parameters
    ----------
    q : Tensor
        ``[B, Hq, D]``, float32, float16 or bfloat16, last stride 1.
    draws : int
        n, between 1 and 1024.
    shared : bool
        False: with M the largest ``|q_d|`` of a head, the mean of n ternary queries, in each of
        which feature d is ``sign(q_d) M`` with probability ``|q_d| / M`` and 0 otherwise; the n
        draws of a feature are stratified (arXiv 2605.01910, section 5 and appendix C). A head
        touches feature d with probability ``min(1, n |q_d| / M)``. True: one sample of features for
        all heads of a group. With ``m_d = sqrt(sum_h q_hd^2)`` feature d is included with
        probability ``pi_d = min(1, n m_d / max m)``, by one systematic draw; it is then
        ``q_hd / pi_d`` for head h (Horvitz and Thompson 1952).
    kv_heads : int
        Hkv, a divisor of Hq.
    seed, position, layer, head_offset
        As in ``decode``; ``position`` must be given.

    Returns
    -------
    Tensor
        float32 ``[B, Hq, D]``. Probabilities are rounded to multiples of 2^-30. A head with NaN or
        infinite features is NaN and does not weigh on the others.

    Raises
    ------
    ValueError
        An argument has a wrong shape, dtype, device or value; the message names it and the value.

    Examples
    --------
    >>> q = torch.randn(1, 8, 64)
    >>> query = santa_torch.bernoulli_query(q, draws=4, kv_heads=2, position=1)
    >>> int((query == 0).sum()) > 0
    True
    """
    _require_kernels(q=q)
    query: torch.Tensor = torch.ops.santa.bernoulli_query(
        q.detach(),
        draws=_integer("draws", draws),
        shared=_flag("shared", shared),
        kv_heads=_integer("kv_heads", kv_heads),
        seed=_as_tensor("seed", seed, q),
        position=_as_tensor("position", position, q),
        layer=_integer("layer", layer),
        head_offset=_integer("head_offset", head_offset),
    )
    return inference_only(query, q)


def score(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    scale: float | None = None,
    mask: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    softcap: float | None = None,
    sketch: KeySketch | None = None,
    sparse_query: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of every row: a stage of ``decode``.

    Parameters
    ----------
    q, k, scale, mask, seq_lens, softcap, sketch
        As in ``decode``. ``q`` may be float32 whatever ``k`` is, as ``bernoulli_query`` returns it.
    sparse_query : bool
        Of rows in the ``sketch``, load only features of which ``q`` is neither 0 nor NaN for some
        head of the group.

    Returns
    -------
    scores : Tensor
        float32 ``[B, Hq, L]``: ``scale <q_h, k_j>``, capped, plus an additive mask; -inf where not
        attended.
    maxima : Tensor
        float32 ``[B, Hq]``: the largest score; -inf where nothing is attended, NaN where a score is
        NaN.
    """
    _require_kernels(q=q, k=k, **_given(mask=mask, seq_lens=seq_lens))
    key_blocks, block_rows = (None, None) if sketch is None else _sketch_tensors(sketch)
    scores, maxima = torch.ops.santa.score(
        q.detach(),
        k.detach(),
        scale=_number("scale", scale),
        mask=None if mask is None else mask.detach(),
        seq_lens=seq_lens,
        softcap=_number("softcap", softcap),
        key_blocks=key_blocks,
        block_rows=block_rows,
        sparse_query=_flag("sparse_query", sparse_query),
    )
    sources = q, k, *_given(mask=mask).values()
    return inference_only(scores, *sources), inference_only(maxima, *sources)


def weigh(scores: torch.Tensor, maxima: torch.Tensor) -> torch.Tensor:
    """Integer weights of every row: the second stage of ``decode``.

    Parameters
    ----------
    scores : Tensor
        float32 ``[B, Hq, L]``; -inf means weight 0.
    maxima : Tensor
        float32 ``[B, Hq]``: no score of the head exceeds it.

    Returns
    -------
    Tensor
        int32 ``[B, Hq, L]``: ``rint(2^30 exp(score - maximum))``; all 0 for a head whose maximum is
        not finite.
    """
    _require_kernels(scores=scores, maxima=maxima)
    weights: torch.Tensor = torch.ops.santa.weigh(scores.detach(), maxima.detach())
    return weights


def draw(
    weights: torch.Tensor,
    *,
    samples: int,
    method: str = "shared",
    kv_heads: int,
    seed: int | torch.Tensor = 0,
    position: int | torch.Tensor,
    layer: int = 0,
    head_offset: int = 0,
    row_mass: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows drawn from integer weights: the third stage of ``decode``, exact on every backend.

    Parameters
    ----------
    weights : Tensor
        int32 ``[B, Hq, L]`` between 0 and 2^30: weights of any origin, for instance a proxy's.
    samples, method, seed, position, layer, head_offset
        As in ``decode``; ``method`` is one that draws and ``position`` must be given.
    kv_heads : int
        Hkv, a divisor of Hq: heads of one group share a sample under ``"shared"``.
    row_mass : Tensor, optional
        float32 ``[B, Hq]`` between 0 and 1: share of each head's softmax that lies on its rows,
        ``1 / (1 + exp(sink - lse))`` with a sink. It makes ``"shared"`` read fewer rows for heads
        that mostly look at their sink; the other methods ignore it. Default 1.

    Returns
    -------
    rows : Tensor
        int64 ``[B, H, C]``: distinct rows, ascending, then zeros. H is Hq, or Hkv for ``"shared"``.
    counts : Tensor
        int32 ``[B, H, C]``: how often each row was drawn; for ``"shared"`` its inclusion
        probability in units of 2^-30.
    num_rows : Tensor
        int32 ``[B, H]``: how many of the C places are in use.
    """
    _require_kernels(weights=weights)
    rows, counts, num_rows = torch.ops.santa.draw(
        weights,
        samples=samples,
        method=method,
        kv_heads=kv_heads,
        seed=_as_tensor("seed", seed, weights),
        position=_as_tensor("position", position, weights),
        layer=layer,
        head_offset=head_offset,
        row_mass=row_mass,
    )
    return rows, counts, num_rows


def gather(
    rows: torch.Tensor, coefficients: torch.Tensor, num_rows: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Weighted sums of chosen V rows: the last stage of ``decode``.

    Parameters
    ----------
    rows : Tensor
        int64 ``[B, Hq or Hkv, C]``: one list per query head, or one per group.
    coefficients : Tensor
        float32 ``[B, Hq, C]``. A row with coefficient 0 is not used for that head.
    num_rows : Tensor
        int32 ``[B, Hq or Hkv]``: places of ``rows`` in use.
    v : Tensor
        ``[B, Hkv, L, Dv]``, float32, float16 or bfloat16, last stride 1.

    Returns
    -------
    Tensor
        float32 ``[B, Hq, Dv]``: ``sum_i coefficients[h, i] v[rows[i]]``, in fp32 within a chunk of
        256 rows and in fp64 between chunks.
    """
    _require_kernels(rows=rows, coefficients=coefficients, num_rows=num_rows, v=v)
    out: torch.Tensor = torch.ops.santa.gather(rows, coefficients.detach(), num_rows, v.detach())
    return inference_only(out, coefficients, v)


def _sketch_tensors(sketch: KeySketch) -> tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(sketch, KeySketch):
        raise ValueError(f"sketch must be a KeySketch or None, got {type(sketch).__name__}")
    return sketch.blocks, sketch.rows


def _integer(name: str, value: Any) -> int:
    """An integer argument; the dispatcher would answer other types with a page about schemas."""
    if type(value) is int and _INT64_MIN <= value <= _INT64_MAX:
        return value
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not _INT64_MIN <= number <= _INT64_MAX:
        raise ValueError(f"{name} must be an integer of 64 bits, got {value!r}")
    return number


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def _number(name: str, value: Any) -> float | None:
    """A real number of any kind, numpy's too; None stays."""
    if value is None or isinstance(value, float):
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} must be a number or None, got {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must be finite in float32, got an integer too large") from None


def _as_tensor(name: str, value: int | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """An int64 tensor ``[1]`` from an integer; a tensor as it is (the operator checks it)."""
    if isinstance(value, torch.Tensor):
        return value.reshape(1) if value.ndim == 0 else value
    return torch.full((1,), _integer(name, value), dtype=torch.int64, device=like.device)


def _refuse_later_arguments(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(
                f"decode: {name} is not available in this version; leave it None"
            )


def _given(**optional: Any) -> dict[str, Any]:
    """Those of the optional arguments that are not None."""
    return {name: value for name, value in optional.items() if value is not None}


def _require_kernels(**tensors: Any) -> None:
    """Tensors on a device with kernels; the dispatcher would print a page where there are none."""
    for name, tensor in tensors.items():
        if (
            isinstance(tensor, torch.Tensor)
            and (tensor.is_cpu or (tensor.is_cuda and _CUDA))
            and tensor.layout == torch.strided
        ):
            continue
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"{name} must be a torch.Tensor, got {type(tensor).__name__} {tensor!r:.60}"
            )
        if tensor.layout != torch.strided:
            raise ValueError(f"{name} must be a strided tensor, got {tensor.layout}")
        if tensor.device.type not in ("cpu", "meta"):
            why = f" (CUDA operators: {_load.CUDA_MODULE})" if tensor.is_cuda else ""
            raise NotImplementedError(
                f"{name}: santa_torch has no kernels for device {str(tensor.device)!r} in this "
                f"build, only for {_DEVICES}{why}"
            )
