"""Rules 15 to 30 where no other file has them: shapes, layouts, integer limits, samplers.

Rules 10 to 14: test_numeric.py. Rule 16: test_bad_input.py. Rules 24 to 26, 29 and 30:
test_exact.py and test_pipeline.py; their statistics: test_statistics.py.
"""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest
import torch
from cases import DRAWING, DTYPES, LAYOUTS, METHODS, Case, Inputs
from compare import (
    OPS,
    assert_drawn,
    assert_equal,
    assert_same,
    assert_within,
    check_decode,
    output_tolerance,
)

import santa_torch
from santa_torch import reference

FLAGS = {"return_lse": True, "return_stats": True}


def decode(inputs: Inputs, method: str, **arguments: object) -> santa_torch.DecodeOutput:
    arguments = {"samples": 15, "seed": 2, **FLAGS, **arguments}
    return santa_torch.decode(**inputs.arguments(), method=method, **arguments)


# ---- B: shapes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 16, 255, 256, 257])
def test_rule15_both_edges_of_a_window(window: int) -> None:
    """A window of w rows ends with the newest: L - w is attended, L - w - 1 is not."""
    case = Case(batch=1, kv_heads=1, group=2, rows=600)
    inputs = case.inputs()
    mask = torch.arange(600) >= 600 - window
    cut = inputs._replace(k=inputs.k[:, :, -window:], v=inputs.v[:, :, -window:])
    exact = reference.decode(*cut[:3], method="dense")
    got = decode(inputs._replace(mask=mask), "dense")
    assert_within("out", got.out, exact, torch.tensor(1e-5))
    assert (got.stats.key_rows == window).all()
    for inside, row in ((True, 600 - window), (True, 599), (False, 599 - window)):
        v = inputs.v.clone()
        v[:, :, row] = torch.nan
        got = decode(inputs._replace(v=v, mask=mask), "dense")
        assert got.out.isnan().all() == inside


@pytest.mark.parametrize("method", DRAWING)
def test_rule17_lists_carry_their_length(method: str) -> None:
    """What stands past ``num_rows`` changes nothing, and is zero as the operator leaves it."""
    inputs = Case(rows=400).inputs()
    weights = OPS.weigh(*OPS.score(inputs.q, inputs.k))
    rows, counts, num_rows = santa_torch.ops.draw(
        weights, samples=40, method=method, kv_heads=2, position=1
    )
    past = torch.arange(rows.shape[2]) >= num_rows[..., None]
    assert past.any()
    assert not rows[past].any()
    assert not counts[past].any()
    coefficients = torch.ones(2, 6, rows.shape[2])
    first = OPS.gather(rows, coefficients, num_rows, inputs.v)
    for wild in (-1, -(2**63), 2**62, 400):
        got = OPS.gather(rows.masked_fill(past, wild), coefficients, num_rows, inputs.v)
        assert_equal("out", got, first)


# ---- C: layout and alignment ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rule18_rule19_rule20_any_strides(level: str, layout: str, dtype: torch.dtype) -> None:
    """Rule 19 (rows at odd addresses) and rule 20 (each case twice) with it."""
    torch.set_num_threads(1)
    for dim, value_dim in ((64, 64), (20, 33)):
        case = Case(rows=270, head_dim=dim, value_dim=value_dim, dtype=dtype, layout=layout)
        inputs = case.inputs()
        plain = inputs._replace(k=inputs.k.contiguous(), v=inputs.v.contiguous())
        for method in METHODS:
            first = decode(plain, method)
            for _ in range(2):
                assert_same(decode(inputs, method), first)
                if layout != "contiguous":  # the other layout in between
                    assert_same(decode(plain, method), first)
        check_decode(case, inputs, "shared", 15)


@pytest.mark.parametrize("method", METHODS)
def test_rule18_queries_of_any_strides(method: str) -> None:
    inputs = Case(dtype=torch.bfloat16).inputs()
    first = decode(inputs, method)
    wide = torch.full((6, 2, 70), torch.nan, dtype=torch.bfloat16)
    wide[..., 3:67] = inputs.q.transpose(0, 1)
    for q in (
        wide.transpose(0, 1)[..., 3:67],
        torch.stack([inputs.q, inputs.q * torch.nan], 2)[:, :, 0],
        torch.cat([inputs.q.flatten(), inputs.q.flatten()])[1:][: inputs.q.numel()].view(2, 6, 64),
    ):
        expected = first if q is not None and torch.equal(q, inputs.q) else None
        for _ in range(2):
            got = decode(inputs._replace(q=q), method)
            assert_same(got, expected or decode(inputs._replace(q=q.contiguous()), method))
    same = inputs.q[:1, :1].expand(2, 6, 64)
    assert_same(
        decode(inputs._replace(q=same), method), decode(inputs._replace(q=same.clone()), method)
    )


@pytest.mark.parametrize("method", METHODS)
def test_rule18_dimensions_of_one_may_have_any_stride(method: str) -> None:
    """A last dimension of one element, or a batch of one, has no stride to speak of."""
    case = Case(batch=1, kv_heads=1, group=1, rows=50, head_dim=1, value_dim=1)
    inputs = case.inputs()
    first = decode(inputs, method)
    odd = inputs._replace(
        q=inputs.q.as_strided((1, 1, 1), (99, 98, 97)),
        k=inputs.k.as_strided((1, 1, 50, 1), (7, 5, 1, 50)),
        v=inputs.v.as_strided((1, 1, 50, 1), (0, 3, 1, 9)),
    )
    assert_same(decode(odd, method), first)


def peak_bytes() -> int:
    """Largest resident size of this process since it was last reset."""
    (line,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(line)


@pytest.mark.parametrize("method", METHODS)
def test_rule18_nothing_is_copied(method: str) -> None:
    """The step over a view of 64 MB of rows takes no memory of that order."""
    pool = torch.ones(1, 1 << 17, 2, 1, 64, dtype=torch.float32)
    k, v = (x.transpose(1, 2) for x in pool.unbind(2))
    q = torch.ones(1, 2, 64)
    decode(Inputs(q, k[:, :, :4096], v[:, :, :4096], None, None), method)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = peak_bytes()
    decode(Inputs(q, k, v, None, None), method)
    assert peak_bytes() - before < 16 * 2**20


# ---- D: integer limits ---------------------------------------------------------------------------


def untouched(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take no memory until they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    size = elements * torch.empty((), dtype=dtype).element_size()
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=dtype)


def far_apart(x: torch.Tensor, stride: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """The same numbers with dimension ``dim`` at ``stride`` elements: address space, not memory."""
    sizes = list(x.shape)
    strides = [1] * x.dim()
    at = sizes[-1]
    for d in reversed(range(x.dim() - 1)):
        strides[d] = stride if d == dim else at
        at = at if d == dim else at * sizes[d]
    span = sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)) + 1
    base = untouched(span, dtype)
    view = base.as_strided(sizes, strides)
    view.copy_(x)
    return view


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_rule21_offsets_past_two_to_the_31(method: str, dim: int) -> None:
    case = Case(batch=2, kv_heads=2, group=2, rows=6, head_dim=8, value_dim=8)
    case = case.but(dtype=torch.bfloat16)
    inputs = case.inputs()
    stride = 2**31 + 8 if dim != 2 else 2**29 + 8
    k = far_apart(inputs.k, stride, dim, case.dtype)
    v = far_apart(inputs.v, stride, dim, case.dtype)
    assert max((n - 1) * s for n, s in zip(k.shape, k.stride(), strict=True)) > 2**31
    assert_same(decode(inputs._replace(k=k, v=v), method), decode(inputs, method))


def test_rule21_masks_and_queries_past_two_to_the_31() -> None:
    case = Case(batch=2, kv_heads=1, group=2, rows=6, head_dim=8, value_dim=8, mask="heads")
    inputs = case.inputs()
    mask = far_apart(inputs.mask, 2**32 + 1, 0, torch.bool)
    q = far_apart(inputs.q, 2**31 + 8, 0, torch.float32)
    for method in METHODS:
        assert_same(decode(inputs._replace(q=q, mask=mask), method), decode(inputs, method))
    v = far_apart(inputs.v, 2**31 + 8, 0, torch.float32)
    rows = torch.tensor([[[1, 5]], [[0, 4]]])
    coefficients, num_rows = torch.ones(2, 2, 2), torch.full((2, 1), 2, dtype=torch.int32)
    got = OPS.gather(rows, coefficients, num_rows, v)
    assert_equal("out", got, OPS.gather(rows, coefficients, num_rows, inputs.v))


def test_rule21_a_row_index_past_two_to_the_31_elements() -> None:
    """The last of 2^24 equal rows 256 elements apart: row times stride passes 2^31."""
    rows = 2**24
    k = torch.zeros(1, dtype=torch.float16).as_strided((1, 1, rows, 1), (0, 0, 0, 1))
    v = untouched(rows * 256, torch.float16).view(1, 1, rows, 256)[..., :1]
    v[0, 0, -1] = 7.0
    out = OPS.gather(
        torch.tensor([[[rows - 1]]]), torch.ones(1, 1, 1), torch.ones(1, 1, dtype=torch.int32), v
    )
    assert out.tolist() == [[[7.0]]]
    mask = torch.zeros(rows, dtype=torch.bool)
    mask[-1] = True
    for method in METHODS:
        q = torch.ones(1, 1, 1, dtype=torch.float16)
        assert santa_torch.decode(q, k, v, method=method, samples=3, mask=mask).tolist() == [
            [[7.0]]
        ]


@pytest.mark.parametrize("method", METHODS)
def test_rule22_a_batch_of_65536(method: str) -> None:
    batch = 65_537
    random = torch.Generator().manual_seed(1)
    q = torch.randn(batch, 1, 8, generator=random)
    k = torch.randn(1, 1, 4, 8, generator=random).expand(batch, 1, 4, 8)
    inputs = Inputs(q, k, k, None, None)
    got = decode(inputs, method, samples=3)
    last = Inputs(q[-3:], k[-3:], k[-3:], None, None)
    small = decode(last, method, samples=3)
    assert_equal("out", got.out[-3:], small.out)
    assert_equal("lse", got.lse[-3:], small.lse)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kv_heads", [1, 65_537])
def test_rule22_65536_heads(method: str, kv_heads: int) -> None:
    random = torch.Generator().manual_seed(1)
    q = torch.randn(1, 65_537, 8, generator=random)
    k = torch.randn(1, 1, 5, 8, generator=random).expand(1, kv_heads, 5, 8)
    got = decode(Inputs(q, k, k, None, None), method, samples=4)
    exact = reference.score(q[:, -2:], k[:, -1:])[0]
    assert_within("lse", got.lse[:, -2:], exact.logsumexp(-1), torch.tensor(1e-5))
    if kv_heads > 1:
        local = Inputs(q[:, -2:], k[:, -2:], k[:, -2:], None, None)
        small = decode(local, method, samples=4, head_offset=65_535)
        assert_equal("out", got.out[:, -2:], small.out)
    else:
        dense = reference.decode(q[:, -2:], k, k, method="dense")
        tolerance = output_tolerance(dense, dense.abs() + 1, torch.float32)
        if method == "dense":
            assert_within("out", got.out[:, -2:], dense, tolerance)


def test_rule23_an_error_leaves_nothing_behind() -> None:
    """After a refused call the next one is what it was."""
    inputs = Case().inputs()
    first = decode(inputs, "shared")
    for bad in ({"samples": 0}, {"layer": -1}, {"method": "none"}, {"scale": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            decode(inputs, **{"method": "shared", **bad})
        assert_same(decode(inputs, "shared"), first)


# ---- E: samplers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", DRAWING)
def test_rule28_prefixes_are_integers(level: str, method: str) -> None:
    """A million equal rows behind one that is large: an fp32 prefix would stand still at 2^24."""
    weights = torch.full((1, 1, 1_000_000), 3, dtype=torch.int32)
    weights[..., 0] = 2**30
    where = torch.tensor([4])
    arguments = {"samples": 2000, "method": method, "kv_heads": 1, "seed": where, "position": where}
    got = OPS.draw(weights, **arguments)
    assert_drawn(got, reference.draw(weights.long(), **arguments))
    rows = got[0][0, 0, : int(got[2])]
    assert rows[0] == 0
    assert 2 < len(rows) < 30
    assert rows[-1] > 500_000


@pytest.mark.parametrize("method", DRAWING)
def test_rule30_one_hot_softmax(method: str) -> None:
    """A head that attends one row returns that row, however many samples."""
    case = Case(batch=1, rows=300)
    inputs = case.inputs()
    for row in (0, 15, 16, 255, 256, 299):
        bias = torch.zeros(300)
        bias[row] = 200.0
        for samples in (1, 2, 77, 1000):
            got = decode(inputs._replace(mask=bias), method, samples=samples)
            exact = inputs.v[0, :, row].repeat_interleave(3, 0)
            assert_within("out", got.out[0], exact.double(), 1e-6 * exact.double().abs())
            assert (got.stats.value_rows == 1).all()


@pytest.mark.parametrize("rows", [1, 16, 300])
def test_rule30_all_rows_drawn_give_exact_attention(rows: int) -> None:
    """With samples enough for every inclusion to be 1, ``"shared"`` is dense."""
    inputs = Case(rows=rows, peak=1.0).inputs()
    got = decode(inputs, "shared", samples=2**24)
    exact = reference.decode(*inputs[:3], method="dense")
    assert_within("out", got.out, exact, torch.tensor(1e-6))
    assert not got.stats.squared_error.any()
    assert (got.stats.value_rows == rows).all()


def test_rule30_equal_rows_are_drawn_equally() -> None:
    """n samples of n equal rows: the systematic mean is the mean of V, for any n."""
    for n in (1, 3, 64, 257, 1000):
        v = torch.randn(1, 1, n, 8, generator=torch.Generator().manual_seed(n))
        zero = torch.zeros(1, 1, n, 8)
        for method in ("systematic", "stratified"):
            out = santa_torch.decode(zero[:, :, 0], zero, v, method=method, samples=n)
            assert_within("out", out[0], v[0].double().mean(1), torch.tensor(1e-6))
