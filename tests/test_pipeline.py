"""Exact tier, the whole step: fused equals staged, and nothing but the inputs decides the bits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from cases import CHUNK, DRAWING, DTYPES, METHODS, Case
from compare import OPS, assert_equal, assert_same

import santa_torch

ONE = 2**30
EVERYTHING = {"return_lse": True, "return_stats": True}
RAGGED = Case(batch=4, kv_heads=2, group=3, rows=1500, seq_lens=(1500, 0, 257, 1100))


def decode(inputs: Any, method: str, **arguments: Any) -> santa_torch.DecodeOutput:
    arguments = {"samples": 24, "seed": 5, "layer": 3, **EVERYTHING, **arguments}
    out = santa_torch.decode(**inputs.arguments(), method=method, **arguments)
    assert isinstance(out, santa_torch.DecodeOutput)
    return out


# ---- rule 29: the fused operator is its stages ---------------------------------------------------


def staged(inputs: Any, method: str, samples: int, **address: int) -> dict[str, torch.Tensor]:
    scores, maxima = OPS.score(inputs.q, inputs.k, **inputs.scoring())
    weights = OPS.weigh(scores, maxima)
    _, heads, rows = weights.shape
    kv_heads = inputs.k.shape[1]
    group = heads // kv_heads
    attended = (scores != -torch.inf).any(1)
    last = torch.where(attended, torch.arange(1, rows + 1), 0).amax(-1)
    total = weights.long().sum(-1, keepdim=True)
    lse = maxima.double() + (total[..., 0].double() / ONE).log()
    sinks = torch.full((heads,), -torch.inf) if inputs.sinks is None else inputs.sinks
    row_mass = torch.sigmoid(lse - sinks.double()).float().nan_to_num(1.0)  # dead heads: any
    listed, counts, num_rows = santa_torch.ops.draw(
        weights,
        samples=samples,
        method=method,
        kv_heads=kv_heads,
        position=last,
        row_mass=None if inputs.sinks is None else row_mass,
        **address,
    )
    if method == "shared":
        of_head = listed.repeat_interleave(group, 1)
        p = weights.gather(2, of_head).double() / total.clamp(min=1) * row_mass[..., None].double()
        inclusion = counts.repeat_interleave(group, 1).double()
        coefficients = torch.where(inclusion > 0, p * ONE / inclusion, 0.0).float()
    else:
        coefficients = counts.float() / float(samples) * row_mass[..., None]
    lse = torch.where(maxima == -torch.inf, -torch.inf, lse)
    return {
        "out": OPS.gather(listed, coefficients, num_rows, inputs.v),
        "lse": torch.logaddexp(lse, sinks.double()).float(),
    }


@pytest.mark.parametrize("method", DRAWING)
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(group=1, rows=1000, value_dim=40),
        Case(group=8, rows=4097, batch=1, value_dim=100),
        Case(rows=600, mask="heads"),
        Case(rows=900, mask="additive", seq_lens=(900, 333)),
        RAGGED,
        Case(sinks="float32", mask="per_head"),
        Case(sinks="strong", rows=2000, softcap=3.0, group=5),
        RAGGED.but(sinks="bfloat16", softcap=20.0),
    ],
    ids=str,
)
def test_rule29_fused_equals_staged_bit_for_bit(level: str, method: str, case: Case) -> None:
    inputs = case.inputs()
    expected = staged(inputs, method, 24, seed=5, layer=3, head_offset=2)
    got = decode(inputs, method, head_offset=2)
    assert_equal("out", got.out, expected["out"])
    assert_equal("lse", got.lse, expected["lse"])


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("method", DRAWING)
def test_rule29_fused_equals_staged_in_16_bits(method: str, dtype: torch.dtype) -> None:
    inputs = Case(dtype=dtype, rows=1000).inputs()
    expected = staged(inputs, method, 24, seed=5, layer=3)
    assert_equal("out", decode(inputs, method).out, expected["out"].to(dtype))


# ---- rules 25 and 37: threads, runs, batch composition, capacity ---------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rule37_flushing_denormals_changes_no_bit(
    level: str, method: str, dtype: torch.dtype
) -> None:
    """torch.set_flush_denormal reaches the calling thread, and none of those that help it."""
    inputs = Case(batch=2, kv_heads=2, rows=3000, dtype=dtype, value_dim=33).inputs()
    tiny = 40 * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # subnormal
    small = tiny if dtype == torch.float16 else 1.0  # others have no scale that would undo it
    inputs = inputs._replace(q=(inputs.q * small).to(dtype), v=(inputs.v * tiny).to(dtype))
    expected = decode(inputs, method, scale=0.02 / small)
    assert expected.out.count_nonzero() > expected.out.numel() / 2
    got = []
    assert torch.set_flush_denormal(True)
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            got.append(decode(inputs, method, scale=0.02 / small))
    finally:
        torch.set_flush_denormal(False)
    for result in got:  # compared here, where a comparison does not flush either
        assert_same(result, expected)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rule37_threads_and_reruns(method: str, dtype: torch.dtype) -> None:
    for case in (RAGGED.but(dtype=dtype), Case(batch=1, kv_heads=1, rows=5000, dtype=dtype)):
        inputs = case.inputs()
        torch.set_num_threads(1)
        first = decode(inputs, method)
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            assert_same(decode(inputs, method), first)
            assert_same(decode(inputs, method), first)


def test_rule37_callers_in_several_threads() -> None:
    """Steps of different sizes at once: each caller has scratch memory of its own."""
    sizes = ((3000, 3), (17, 8), (700, 1))
    cases = [Case(batch=1, rows=rows, group=group) for rows, group in sizes]
    jobs = [(case.inputs(), method) for case in cases for method in METHODS]
    expected = [decode(*job) for job in jobs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            for got, first in zip(pool.map(lambda job: decode(*job), jobs), expected, strict=True):
                assert_same(got, first)


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_rule37_threads_of_the_stages(threads: int) -> None:
    inputs = RAGGED.inputs()

    def stages() -> list[torch.Tensor]:
        scores, maxima = OPS.score(inputs.q, inputs.k, **inputs.scoring())
        weights = OPS.weigh(scores, maxima)
        drawn = santa_torch.ops.draw(weights, samples=30, kv_heads=2, position=1)
        coefficients = drawn[1].float().repeat_interleave(3, 1) / ONE
        return [
            scores,
            maxima,
            weights,
            *drawn,
            OPS.gather(drawn[0], coefficients, *drawn[2:], inputs.v),
        ]

    torch.set_num_threads(1)
    first = stages()
    torch.set_num_threads(threads)
    for got, expected in zip(stages(), first, strict=True):
        assert_equal("stage", got, expected)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mask", ["none", "heads", "additive"])
def test_rule25_alone_or_in_a_batch(level: str, method: str, mask: str) -> None:
    inputs = RAGGED.but(mask=mask).inputs()
    seeds = torch.tensor([9, -4, 2**40, 7])
    whole = decode(inputs, method, seed=seeds)
    for b in range(4):
        one = inputs._make(None if x is None else x[b : b + 1] for x in inputs)
        alone = decode(one, method, seed=seeds[b : b + 1])
        assert_same(alone, slice_of(whole, slice(b, b + 1)))
    order = torch.tensor([2, 0, 3, 1, 2])
    mixed = decode(
        inputs._make(None if x is None else x[order] for x in inputs), method, seed=seeds[order]
    )
    assert_same(mixed, slice_of(whole, order))


def slice_of(result: santa_torch.DecodeOutput, index: Any) -> santa_torch.DecodeOutput:
    assert result.lse is not None
    assert result.stats is not None
    stats = type(result.stats)._make(x[index] for x in result.stats)
    return santa_torch.DecodeOutput(result.out[index], result.lse[index], stats)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rows", [1, 16, 255, 256, 257, 700])
def test_rule37_capacity_changes_no_bit(level: str, method: str, rows: int) -> None:
    """A buffer cut to its length, a longer one with lengths, a longer one with a mask."""
    long = Case(rows=1500, group=5).inputs()
    exact = long._replace(k=long.k[:, :, :rows], v=long.v[:, :, :rows])
    first = decode(exact, method)
    lengths = long._replace(seq_lens=torch.full((2,), rows))
    masked = long._replace(mask=torch.arange(1500) < rows)
    assert_same(decode(lengths, method), first)
    assert_same(decode(masked, method), first)
    assert_same(
        decode(exact._replace(mask=torch.ones(2, 10, rows, dtype=torch.bool)), method), first
    )
    zero = torch.zeros(2, 10, rows)
    if method != "dense":  # adding a bias of 0 takes the packed path and must give the same scores
        assert_same(decode(exact._replace(mask=zero), method), first)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_rule25_ranks_draw_as_the_whole(method: str, ranks: int) -> None:
    """Tensor parallel: each rank holds some of the heads and says where they begin."""
    inputs = Case(kv_heads=4, group=3, rows=700).inputs()
    whole = decode(inputs, method)
    for rank in range(ranks):
        kv = slice(rank * 4 // ranks, (rank + 1) * 4 // ranks)
        heads = slice(3 * kv.start, 3 * kv.stop)
        local = inputs._replace(q=inputs.q[:, heads], k=inputs.k[:, kv], v=inputs.v[:, kv])
        got = decode(local, method, head_offset=heads.start)
        assert_equal("out", got.out, whole.out[:, heads])
        assert_equal("lse", got.lse, whole.lse[:, heads])
        assert_equal("rows", got.stats.value_rows, whole.stats.value_rows[:, kv])
        assert_equal("error", got.stats.squared_error, whole.stats.squared_error[:, heads])


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_do_not_depend_on_the_tile(level: str, dtype: torch.dtype) -> None:
    """One summation order, wherever a row lies in its tile and a head in its register block."""
    for dim in (8, 64, 100):
        q, k, *_ = Case(batch=1, kv_heads=1, group=7, rows=40, head_dim=dim, dtype=dtype).inputs()
        scores, _ = OPS.score(q, k)
        for first in range(1, 8):
            moved, _ = OPS.score(q[:, first - 1 :].flip(1), k[:, :, first:])
            assert_equal("scores", moved, scores[:, first - 1 :, first:].flip(1))


@pytest.mark.parametrize("method", METHODS)
def test_outputs_alone_equal_outputs_with_statistics(method: str) -> None:
    inputs = Case(mask="batch").inputs()
    full = decode(inputs, method)
    plain = santa_torch.decode(**inputs.arguments(), method=method, samples=24, seed=5, layer=3)
    assert isinstance(plain, torch.Tensor)
    assert_equal("out", plain, full.out)


# ---- rules 25 and 26: the default position, and what moves the draws -----------------------------


@pytest.mark.parametrize("method", DRAWING)
def test_position_defaults_to_the_last_attended_row_plus_one(method: str) -> None:
    case = Case(batch=3, rows=400, seq_lens=(400, 90, 0))
    inputs = case.inputs()
    assert_same(decode(inputs, method, position=torch.tensor([400, 90, 0])), decode(inputs, method))
    mask = torch.ones(3, 6, 400, dtype=torch.bool)
    mask[0, :, 350:] = False
    mask[0, 2, 370] = True  # one head's last row counts for the sequence
    masked = inputs._replace(mask=mask)
    assert_same(decode(masked, method, position=torch.tensor([371, 90, 0])), decode(masked, method))


@pytest.mark.parametrize("method", DRAWING)
def test_rule26_layers_steps_seeds_and_heads_differ(method: str) -> None:
    inputs = Case(batch=1, rows=1000, peak=2.0).inputs()
    base = {"seed": 5, "layer": 3, "position": 10, "head_offset": 0}
    first = decode(inputs, method, **base)
    for name, value in base.items():
        other = decode(inputs, method, **{**base, name: value + 1})
        assert (other.out != first.out).any(-1).all(), name
        assert_equal("lse", other.lse, first.lse)
    assert_same(decode(inputs, method, **base), first)
    assert_same(decode(inputs, method, **{**base, "position": 10 + 2**32}), first)


def test_dense_ignores_how_to_draw() -> None:
    inputs = Case().inputs()
    first = decode(inputs, "dense")
    for other in ({"samples": 1}, {"seed": 6}, {"layer": 4}, {"position": 3}, {"head_offset": 5}):
        assert_same(decode(inputs, "dense", **other), first)


# ---- rules 8 and 37: the order of the sums -------------------------------------------------------


def ordered_sum(terms: torch.Tensor) -> torch.Tensor:
    """``[rows, Dv]`` summed as the kernels promise: fp32 row by row in a chunk, fp64 between."""
    total = torch.zeros(terms.shape[1], dtype=torch.float64)
    for chunk in terms.split(CHUNK):
        partial = torch.zeros(terms.shape[1])
        for row in chunk:
            partial = partial + row
        total += partial.double()
    return total


@pytest.mark.parametrize("rows", [1, 255, 256, 257, 1100])
def test_rule37_gather_adds_in_row_order(level: str, rows: int) -> None:
    """Coefficients are powers of two: products are exact, with fused multiply-adds or without."""
    random = torch.Generator().manual_seed(rows)
    v = torch.randn(1, 1, 2 * rows, 19, generator=random)
    coefficients = 2.0 ** torch.randint(-20, 3, (1, 5, rows), generator=random)
    listed = torch.randperm(2 * rows, generator=random)[:rows].sort().values
    got = OPS.gather(listed[None, None], coefficients, torch.tensor([[rows]], dtype=torch.int32), v)
    for h in range(5):
        terms = torch.zeros(2 * rows, 19)
        terms[listed] = coefficients[0, h, :, None] * v[0, 0, listed]
        assert_equal("out", got[0, h], ordered_sum(terms).float())


@pytest.mark.parametrize("rows", [1, 255, 256, 257, 1100])
def test_rule37_dense_adds_in_row_order(level: str, rows: int) -> None:
    """Equal scores have weight 1 exactly; what is left is the sum and one division."""
    v = torch.randn(1, 1, rows, 19, generator=torch.Generator().manual_seed(rows))
    k = torch.zeros(1, 1, rows, 8)
    got = santa_torch.decode(k[:, :, 0], k, v, method="dense")
    assert_equal("out", got[0, 0], (ordered_sum(v[0, 0]) / rows).float())


def test_rule08_gather_sums_chunks_in_fp64(level: str) -> None:
    """A thousand small terms, each lost on its own beside 1 in fp32."""
    chunks = 1000
    v = torch.ones(1, 1, 1, 8).expand(1, 1, chunks * CHUNK, 8)
    listed = torch.arange(0, chunks * CHUNK, CHUNK)[None, None]
    coefficients = torch.full((1, 1, chunks), 2.0**-25)
    coefficients[..., 0] = 1.0
    got = OPS.gather(listed, coefficients, torch.tensor([[chunks]], dtype=torch.int32), v)
    exact = torch.full((1, 1, 8), 1 + (chunks - 1) * 2.0**-25, dtype=torch.float64)
    assert_equal("out", got, exact.float())
