"""What the CUDA kernels read and write, on the emulator: fences, poisoned memory, far strides.

A fence is a page without access beside a tensor: a kernel that leaves the tensor stops there with
an error of the emulator, where on a GPU it would go on with whatever it found.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from typing import Any

import pytest
import simt_library
import torch
from cases import DTYPES, METHODS, Case, Inputs
from compare import assert_equal
from simt_library import Setting
from test_cuda_kernels import assert_results, decode
from test_faults_b_e import far_apart, untouched

LIBC = ctypes.CDLL(None, use_errno=True)
PAGE = mmap.PAGESIZE
PROT_NONE = 0
M_PERTURB = -6  # mallopt of glibc: what new memory is filled with, inverted

pytestmark = pytest.mark.usefixtures("one_thread")


def fence_off(address: int, size: int) -> None:
    if LIBC.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), PROT_NONE) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")


def fenced(x: torch.Tensor, readable: int | None = None, before: bool = False) -> torch.Tensor:
    """A contiguous copy whose first ``readable`` elements end where memory ends.

    What lies behind them in the view is not there. With ``before``, all of it is, and the fence
    lies in front of the first element.
    """
    flat = x.contiguous().flatten()
    readable = flat.numel() if readable is None else readable
    size = flat.element_size()
    room = -(-readable * size // PAGE) * PAGE
    hidden = -(-(flat.numel() - readable) * size // PAGE) * PAGE + PAGE
    memory = mmap.mmap(-1, room + hidden)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    offset = PAGE if before else room - readable * size
    view = torch.frombuffer(memory, dtype=x.dtype, count=flat.numel(), offset=offset)
    view[:readable] = flat[:readable]
    fence_off(address if before else address + room, PAGE if before else hidden)
    return view.view(x.shape)


def operators(setting: Setting) -> Any:
    setting.use()
    return simt_library.load()


# ---- reads ---------------------------------------------------------------------------------------


def test_a_fence_is_seen() -> None:
    ops = operators(Setting())
    k = torch.randn(1, 1, 40, 16)
    ops.score(torch.randn(1, 2, 16), fenced(k))
    with pytest.raises(RuntimeError, match=r"kernel 'score'.*where there is no memory"):
        ops.score(torch.randn(1, 2, 16), fenced(k, readable=39 * 16))


@pytest.mark.parametrize("before", [False, True], ids=["behind", "before"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rule11_nothing_is_read_outside_of_the_inputs(
    dtype: torch.dtype, method: str, before: bool
) -> None:
    ops = operators(Setting(2, 3, 2, 4))
    for dim, value_dim in ((8, 1), (17, 33), (100, 20), (128, 40)):
        case = Case(2, 1, 3, 300, dim, value_dim, dtype, "heads", (300, 270), sinks="float32")
        inputs = case.inputs()
        edged = inputs._make(
            fenced(x, before=before) if isinstance(x, torch.Tensor) else x for x in inputs
        )
        assert_results(decode(ops, edged, method), decode(ops, inputs, method))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("by", ["seq_lens", "mask"])
def test_rule16_rows_that_are_not_attended_are_not_loaded(method: str, by: str) -> None:
    ops = operators(Setting(3, 3, 2, 132))
    for rows in (1, 63, 257):
        whole = Case(1, 1, 3, rows, 24, 40, torch.bfloat16).inputs()
        longer = Case(1, 1, 3, 800, 24, 40, torch.bfloat16).inputs()
        k, v = longer.k.clone(), longer.v.clone()
        k[:, :, :rows], v[:, :, :rows] = whole.k, whole.v
        given = whole._replace(k=fenced(k, rows * 24), v=fenced(v, rows * 40))
        if by == "mask":
            given = given._replace(mask=torch.arange(800) < rows)
        else:
            given = given._replace(seq_lens=torch.tensor([rows]))
        assert_results(decode(ops, given, method), decode(ops, whole, method))


@pytest.mark.parametrize("method", METHODS[1:])
def test_only_drawn_rows_of_v_are_loaded(method: str) -> None:
    """One row has all the mass: it is the last that V has memory for."""
    ops = operators(Setting(2, 3, 2, 4))
    inputs = Case(1, 1, 3, 600, 24, 40).inputs()
    bias = torch.zeros(600)
    bias[290] = 200.0
    given = inputs._replace(mask=bias)
    expected = decode(ops, given, method)
    assert_results(decode(ops, given._replace(v=fenced(inputs.v, 291 * 40)), method), expected)
    assert (expected.value_rows == 1).all()


# ---- writes, and memory that was something else --------------------------------------------------


@pytest.fixture
def perturb() -> Iterator[Any]:
    """Fill memory with a byte whenever the allocator gives it out."""
    if not hasattr(LIBC, "mallopt"):
        pytest.skip("mallopt is glibc's")

    def fill(byte: int) -> None:
        assert LIBC.mallopt(M_PERTURB, byte ^ 0xFF) == 1
        for size in (1000, 3_000_000):  # the allocator's own pointers may stand in between
            filled = torch.empty(size, dtype=torch.uint8) == byte
            assert filled.float().mean() > 0.9

    yield fill
    LIBC.mallopt(M_PERTURB, 0)


@pytest.mark.parametrize("method", METHODS)
def test_nothing_depends_on_what_memory_held(method: str, perturb: Any) -> None:
    ops = operators(Setting(2, 3, 2, 4))
    cases = [
        Case(2, 2, 3, 600, 24, 40, torch.float16, mask="heads", seq_lens=(600, 0)),
        Case(1, 1, 17, 300, 17, 33, sinks="float32"),
        Case(1, 1, 1, 1, 8, 8, mask="nothing"),
    ]
    expected = [decode(ops, case.inputs(), method) for case in cases]
    for byte in (0x7F, 0xFE, 0x80):  # numbers that are huge, and huge and negative, and tiny
        perturb(byte)
        for case, first in zip(cases, expected, strict=True):
            assert_results(decode(ops, case.inputs(), method), first)


def test_stages_write_all_of_their_results(perturb: Any) -> None:
    ops = operators(Setting(2, 3, 2, 4))
    inputs = Case(4, 2, 17, 100, 24, 40, seq_lens=(40, 0, 100, 7)).inputs()
    where = torch.tensor([3])

    def stages() -> list[torch.Tensor]:
        scores, maxima = ops.score(inputs.q, inputs.k, seq_lens=inputs.seq_lens)
        weights = ops.weigh(scores, maxima)
        found = [scores, maxima, weights]
        for method in METHODS[1:]:
            drawn = ops.draw(
                weights, samples=70, method=method, kv_heads=2, seed=where, position=where
            )
            ones = torch.ones(4, 34, drawn[0].shape[2])
            found += [*drawn, ops.gather(drawn[0], ones, drawn[2], inputs.v)]
        return found

    expected = stages()
    for byte in (0x7F, 0x80):
        perturb(byte)
        for got, first in zip(stages(), expected, strict=True):
            assert_equal("stage", got, first)


# ---- integer limits ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["q", "k", "v", "mask"])
@pytest.mark.parametrize("method", METHODS)
def test_rule21_strides_past_two_to_the_31(method: str, name: str) -> None:
    ops = operators(Setting(2, 3, 2, 132))
    for dtype in (torch.bfloat16, torch.float32):
        inputs = Case(2, 2, 2, 6, 8, 8, dtype, mask="heads").inputs()
        expected = decode(ops, inputs, method)
        x = getattr(inputs, name)
        for dim in range(x.dim() - 1):
            stride = 2**31 // (x.shape[dim] - 1) + 8
            far = far_apart(x, stride, dim, x.dtype)
            assert (x.shape[dim] - 1) * stride > 2**31
            assert_results(decode(ops, inputs._replace(**{name: far}), method), expected)


def test_rule21_rows_of_a_list_past_two_to_the_31_elements() -> None:
    ops = operators(Setting())
    rows = 2**24
    v = untouched(rows * 256, torch.float16).view(1, 1, rows, 256)[..., :1]
    v[0, 0, -1] = 7.0
    one = torch.ones(1, 1, dtype=torch.int32)
    assert ops.gather(torch.tensor([[[rows - 1]]]), torch.ones(1, 1, 1), one, v).item() == 7.0


@pytest.mark.parametrize("method", ["dense", "shared"])
def test_rule22_more_heads_of_a_group_than_shared_memory_holds(method: str) -> None:
    """Every head's part equals that of a small group on its own."""
    ops = operators(Setting())
    heads = 26_000
    random = torch.Generator().manual_seed(1)
    q = torch.randn(1, heads, 8, generator=random)
    k = torch.randn(1, 1, 4, 8, generator=random)
    got = decode(ops, Inputs(q, k, k, None, None), method, samples=4, return_stats=False)
    small = decode(ops, Inputs(q[:, -2:], k, k, None, None), method, samples=4)
    assert_equal("lse", got.lse[:, -2:], small.lse)
    if method == "dense":
        assert_equal("out", got.out[:, -2:], small.out)
    assert got.out.isfinite().all()


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("batch", [1, 70_000])
def test_rule22_grids_of_70_000(method: str, batch: int) -> None:
    ops = operators(Setting(multiprocessors=132))
    heads = 70_000 // batch
    random = torch.Generator().manual_seed(1)
    q = torch.randn(batch, heads, 8, generator=random)
    k = torch.randn(1, 1, 4, 8, generator=random).expand(batch, heads, 4, 8)
    got = decode(ops, Inputs(q, k, k, None, None), method, samples=3)
    b, h = slice(-2, None), slice(-2, None)
    last = Inputs(q[b, h], k[b, h], k[b, h], None, None)
    small = decode(ops, last, method, samples=3, head_offset=max(heads - 2, 0))
    for name, x, y in zip(got._fields, got, small, strict=True):
        assert_equal(name, x[b, h], y)
