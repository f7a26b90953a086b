"""Sampled attention in plain PyTorch: the oracle that every backend is tested against.

Written to be read, not to be fast. Scores, sums and outputs are float64; random numbers, integer
weights and thresholds are the exact integers of the kernels, so that ``draw`` here and
``torch.ops.santa.draw`` return the same rows for the same weights. The stages have the names they
have everywhere:

    bernoulli_query  q      -> q           stochastic, with features that are 0
    score   q, k            -> scores, maxima
    weigh   scores, maxima  -> weights     integers in units of 2^-30
    draw    weights         -> rows, counts, num_rows
    gather  rows, v         -> out
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from santa_torch.config import MAX_SAMPLES, METHODS, BernoulliConfig
from santa_torch.ops import DecodeOutput, _as_tensor, _refuse_later_arguments
from santa_torch.sketch import KeySketch
from santa_torch.stats import decode_stats

ONE = 2**30  # a weight or an inclusion probability of 1
WORD = 2**32
VALUES, FEATURES = 0, 1  # streams of random numbers: draws of V rows, draws of features of K


# ---- random numbers ------------------------------------------------------------------------------


def philox4x32(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Ten rounds of Philox4x32 (Salmon et al., SC 2011): four 32-bit words from counter and key."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (product1 // WORD) ^ c1 ^ k0,
            product1 % WORD,
            (product0 // WORD) ^ c3 ^ k1,
            product0 % WORD,
        )
        k0, k1 = (k0 + 0x9E3779B9) % WORD, (k1 + 0xBB67AE85) % WORD
    return [c0, c1, c2, c3]


def random_words(
    seed: int, position: int, layer: int, head: int, draw: int, stream: int
) -> list[int]:
    """Four random words of one draw: a pure function of where the draw happens."""
    seed %= 2**64
    return philox4x32(
        (position % WORD, draw, stream << 24 | layer, head), (seed % WORD, seed // WORD)
    )


def random64(
    seed: int, position: int, layer: int, head: int, draw: int, stream: int = VALUES
) -> int:
    """64 random bits of one draw."""
    word = random_words(seed, position, layer, head, draw, stream)
    return word[1] * WORD + word[0]


# ---- bernoulli_query -----------------------------------------------------------------------------


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
    """``santa_torch.bernoulli_query``, to the bit: float32 ``[B, Hq, D]``."""
    batch, heads, _ = q.shape
    seeds = _as_tensor("seed", seed, q).expand(batch).tolist()
    positions = _as_tensor("position", position, q).expand(batch).tolist()
    group = heads // kv_heads
    out = torch.empty(q.shape, dtype=torch.float32)
    for b in range(batch):
        for first in range(0, heads, group):

            def words(h: int, draw: int, b: int = b, first: int = first) -> list[int]:
                head = head_offset + first + h
                return random_words(seeds[b], positions[b], layer, head, draw, FEATURES)

            queries = q[b, first : first + group].float()
            random_query = one_sample if shared else ternary_means
            out[b, first : first + group] = random_query(queries, draws, words)
    return out


def chances(size: torch.Tensor) -> torch.Tensor:
    """Chance of each feature of a ternary query, int64 in units of 2^-30."""
    return ((size / size.max()).double() * ONE).round().long()


def ternary_means(
    q: torch.Tensor, draws: int, words: Callable[[int, int], list[int]]
) -> torch.Tensor:
    """Means of stratified ternary queries, one per head; ``[G, D]`` (arXiv 2605.01910, C).

    Draw i compares ``(i + u) / draws`` with the chance: all below it take the feature, all above do
    not, and one slice is in doubt.
    """
    out = torch.full_like(q, math.nan)
    for h, query in enumerate(q):
        largest = query.abs().max()
        if largest == 0:
            out[h] = 0.0
        if largest == 0 or not largest.isfinite():
            continue
        expected = chances(query.abs()) * draws
        word = [word for d in range(0, len(query), 4) for word in words(h, d // 4)]
        number = torch.tensor(word[: len(query)]) // 4  # 30 bits
        counts = expected // ONE + (number < expected % ONE)
        size = largest.double() * counts / draws
        out[h] = torch.where(query < 0, -size, size)
    return out + 0.0  # no negative zeros


def one_sample(q: torch.Tensor, draws: int, words: Callable[[int, int], list[int]]) -> torch.Tensor:
    """One Horvitz-Thompson sample of features for all heads of a group; ``[G, D]``."""
    finite = q.isfinite().all(-1)
    out = torch.where(finite[:, None], 0.0, math.nan) * torch.ones_like(q)
    largest = torch.cat([q[finite].abs().flatten(), torch.zeros(1)]).max()
    if largest == 0:
        return out
    square = torch.zeros(q.shape[1])
    for query in q[finite]:
        square = square + (query / largest) * (query / largest)
    size = square.double().sqrt().float()  # correctly rounded
    inclusion = (chances(size) * draws).clamp(max=ONE)
    low, high, *_ = words(0, 0)
    points = torch.tensor(
        thresholds("shared", 1, int(inclusion.sum()), lambda _: high * WORD + low)
    )
    drawn = torch.searchsorted(inclusion.cumsum(0), points, right=True).unique()
    expanded = q[:, drawn].double() * ONE / inclusion[drawn].double()
    out[:, drawn] = torch.where(finite[:, None], expanded.float(), math.nan)
    return out


def used_features(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Which features some head of a group needs, bool ``[B, Hkv, D]``; at least one."""
    batch, heads, dim = q.shape
    needs = (q != 0) & ~q.isnan()
    used = needs.view(batch, kv_heads, heads // kv_heads, dim).any(2)
    used[..., 0] |= ~used.any(-1)
    return used


# ---- score and weigh -----------------------------------------------------------------------------


def attended(
    q: torch.Tensor, rows: int, mask: torch.Tensor | None, seq_lens: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which rows each head attends, bool ``[B, Hq, L]``, and what is added to their scores."""
    batch, heads, _ = q.shape
    attends = torch.ones(batch, heads, rows, dtype=torch.bool)
    bias = torch.zeros(batch, heads, rows, dtype=torch.float64)
    if seq_lens is not None:
        attends &= (torch.arange(rows) < seq_lens[:, None])[:, None]
    if mask is not None and mask.dtype == torch.bool:
        attends &= mask
    elif mask is not None:
        lowest = torch.finfo(torch.float16 if mask.dtype == torch.float16 else torch.bfloat16).min
        attends &= ~(mask.double() <= lowest)  # float32 masks are often made in bfloat16
        bias = bias + mask.double()
    return attends, bias


def score(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    scale: float | None = None,
    mask: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores float64 ``[B, Hq, L]``, -inf where not attended, and their maxima ``[B, Hq]``."""
    group = q.shape[1] // k.shape[1]
    factor = 1 / math.sqrt(q.shape[2]) if scale is None else scale
    products = torch.einsum("bhd,bhld->bhl", q.double(), k.double().repeat_interleave(group, 1))
    raw = factor * products
    if softcap is not None:
        raw = softcap * torch.tanh(raw / softcap)
    attends, bias = attended(q, k.shape[2], mask, seq_lens)
    scores = torch.where(attends, raw + bias, -math.inf)
    none = torch.full((*scores.shape[:2], 1), -math.inf, dtype=torch.float64)
    return scores, torch.cat([scores, none], -1).amax(-1)


def keys_of(k: torch.Tensor, sketch: KeySketch | None) -> torch.Tensor:
    """The keys that are scored: those of the sketch's whole blocks, all others from ``k``."""
    if sketch is None:
        return k
    keys = k.clone()
    for b, packed in enumerate(_packed_rows(sketch)):
        blocks = sketch.blocks[b, :, : packed // 64]  # [Hkv, blocks, D, 64]
        keys[b, :, :packed] = blocks.transpose(-1, -2).flatten(1, 2)
    return keys


def _packed_rows(sketch: KeySketch) -> list[int]:
    return [min(rows // 64, sketch.blocks.shape[2]) * 64 for rows in sketch.rows.tolist()]


def keys_read(
    attends: torch.Tensor, used: torch.Tensor, sketch: KeySketch | None, row_bytes: int
) -> torch.Tensor:
    """Rows, features and bytes read of K, int64 ``[B, Hkv, 3]``.

    ``attends`` ``[B, Hkv, L]`` says which rows some head attends, ``used`` ``[B, Hkv, D]`` which
    features.
    """
    rows, features = attends.sum(-1), used.sum(-1)
    bytes_read = rows * row_bytes
    if sketch is not None:
        for b, packed in enumerate(_packed_rows(sketch)):
            blocks = attends[b, :, :packed].unflatten(-1, (packed // 64, 64)).any(-1).sum(-1)
            open_rows = attends[b, :, packed:].sum(-1)
            run_bytes = 64 * row_bytes // used.shape[-1]
            bytes_read[b] = open_rows * row_bytes + blocks * features[b] * run_bytes
    return torch.stack([rows, features, bytes_read], -1)


def weigh(scores: torch.Tensor, maxima: torch.Tensor) -> torch.Tensor:
    """Integer weights int64 ``[B, Hq, L]``; all 0 for a head whose maximum is not finite."""
    live = maxima.isfinite()[..., None]
    p = torch.where(live, (scores - maxima[..., None]).exp(), 0.0)
    return (ONE * p).round().long()


# ---- draw ----------------------------------------------------------------------------------------


class Drawn(NamedTuple):
    """The sample of one head or group."""

    rows: torch.Tensor  # int64 [n], ascending and distinct
    counts: torch.Tensor  # int64 [n]: multiplicity; "shared": inclusion in units of 2^-30
    hits: torch.Tensor  # int64 [draws]: row of each draw, in the order of the thresholds


def inclusion(
    weights: torch.Tensor, samples: int, kv_heads: int, row_mass: torch.Tensor | None = None
) -> torch.Tensor:
    """Inclusion probabilities of the shared sample in units of 2^-30, int64 ``[B, Hkv, L]``.

    ``row_mass``, float32 ``[B, Hq]``, is the share of each head's softmax that its rows hold.
    float32 from operation to operation, in head order: the kernels round in the same places.
    """
    batch, heads, rows = weights.shape
    total = weights.sum(-1, keepdim=True)
    mass = torch.ones(batch, heads) if row_mass is None else row_mass
    reciprocal = torch.where(total > 0, 1 / total.float() * mass[..., None], 0.0)
    p = (weights.float() * reciprocal).view(batch, kv_heads, heads // kv_heads, rows)
    square = torch.zeros(batch, kv_heads, rows)
    for g in range(heads // kv_heads):
        square = square + p[:, :, g] * p[:, :, g]
    root = square.double().sqrt().float()  # correctly rounded, which torch's fp32 root is not
    share = torch.clamp(torch.tensor(float(samples)) * root, max=1.0)
    return (share * ONE).round().long()


def _check(method: str, samples: int | None) -> None:
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    if method != "dense" and (samples is None or not 1 <= samples <= MAX_SAMPLES):
        raise ValueError(f"samples must be between 1 and {MAX_SAMPLES}, got {samples}")


def thresholds(method: str, samples: int, total: int, random: Callable[[int], int]) -> list[int]:
    """Ascending points of ``[0, total)``; each draws the row whose share of the total holds it.

    ``random(m)`` gives the 64 bits of draw m, which ``bits * total >> 64`` maps to ``[0, total)``.
    """
    if total == 0:
        return []
    if method == "multinomial":
        return sorted(random(m) * total >> 64 for m in range(samples))
    if method == "stratified":
        return [(m * total + (random(m) * total >> 64)) // samples for m in range(samples)]
    if method == "systematic":
        u = random(0) * total >> 64
        return [(m * total + u) // samples for m in range(samples)]
    offset = random(0) >> 34  # shared: points 2^30 apart
    return list(range(ONE - 1 - offset, total, ONE))


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
) -> list[list[Drawn]]:
    """What each head drew, per sequence; ``"shared"``: what each KV head drew."""
    _check(method, samples)
    batch, heads, _ = weights.shape
    seeds = _as_tensor("seed", seed, weights).expand(batch).tolist()
    positions = _as_tensor("position", position, weights).expand(batch).tolist()
    shared = method == "shared"
    density = inclusion(weights, samples, kv_heads, row_mass) if shared else weights
    group = heads // density.shape[1]

    def draw_head(b: int, h: int) -> Drawn:
        def random(m: int) -> int:
            return random64(seeds[b], positions[b], layer, head_offset + h * group, m)

        points = thresholds(method, samples, int(density[b, h].sum()), random)
        prefix = density[b, h].cumsum(0)
        hits = torch.searchsorted(prefix, torch.tensor(points, dtype=torch.int64), right=True)
        rows, counts = hits.unique_consecutive(return_counts=True)
        return Drawn(rows, density[b, h, rows] if shared else counts, hits)

    return [[draw_head(b, h) for h in range(density.shape[1])] for b in range(batch)]


# ---- gather and the whole ------------------------------------------------------------------------


def gather(rows: torch.Tensor, coefficients: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """``sum_i coefficients[i] v[rows[i]]`` of one head: ``v`` is ``[L, Dv]``; float64 ``[Dv]``."""
    used = coefficients != 0  # a row that does not count may hold NaN
    return coefficients[used].double() @ v[rows[used]].double()


def squared_error(
    rows: torch.Tensor, coefficients: torch.Tensor, slack: torch.Tensor, v: torch.Tensor
) -> float:
    """``sum a |y - b|^2`` of one head; see ``DecodeStats``."""
    y = torch.where(coefficients[:, None] != 0, coefficients[:, None] * v[rows].double(), 0.0)
    if slack.sum() == 0:
        return 0.0
    mean = (slack[:, None] * y).sum(0) / slack.sum()
    return float((slack * (y - mean).square().sum(-1)).sum())


def slack(method: str, samples: int, weights: torch.Tensor, drawn: Drawn) -> torch.Tensor:
    """How uncertain the selection of each drawn row was, float64 ``[n]``; weights ``[L]``."""
    counts = drawn.counts.double()
    if method == "shared":
        return 1 - counts / ONE
    if method == "multinomial":
        return counts * samples / (samples - 1 if samples > 1 else math.nan)
    per_mass = samples / max(float(weights.sum()), 1.0)  # 0 where nothing is drawn
    if method == "systematic":
        expected = weights[drawn.rows].double() * per_mass
        return torch.where(counts > expected.floor(), 1 - expected.frac(), 0.0)
    # stratified: of stratum [m, m + 1), the part that the row it drew does not cover
    end = weights.cumsum(0)
    m = torch.arange(len(drawn.hits))
    upper = torch.minimum(end[drawn.hits].double() * per_mass, m + 1.0)
    lower = torch.maximum((end - weights)[drawn.hits].double() * per_mass, m.double())
    uncovered = (1 - (upper - lower)).clamp(0, 1)
    return torch.zeros(len(weights)).double().index_add(0, drawn.hits, uncovered)[drawn.rows]


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
    """``santa_torch.decode`` on the CPU in float64.

    Parameters and meaning are those of ``santa_torch.decode``. Outputs, log-sum-exp and squared
    errors are float64. The rows drawn are those of the operator unless a score lies so close to a
    rounding boundary that float32 and float64 give different integer weights.
    """
    _refuse_later_arguments(
        block_table=block_table,
        target_error=target_error,
    )
    _check(method, samples)
    (batch, heads, _), (_, kv_heads, length, value_dim) = q.shape, v.shape
    group = heads // kv_heads
    attends, _ = attended(q, length, mask, seq_lens)
    if position is None:
        position = torch.where(attends.any(1), torch.arange(1, length + 1), 0)
        position = torch.nn.functional.pad(position, (0, 1)).amax(-1)
    used = torch.ones(batch, kv_heads, q.shape[2], dtype=torch.bool)
    if bernoulli is not None:
        q = bernoulli_query(
            q,
            draws=bernoulli.draws,
            shared=bernoulli.shared,
            kv_heads=kv_heads,
            seed=seed,
            position=position,
            layer=layer,
            head_offset=head_offset,
        )
        used = used_features(q, kv_heads)
    scores, maxima = score(
        q, keys_of(k, sketch), scale=scale, mask=mask, seq_lens=seq_lens, softcap=softcap
    )
    sink = torch.full((heads,), -math.inf) if sinks is None else sinks
    sink = sink.double().expand(batch, heads)
    maxima = torch.where(sink < math.inf, maxima, sink)  # a bad sink spoils its head
    of_group = attends.view(batch, kv_heads, group, length).any(2)
    value_rows = of_group.sum(-1)
    out = torch.zeros(batch, heads, value_dim, dtype=torch.float64)
    errors = torch.zeros(batch, heads, dtype=torch.float64)
    every_head = [(b, h) for b in range(batch) for h in range(heads)]

    if method == "dense":
        lse = torch.logsumexp(scores, -1)
        row_mass = torch.sigmoid(lse - sink)
        for b, h in every_head:
            rows = attends[b, h].nonzero()[:, 0]  # masks select: other rows are not touched
            p = scores[b, h, rows].softmax(-1) * row_mass[b, h]
            out[b, h] = p @ v[b, h // group, rows].double()
    else:
        assert samples is not None
        weights = weigh(scores, maxima)
        total = weights.sum(-1)
        lse = maxima + (total.double() / ONE).log()
        row_mass = torch.sigmoid(lse - sink).float()
        drawn = draw(
            weights,
            samples=samples,
            method=method,
            kv_heads=kv_heads,
            seed=seed,
            position=position,
            layer=layer,
            head_offset=head_offset,
            row_mass=row_mass,
        )
        for b, h in every_head:
            sample = drawn[b][h // group if method == "shared" else h]
            values = v[b, h // group]
            if method == "shared":
                p = weights[b, h, sample.rows].double() / float(total[b, h]) * float(row_mass[b, h])
                coefficients = (p * ONE / sample.counts.double()).float()
                each = coefficients
            else:
                coefficients = sample.counts.float() / float(samples) * row_mass[b, h]
                each = torch.full_like(coefficients, 1 / samples) * row_mass[b, h]
            out[b, h] = gather(sample.rows, coefficients, values)
            uncertain = slack(method, samples, weights[b, h], sample)
            errors[b, h] = squared_error(sample.rows, each, uncertain, values)
        for b in range(batch):
            per_group = len(drawn[b]) // kv_heads
            for kv in range(kv_heads):
                lists = drawn[b][kv * per_group : (kv + 1) * per_group]
                value_rows[b, kv] = torch.cat([sample.rows for sample in lists]).unique().numel()

    empty, bad = maxima == -math.inf, ~maxima.isfinite() & (maxima != -math.inf)
    lse = torch.logaddexp(lse, sink)
    out[empty], lse[empty], errors[empty] = 0.0, sink[empty], 0.0
    out[bad], lse[bad] = math.nan, maxima[bad]
    errors[bad] = 0.0 if method == "dense" else math.nan
    if not return_lse and not return_stats:
        return out
    stats = None
    if return_stats:
        key_bytes = k.shape[3] * k.element_size()
        stats = decode_stats(
            keys_read(of_group, used, sketch, key_bytes),
            value_rows,
            errors,
            key_bytes=key_bytes,
            value_bytes=value_dim * v.element_size(),
        )
    return DecodeOutput(out, lse if return_lse else None, stats)
