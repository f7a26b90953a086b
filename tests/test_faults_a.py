"""Rules 1 to 9: NaN, infinity, empty input. (8 and 9, accuracy: test_numeric.py.)"""

from __future__ import annotations

import math

import pytest
import torch
from cases import CHUNK, DRAWING, DTYPES, LENGTHS, METHODS, Case, Inputs
from compare import assert_equal, assert_same, check_decode, check_dense

import santa_torch
from santa_torch import reference

NAN, INF = torch.nan, torch.inf
FLAGS = {"return_lse": True, "return_stats": True}


pytestmark = pytest.mark.usefixtures("one_thread")


def decode(inputs: Inputs, method: str, **arguments: object) -> santa_torch.DecodeOutput:
    arguments = {"samples": 20, "seed": 1, **FLAGS, **arguments}
    return santa_torch.decode(**inputs.arguments(), method=method, **arguments)


def with_rows(inputs: Inputs, rows: object, value: float) -> Inputs:
    """The same with K and V of some rows set, in every sequence and head."""
    k, v = inputs.k.clone(), inputs.v.clone()
    k[:, :, rows] = value
    v[:, :, rows] = value
    return inputs._replace(k=k, v=v)


# ---- rule 1 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
def test_rule01_rows_past_the_length_are_never_used(
    level: str, method: str, dtype: torch.dtype
) -> None:
    """Poison at every position of a tile, a block and a chunk, and in the unused capacity."""
    capacity = 530
    case = Case(batch=1, kv_heads=2, group=3, rows=capacity, head_dim=24, value_dim=20, dtype=dtype)
    clean = case.inputs()
    for length in (*range(20), 31, 32, 33, *range(250, 262), 511, 512, 513, 529):
        lengths = clean._replace(seq_lens=torch.tensor([length]))
        first = decode(lengths, method)
        for value in (NAN, INF):
            assert_same(decode(with_rows(lengths, slice(length, None), value), method), first)
        assert not first.out.isnan().any()


@pytest.mark.parametrize("method", METHODS)
def test_rule01_poisoned_rows_between_attended_ones(level: str, method: str) -> None:
    """Rows that no head attends, within the attended range; one mask for all heads or one each."""
    for mask in ("batch", "heads", "additive", "additive_heads"):
        inputs = Case(rows=700, head_dim=24, value_dim=20, mask=mask).inputs()
        attends, _ = reference.attended(inputs.q, 700, inputs.mask, None)
        nobody = ~attends.view(2, 2, 3, 700).any(2)
        k, v = inputs.k.clone(), inputs.v.clone()
        k[nobody] = NAN
        v[nobody] = INF
        assert nobody.any()
        assert_same(decode(inputs._replace(k=k, v=v), method), decode(inputs, method))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
def test_rule01_rows_that_another_head_attends(level: str, method: str, dtype: torch.dtype) -> None:
    """K and V of a row hold NaN; only the heads that attend it may show it."""
    case = Case(batch=1, kv_heads=1, group=5, rows=600, head_dim=24, value_dim=20, dtype=dtype)
    for poisoned in ((0,), (255, 256), (17, 300, 599)):
        for value in (NAN, INF):
            for spoil_keys in (False, True):
                inputs = case.inputs()
                mask = torch.ones(1, 5, 600, dtype=torch.bool)
                for head in (0, 2, 3):
                    mask[0, head, list(poisoned)] = False
                inputs = inputs._replace(mask=mask)
                first = decode(inputs, method)
                k, v = inputs.k.clone(), inputs.v.clone()
                v[:, :, list(poisoned)] = value
                if spoil_keys:
                    k[:, :, list(poisoned)] = NAN
                got = decode(inputs._replace(k=k, v=v), method)
                if method != "shared" or not spoil_keys:  # a dead head moves the shared sample
                    for clean in (0, 2, 3):
                        assert_equal("out", got.out[:, clean], first.out[:, clean])
                        assert_equal("lse", got.lse[:, clean], first.lse[:, clean])
                assert not got.out[:, [0, 2, 3]].isnan().any()
                if spoil_keys:
                    assert got.out[:, [1, 4]].isnan().all()
                elif method == "dense":
                    assert not got.out[:, [1, 4]].isfinite().any()


# ---- rules 2 to 4 --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
def test_rule02_length_zero(level: str, method: str, dtype: torch.dtype) -> None:
    case = Case(batch=3, rows=300, dtype=dtype, seq_lens=(0, 300, 0))
    inputs = with_rows(case.inputs(), slice(0, 0), NAN)
    k, v = inputs.k.clone(), inputs.v.clone()
    k[[0, 2]] = v[[0, 2]] = NAN
    got = decode(inputs._replace(k=k, v=v), method)
    for b in (0, 2):
        assert not got.out[b].any()
        assert (got.lse[b] == -INF).all()
        assert not got.stats.squared_error[b].any()
        for name in ("key_rows", "value_rows", "bytes_read", "bytes_total"):
            assert not getattr(got.stats, name)[b].any()
    assert got.out[1].isfinite().all()
    assert got.out[1].any()


@pytest.mark.parametrize("method", METHODS)
def test_rule02_no_rows_at_all(level: str, method: str) -> None:
    for case in (Case(rows=0), Case(rows=0, seq_lens=(0, 0)), Case(rows=0, mask="heads")):
        got = decode(case.inputs(), method)
        assert not got.out.any()
        assert (got.lse == -INF).all()
        assert not got.stats.value_rows.any()
    got = decode(Case(batch=0, rows=10).inputs(), method)
    assert got.out.shape == (0, 6, 64)
    assert got.stats.key_rows.shape == (0, 2)


@pytest.mark.parametrize("method", METHODS)
def test_rule03_every_output_element_is_written(level: str, method: str) -> None:
    """Memory that the allocator hands out again is filled with NaN first."""
    cases = [
        Case(batch=5, rows=40, value_dim=33, seq_lens=(0, 1, 40, 0, 17)),
        Case(batch=5, rows=40, value_dim=33, mask="sparse"),
        Case(batch=5, rows=0, value_dim=33),
    ]
    for case in cases:
        inputs = case.inputs()
        for _ in range(3):
            poison = [torch.full((n,), NAN) for n in (5 * 6 * 33, 5 * 6, 5 * 2 * 2, 4 * 5 * 6)]
            del poison
            got = decode(inputs, method)
            assert not got.out.isnan().any()
            assert not got.lse.isnan().any()
            assert (got.stats.key_rows <= case.rows).all()
            assert (got.stats.value_rows <= case.rows).all()
            assert not got.stats.squared_error.isnan().any()


@pytest.mark.parametrize("mask_dtype", [torch.bool, *DTYPES])
@pytest.mark.parametrize("method", METHODS)
def test_rule04_masked_chunks_change_nothing(
    level: str, method: str, mask_dtype: torch.dtype
) -> None:
    """First, middle, last chunk masked as a whole; everything masked; one head masked."""
    rows = 4 * CHUNK + 5
    case = Case(batch=1, rows=rows, head_dim=16, value_dim=16)
    plain = case.inputs()
    off = [
        slice(0, CHUNK),
        slice(CHUNK, 2 * CHUNK),
        slice(CHUNK, 4 * CHUNK),
        slice(4 * CHUNK, None),
        slice(0, rows - 1),
        slice(1, None),
    ]
    for where in off:
        attends = torch.ones(1, 1, rows, dtype=torch.bool)
        attends[..., where] = False
        poisoned = with_rows(plain, where, NAN)
        for heads in (1, 6):
            mask = attends.expand(1, heads, rows)
            if mask_dtype != torch.bool:
                lowest = -INF if heads == 1 else torch.finfo(mask_dtype).min
                mask = torch.zeros(mask.shape, dtype=mask_dtype).masked_fill(~mask, lowest)
            got = decode(poisoned._replace(mask=mask), method, position=9)
            assert got.out.isfinite().all()
            kept = attends[0, 0].nonzero()[:, 0]
            few = plain._replace(k=plain.k[:, :, kept], v=plain.v[:, :, kept])
            exact = reference.decode(*few[:3], method="dense", return_lse=True)
            assert ((got.lse - exact.lse).abs() < 1e-4).all()
            if method == "dense":
                assert ((got.out - exact.out).abs() < 1e-4).all()


@pytest.mark.parametrize("mask_dtype", [torch.bool, *DTYPES])
@pytest.mark.parametrize("method", METHODS)
def test_rule04_a_head_that_attends_nothing(
    level: str, method: str, mask_dtype: torch.dtype
) -> None:
    case = Case(batch=2, rows=300)
    attends = torch.ones(2, 6, 300, dtype=torch.bool)
    attends[0, 1] = attends[1, 3:] = False
    for lowest in (-INF, None):
        mask = attends
        if mask_dtype != torch.bool:
            low = torch.finfo(mask_dtype).min if lowest is None else lowest
            mask = torch.zeros(2, 6, 300, dtype=mask_dtype).masked_fill(~attends, low)
        got = decode(case.inputs()._replace(mask=mask), method)
        empty = ~attends.any(-1)
        assert not got.out[empty].any()
        assert (got.lse[empty] == -INF).all()
        assert got.out[~empty].isfinite().all()
        assert got.lse[~empty].isfinite().all()


# ---- rules 5 and 6 -------------------------------------------------------------------------------


@pytest.mark.parametrize("mask_dtype", DTYPES)
def test_rule05_additive_masks_select(level: str, mask_dtype: torch.dtype) -> None:
    """The lowest number and -inf both mean "not attended", beside scores that dwarf them."""
    case = Case(rows=100, peak=4.0)
    inputs = case.inputs()
    attends = torch.rand(2, 6, 100, generator=torch.Generator().manual_seed(2)) < 0.5
    expected = {m: decode(inputs._replace(mask=attends), m) for m in METHODS}
    for low in (-INF, torch.finfo(mask_dtype).min):
        mask = torch.zeros(2, 6, 100, dtype=mask_dtype).masked_fill(~attends, low)
        for method in METHODS:
            assert_same(decode(inputs._replace(mask=mask), method), expected[method])
    if mask_dtype == torch.float32:  # made in bfloat16 and widened
        low = torch.finfo(torch.bfloat16).min
        mask = torch.zeros(2, 6, 100).masked_fill(~attends, low)
        assert_same(decode(inputs._replace(mask=mask), "shared"), expected["shared"])


def test_rule05_large_finite_masks_are_only_numbers(level: str) -> None:
    """-1e4 on every row of a head is a shift, not a mask."""
    inputs = Case(rows=50).inputs()
    for low in (-1e4, torch.finfo(torch.float16).min):
        mask = torch.full((1, 6, 50), low)
        got = decode(inputs._replace(mask=mask), "dense")
        assert ((got.out - decode(inputs, "dense").out).abs() < 0.05).all()
        assert (got.stats.key_rows == 50).all()
    half = torch.full((1, 6, 50), -6e4, dtype=torch.float16)
    assert decode(inputs._replace(mask=half), "shared").out.any()


@pytest.mark.parametrize("size", [1e5, 1e10, 1e20, 1e30, 1e37])
@pytest.mark.parametrize("method", METHODS)
def test_rule06_huge_logits(level: str, method: str, size: float) -> None:
    """One row far above or all far below zero: the softmax is what its differences say."""
    for rows in (1, 17, 300, 600):
        random = torch.Generator().manual_seed(rows)
        sign = torch.where(torch.rand(1, 1, rows, 1, generator=random) < 0.5, -1.0, 1.0)
        k = torch.cat([sign * size, torch.zeros(1, 1, rows, 7)], 3)
        q = torch.zeros(1, 3, 8)
        q[:, 0, 0], q[:, 1, 0], q[:, 2, 0] = 1.0, -1.0, 0.5
        v = torch.randn(1, 1, rows, 16, generator=random)
        for keys in (k, -k.abs(), k.abs()):
            inputs = Inputs(q, keys, v, None, None)
            got = decode(inputs, method, scale=1.0, samples=50)
            exact = reference.decode(q, keys, v, method="dense", scale=1.0, return_lse=True)
            assert got.out.isfinite().all()
            assert torch.allclose(got.lse.double(), exact.lse, rtol=1e-6)
            if method == "dense":
                assert ((got.out - exact.out).abs() < 1e-4).all()


def test_rule06_scores_far_apart(level: str) -> None:
    """A difference beyond fp32's largest number is still only "infinitely far below"."""
    q = torch.tensor([[[1.0] + [0.0] * 7]])
    k = torch.zeros(1, 1, 3, 8)
    k[0, 0, :, 0] = torch.tensor([-3e38, 3e38, 0.0])
    v = torch.eye(3).view(1, 1, 3, 3)
    for method in METHODS:
        got = decode(Inputs(q, k, v, None, None), method, scale=1.0)
        assert got.out.tolist() == [[[0.0, 1.0, 0.0]]]
        assert float(got.lse) == float(torch.tensor(3e38))


# ---- rule 7 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("method", METHODS)
def test_rule07_a_query_head_that_is_not_a_number(level: str, method: str, value: float) -> None:
    """That head's output is NaN; the others are what they are without it."""
    case = Case(batch=2, kv_heads=2, group=4, rows=300)
    inputs = case.inputs()
    for head in range(4):
        q = inputs.q.clone()
        q[0, head, 5] = value  # infinity: scores of +inf and -inf
        spoiled = inputs._replace(q=q)
        got = decode(spoiled, method)
        others = [h for h in range(8) if h != head]
        assert got.out[0, head].isnan().all()
        assert not got.lse[0, head].isfinite()
        assert got.out[0, others].isfinite().all()
        first = decode(inputs, method)
        assert_equal("out", got.out[1], first.out[1])
        assert_equal("out", got.out[0, 4:], first.out[0, 4:])
        if method != "shared":
            assert_equal("out", got.out[0, others], first.out[0, others])
            assert_equal("lse", got.lse[0, others], first.lse[0, others])
        undefined = got.stats.squared_error.isnan()
        assert undefined.sum() == (0 if method == "dense" else 1)


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("method", METHODS)
def test_rule07_a_sink_that_is_not_a_number(level: str, method: str, value: float) -> None:
    """Its head is NaN in every sequence, as softmax is; the others are as if it were silent."""
    inputs = Case(batch=2, kv_heads=2, group=3, sinks="float32", seq_lens=(300, 0)).inputs()
    for head in range(3):
        sinks = inputs.sinks.clone()
        sinks[head] = value
        got = decode(inputs._replace(sinks=sinks), method)
        others = [h for h in range(6) if h != head]
        assert got.out[:, head].isnan().all()
        assert not got.lse[:, head].isfinite().any()
        assert got.out[:, others].isfinite().all()
        mask = torch.ones(2, 6, 1, dtype=torch.bool)
        mask[:, head] = False
        silent = decode(inputs._replace(mask=mask), method)
        assert_equal("out", got.out[:, others], silent.out[:, others])
        assert_equal("lse", got.lse[:, others], silent.lse[:, others])


@pytest.mark.parametrize("method", METHODS)
def test_rule02_a_sink_alone(level: str, method: str) -> None:
    """Nothing attended beside a sink: output 0, and the sink is all there is of the softmax."""
    for case in (Case(rows=0), Case(seq_lens=(0, 0)), Case(rows=40, mask="nothing")):
        inputs = case.but(sinks="some").inputs()
        got = decode(inputs, method)
        assert not got.out.any()
        assert_equal("lse", got.lse, inputs.sinks.expand(2, 6))


@pytest.mark.parametrize("method", METHODS)
def test_rule06_huge_logits_under_a_cap(level: str, method: str) -> None:
    """Scores of any size, infinite ones too, end at the cap: nothing is NaN but what was."""
    inputs = Case(batch=1, rows=300, peak=1e30, softcap=50.0).inputs()
    q = inputs.q.clone()
    q[0, 1, 0] = INF
    q[0, 2, 0] = NAN
    got = decode(inputs._replace(q=q), method)
    assert got.out[0, 2].isnan().all()
    assert got.out[0, [0, 1, 3, 4, 5]].isfinite().all()
    assert (got.lse[0, [0, 1]] <= 50 + math.log(300)).all()
    assert (got.lse[0, [0, 1]] >= 50).all()


@pytest.mark.parametrize("group", [2, 3, 5])
def test_rule07_a_dead_head_is_left_out_of_the_shared_sample(level: str, group: int) -> None:
    """A NaN head moves its group's sample no more than a head that attends nothing."""
    inputs = Case(batch=1, kv_heads=1, group=group, rows=400).inputs()
    for head in range(group):
        q = inputs.q.clone()
        q[0, head, 0] = NAN
        mask = torch.ones(1, group, 400, dtype=torch.bool)
        mask[0, head] = False
        dead = decode(inputs._replace(q=q), "shared")
        silent = decode(inputs._replace(mask=mask), "shared")
        others = [h for h in range(group) if h != head]
        assert_equal("out", dead.out[:, others], silent.out[:, others])
        assert_equal("rows", dead.stats.value_rows, silent.stats.value_rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
def test_rule07_nan_in_a_valid_key(level: str, method: str, dtype: torch.dtype) -> None:
    case = Case(batch=2, kv_heads=2, group=2, rows=520, head_dim=33, dtype=dtype)
    inputs = case.inputs()
    first = decode(inputs, method)
    for row in (0, 3, 255, 256, 511, 519):
        for d in (0, 32):
            k = inputs.k.clone()
            k[1, 0, row, d] = NAN
            got = decode(inputs._replace(k=k), method)
            assert got.out[1, :2].isnan().all()
            assert got.lse[1, :2].isnan().all()
            assert_equal("out", got.out[0], first.out[0])
            assert_equal("out", got.out[1, 2:], first.out[1, 2:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("method", METHODS)
def test_rule07_values_that_are_not_numbers(
    level: str, method: str, value: float, dtype: torch.dtype
) -> None:
    """A V row that is used shows, in its own feature and where the reference says."""
    case = Case(batch=1, kv_heads=2, group=3, rows=300, value_dim=20, dtype=dtype, peak=1.0)
    for row in range(0, 300, 37):
        inputs = case.inputs()
        inputs.v[0, 1, row, 17] = value
        if method == "dense":
            exact = reference.decode(**inputs.arguments(), method="dense", return_lse=True)
            got = decode(inputs, method)
            check_dense(inputs, exact, got)
        else:
            got = decode(inputs, method, samples=100)
            clean = case.inputs()
            first = decode(clean, method, samples=100)
            assert_equal("out", got.out[..., :17], first.out[..., :17])
            hit = (got.out[..., 17] != first.out[..., 17]).nonzero()
            assert all(h >= 3 for _, h in hit.tolist())
            assert not got.out[..., 17][got.out[..., 17] != first.out[..., 17]].isfinite().any()


@pytest.mark.parametrize("method", METHODS)
def test_rule07_infinite_scores_give_nan(level: str, method: str) -> None:
    inputs = Case(batch=1, rows=300).inputs()
    for bias in (INF, NAN):
        for row in (0, 255, 256, 299):
            mask = torch.zeros(1, 6, 300)
            mask[0, 2, row] = bias
            got = decode(inputs._replace(mask=mask), method)
            assert got.out[0, 2].isnan().all()
            assert torch.equal(got.out.isnan().any(-1), torch.arange(6)[None] == 2)
            assert float(got.lse[0, 2]) == INF or bias != INF


@pytest.mark.parametrize("method", METHODS)
def test_rule07_minus_infinite_scores_have_no_weight(level: str, method: str) -> None:
    """Keys of -inf: those rows are attended and never drawn; a head of nothing else gets 0."""
    inputs = Case(batch=1, kv_heads=1, group=2, rows=40, head_dim=8).inputs()
    q = inputs.q.abs()
    k = inputs.k.clone()
    k[:, :, ::2] = -INF
    got = decode(inputs._replace(q=q, k=k), method)
    odd = inputs._replace(q=q, k=inputs.k[:, :, 1::2], v=inputs.v[:, :, 1::2])
    exact = reference.decode(*odd[:3], method="dense", return_lse=True)
    assert got.out.isfinite().all()
    assert ((got.lse - exact.lse).abs() < 1e-5).all()
    k[:] = -INF
    got = decode(inputs._replace(q=q, k=k), method)
    assert not got.out.any()
    assert (got.lse == -INF).all()


@pytest.mark.parametrize("method", DRAWING)
def test_rule07_nothing_is_a_wild_index(method: str) -> None:
    """Every float16 number, infinities and NaN included, as keys and queries."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    k = bits.view(1, 1, -1, 8)
    q = bits[::1024].clone().view(1, 8, 8)
    for rows in LENGTHS:
        got = decode(Inputs(q, k[:, :, -rows:], k[:, :, -rows:], None, None), method)
        assert got.out.shape == (1, 8, 8)


def test_rule07_check_against_the_reference(level: str) -> None:
    """The oracle's account of dead heads, with a mask and lengths, for every method."""
    case = Case(batch=2, group=4, rows=150, mask="heads", seq_lens=(150, 60))
    inputs = case.inputs()
    q = inputs.q.clone()
    q[0, 1] = NAN
    q[1, 6] = INF
    for method in METHODS:
        check_decode(case, inputs._replace(q=q), method, 9)
