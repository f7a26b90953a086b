"""Keys in blocks and stochastic queries on the CUDA kernels, run by the emulator.

What a packed row's score is compared with is the same kernel's score of the row as it was: the
bits have to be the same. Stochastic queries have to be those of the CPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import simt_library
import torch
from cases import CPU_LEVELS, DTYPES, METHODS, Case, Inputs
from compare import assert_equal
from simt_library import Setting
from test_cuda_kernels import LAUNCHES, Results, assert_results, decode
from test_cuda_memory import fenced

CPU = torch.ops.santa
BLOCK = 64  # rows, csrc/math/layout.h
HEAD_DIMS = (1, 5, 32, 64, 80, 128, 257)
GROUPS = (1, 3, 4, 5, 17, 71)
SETTINGS = (
    Setting(0, 1, 1, 132),
    Setting(1, 1, 2, 4, overlap=True),
    Setting(2, 7, 3, 132, overlap=True),
    Setting(3, 8, 3, 1, shared_bytes=64 << 10),
)
WHERE = {"seed": torch.tensor([5]), "layer": 3}
pytestmark = pytest.mark.usefixtures("one_thread")


class Sketch(NamedTuple):
    """Tensors of a sketch."""

    key_blocks: torch.Tensor  # [B, Hkv, C, D, 64]
    open_rows: torch.Tensor  # [B, Hkv, 64, D]
    block_rows: torch.Tensor  # int64 [B]

    @staticmethod
    def empty(k: torch.Tensor, blocks: int) -> Sketch:
        batch, heads, _, dim = k.shape
        nothing = k.new_full((batch, heads, blocks + 1, dim, BLOCK), torch.nan)
        open_rows = k.new_full((batch, heads, BLOCK, dim), torch.nan)
        return Sketch(nothing[:, :, :blocks], open_rows, torch.zeros(batch, dtype=torch.int64))

    def keys(self) -> dict[str, torch.Tensor]:
        return {"key_blocks": self.key_blocks, "block_rows": self.block_rows}


def sketch_of(k: torch.Tensor, rows: list[int]) -> Sketch:
    """What packing ``rows[b]`` rows of each sequence has to give, by torch."""
    sketch = Sketch.empty(k, max(rows) // BLOCK + 1)
    sketch.block_rows.copy_(torch.tensor(rows))
    for b, held in enumerate(rows):
        for block in range(held // BLOCK):
            part = k[b, :, block * BLOCK : (block + 1) * BLOCK]
            sketch.key_blocks[b, :, block] = part.transpose(1, 2)
        rest = k[b, :, held // BLOCK * BLOCK : held]
        sketch.open_rows[b, :, : rest.shape[1]] = rest
    return sketch


def assert_sketch(got: Sketch, want: Sketch) -> None:
    """Equal where rows are held, and untouched where none was ever written."""
    assert_equal("block_rows", got.block_rows, want.block_rows)
    for b, held in enumerate(want.block_rows.tolist()):
        whole = held // BLOCK
        blocks = got.key_blocks[b, :, :whole], want.key_blocks[b, :, :whole]
        assert_equal(f"key_blocks of {b}", *blocks)
        assert got.key_blocks[b, :, whole:].isnan().all()
        rest = held % BLOCK
        assert_equal(f"open_rows of {b}", got.open_rows[b, :, :rest], want.open_rows[b, :, :rest])


def ragged(case: Case) -> list[int]:
    """Rows held by each sequence: all, none of a block, something in between."""
    return [(case.rows, BLOCK - 1, case.rows // 2 + 3)[b % 3] for b in range(case.batch)]


# ---- packing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("races", [False, True], ids=["plain", "races"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_appending_gives_the_blocks_of_all_rows(dtype: torch.dtype, races: bool) -> None:
    ops = simt_library.load(races)
    for at, dim in enumerate(HEAD_DIMS):
        SETTINGS[at % 4].use(races)
        layout = ("contiguous", "offset", "transposed", "sliced", "interleaved")[at % 5]
        k = Case(2, 2, 1, 400, dim, 8, dtype, layout=layout).inputs().k
        got = Sketch.empty(k, 6)
        begin = 0
        # One row, up to a block, over two, over a block and a half, nothing.
        for n in (1, 62, 1, 65, 100, 0, 7, 164):
            part = k[:, :, begin : begin + n]
            # Before a copy there is not the row that comes before it.
            ops.sketch_append(*got, part.clone() if layout == "contiguous" else part)
            begin += n
            assert_sketch(got, sketch_of(k[:, :, :begin], [begin, begin]))


def test_a_sequence_gets_as_many_rows_as_it_is_told() -> None:
    ops = simt_library.load()
    SETTINGS[2].use()
    k = Case(4, 2, 1, 200, 20, 8).inputs().k
    got = Sketch.empty(k, 5)
    first = torch.tensor([200, 0, 63, 64])
    ops.sketch_append(*got, k, num_rows=first)
    assert_sketch(got, sketch_of(k, first.tolist()))
    ops.sketch_append(*got, k[:, :, :90], num_rows=torch.tensor([30, 90, 1, -7]))
    rows = [torch.cat([k[b, :, :n], k[b, :, :m]], 1) for b, n, m in
            zip(range(4), first.tolist(), (30, 90, 1, 0), strict=True)]  # fmt: skip
    longest = max(x.shape[1] for x in rows)
    whole = torch.stack([torch.nn.functional.pad(x, (0, 0, 0, longest - x.shape[1])) for x in rows])
    assert_sketch(got, sketch_of(whole, [x.shape[1] for x in rows]))


def test_rows_that_have_no_room_are_left_out() -> None:
    """Nothing on the host may look; nothing is written outside of the blocks either."""
    ops = simt_library.load()
    SETTINGS[1].use()
    k = Case(2, 2, 1, 500, 24, 8, torch.float16).inputs().k
    room = 3 * BLOCK - 1
    got = Sketch.empty(k, 2)
    ops.sketch_append(*got, k, num_rows=torch.tensor([10**12, 100]))
    assert_sketch(got, sketch_of(k, [room, 100]))
    ops.sketch_append(*got, k[:, :, 100:])
    assert_sketch(got, sketch_of(k, [room, room]))
    got.block_rows[0] = -(10**9)  # taken for none
    ops.sketch_append(*got, k[:, :, :70])
    assert got.block_rows.tolist() == [70, room]
    none = Sketch.empty(k, 0)
    ops.sketch_append(*none, k)
    assert none.block_rows.tolist() == [BLOCK - 1] * 2
    # Memory ends with the last block and the last open row.
    edged = Sketch.empty(k, 2)
    edged = edged._replace(key_blocks=fenced(edged.key_blocks), open_rows=fenced(edged.open_rows))
    ops.sketch_append(*edged, fenced(k))
    assert_sketch(edged, sketch_of(k, [room, room]))


def test_nothing_to_append_is_no_launch() -> None:
    ops = simt_library.load()
    k = torch.randn(2, 1, 3, 8)
    got = Sketch.empty(k, 1)
    ops.launches()
    ops.sketch_append(*got, k[:, :, :0])
    assert ops.launches() == ""
    ops.sketch_append(*got, k)
    assert ops.launches() == "pack,count"


def test_blocks_that_are_not_aligned_are_an_error() -> None:
    ops = simt_library.load()
    k = torch.randn(1, 1, 100, 8)
    flat = torch.zeros(2 * 8 * BLOCK + 1)
    blocks = flat[1:].view(1, 1, 2, 8, BLOCK)
    rows = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"key_blocks must .* multiples of 16 bytes, got .* of 4"):
        ops.sketch_append(blocks, torch.zeros(1, 1, BLOCK, 8), rows, k)
    with pytest.raises(ValueError, match=r"key_blocks must .* multiples of 16 bytes, got .* of 4"):
        ops.score(torch.randn(1, 1, 8), k, key_blocks=blocks, block_rows=rows)


# ---- scores --------------------------------------------------------------------------------------


def score(ops: Any, inputs: Inputs, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return ops.score(inputs.q, inputs.k, **inputs.scoring(), **more)


def assert_same_scores(ops: Any, inputs: Inputs, rows: list[int], **more: Any) -> None:
    packed = score(ops, inputs, **sketch_of(inputs.k, rows).keys(), **more)
    for name, got, want in zip(("scores", "maxima"), packed, score(ops, inputs), strict=True):
        assert_equal(name, got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_packed_rows_have_the_bits_of_rows(dim: int, dtype: torch.dtype) -> None:
    ops = simt_library.load()
    for at, group in enumerate(GROUPS):
        case = Case(2, 1, group, (600, 256, 320)[at % 3], dim, 8, dtype)
        SETTINGS[at % 4].use()
        assert_same_scores(ops, case.inputs(), ragged(case))


CASES = [
    Case(3, 2, 3, 700, 40, 24, torch.bfloat16, seq_lens=(700, 0, 260)),
    Case(3, 2, 3, 700, 40, 24, torch.float16, mask="heads"),
    Case(2, 2, 5, 1100, 24, 24, mask="additive_heads", softcap=3.0, seq_lens=(1100, 44)),
    Case(3, 2, 2, 520, 64, 24, mask="sparse", layout="interleaved"),
    Case(2, 2, 4, 300, 20, 24, mask="per_head", layout="offset", sinks="float32"),
    Case(1, 1, 24, 515, 100, 24, mask="prefix"),
]


@pytest.mark.parametrize("races", [False, True], ids=["plain", "races"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_masks_and_lengths(case: Case, races: bool) -> None:
    ops = simt_library.load(races)
    inputs = case.inputs()
    for setting in SETTINGS[:: 3 if races else 1]:
        setting.use(races)
        assert_same_scores(ops, inputs, ragged(case))


@pytest.mark.parametrize("held", [0, 1, 63, 64, 65, 128, 255, 256, 257, 320, 511, 512, 520])
def test_any_number_of_rows_may_be_packed(held: int) -> None:
    ops = simt_library.load()
    for setting in SETTINGS:
        setting.use()
        inputs = Case(1, 1, 3, 520, 48, 8, torch.bfloat16).inputs()
        assert_same_scores(ops, inputs, [held])


def test_rows_of_a_sketch_that_cannot_be_are_cut() -> None:
    ops = simt_library.load()
    SETTINGS[2].use()
    inputs = Case(3, 1, 2, 300, 16, 8).inputs()
    sketch = sketch_of(inputs.k, [300, 300, 300])
    want = score(ops, inputs)
    for wild in (10**15, -(10**15)):
        given = {**sketch.keys(), "block_rows": torch.tensor([wild, 300, wild])}
        # A block past the keys' last whole one is there, and is NaN.
        got = score(ops, inputs._replace(seq_lens=torch.tensor([256] * 3)), **given)
        assert_equal("scores", got[0][..., :256], want[0][..., :256])


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_used_features_are_loaded(dtype: torch.dtype) -> None:
    """NaN in all runs that the query has no use for is never noticed."""
    ops = simt_library.load()
    random = torch.Generator().manual_seed(3)
    for at, (dim, group) in enumerate(((1, 3), (5, 1), (64, 4), (80, 17), (257, 5), (128, 71))):
        SETTINGS[at % 4].use()
        inputs = Case(2, 2, group, 300, dim, 8, dtype).inputs()
        q = inputs.q.float().view(2, 2, group, dim)
        unused = torch.rand(2, 2, dim, generator=random) < 0.6
        unused[1, 1] = True
        unused[0, 0, 0] = False
        q.masked_fill_(unused[:, :, None], 0.0)
        q[0, 1, 0] = torch.nan  # of a head that is NaN nothing is needed
        sketch = sketch_of(inputs.k, [300, 256])
        q_flat = q.flatten(1, 2)
        want = score(ops, inputs._replace(q=q_flat))
        hidden = unused.clone()
        hidden[:, :, 0] &= ~unused.all(2)  # where none is used, the first stands in
        sketch.key_blocks.masked_fill_(hidden[:, :, None, :, None], torch.nan)
        got = score(ops, inputs._replace(q=q_flat), **sketch.keys(), sparse_query=True)
        for name, x, y in zip(("scores", "maxima"), got, want, strict=True):
            assert_equal(name, x, y)
        dense = score(ops, inputs._replace(q=q_flat), **sketch.keys())[0]
        noticed = dense.isnan() & ~want[0].isnan()
        assert bool(noticed[:, :, :256].any()) == bool(hidden.any())


def test_a_feature_of_another_block_of_heads_is_used_too() -> None:
    """Which keys are looked at must not depend on how many heads a block has room for."""
    ops = simt_library.load()
    inputs = Case(1, 1, 71, 128, 128, 8).inputs()
    inputs.q[:, :, 7] = 0.0
    inputs.q[:, 70, 7] = 1.0
    sketch = sketch_of(inputs.k, [128])
    sketch.key_blocks[:, :, :, 7, 5] = torch.nan
    for setting in SETTINGS:
        setting.use()
        scores, _ = score(ops, inputs, **sketch.keys(), sparse_query=True)
        assert scores[:, :, 5].isnan().all()
        assert not scores[:, :, 6].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_queries_may_be_wider_than_keys(dtype: torch.dtype) -> None:
    ops = simt_library.load()
    SETTINGS[3].use()
    inputs = Case(2, 2, 3, 300, 40, 8, dtype).inputs()
    wide = inputs._replace(q=inputs.q.float())
    for name, got, want in zip("sm", score(ops, wide), score(ops, inputs), strict=True):
        assert_equal(name, got, want)
    wide.q.add_(2.0**-20)  # what 16 bits cannot hold
    exact = wide._replace(k=inputs.k.float())
    got, want = score(ops, wide)[0], score(ops, exact)[0]
    # Vectors of 8 features are added up elsewhere than those of 4: only close.
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert_same_scores(ops, wide, [300, 200])


def test_blocks_without_an_attended_row_are_not_loaded() -> None:
    ops = simt_library.load()
    SETTINGS[0].use()
    inputs = Case(1, 1, 3, 512, 24, 8, torch.bfloat16).inputs()
    sketch = sketch_of(inputs.k, [512])
    blocks = fenced(sketch.key_blocks[:, :, :8], 3 * 24 * BLOCK)
    given = {"key_blocks": blocks, "block_rows": sketch.block_rows}
    for row in (0, 130, 191):
        masked = inputs._replace(mask=(torch.arange(512) == row))
        for name, got, want in zip("sm", score(ops, masked, **given), score(ops, masked),
                                   strict=True):  # fmt: skip
            assert_equal(name, got, want)
    short = inputs._replace(seq_lens=torch.tensor([192]))
    assert_equal("scores", score(ops, short, **given)[0], score(ops, short)[0])
    with pytest.raises(RuntimeError, match=r"kernel 'score'.*where there is no memory"):
        score(ops, inputs._replace(mask=(torch.arange(512) == 192)), **given)


# ---- stochastic queries --------------------------------------------------------------------------

QUERIES = [
    (torch.float32, 1, 1, 1, 1),  # dtype, KV heads, group, head dim, draws
    (torch.bfloat16, 2, 3, 64, 8),
    (torch.float16, 1, 71, 80, 3),
    (torch.float32, 3, 17, 257, 4),
    (torch.bfloat16, 2, 4, 128, 16),
    (torch.float32, 1, 5, 300, 1024),
]


@pytest.mark.parametrize("races", [False, True], ids=["plain", "races"])
@pytest.mark.parametrize("shared", [False, True], ids=["heads", "shared"])
@pytest.mark.parametrize("at", range(len(QUERIES)))
def test_stochastic_queries_are_those_of_the_cpu(at: int, shared: bool, races: bool) -> None:
    dtype, kv_heads, group, dim, draws = QUERIES[at]
    ops = simt_library.load(races)
    SETTINGS[at % 4].use(races)
    random = torch.Generator().manual_seed(at)
    heads = kv_heads * group
    q = torch.randn(3, heads, dim, generator=random)
    q = (q * q.abs() * 3).to(dtype)[:, :, :dim]
    q[1, 0, dim // 2] = torch.nan
    q[2, heads - 1, 0] = torch.inf
    q[2, heads // 2] = 0.0
    given = {
        "draws": draws,
        "shared": shared,
        "kv_heads": kv_heads,
        "seed": torch.tensor([3, -4, 2**40]),
        "position": torch.tensor([0, 77, 2**31]),
        "layer": 5,
        "head_offset": heads,
    }
    assert_equal("query", ops.bernoulli_query(q, **given), CPU.bernoulli_query(q, **given))


def test_a_group_that_has_no_number_or_only_zeros() -> None:
    ops = simt_library.load()
    SETTINGS[3].use()
    q = torch.randn(2, 4, 40)
    q[0, :2] = 0.0
    q[0, 0, 3] = -0.0
    q[1, 2:, 1] = torch.nan
    for shared in (False, True):
        given = {
            "draws": 4,
            "shared": shared,
            "kv_heads": 2,
            "seed": torch.tensor([1]),
            "position": torch.tensor([2]),
        }
        assert_equal("query", ops.bernoulli_query(q, **given), CPU.bernoulli_query(q, **given))


# ---- whole steps ---------------------------------------------------------------------------------


class Read(NamedTuple):
    """What keys_read holds for one KV head."""

    rows: int
    features: int
    bytes: int


def expected_reads(inputs: Inputs, rows: list[int], query: torch.Tensor | None) -> torch.Tensor:
    """``keys_read``, counted from the mask and the query."""
    batch, heads, length, dim = inputs.k.shape
    group = inputs.q.shape[1] // heads
    attended = torch.ones(batch, inputs.q.shape[1], length, dtype=torch.bool)
    if inputs.mask is not None:
        mask = inputs.mask
        lowest = -65504.0 if mask.dtype == torch.float16 else -3.3895313892515355e38
        attended &= mask if mask.dtype == torch.bool else ~(mask.float() <= lowest)
    if inputs.seq_lens is not None:
        attended &= torch.arange(length) < inputs.seq_lens[:, None, None]
    any_head = attended.view(batch, heads, group, length).any(2)
    read = torch.zeros(batch, heads, 3, dtype=torch.int64)
    for b in range(batch):
        packed = rows[b] // BLOCK * BLOCK
        for h in range(heads):
            features = dim
            if query is not None:
                mine = query[b, h * group : (h + 1) * group]
                features = max(int(((mine != 0) & ~mine.isnan()).any(0).sum()), 1)
            blocks = any_head[b, h, :packed].view(-1, BLOCK).any(1).sum()
            others = any_head[b, h, packed:].sum()
            size = inputs.k.element_size()
            bytes_read = (blocks * BLOCK * features + others * dim) * size
            read[b, h] = torch.tensor(Read(any_head[b, h].sum(), features, bytes_read))
    return read


@pytest.mark.parametrize("races", [False, True], ids=["plain", "races"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_with_a_sketch_are_those_without(case: Case, method: str, races: bool) -> None:
    ops = simt_library.load(races)
    inputs = case.inputs()
    rows = ragged(case)
    at = CASES.index(case) + METHODS.index(method)
    SETTINGS[at % 4].use(races)
    want = decode(ops, inputs, method)
    SETTINGS[(at + 1) % 4].use(races)
    got = decode(ops, inputs, method, **sketch_of(inputs.k, rows).keys())
    assert_equal("keys_read", got.keys_read, expected_reads(inputs, rows, None))
    assert_results(got._replace(keys_read=want.keys_read), want)


@pytest.mark.parametrize("races", [False, True], ids=["plain", "races"])
@pytest.mark.parametrize("shared", [False, True], ids=["heads", "shared"])
@pytest.mark.parametrize("method", METHODS)
def test_steps_with_a_stochastic_query(method: str, shared: bool, races: bool) -> None:
    """A step is one whose query is the stochastic one, from a sketch or without."""
    ops = simt_library.load(races)
    first = METHODS.index(method) + shared
    for at in range(first, first + (1 if races else 3)):
        case = CASES[at % len(CASES)]
        inputs = case.inputs()
        rows = ragged(case)
        SETTINGS[at % 4].use(races)
        ends = expected_ends(inputs)
        query = ops.bernoulli_query(
            inputs.q, draws=3, shared=shared, kv_heads=case.kv_heads, position=ends, **WHERE
        )
        given = {"bernoulli_draws": 3, "bernoulli_shared": shared}
        got = decode(ops, inputs, method, **given, **sketch_of(inputs.k, rows).keys())
        assert_equal("keys_read", got.keys_read, expected_reads(inputs, rows, query))
        without = decode(ops, inputs, method, **given)
        none = expected_reads(inputs, [0] * case.batch, query)
        assert_equal("keys_read", without.keys_read, none)
        assert_results(got._replace(keys_read=without.keys_read), without)
        # The same decode of fp32 rows and the query as it is.
        if case.dtype == torch.float32:
            plain = decode(ops, inputs._replace(q=query), method, position=ends)
            assert_results(without._replace(keys_read=plain.keys_read), plain)
        scores, maxima = score(ops, inputs._replace(q=query), sparse_query=True)
        if method == "shared":
            assert_drawn_from(ops, got, scores, maxima, inputs, ends)


def assert_drawn_from(
    ops: Any, got: Results, scores: torch.Tensor, maxima: torch.Tensor, inputs: Inputs,
    ends: torch.Tensor,
) -> None:  # fmt: skip
    """As many rows of V as stage "draw" takes by these scores."""
    if inputs.sinks is not None:
        return
    _, _, drawn = ops.draw(
        ops.weigh(scores, maxima), samples=12, method="shared", kv_heads=inputs.k.shape[1],
        position=ends, **WHERE,
    )  # fmt: skip
    assert_equal("value_rows", got.value_rows, drawn.long())


def expected_ends(inputs: Inputs) -> torch.Tensor:
    """One past the last row that any head of a sequence attends."""
    length = inputs.k.shape[2]
    rows = torch.arange(1, length + 1)
    attended = torch.ones(*inputs.q.shape[:2], length, dtype=torch.bool)
    if inputs.mask is not None:
        mask = inputs.mask
        lowest = -65504.0 if mask.dtype == torch.float16 else -3.3895313892515355e38
        attended &= mask if mask.dtype == torch.bool else ~(mask.float() <= lowest)
    if inputs.seq_lens is not None:
        attended &= rows <= inputs.seq_lens[:, None, None]
    return (attended.any(1) * rows).amax(1)


@pytest.mark.parametrize("length", [0, 1, 700, 2999, 5000])
def test_the_default_position_is_found_from_the_end_of_a_mask(length: int) -> None:
    """The random numbers of a query are those of its position, however far the mask has to be
    searched, and whichever head it is that attends the last row."""
    ops = simt_library.load()
    SETTINGS[1].use()
    inputs = Case(1, 1, 2, 5000, 8, 8).inputs()
    for heads in (1, 2):
        mask = torch.zeros(1, heads, 5000, dtype=torch.bool)
        mask[0, heads - 1, :length] = True
        masked = inputs._replace(mask=mask)
        given = {"bernoulli_draws": 2, "bernoulli_shared": False}
        got = decode(ops, masked, "systematic", **given)
        want = decode(ops, masked, "systematic", position=torch.tensor([length]), **given)
        assert_results(got, want)


@pytest.mark.parametrize("method", METHODS)
def test_launches(method: str) -> None:
    ops = simt_library.load()
    inputs = Case(1, 1, 3, 300, 24, 8).inputs()
    sketch = sketch_of(inputs.k, [300])
    ops.launches()
    decode(ops, inputs, method, **sketch.keys())
    assert ops.launches() == LAUNCHES[method]
    decode(ops, inputs, method, bernoulli_draws=4)
    assert ops.launches() == f"bernoulli,{LAUNCHES[method]}"


def test_a_head_that_is_nan_stays_alone() -> None:
    ops = simt_library.load()
    SETTINGS[2].use()
    inputs = Case(1, 1, 4, 300, 24, 8).inputs()
    rows = sketch_of(inputs.k, [300]).keys()
    for method in METHODS:
        for shared in (False, True):
            given = dict(bernoulli_draws=4, bernoulli_shared=shared, **rows)
            q = inputs.q.clone()
            q[0, 2] = 0.0
            want = decode(ops, inputs._replace(q=q), method, **given)
            q[0, 2, 5] = torch.inf
            got = decode(ops, inputs._replace(q=q), method, **given)
            assert got.out[0, 2].isnan().all()
            if method == "shared":  # a head of zeros weighs on the sample, one of NaN does not
                assert not got.out[0, [0, 1, 3]].isnan().any()
            else:
                others = [0, 1, 3]
                assert_equal("out", got.out[0, others], want.out[0, others])
                assert_equal("lse", got.lse[0, others], want.lse[0, others])


def test_the_levels_of_the_cpu_read_the_same() -> None:
    """Statistics of keys, level by level."""
    ops = simt_library.load()
    SETTINGS[0].use()
    case = CASES[1]
    inputs = case.inputs()
    rows = sketch_of(inputs.k, ragged(case)).keys()
    before = CPU.cpu_level()
    try:
        for level in CPU_LEVELS:
            CPU.set_cpu_level(level)
            for draws in (0, 3):
                given = dict(bernoulli_draws=draws, **rows)
                cpu, simt = (decode(x, inputs, "systematic", **given) for x in (CPU, ops))
                assert_equal("keys_read", simt.keys_read, cpu.keys_read)
    finally:
        CPU.set_cpu_level(before)
