"""The planner of the CUDA backend: its choices for known devices, by arithmetic of their own."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from math import ceil, prod
from typing import Any, NamedTuple

import pytest
import torch

from santa_torch import _load
from santa_torch.__main__ import main
from santa_torch.config import METHODS
from santa_torch.plan import DEVICES, DeviceFigures, plan

K = 1024
STATIC = 512  # bytes of a scoring block that are not in its plan
CHUNK = 256  # rows; the cut decides bits of results, so no device may have another


class Model(NamedTuple):
    """The part of a shape that a model gives."""

    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str = "bfloat16"

    @property
    def group(self) -> int:
        return self.query_heads // self.kv_heads

    @property
    def size(self) -> int:
        return 4 if self.dtype == "float32" else 2


MODELS = {
    "32/8": Model(32, 8, 128, 128),
    "40/8": Model(40, 8, 128, 128),  # on 8.9, a third block would fit but for the KiB it costs
    "64/8": Model(64, 8, 128, 128),
    "71/1": Model(71, 1, 64, 64),
    "wide": Model(16, 8, 256, 256, "float32"),
    "latent": Model(128, 1, 576, 512),
}
STEPS = [(model, batch, rows) for model in MODELS for batch in (1, 16) for rows in (8 * K, 32 * K)]
STEPS += [(model, 1, rows) for model in MODELS for rows in (1, 257, 128 * K, K * K)]


def planned(device: str, model: str, batch: int, rows: int, **more: Any) -> dict[str, Any]:
    return plan(DEVICES[device], batch=batch, rows=rows, **MODELS[model]._asdict(), **more)


def cut(splits: dict[str, int]) -> tuple[int, int, int]:
    return splits["units"], splits["splits"], splits["chunks_per_split"]


# ---- what was chosen -----------------------------------------------------------------------------

# Of the shared method with 128 samples: rows of a tile, heads of a block; units, splits and chunks
# of a split for score, weigh and include; slices of V.
CUTS: dict[Any, Any] = {
    ("32/8", 1, 32 * K, "rtx6000ada"): [32, 4, (8, 43, 3), (32, 32, 4), (8, 32, 4), 8],
    ("32/8", 1, 32 * K, "a100"): [32, 4, (8, 43, 3), (32, 26, 5), (8, 32, 4), 8],
    ("32/8", 1, 32 * K, "h100"): [32, 4, (8, 64, 2), (32, 32, 4), (8, 32, 4), 8],
    ("32/8", 1, 32 * K, "h200"): [32, 4, (8, 64, 2), (32, 32, 4), (8, 32, 4), 8],
    ("32/8", 1, 32 * K, "b200"): [32, 4, (8, 64, 2), (32, 32, 4), (8, 32, 4), 8],
    ("32/8", 1, 8 * K, "h100"): [32, 4, (8, 32, 1), (32, 8, 4), (8, 8, 4), 8],
    ("32/8", 1, K * K, "b200"): [32, 4, (8, 74, 56), (32, 37, 111), (8, 147, 28), 8],
    ("32/8", 16, 32 * K, "h100"): [32, 4, (128, 4, 32), (512, 2, 64), (128, 8, 16), 4],
    ("64/8", 1, 128 * K, "a100"): [32, 8, (8, 52, 10), (64, 13, 40), (8, 103, 5), 8],
    ("64/8", 16, 32 * K, "rtx6000ada"): [32, 8, (128, 2, 64), (1024, 1, 128), (128, 8, 16), 4],
    ("71/1", 1, 32 * K, "h200"): [64, 71, (1, 128, 1), (71, 13, 10), (1, 32, 4), 4],
    ("71/1", 1, 32 * K, "rtx6000ada"): [64, 36, (2, 64, 2), (71, 16, 8), (1, 32, 4), 4],
    ("wide", 1, 32 * K, "a100"): [8, 2, (8, 43, 3), (16, 32, 4), (8, 32, 4), 16],
    ("latent", 1, 128 * K, "h100"): [8, 43, (3, 43, 12), (128, 8, 64), (1, 128, 4), 32],
    ("latent", 1, 8 * K, "rtx6000ada"): [8, 19, (7, 16, 2), (128, 8, 4), (1, 8, 4), 32],
}

# Bytes of shared memory, blocks that score on a multiprocessor, bytes of scratch memory, of K and
# V, of everything; microseconds.
SIZES: dict[Any, Any] = {
    ("32/8", 1, 32 * K, "rtx6000ada"): [32512, 3, 5597440, 68157440, 85983232, 89.6],
    ("32/8", 1, 32 * K, "a100"): [32512, 4, 5597440, 68157440, 85983232, 42.2],
    ("32/8", 1, 32 * K, "h100"): [32512, 4, 5597440, 68157440, 85983232, 25.7],
    ("32/8", 1, 32 * K, "h200"): [32512, 4, 5597440, 68157440, 85983232, 17.9],
    ("32/8", 1, 32 * K, "b200"): [32512, 4, 5597440, 68157440, 85983232, 10.7],
    ("32/8", 1, 8 * K, "h100"): [32512, 4, 1511680, 17825792, 22282240, 6.7],
    ("32/8", 1, K * K, "b200"): [32512, 4, 174475520, 2148532224, 2718957568, 339.9],
    ("32/8", 16, 32 * K, "h100"): [32512, 4, 89540096, 1090519040, 1375731712, 410.7],
    ("64/8", 1, 128 * K, "a100"): [38656, 4, 39193344, 270532608, 408944640, 200.6],
    ("64/8", 16, 32 * K, "rtx6000ada"): [38656, 2, 161904128, 1107296256, 1660944384, 1730.2],
    ("71/1", 1, 32 * K, "h200"): [118784, 1, 12332288, 5357568, 42713088, 8.9],
    ("71/1", 1, 32 * K, "rtx6000ada"): [73984, 1, 12332288, 9551872, 46907392, 48.9],
    ("wide", 1, 32 * K, "a100"): [29312, 4, 3385600, 270532608, 279969792, 137.3],
    ("latent", 1, 128 * K, "h100"): [171392, 1, 77218048, 469762048, 738721792, 220.5],
    ("latent", 1, 8 * K, "rtx6000ada"): [91520, 1, 8641536, 74448896, 91258880, 95.1],
}


def spelled(key: tuple[Any, ...]) -> str:
    return " ".join(map(str, key))


@pytest.mark.parametrize("key", CUTS, ids=spelled)
def test_cuts(key: tuple[str, int, int, str]) -> None:
    """A change of the planner shows here and below, with all that it moves."""
    model, batch, rows, device = key
    found = planned(device, model, batch, rows)
    stages = [cut(found[stage]) for stage in ("score", "weigh", "include")]
    names = ("tile_rows", "heads_per_block")
    assert [*(found[name] for name in names), *stages, found["value_slices"]] == CUTS[key]


@pytest.mark.parametrize("key", SIZES, ids=spelled)
def test_sizes(key: tuple[str, int, int, str]) -> None:
    model, batch, rows, device = key
    found = planned(device, model, batch, rows)
    names = ("score_shared_bytes", "score_resident", "scratch_bytes", "kv_bytes", "bytes")
    numbers = [*(found[name] for name in names), round(found["microseconds"], 1)]
    assert numbers == SIZES[key]


def test_text() -> None:
    assert planned("h100", "32/8", 1, 32 * K)["text"].splitlines() == [
        "LaunchPlan(shared, 5 launches, overlap on)",
        "  score: 512 blocks (8 x 64 splits of 2 chunks), tiles of 32 rows, 4 heads a block, "
        "32512 bytes of shared memory, 4 resident",
        "  weigh: 1024 blocks (32 x 32 splits of 4 chunks)",
        "  include: 256 blocks (8 x 32 splits of 4 chunks)",
        "  draw: 8 blocks, at most 514 rows of 514 draws",
        "  gather: 64 blocks (8 slices of 16 features)",
        "  scratch: 5597440 bytes",
        "  predicted: 68157440 bytes of K and V, 85983232 in all, 25.7 us at full bandwidth",
    ]
    assert planned("a100", "latent", 1, 8 * K, method="dense")["text"].splitlines() == [
        "LaunchPlan(dense, 2 launches, overlap off)",
        "  score: 64 blocks (4 x 16 splits of 2 chunks), tiles of 8 rows, 32 heads a block, "
        "134784 bytes of shared memory, 1 resident",
        "  merge: 512 blocks",
        f"  scratch: {256 + 2 * 128 * 32 * 4 + 128 * 32 * 512 * 4} bytes",
        f"  predicted: {8 * K * 2 * (4 * 576 + 512)} bytes of K and V, "
        f"{8 * K * 2 * (4 * 576 + 512) + 2 * 128 * 32 * 514 * 4} in all, 30.9 us at full bandwidth",
    ]


# ---- why -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", METHODS)
def test_launches(device: str, method: str) -> None:
    """At most two for dense, four for samples per head, five for shared; overlap from 9.0 on."""
    found = planned(device, "32/8", 1, 8 * K, method=method)
    assert found["launches"] == {"dense": 2, "shared": 5}.get(method, 4)
    assert found["overlap"] == (device in ("h100", "h200", "b200"))


@pytest.mark.parametrize("method", METHODS)
def test_a_stochastic_query_is_a_launch_and_a_sketch_is_none(method: str) -> None:
    """The query needs memory, and with statistics the rows of every block of the sketch do."""
    figures = DEVICES["h100"]
    device = [figures.multiprocessors, figures.shared_bytes]
    device += [figures.shared_bytes_per_multiprocessor, figures.compute_capability]

    def found(statistics: bool = False, **reading: bool) -> dict[str, Any]:
        sizes = [2, 12, 4, 700, 100, 64]
        return _load.C.plan_launch(sizes, "bfloat16", method, 9, statistics, device, **reading)

    plain, counted = found(), found(statistics=True)
    drawn = found(bernoulli=True)
    query = aligned((2, 12, 100, 4), (2, 12, 4))
    assert drawn["launches"] == plain["launches"] + 1
    assert drawn["scratch_bytes"] == plain["scratch_bytes"] + query
    assert drawn["kv_bytes"] == plain["kv_bytes"]  # at most: features are not drawn yet
    assert drawn["bytes"] == plain["bytes"] + 2 * 2 * 12 * 100 * 4
    assert found(sketch=True) == plain
    both = found(statistics=True, sketch=True, bernoulli=True)
    blocks = aligned((2, 4, 3, CHUNK // 64, 4))
    assert both["launches"] == drawn["launches"]
    assert both["scratch_bytes"] == counted["scratch_bytes"] + query + blocks


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_shared_memory_of_scoring(device: str, name: str) -> None:
    """Queries and scores in fp32, three tiles of K without bank conflicts, a list of rows."""
    model, figures = MODELS[name], DEVICES[device]
    stride = (model.head_dim * model.size // 16 + 1) * 16
    assert stride // 16 % 2 == 1
    tile = max(rows for rows in (8, 16, 32, 64) if rows == 8 or 3 * rows * stride <= 28 * K)

    def needed(heads: int) -> int:
        return heads * 4 * (model.head_dim + CHUNK) + 3 * tile * stride + CHUNK

    counts = range(1, model.group + 1)
    parts = next(
        n for n in counts if needed(ceil(model.group / n)) <= figures.shared_bytes - STATIC
    )
    heads = ceil(model.group / parts)  # as even as may be: no block has much less to do
    # Each block costs 1 KiB beside its own; four fill the registers.
    room = figures.shared_bytes_per_multiprocessor // (needed(heads) + STATIC + K)
    for method, batch in product(METHODS, (1, 16)):
        found = planned(device, name, batch, 8 * K, method=method)
        assert found["tile_rows"] == tile
        assert found["heads_per_block"] == heads
        assert found["score_shared_bytes"] == needed(heads) <= figures.shared_bytes
        assert found["score_resident"] == min(room, 4) > 0
        assert found["score"]["units"] == batch * model.kv_heads * parts


@pytest.mark.parametrize("device", DEVICES)
def test_work_is_cut_to_fill_the_machine_once(device: str) -> None:
    for step in STEPS:
        check_cuts(device, step)


def check_cuts(device: str, step: tuple[str, int, int]) -> None:
    model, batch, rows = step
    found = planned(device, model, batch, rows)
    multiprocessors = DEVICES[device].multiprocessors
    chunks = ceil(rows / CHUNK)
    # Who only passes over numbers has eight light blocks on each, with a chunk for each warp.
    stages = [("score", multiprocessors * found["score_resident"], 1)]
    stages += [("weigh", multiprocessors * 8, 4), ("include", multiprocessors * 8, 4)]
    for stage, blocks, least in stages:
        units, splits, per_split = cut(found[stage])
        assert (splits - 1) * per_split < chunks <= splits * per_split, (
            step,
            stage,
        )  # all, none empty
        assert splits == 1 or units * splits <= blocks, (step, stage)
        shorter = per_split - 1
        if shorter >= min(least, chunks):
            assert units * ceil(chunks / shorter) > blocks, (step, stage)
        else:
            assert per_split == min(least, chunks), (step, stage)
    assert found["weigh"]["units"] == batch * MODELS[model].query_heads
    assert found["include"]["units"] == batch * MODELS[model].kv_heads


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", METHODS[1:])
def test_slices_of_values(device: str, method: str) -> None:
    """A block for every multiprocessor, unless slices would be narrower than 32 bytes of a row."""
    for step in STEPS:
        check_slices(device, step, method)


def check_slices(device: str, step: tuple[str, int, int], method: str) -> None:
    name, batch, rows = step
    model = MODELS[name]
    found = planned(device, name, batch, rows, method=method)
    shared = method == "shared"
    lists = batch * (model.kv_heads if shared else model.query_heads)
    tiles_of_heads = ceil(model.group / 16) if shared else 1
    features = model.value_dim // found["value_slices"]

    def blocks(width: int) -> int:
        return lists * tiles_of_heads * model.value_dim // width

    assert found["draw_heads"] == lists
    assert features <= 32
    assert features * model.size >= 32
    if features < 32:
        assert blocks(2 * features) < DEVICES[device].multiprocessors
    if features * model.size > 32:
        assert blocks(features) >= DEVICES[device].multiprocessors


def aligned(*arrays: tuple[int, ...]) -> int:
    """Bytes of arrays, each of (factors of its size in bytes), that start at multiples of 256."""
    return sum(ceil(prod(array) / 256) * 256 for array in arrays)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("statistics", [False, True])
def test_scratch_memory(method: str, statistics: bool) -> None:
    """The sum of the arrays that csrc/planner.h lists; no device changes it."""
    for step in STEPS:
        check_scratch(step, method, statistics)


def check_scratch(step: tuple[str, int, int], method: str, statistics: bool) -> None:
    name, batch, rows = step
    model = MODELS[name]
    heads, groups = batch * model.query_heads, batch * model.kv_heads
    chunks = ceil(rows / CHUNK)
    samples = 128
    shared = method == "shared"
    lists = groups if shared else heads
    # Inclusions sum to at most S G and a little.
    capacity = min(rows, samples * model.group + 2 if shared else samples)
    wanted = aligned((groups, chunks, 2, 4), (heads, chunks, 4))
    if method == "dense":
        wanted += aligned((heads, chunks, 4), (heads, chunks, model.value_dim, 4))
    else:
        wanted += aligned((heads, 4), (heads, chunks * CHUNK, 4), (heads, chunks, 8))
        wanted += aligned((heads, 8), (heads, 4), (lists, chunks * 16, 8), (lists, chunks, 8))
        picks = {"shared": capacity, "multinomial": 2 * samples}.get(method, samples)
        wanted += aligned((lists, picks, 4), (lists, capacity, 4), (lists, capacity, 8))
        wanted += aligned((lists, capacity, 4), (lists, 4), (heads, capacity, 4))
        wanted += aligned((lists, capacity, 8)) if statistics else 0
        assert planned("a100", name, batch, rows, method=method)["capacity"] == capacity
    if shared:
        wanted += aligned((groups, chunks * CHUNK, 4), (groups, chunks, 8))
    for device in DEVICES:
        found = planned(device, name, batch, rows, method=method, statistics=statistics)
        assert found["scratch_bytes"] == wanted


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", METHODS)
def test_predictions(device: str, method: str) -> None:
    """K once for each part of a group, V of all rows or of those drawn, scores to and fro."""
    for step in STEPS:
        check_prediction(device, step, method)


def check_prediction(device: str, step: tuple[str, int, int], method: str) -> None:
    name, batch, rows = step
    model = MODELS[name]
    found = planned(device, name, batch, rows, method=method)
    padded = ceil(rows / CHUNK) * CHUNK
    parts = ceil(model.group / found["heads_per_block"])
    drawn = rows if method == "dense" else min(rows, 128 * model.group)
    keys_and_values = rows * model.head_dim * parts + drawn * model.value_dim
    assert found["kv_bytes"] == batch * model.kv_heads * model.size * keys_and_values
    scores = batch * model.query_heads * padded * 4
    beside = {
        # Per chunk: a partial output, a sum and a maximum, written and read.
        "dense": 2 * scores // CHUNK * (model.value_dim + 2),
        # Scores written and read, weights written, and read with an inclusion written.
        "shared": 4 * scores + scores // model.group,
    }
    assert found["bytes"] - found["kv_bytes"] == beside.get(method, 3 * scores)
    seconds = found["bytes"] / DEVICES[device].bytes_per_second
    assert found["microseconds"] == pytest.approx(1e6 * seconds, rel=1e-12)


def test_half_precision_types_are_planned_alike() -> None:
    shape = MODELS["32/8"]._asdict()
    assert plan(DEVICES["a100"], **shape | {"dtype": "float16"}) == plan(DEVICES["a100"], **shape)
    double = plan(DEVICES["a100"], **shape | {"dtype": "float32"})
    assert double["kv_bytes"] == 2 * plan(DEVICES["a100"], **shape)["kv_bytes"]


def test_value_dim_defaults_to_the_head_dim() -> None:
    assert plan(DEVICES["a100"], head_dim=64) == plan(DEVICES["a100"], head_dim=64, value_dim=64)


@pytest.mark.parametrize("method", METHODS)
def test_same_input_same_plan(method: str) -> None:
    """Whatever was planned before; and the bandwidth enters predictions alone."""
    first = planned("h100", "64/8", 2, 1000, method=method)
    planned("rtx6000ada", "latent", 16, K * K)
    assert planned("h100", "64/8", 2, 1000, method=method) == first
    unknown = replace(DEVICES["h100"], name="another", bytes_per_second=0.0)
    found = plan(unknown, batch=2, rows=1000, method=method, **MODELS["64/8"]._asdict())
    assert found.pop("microseconds") == 0
    assert first["text"].startswith(found.pop("text"))
    assert found == {key: first[key] for key in found}


@pytest.mark.parametrize("method", METHODS)
def test_nothing_to_do(method: str) -> None:
    for batch, rows in ((0, K), (2, 0)):
        found = plan(DEVICES["h100"], method=method, batch=batch, rows=rows)
        assert found["bytes"] == found["kv_bytes"] == found["microseconds"] == 0
        assert found["score"]["splits"] == found["weigh"]["splits"] == 1


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"head_dim": 100_000}, "head dim of 100000, too large for the 232448 bytes of shared"),
        ({"batch": 2**27}, "too many heads in all: 4294967296 blocks, a launch has at most 2"),
        ({"batch": 2**40, "rows": 1}, "too many heads in all"),
        ({"rows": 2**56}, "sizes are too large together"),
        ({"batch": 2**62}, "sizes are too large together"),
        ({"batch": 0, "rows": 10**30}, "sizes are too large together"),
        ({"samples": 10**30}, "sizes are too large together"),
        ({"batch": -(10**30)}, "sizes are too large together"),
        ({"dtype": "int8"}, "dtype must be float32, float16 or bfloat16, got 'int8'"),
        ({"method": "topk"}, "method must be one of dense, .*shared; got 'topk'"),
        ({"samples": 0}, r"samples must be between 1 and 2\^24, got 0"),
        ({"samples": 2**24 + 1}, r"samples must be between 1 and 2\^24, got 16777217"),
        ({"rows": -1}, "sizes are not negative, got -1"),
        ({"kv_heads": 0}, "Hkv must be at least 1"),
        ({"kv_heads": 5}, "Hkv must be at least 1 and divide Hq"),
        ({"head_dim": 0}, "D at least 1"),
    ],
)
def test_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(DEVICES["h100"], **arguments)


def test_the_largest_head_dim() -> None:
    """One head, a query of it and three tiles of eight rows: the last that fits, and the next."""
    figures = DEVICES["rtx6000ada"]

    def needed(head_dim: int) -> int:
        return 4 * (head_dim + CHUNK) + 3 * 8 * (head_dim // 8 + 1) * 16 + CHUNK

    largest = max(d for d in range(16, 8192, 16) if needed(d) <= figures.shared_bytes - STATIC)
    found = plan(figures, head_dim=largest)
    assert (found["tile_rows"], found["heads_per_block"]) == (8, 1)
    assert found["score_shared_bytes"] == needed(largest)
    with pytest.raises(ValueError, match=f"head dim of {largest + 16}, too large for the 101376"):
        plan(figures, head_dim=largest + 16)


def test_tiles_shrink_before_a_head_dim_is_refused() -> None:
    assert plan(DEVICES["h100"], head_dim=128)["tile_rows"] == 32
    assert plan(DEVICES["h100"], head_dim=144)["tile_rows"] == 16  # three of 32 take 28.5 KiB
    small = DeviceFigures("small", 10, 16 * K, 32 * K, 80)
    assert plan(small, head_dim=128)["tile_rows"] == 16
    assert plan(small, head_dim=256)["tile_rows"] == 8


# ---- python -m santa_torch plan ------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    try:
        code = main(["plan", *arguments])
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    return code, *capsys.readouterr()


def test_command_prints_every_method(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, error = run(capsys, "--device", "a100")
    assert (code, error) == (0, "")
    assert out.startswith("A100")
    for method in METHODS:
        assert planned("a100", "32/8", 1, 32 * K, method=method)["text"] in out


def test_command_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys,
        *("--json", "--device", "b200", "--method", "dense", "--method", "shared"),
        *("--batch", "16", "--rows", "8192", "--query-heads", "128", "--kv-heads", "1"),
        *("--head-dim", "576", "--value-dim", "512", "--samples", "64", "--statistics"),
    )
    assert code == 0
    found = json.loads(out)
    assert list(found) == ["device", "dense", "shared"]
    assert found["device"] == "B200"
    for method in ("dense", "shared"):
        more = {"method": method, "samples": 64, "statistics": True}
        assert found[method] == planned("b200", "latent", 16, 8 * K, **more)


def test_command_helps(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for word in (*DEVICES, "this", *METHODS, "--dtype", "--json", "--value-dim", "--statistics"):
        assert word in out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--dtype", "int8"), 1, "error: plan_launch: dtype must be float32"),
        (("--rows", "-1"), 1, "error: plan_launch: sizes are not negative, got -1"),
        (("--batch", "9" * 30), 1, "error: plan: sizes are too large together"),
        (("--head-dim", "100000"), 1, "error: santa: k has a head dim of 100000"),
        (("--device", "toaster"), 2, "invalid choice: 'toaster'"),
        (("--method", "topk"), 2, "invalid choice: 'topk'"),
        (("--batch", "many"), 2, "invalid int value: 'many'"),
    ],
)
def test_command_refuses(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, message: str
) -> None:
    found, out, error = run(capsys, *arguments)
    assert (found, out) == (code, "")
    assert message in error
    assert "Traceback" not in error


def test_command_for_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, error = run(capsys, "--device", "this")
    if torch.cuda.is_available():
        assert code == 0, error
        assert out.startswith(torch.cuda.get_device_name())
        return
    assert (code, out) == (1, "")
    assert error.startswith("error: no GPU: ")
    assert torch.__version__ in error
