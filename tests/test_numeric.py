"""Numeric tier: every method, dtype and shape against the float64 reference, at every level."""

from __future__ import annotations

import math

import pytest
import torch
from cases import (
    CHUNK,
    CPU_LEVELS,
    DRAWING,
    DTYPES,
    GROUPS,
    HEAD_DIMS,
    LENGTHS,
    MASKS,
    METHODS,
    SINKS,
    Case,
)
from compare import (
    FP32,
    OPS,
    assert_equal,
    assert_same,
    assert_within,
    check_decode,
    check_dense,
    check_scores,
    output_tolerance,
    plain_attention,
)

import santa_torch
from santa_torch import reference

FLAGS = {"return_lse": True, "return_stats": True}


pytestmark = pytest.mark.usefixtures("one_thread")


def check(case: Case, samples: int = 12, methods: tuple[str, ...] = METHODS) -> None:
    """Scores, and the step by each of the methods, at the level in use."""
    inputs = case.inputs()
    check_scores(case, inputs)
    for method in methods:
        if method == "dense":
            got = santa_torch.decode(**inputs.arguments(), method="dense", **FLAGS)
            exact = reference.decode(**inputs.arguments(), method="dense", **FLAGS)
            check_dense(inputs, exact, got)
        else:
            check_decode(case, inputs, method, samples, seed=case.seed)


def vary(values: tuple[int, ...]) -> list[tuple[int, torch.dtype]]:
    """Each value with a dtype, in turn."""
    return [(value, DTYPES[i % 3]) for i, value in enumerate(values)]


# ---- shapes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", GROUPS)
def test_rule10_rule13_any_group(level: str, group: int, dtype: torch.dtype) -> None:
    """Rule 13 too: two KV heads, so that a head tile padded past its group would be seen."""
    methods = METHODS if group in (3, 8) else ("dense", "shared")
    check(Case(batch=1, group=group, rows=70, head_dim=24, value_dim=40, dtype=dtype), 5, methods)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_rule11_any_head_dim(level: str, dim: int, dtype: torch.dtype) -> None:
    case = Case(batch=1, group=3, rows=37, head_dim=dim, value_dim=dim, dtype=dtype)
    check(case, 9, ("dense", "shared"))


@pytest.mark.parametrize(
    ("dim", "value_dim"), [(64, 128), (128, 64), (192, 128), (7, 250), (96, 1)]
)
def test_rule11_values_of_another_dim(level: str, dim: int, value_dim: int) -> None:
    for dtype in DTYPES:
        case = Case(batch=1, rows=50, head_dim=dim, value_dim=value_dim, dtype=dtype)
        check(case, 6, ("dense", "shared", "stratified"))


@pytest.mark.parametrize(("rows", "dtype"), vary(LENGTHS))
def test_rule12_any_length(level: str, rows: int, dtype: torch.dtype) -> None:
    for other in DTYPES if rows < 300 else (dtype,):
        case = Case(batch=1, kv_heads=1, group=2, rows=rows, head_dim=16, value_dim=8, dtype=other)
        check(case, 7)


@pytest.mark.parametrize("samples", [1, 2, 31, 400])
def test_sample_sizes(level: str, samples: int) -> None:
    check(Case(batch=1, rows=120), samples, DRAWING)


@pytest.mark.parametrize("batch", [0, 1, 3, 9])
def test_batches(batch: int) -> None:
    check(Case(batch=batch, rows=60), 4)


def test_the_shape_of_llama() -> None:
    for dtype in DTYPES:
        case = Case(
            batch=1, kv_heads=8, group=4, rows=2049, head_dim=128, value_dim=128, dtype=dtype
        )
        check(case, 32, ("dense", "systematic", "shared"))


# ---- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.3, 0.01, 2.5])
def test_rule14_scale_is_applied_once(level: str, scale: float) -> None:
    case = Case(batch=1, rows=90, peak=1.0)
    inputs = case.inputs()
    check_scores(case, inputs, scale)
    default = santa_torch.decode(*inputs[:3], method="dense")
    same = santa_torch.decode(*inputs[:3], method="dense", scale=case.head_dim**-0.5)
    assert_equal("out", same, default)
    for method in METHODS:
        check_decode(case, inputs, method, 10, scale=scale)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", [None, (600, 290, 0)])
def test_masks(level: str, mask: str, lengths: tuple[int, ...] | None) -> None:
    case = Case(batch=3, group=2, rows=600, head_dim=16, value_dim=24, mask=mask, seq_lens=lengths)
    check(case, 8, ("dense", "multinomial", "shared"))


@pytest.mark.parametrize("mask", ["heads", "additive_heads", "row_last", "sparse"])
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_masks_in_16_bits(mask: str, dtype: torch.dtype) -> None:
    check(Case(rows=300, head_dim=16, value_dim=24, mask=mask, dtype=dtype), 8)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths_at_every_edge(level: str, dtype: torch.dtype) -> None:
    lengths = (0, 1, 15, 16, 17, 255, 256, 257, 511, 512, 513, 520)
    case = Case(batch=12, kv_heads=1, group=2, rows=520, head_dim=8, value_dim=8, seq_lens=lengths)
    inputs = case.inputs()
    typed = inputs._replace(seq_lens=inputs.seq_lens.to(dtype))
    for method in METHODS:
        check_decode(case, typed, method, 6)
    strided = torch.stack([typed.seq_lens, typed.seq_lens * 0 + 10**6], 1)[:, 0]
    check_decode(case, typed._replace(seq_lens=strided), "shared", 6)


@pytest.mark.parametrize("cap", [0.7, 30.0, 1e6])
def test_softcap(level: str, cap: float) -> None:
    """Caps that bind everywhere, sometimes and never; before the mask, which is not capped."""
    for dtype, mask in zip(DTYPES, ("none", "additive_heads", "sparse"), strict=True):
        case = Case(rows=300, head_dim=24, peak=20.0, softcap=cap, mask=mask, dtype=dtype)
        check(case.but(value_dim=40), 8)


def test_softcap_binds() -> None:
    case = Case(peak=20.0, softcap=5.0)
    scores, _ = OPS.score(case.inputs().q, case.inputs().k, softcap=5.0)
    plain, _ = OPS.score(case.inputs().q, case.inputs().k)
    assert 4.99 < scores.abs().max() <= 5.0 < plain.abs().max()


@pytest.mark.parametrize("sinks", SINKS)
def test_sinks(level: str, sinks: str) -> None:
    """At every strength, with heads and sequences that attend nothing."""
    for dtype, mask in zip(DTYPES, ("none", "per_head", "additive"), strict=True):
        case = Case(batch=2, rows=300, head_dim=24, value_dim=40, dtype=dtype, mask=mask)
        check(case.but(sinks=sinks, seq_lens=(300, 0)), 8)
        check(case.but(sinks=sinks, softcap=4.0, peak=9.0), 8, ("dense", "shared"))


@pytest.mark.parametrize("method", METHODS)
def test_sinks_that_are_absent_change_no_bit(method: str) -> None:
    arguments = {"method": method, "samples": 12, **FLAGS}
    plain = santa_torch.decode(**Case().inputs().arguments(), **arguments)
    for sinks in ("absent", "weak"):
        got = santa_torch.decode(**Case(sinks=sinks).inputs().arguments(), **arguments)
        assert_same(got, plain)


def test_a_sink_takes_its_share() -> None:
    """A sink as strong as all rows together leaves half, and log(2) more in the log-sum-exp."""
    inputs = Case(batch=1).inputs()
    for method in METHODS:
        arguments = {"method": method, "samples": 2**20, **FLAGS}
        plain = santa_torch.decode(**inputs.arguments(), **arguments)
        got = santa_torch.decode(**inputs._replace(sinks=plain.lse[0]).arguments(), **arguments)
        torch.testing.assert_close(got.out, plain.out / 2, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(got.lse, plain.lse + math.log(2))


def test_heads_that_look_at_their_sink_read_fewer_rows() -> None:
    inputs = Case(rows=4000, peak=1.0).inputs()
    rows = [
        santa_torch.decode(**each.arguments(), samples=100, return_stats=True).stats.value_rows
        for each in (inputs, inputs._replace(sinks=Case(sinks="strong").inputs().sinks))
    ]
    assert (rows[1] < rows[0] / 4).all()


def test_seeds_and_positions_of_every_kind() -> None:
    case = Case(batch=3, rows=200)
    inputs = case.inputs()
    seeds = (0, -1, 2**63 - 1, -(2**63), torch.tensor([4]), torch.tensor([1, -2, 3 << 40]))
    positions = (None, 7, -3, 2**40, torch.tensor([5]), torch.arange(12).view(3, 4)[:, 1])
    for shift in (0, 1):
        for seed, position in zip(seeds, positions[shift:] + positions[:shift], strict=True):
            check_decode(case, inputs, "stratified", 5, seed=seed, position=position)


# ---- statistics ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_statistics_count_rows_and_bytes(method: str) -> None:
    """Against sets made from the draws themselves, without the reference's bookkeeping."""
    case = Case(rows=300, group=4, dtype=torch.bfloat16, head_dim=40, value_dim=72, mask="heads")
    case = case.but(seq_lens=(300, 120))
    inputs = case.inputs()
    stats = santa_torch.decode(
        **inputs.arguments(), method=method, samples=10, position=3, return_stats=True
    ).stats
    attends, _ = reference.attended(inputs.q, 300, inputs.mask, inputs.seq_lens)
    keys = attends.view(2, 2, 4, 300).any(2).sum(-1)
    values = keys
    if method != "dense":
        weights = OPS.weigh(*OPS.score(inputs.q, inputs.k, **inputs.scoring()))
        rows, _, num_rows = santa_torch.ops.draw(
            weights, samples=10, method=method, kv_heads=2, position=3
        )
        lists = rows.view(2, 2, -1, rows.shape[2]), num_rows.view(2, 2, -1)
        values = torch.tensor(
            [
                [
                    len(
                        {
                            int(r)
                            for i, n in enumerate(lists[1][b, h])
                            for r in lists[0][b, h, i, :n]
                        }
                    )
                    for h in range(2)
                ]
                for b in range(2)
            ]
        )
    assert_equal("key_rows", stats.key_rows, keys)
    assert_equal("value_rows", stats.value_rows, values)
    assert_equal("bytes_read", stats.bytes_read, keys * 80 + values * 144)
    assert_equal("bytes_total", stats.bytes_total, keys * (80 + 144))
    assert stats.squared_error.dtype == torch.float32
    assert stats.squared_error.shape == (2, 8)


def test_statistics_without_variance() -> None:
    inputs = Case(rows=20).inputs()
    dense = santa_torch.decode(*inputs[:3], method="dense", return_stats=True).stats
    assert not dense.squared_error.any()
    one = santa_torch.decode(*inputs[:3], method="multinomial", samples=1, return_stats=True).stats
    assert one.squared_error.isnan().all()
    every = santa_torch.decode(*inputs[:3], samples=10**6, return_stats=True).stats
    assert (every.squared_error < 1e-6).all()


# ---- gather --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_head", [True, False])
def test_gather(level: str, per_head: bool, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(3)
    for group, value_dim, capacity in (
        (1, 8, 1),
        (3, 17, 50),
        (8, 128, 300),
        (71, 33, 90),
        (2, 4, 0),
    ):
        v = Case(group=group, rows=999, value_dim=value_dim, dtype=dtype).inputs().v
        heads = 2 * group if per_head else 2
        rows = torch.randint(0, 999, (2, heads, capacity), generator=random).sort(-1).values
        num_rows = torch.randint(0, capacity + 1, (2, heads), generator=random, dtype=torch.int32)
        past = torch.arange(capacity) >= num_rows[..., None]
        rows = rows.masked_fill(past, -(2**62))  # places not in use are not looked at
        coefficients = torch.randn(2, 2 * group, capacity, generator=random)
        got = OPS.gather(rows, coefficients, num_rows, v)
        assert got.dtype == torch.float32
        assert got.shape == (2, 2 * group, value_dim)
        per = 1 if per_head else group
        for b in range(2):
            for h in range(2 * group):
                n = int(num_rows[b, h // per])
                used, weight = rows[b, h // per, :n], coefficients[b, h, :n]
                values = v[b, h // group]
                exact = reference.gather(used, weight, values)
                size = reference.gather(used, weight.abs(), values.abs())
                assert_within("out", got[b, h], exact, 2.0**-17 * size)


# ---- rules 8 and 9: accuracy ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("peak", [0.1, 1.0, 4.0, 20.0])
def test_rule09_error_is_at_most_twice_that_of_pytorch(
    level: str, dtype: torch.dtype, peak: float
) -> None:
    inputs = Case(rows=3000, group=4, dtype=dtype, peak=peak).inputs()
    exact = reference.decode(*inputs[:3], method="dense")
    got = santa_torch.decode(*inputs[:3], method="dense").double()
    plain = plain_attention(inputs).double()
    floor = torch.finfo(dtype).eps * exact.abs().max()
    assert (got - exact).abs().max() <= 2 * (plain - exact).abs().max() + floor
    assert (got - exact).square().mean().sqrt() <= 2 * (plain - exact).square().mean().sqrt() + (
        floor / 8
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
def test_rule08_sums_are_not_in_16_bits(level: str, method: str, dtype: torch.dtype) -> None:
    """Equal values over 20,000 rows: a 16-bit sum would stall, or overflow in float16."""
    rows = 20_000
    q = torch.zeros(1, 2, 8, dtype=dtype)
    k = torch.zeros(1, 1, rows, 8, dtype=dtype)
    v = torch.full((1, 1, rows, 8), 300.0, dtype=dtype)
    out, lse, _ = santa_torch.decode(q, k, v, method=method, samples=8192, return_lse=True)
    expected = torch.full((1, 2, 8), 300.0, dtype=torch.float64)
    assert_within("out", out, expected, output_tolerance(expected, 8 * expected, dtype))
    assert_within("lse", lse, torch.full((1, 2), rows).double().log(), torch.tensor(1e-5))


def test_rule08_partial_sums_between_chunks_are_fp64() -> None:
    """Chunks of weight 1 and 2^-20 in turn: fp32 between chunks would lose the small ones."""
    chunks = 400
    bias = torch.zeros(chunks, CHUNK)
    bias[1::2] = -13.8
    v = torch.ones(1, 1, chunks * CHUNK, 8)
    v.view(chunks, CHUNK, 8)[1::2] = 1000.0
    q, k = torch.zeros(1, 1, 8), torch.zeros(1, 1, chunks * CHUNK, 8)
    mask = bias.view(1, 1, -1)
    got = santa_torch.decode(q, k, v, method="dense", mask=mask).double()
    exact = reference.decode(q, k, v, method="dense", mask=mask)
    assert_within("out", got, exact, 4 * FP32 * exact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_of_the_output(dtype: torch.dtype) -> None:
    """One row: the output is that row of V, bit for bit, subnormals and infinities included."""
    if dtype == torch.float32:
        values = torch.tensor([0.0, -0.0, 1e-45, -3e38, 1.5, torch.inf, -torch.inf, 1e-39])
    else:
        values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    v = values.view(1, 1, 1, -1)
    q, k = torch.ones(1, 1, 8, dtype=dtype), torch.ones(1, 1, 1, 8, dtype=dtype)
    for name in CPU_LEVELS:
        OPS.set_cpu_level(name)
        for method in METHODS:
            out = santa_torch.decode(q, k, v, method=method, samples=1)
            assert_equal(f"{method} at {name}", out[0, 0], values)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_rounding_to_16_bits_is_to_nearest_even(dtype: torch.dtype) -> None:
    """Means of two neighbours and values beside them, made by two rows of equal weight."""
    bits = torch.arange(0, 2**15, 7, dtype=torch.int32).to(torch.int16)
    low = bits.view(dtype)
    low = low[low.isfinite() & (low < 60000)]
    high = (low.view(torch.int16) + 1).view(dtype)
    v = torch.stack([low, high])[None, None]
    zero = torch.zeros(1, 1, 2, 8, dtype=dtype)
    out = santa_torch.decode(zero[:, :, 0], zero, v, method="dense")
    expected = ((low.double() + high.double()) / 2).to(dtype)
    assert_equal("out", out[0, 0], expected)
