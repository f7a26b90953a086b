"""KeySketch: what it holds, and that scores from it have the bits of scores from row-major keys."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from cases import DTYPES, METHODS, Case
from compare import OPS, assert_equal, assert_same, check_decode

import santa_torch
from santa_torch import KeySketch


def keys(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def assert_holds(sketch: KeySketch, rows: list[torch.Tensor]) -> None:
    """Each sequence of the sketch holds ``rows[b]``, ``[Hkv, n, D]``, and nothing else counts."""
    assert_equal("rows", sketch.rows.cpu(), torch.tensor([part.shape[1] for part in rows]).long())
    for b, part in enumerate(rows):
        whole = part.shape[1] // 64 * 64
        blocks = part[:, :whole].unflatten(1, (whole // 64, 64)).transpose(-1, -2)
        assert_equal(f"blocks of {b}", sketch.blocks[b, :, : whole // 64], blocks)
        assert_equal(
            f"open rows of {b}", sketch.open_rows[b, :, : part.shape[1] - whole], part[:, whole:]
        )


# ---- what it holds -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 5, 64, 80, 257])
@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 300])
def test_holds_the_keys_it_was_made_from(
    backend: str, rows: int, dim: int, dtype: torch.dtype
) -> None:
    k = keys(2, 3, rows, dim, dtype=dtype)
    sketch = KeySketch(k, bits=32 if dtype == torch.float32 else 16)
    assert_holds(sketch, list(k))
    assert sketch.dtype == dtype
    assert sketch.shape == (2, 3, rows // 64 * 64, dim)


@pytest.mark.parametrize("capacity", [None, 1000])
def test_appends_of_every_length(backend: str, capacity: int | None) -> None:
    k = keys(2, 2, 1000, 24)
    sketch = KeySketch(k[:, :, :0], capacity=capacity)
    memory = sketch.blocks.data_ptr()
    end = 0
    for n in (1, 62, 1, 1, 0, 64, 130, 63, 65, 400, 5):
        sketch.append(k[:, :, end : end + n])
        end += n
        assert_holds(sketch, list(k[:, :, :end]))
    assert (sketch.blocks.data_ptr() == memory) == (capacity is not None)
    assert sketch.nbytes >= sketch.blocks.nbytes + sketch.open_rows.nbytes


def test_sequences_of_different_lengths(backend: str) -> None:
    k = keys(3, 2, 200, 16)
    sketch = KeySketch(k, seq_lens=torch.tensor([200, 0, 70]))
    held = [k[0], k[1, :, :0], k[2, :, :70]]
    assert_holds(sketch, held)
    for counts in ([0, 5, 60], [1, 1, 1], [60, 59, 0]):
        more = keys(3, 2, 60, 16)
        sketch.append(more, torch.tensor(counts))
        held = [torch.cat([a, b[:, :n]], 1) for a, b, n in zip(held, more, counts, strict=True)]
        assert_holds(sketch, held)


@pytest.mark.parametrize("layout", ["transposed", "interleaved", "offset", "sliced", "every_other"])
def test_keys_of_any_strides(backend: str, layout: str) -> None:
    k = Case(rows=150, head_dim=33, layout=layout).inputs().k
    assert_holds(KeySketch(k), list(k))


def test_crop_and_go_on(backend: str) -> None:
    k = keys(2, 2, 300, 24)
    for rows in (0, 1, 63, 64, 100, 128, 256, 299, 300, 400):
        sketch = KeySketch(k)
        sketch.crop(rows)
        assert_holds(sketch, list(k[:, :, :rows]))
        more = keys(2, 2, 70, 24)
        sketch.append(more)
        assert_holds(sketch, list(torch.cat([k[:, :, :rows], more], 2)))
    sketch = KeySketch(k)
    sketch.crop(torch.tensor([130, 7]))
    assert_holds(sketch, [k[0, :, :130], k[1, :, :7]])
    sketch.crop(torch.tensor([-3, 400]))
    assert_holds(sketch, [k[0, :, :0], k[1, :, :7]])


def test_a_crop_gives_room_back(backend: str) -> None:
    """Whoever crops and appends in turn, as assisted decoding does, needs no more memory."""
    k = keys(1, 1, 640, 8)
    sketch = KeySketch(k)
    room = sketch.capacity
    for _ in range(5):
        sketch.crop(500)
        sketch.append(k[:, :, 500:])
    assert sketch.capacity == room
    assert_holds(sketch, list(k))
    for _ in range(5):
        sketch.crop(torch.tensor([500]))
        sketch.append(k[:, :, 500:])
    assert sketch.capacity == room
    assert_holds(sketch, list(k))


def test_reorder_and_reset(backend: str) -> None:
    k = keys(3, 2, 100, 8)
    sketch = KeySketch(k, seq_lens=torch.tensor([100, 64, 3]))
    sketch.reorder(torch.tensor([2, 0, 0, 1]))
    assert_holds(sketch, [k[2, :, :3], k[0], k[0], k[1, :, :64]])
    memory = sketch.blocks.data_ptr()
    sketch.reorder(torch.tensor([1, 1, 2, 3]))
    assert sketch.blocks.data_ptr() == memory
    assert_holds(sketch, [k[0], k[0], k[0], k[1, :, :64]])
    sketch.reorder(torch.tensor([3, 0, 1, 2]))
    assert_holds(sketch, [k[1, :, :64], k[0], k[0], k[0]])
    other = copy.deepcopy(sketch)
    sketch.reset()
    assert_holds(sketch, [k[0, :, :0]] * 4)
    assert_holds(other, [k[1, :, :64], k[0], k[0], k[0]])


def test_full_capacity(fast_backend: str) -> None:
    k = keys(2, 1, 200, 8)
    sketch = KeySketch(k[:, :, :100], capacity=130)
    assert sketch.capacity == 128
    sketch.append(k[:, :, 100:191])  # the open block needs no room
    if fast_backend == "cpu":
        before = copy.deepcopy(sketch)
        with pytest.raises(ValueError, match=r"key_blocks.*192 rows.*2 blocks"):
            sketch.append(k[:, :, 191:192], torch.tensor([0, 1]))
        assert_equal("blocks", sketch.blocks, before.blocks)
        assert_equal("rows", sketch.rows, before.rows)
        sketch.append(k[:, :, 191:192], torch.tensor([0, 0]))
    assert_holds(sketch, list(k[:, :, :191]))


def test_empty_shapes(backend: str) -> None:
    for shape in ((0, 2, 100, 8), (2, 2, 0, 8)):
        k = keys(*shape)
        sketch = KeySketch(k)
        sketch.append(k)
        sketch.crop(0)
        assert_holds(sketch, list(k[:, :, :0]))
        q = keys(shape[0], 4, 8)
        out = santa_torch.decode(q, k, k, samples=4, sketch=sketch)
        assert_equal("out", out, santa_torch.decode(q, k, k, samples=4))


def test_inference_mode_leaves_a_sketch_that_can_go_on() -> None:
    k = keys(1, 1, 100, 8)
    with torch.inference_mode():
        sketch = KeySketch(k)
        sketch.append(k)
    sketch.append(k)
    sketch.crop(150)
    sketch.reorder(torch.tensor([0]))
    sketch.append(k.requires_grad_())
    assert int(sketch.rows) == 250
    assert not sketch.blocks.requires_grad


def test_representation() -> None:
    text = repr(KeySketch(keys(2, 3, 100, 8, dtype=torch.bfloat16), 16))
    assert text == "KeySketch(batch 2, 3 KV heads, 8 features of 16 bits, room for 64 rows)"


# ---- errors --------------------------------------------------------------------------------------

K = torch.zeros(2, 2, 10, 8)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"k": K[0]}, ValueError, "k must be .*2, 10, 8"),
        ({"k": K.double()}, ValueError, "k must be .*float64"),
        ({"k": None}, ValueError, "k must be .*None"),
        ({"k": K[..., ::2]}, ValueError, "k must have .*stride 2"),
        ({"bits": 16}, ValueError, "bits must be 32 .*float32, got 16"),
        ({"k": K.half(), "bits": 32}, ValueError, "bits must be 16 .*float16, got 32"),
        ({"bits": 5}, ValueError, "bits must be .*got 5"),
        ({"bits": True}, ValueError, "bits must be .*got True"),
        ({"bits": 4}, NotImplementedError, "bits=4"),
        ({"capacity": 9}, ValueError, "capacity must be .*got 9"),
        ({"capacity": -1}, ValueError, "capacity must be .*got -1"),
        ({"capacity": 1.5}, ValueError, "capacity must be .*got 1.5"),
        ({"seq_lens": torch.tensor([10, 11])}, ValueError, r"num_rows\[1\].*10.*got 11"),
        ({"seq_lens": torch.tensor([-1, 1])}, ValueError, r"num_rows\[0\].*got -1"),
        ({"seq_lens": torch.tensor([1])}, ValueError, r"num_rows.*\[2\].*\[1\]"),
        ({"seq_lens": torch.tensor([1, 1]).int()}, ValueError, "num_rows.*int32"),
        ({"seq_lens": [1, 1]}, ValueError, "num_rows"),
    ],
)
def test_rule16_making_one(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        KeySketch(**{"k": K, **arguments})


@pytest.mark.parametrize(
    ("k", "words"),
    [
        (K[:1], "key_blocks.*1, 2, 10, 8"),
        (K[:, :1], "key_blocks.*2, 1, 10, 8"),
        (K[..., :4], "key_blocks.*2, 2, 10, 4"),
        (K.half(), "key_blocks.*float16.*float32"),
        (K[0], "k must be .*2, 10, 8"),
        (K[..., ::2], "k must have.*stride 2"),
        (7, "k must be .*7"),
    ],
)
def test_rule16_appending(k: Any, words: str) -> None:
    sketch = KeySketch(K)
    with pytest.raises(ValueError, match=words):
        sketch.append(k)
    assert_holds(sketch, list(K))


def test_rule16_crop_and_reorder() -> None:
    sketch = KeySketch(K)
    for rows in (-1, 1.5, True, torch.tensor([1]), torch.tensor([1, 2]).int()):
        with pytest.raises(ValueError, match="rows"):
            sketch.crop(rows)  # type: ignore[arg-type]
    for indices in (0, torch.tensor([[0]])):
        with pytest.raises(ValueError, match="indices"):
            sketch.reorder(indices)  # type: ignore[arg-type]
    assert_holds(sketch, list(K))


INPUTS = Case(rows=200).inputs()
HELD = KeySketch(INPUTS.k)
BLOCKS, ROWS = HELD.blocks, HELD.rows
BAD: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"key_blocks": BLOCKS}, ("key_blocks", "block_rows", "together")),
    ({"block_rows": ROWS}, ("key_blocks", "block_rows", "together")),
    ({"key_blocks": BLOCKS[0], "block_rows": ROWS}, ("key_blocks", "[2, 3, 64, 64]")),
    ({"key_blocks": BLOCKS[:1], "block_rows": ROWS}, ("key_blocks", "[1, 2, 3, 64, 64]")),
    ({"key_blocks": BLOCKS[:, :1], "block_rows": ROWS}, ("key_blocks", "[2, 1, 3, 64, 64]")),
    ({"key_blocks": BLOCKS[..., :32], "block_rows": ROWS}, ("key_blocks", "[2, 2, 3, 64, 32]")),
    ({"key_blocks": BLOCKS.half(), "block_rows": ROWS}, ("key_blocks", "float16")),
    ({"key_blocks": BLOCKS.transpose(3, 4), "block_rows": ROWS}, ("key_blocks", "contiguous")),
    ({"key_blocks": BLOCKS, "block_rows": ROWS[:1]}, ("block_rows", "[2]", "[1]")),
    ({"key_blocks": BLOCKS, "block_rows": ROWS.int()}, ("block_rows", "int32")),
    ({"key_blocks": BLOCKS, "block_rows": ROWS[None]}, ("block_rows", "[1, 2]")),
]
BAD_VALUES: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"key_blocks": BLOCKS, "block_rows": ROWS + 1}, ("block_rows[0]", "200", "201")),
    ({"key_blocks": BLOCKS, "block_rows": ROWS - 201}, ("block_rows[0]", "-1")),
    ({"key_blocks": BLOCKS[:, :, :2], "block_rows": ROWS}, ("block_rows[0]", "191", "200")),
]


def refuse(change: dict[str, Any], words: tuple[str, ...]) -> None:
    given = {"samples": 4, "seed": torch.tensor([1]), **change}
    with pytest.raises((ValueError, RuntimeError)) as caught:
        OPS.decode(*INPUTS[:3], **given)
    with pytest.raises((ValueError, RuntimeError)) as of_score:
        OPS.score(*INPUTS[:2], **change)
    for word in words:
        assert word in str(caught.value)
        assert word in str(of_score.value)


@pytest.mark.parametrize(("change", "words"), BAD)
def test_rule16_blocks_of_a_step(
    backend: str, change: dict[str, Any], words: tuple[str, ...]
) -> None:
    refuse(change, words)


@pytest.mark.parametrize(("change", "words"), BAD_VALUES)
def test_rule16_rows_of_a_step(change: dict[str, Any], words: tuple[str, ...]) -> None:
    refuse(change, words)


def test_rule16_sketch_of_a_step() -> None:
    for wrong in (BLOCKS, (BLOCKS, ROWS), "sketch", 0):
        with pytest.raises(ValueError, match="sketch must be a KeySketch"):
            santa_torch.decode(*INPUTS[:3], samples=4, sketch=wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="sketch must be a KeySketch"):
            santa_torch.score(*INPUTS[:2], sketch=wrong)  # type: ignore[arg-type]


# ---- scores and steps ----------------------------------------------------------------------------

STEPS = [
    Case(),
    *(Case(batch=1, kv_heads=1, group=g, rows=320, dtype=torch.bfloat16) for g in (1, 2, 4, 7, 17)),
    *(Case(batch=1, group=2, rows=150, head_dim=d) for d in (1, 3, 8, 17, 100, 257)),
    *(Case(batch=1, rows=n, dtype=torch.float16) for n in (64, 127, 128, 192, 255, 256, 257, 1000)),
    Case(rows=700, seq_lens=(700, 130), dtype=torch.bfloat16),
    Case(rows=700, seq_lens=(64, 0)),
    Case(rows=400, mask="heads", dtype=torch.bfloat16),
    Case(rows=400, mask="sparse", seq_lens=(400, 77)),
    Case(rows=400, mask="prefix"),
    Case(rows=400, mask="nothing"),
    Case(rows=400, mask="additive_heads", softcap=15.0, sinks="float32"),
    Case(rows=300, layout="interleaved", value_dim=24),
    Case(rows=300, layout="expanded", mask="per_head"),
]


def rows_of(case: Case) -> list[int | None]:
    """Sketches that hold everything, and fewer rows than the keys."""
    return [None, *sorted({0, 63, 64, min(case.rows, 200)} & set(range(case.rows + 1)))]


@pytest.mark.parametrize("case", STEPS, ids=str)
def test_scores_have_the_bits_of_row_major_keys(level: str, case: Case) -> None:
    inputs = case.inputs()
    matrix_unit = level == "amx" and case.dtype == torch.bfloat16  # adds in an order of its own
    torch.ops.santa.set_cpu_level("avx512" if matrix_unit else torch.ops.santa.cpu_level())
    expected = OPS.score(inputs.q, inputs.k, **inputs.scoring())
    if matrix_unit:
        torch.ops.santa.set_cpu_level("amx")
    for rows in rows_of(case):
        lengths = None if rows is None else torch.full((case.batch,), rows)
        sketch = KeySketch(inputs.k, seq_lens=lengths)
        blocks = {"key_blocks": sketch.blocks, "block_rows": sketch.rows}
        got = OPS.score(inputs.q, inputs.k, **inputs.scoring(), **blocks)
        assert_equal("scores", got[0], expected[0])
        assert_equal("maxima", got[1], expected[1])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", STEPS, ids=str)
def test_steps_have_the_bits_of_row_major_keys(level: str, case: Case, method: str) -> None:
    inputs = case.inputs()
    sketch = KeySketch(inputs.k)
    common = {**inputs.arguments(), "method": method, "samples": 12, "seed": 3}
    got = santa_torch.decode(**common, sketch=sketch, return_lse=True, return_stats=True)
    if level == "amx" and case.dtype == torch.bfloat16:
        check_packed(case, inputs, method, sketch)
        return
    expected = santa_torch.decode(**common, return_lse=True, return_stats=True)
    stats = expected.stats._replace(bytes_read=got.stats.bytes_read)  # runs of 64 rows
    assert_same(got, expected._replace(stats=stats))
    assert (got.stats.bytes_read >= expected.stats.bytes_read).all()
    if case.mask == "none" and case.seq_lens is None and case.rows % 64 == 0:
        assert_equal("bytes", got.stats.bytes_read, expected.stats.bytes_read)


def check_packed(case: Case, inputs: Any, method: str, sketch: KeySketch) -> None:
    """Against the reference, from scores of the sketch."""
    torch.ops.santa.set_cpu_level("avx512")
    expected = check_decode(case, inputs, method, 12, seed=3)
    torch.ops.santa.set_cpu_level("amx")
    got = santa_torch.decode(
        **inputs.arguments(), method=method, samples=12, seed=3, sketch=sketch, return_stats=True
    )
    if method == "dense":  # V goes to the matrix unit
        torch.testing.assert_close(got.out, expected.out)
    else:
        assert_equal("out", got.out, expected.out)


def test_rows_past_a_length_are_never_noticed(level: str) -> None:
    case = Case(rows=300, seq_lens=(290, 65), dtype=torch.bfloat16)
    inputs = case.inputs()
    expected = santa_torch.decode(**inputs.arguments(), samples=9, sketch=KeySketch(inputs.k))
    spoilt = inputs.k.clone()
    spoilt[0, :, 290:] = math.nan
    spoilt[1, :, 65:] = math.nan
    out = santa_torch.decode(
        **inputs._replace(k=spoilt).arguments(), samples=9, sketch=KeySketch(spoilt)
    )
    assert_equal("out", out, expected)


def test_rows_of_a_sketch_are_not_read_from_the_keys(level: str) -> None:
    inputs = Case(rows=300).inputs()
    sketch = KeySketch(inputs.k)
    expected = santa_torch.decode(**inputs.arguments(), samples=9, sketch=sketch)
    spoilt = inputs.k.clone()
    spoilt[:, :, :256] = math.nan
    arguments = inputs._replace(k=spoilt).arguments()
    assert_equal("out", santa_torch.decode(**arguments, samples=9, sketch=sketch), expected)
    assert santa_torch.decode(**arguments, samples=9).isnan().any()


def test_a_long_mixed_batch_over_threads() -> None:
    case = Case(
        batch=3, kv_heads=2, group=4, rows=3000, seq_lens=(3000, 1111, 64), dtype=torch.bfloat16
    )
    inputs = case.inputs()
    sketch = KeySketch(inputs.k)
    for method in METHODS:
        torch.set_num_threads(1)
        common = {**inputs.arguments(), "method": method, "samples": 50, "sketch": sketch}
        expected = santa_torch.decode(**common, return_lse=True, return_stats=True)
        torch.set_num_threads(2)
        assert_same(santa_torch.decode(**common, return_lse=True, return_stats=True), expected)
        for b in range(3):
            alone = KeySketch(inputs.k[b : b + 1])
            out = santa_torch.decode(
                *(x[b : b + 1] for x in inputs[:3]),
                seq_lens=inputs.seq_lens[b : b + 1],
                method=method,
                samples=50,
                sketch=alone,
            )
            assert_equal("alone", out, expected.out[b : b + 1])


# ---- graphs --------------------------------------------------------------------------------------


def test_rule32_opcheck(backend: str) -> None:
    k = keys(2, 2, 100, 8)
    sketch = KeySketch(k[:, :, :50], capacity=200)
    tensors = (sketch.blocks, sketch.open_rows, sketch.rows, k)
    for given in ({}, {"num_rows": torch.tensor([100, 3])}):
        torch.library.opcheck(OPS.sketch_append.default, tensors, given)


def test_rule33_steps_of_one_graph() -> None:
    """Append and decode in one graph without a break; the sketch changes in place."""
    inputs = Case(rows=200).inputs()

    def step(
        sketch: KeySketch, q: torch.Tensor, k: torch.Tensor, row: torch.Tensor
    ) -> torch.Tensor:
        sketch.append(row)
        out = santa_torch.decode(q, k, inputs.v, samples=8, sketch=sketch)
        assert isinstance(out, torch.Tensor)
        return out

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    eager, graph = (KeySketch(inputs.k[:, :, :120], capacity=200) for _ in range(2))
    for at in range(120, 140):
        row = inputs.k[:, :, at : at + 1]
        assert_equal(
            "out", compiled(graph, inputs.q, inputs.k, row), step(eager, inputs.q, inputs.k, row)
        )
        assert_equal("rows", graph.rows, eager.rows)
    assert_holds(graph, list(inputs.k[:, :, :140]))
    assert counter.frame_count == 1
