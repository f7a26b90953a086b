"""The CUDA kernels on the emulator: how they run decides no bit, and they agree with the CPU's.

The tests of the whole suite run on them too, as level ``simt``, each in one way of running; here
the ways are compared with each other. What they read and write: test_cuda_memory.py.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import simt_library
import torch
from backends import use
from cases import CHUNK, CPU_LEVELS, DRAWING, DTYPES, METHODS, Case, Inputs
from compare import assert_equal, check_decode, check_dense, check_scores
from simt_library import Setting
from test_exact import DENSITIES, ONE, peaked

import santa_torch
from santa_torch import _load, reference

CPU = torch.ops.santa
FUSED_LEVELS = [level for level in CPU_LEVELS if level != "generic"]  # with fused multiply-adds
LAUNCHES = {
    "dense": "dense,merge",
    **dict.fromkeys(("multinomial", "stratified", "systematic"), "score,weigh,draw,gather"),
    "shared": "score,weigh,include,draw,gather",
}

CASES = [
    Case(batch=1, kv_heads=1, group=1, rows=1, head_dim=8, value_dim=8),
    Case(batch=1, group=1, rows=1000, value_dim=17, dtype=torch.bfloat16),
    Case(
        *(3, 1, 3, 520, 17, 64, torch.float16),
        mask="heads",
        seq_lens=(520, 0, 257),
    ),
    Case(1, 1, 8, 300, 128, 128, torch.bfloat16, layout="interleaved"),
    Case(1, 1, 17, 257, 100, 33, torch.float16, sinks="float32", layout="offset"),
    Case(1, 1, 71, 70, 128, 8, mask="additive", softcap=5.0),
    Case(1, 2, 3, 256, 256, 100, torch.bfloat16, sinks="some", layout="sliced"),
    Case(2, 1, 8, 600, 8, 128, mask="batch", layout="every_other"),
    Case(4, 1, 3, 33, 64, 256, torch.float16, seq_lens=(0, 1, 33, 32), layout="transposed"),
    Case(1, 2, 3, 999, 100, 20, mask="sparse", softcap=20.0, sinks="bfloat16"),
    Case(2, 1, 4, 290, 64, 64, torch.bfloat16, mask="additive_heads", seq_lens=(290, 44)),
    Case(2, 2, 2, 40, 64, 24, mask="per_head", layout="expanded"),
    Case(1, 4, 2, 2300, 8, 8),
]

# Every order, number of resident blocks and number of multiprocessors, and sizes of shared memory
# that give a block all the heads of a group or only some.
SETTINGS = [
    Setting(0, 1, 1, 132),
    Setting(1, 1, 2, 4, shared_bytes=227 << 10, overlap=True),
    Setting(2, 7, 3, 132, overlap=True),
    Setting(3, 8, 3, 4, shared_bytes=64 << 10),
]
MORE_SETTINGS = [
    Setting(order, 10 * order + seed, resident, multiprocessors, overlap=resident == 2)
    for order in range(4)
    for seed in ((1,), (2, 3, 4))[order >= 2]
    for resident in (1, 2, 3)
    for multiprocessors in (1, 4, 132)
]
pytestmark = pytest.mark.usefixtures("one_thread")


class Results(NamedTuple):
    """What ``decode`` returns."""

    out: torch.Tensor
    lse: torch.Tensor
    keys_read: torch.Tensor
    value_rows: torch.Tensor
    squared_error: torch.Tensor


def decode(operators: Any, inputs: Inputs, method: str, **arguments: Any) -> Results:
    arguments = {"samples": 12, "seed": torch.tensor([5]), "return_stats": True, **arguments}
    return Results(*operators.decode(**inputs.arguments(), method=method, layer=3, **arguments))


def assert_results(got: Results, expected: Results, index: Any = slice(None)) -> None:
    for name, x, y in zip(Results._fields, got, expected, strict=True):
        assert_equal(name, x, y[index])


# ---- how kernels run decides no bit --------------------------------------------------------------


def run_everywhere(case: Case, method: str, settings: list[Setting], races: bool) -> None:
    plain, checked = simt_library.load(), simt_library.load(races=True)
    inputs = case.inputs()
    Setting(multiprocessors=1).use()
    first = decode(plain, inputs, method)
    for setting in settings:
        print(setting)
        setting.use(races)
        assert_results(decode(checked if races else plain, inputs, method), first)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_orders_splits_and_devices_change_no_bit(case: Case, method: str) -> None:
    run_everywhere(case, method, SETTINGS, races=False)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_races_and_the_same_bits_under_their_checker(case: Case, method: str) -> None:
    """A race would raise; accesses before the wait for the grid before are races too."""
    at = CASES.index(case) + METHODS.index(method)
    setting = SETTINGS[at % len(SETTINGS)]._replace(overlap=True)
    run_everywhere(case, method, [setting], races=True)


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_many_orders_splits_and_devices(case: Case, method: str) -> None:
    at = CASES.index(case) + METHODS.index(method)
    run_everywhere(case, method, MORE_SETTINGS[at % 3 :: 3], races=False)
    run_everywhere(case, method, MORE_SETTINGS[at % 13 :: 13], races=True)


def test_the_race_checker_is_in_its_library_and_only_there() -> None:
    for races in (False, True):
        objects = simt_library.build(races).parent
        for path in simt_library.kernels():
            announced = b"__tsan_read" in (objects / f"{path.name}.o").read_bytes()
            assert announced == races, path.name


def test_the_settings_differ_in_what_they_plan() -> None:
    """Otherwise the tests above would compare a plan with itself."""

    def plans(case: Case) -> dict[str, set[int]]:
        sizes = (case.batch, case.heads, case.kv_heads, case.rows, case.head_dim, case.value_dim)
        dtype = str(case.dtype).removeprefix("torch.")
        found: dict[str, set[int]] = {
            "score": set(),
            "weigh": set(),
            "include": set(),
            "heads": set(),
        }
        for setting in (Setting(multiprocessors=1), *SETTINGS):
            shared = setting.shared_bytes
            device = [setting.multiprocessors, shared, shared + 1024, 80]
            plan = _load.C.plan_launch(sizes, dtype, "shared", 12, True, device, 0.0)
            for stage in ("score", "weigh", "include"):
                found[stage].add(plan[stage]["splits"])
            found["heads"].add(plan["heads_per_block"])
        return found

    cut = [case for case in CASES if case.rows > 2 * CHUNK]
    for case in cut:
        assert len(plans(case)["score"]) >= 2, case
    (long,) = [case for case in cut if case.rows > 2000]
    assert len(plans(long)["weigh"]) >= 2
    assert len(plans(long)["include"]) >= 2
    (large,) = [case for case in CASES if case.group == 71]
    assert len(plans(large)["heads"]) >= 2


# ---- nor do the other sequences, or the size of the cache ----------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mask", ["none", "heads", "additive"])
def test_a_sequence_alone_on_another_device(method: str, mask: str) -> None:
    case = Case(3, 2, 3, 800, 40, 24, mask=mask, seq_lens=(800, 0, 257), sinks="float32")
    inputs = case.inputs()
    operators = simt_library.load()
    seeds = torch.tensor([9, -4, 2**40])
    Setting(multiprocessors=1).use()
    whole = decode(operators, inputs, method, seed=seeds)
    Setting(2, 5, 2, 132).use()
    for b in range(3):
        given = {
            name: getattr(inputs, name)[b : b + 1]
            for name in ("q", "k", "v", "mask", "seq_lens")
            if getattr(inputs, name) is not None
        }
        alone = decode(operators, inputs._replace(**given), method, seed=seeds[b : b + 1])
        assert_results(alone, whole, slice(b, b + 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rows", [1, 63, 255, 256, 257, 520])
def test_rows_past_the_length_are_as_if_absent(method: str, rows: int, dtype: torch.dtype) -> None:
    inputs = Case(1, 2, 3, rows, 24, 40, dtype).inputs()
    operators = simt_library.load()
    Setting(multiprocessors=4).use()
    first = decode(operators, inputs, method)
    Setting(3, 2, 2, 132).use()
    for capacity in (rows + 1, 300 + rows, 1024):
        poisoned = [x.new_full((1, 2, capacity, x.shape[3]), torch.nan) for x in inputs[1:3]]
        for buffer, x in zip(poisoned, inputs[1:3], strict=True):
            buffer[:, :, :rows] = x
        longer = inputs._replace(k=poisoned[0], v=poisoned[1], seq_lens=torch.tensor([rows]))
        assert_results(decode(operators, longer, method), first)


def test_callers_in_several_threads() -> None:
    operators = simt_library.load()
    Setting(2, 3, 2).use()
    jobs = [(case.inputs(), method) for case in CASES[:1] + CASES[-2:] for method in METHODS]
    expected = [decode(operators, *job) for job in jobs]
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda job: decode(operators, *job), jobs)
        for got, first in zip(results, expected, strict=True):
            assert_results(got, first)


# ---- the CPU backend -----------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_within_the_bounds_of_the_cpu(
    case: Case, method: str, request: pytest.FixtureRequest
) -> None:
    inputs = case.inputs()
    cpu = decode(CPU, inputs, method)
    with use("simt", request.node.nodeid):
        if method == "dense":
            check_scores(case, inputs)
            flags = {"method": "dense", "return_lse": True, "return_stats": True}
            got = santa_torch.decode(**inputs.arguments(), **flags)
            check_dense(inputs, reference.decode(**inputs.arguments(), **flags), got)
            assert_equal("value_rows", got.stats.value_rows, cpu.value_rows)
        else:
            got = check_decode(case, inputs, method, 12, seed=5, layer=3)
        assert_equal("key_rows", got.stats.key_rows, cpu.keys_read[..., 0])


def test_draws_are_those_of_the_cpu() -> None:
    """Bit for bit, whatever the density, the group, the sample and the address of the numbers."""
    operators = simt_library.load()
    sizes = ((1, 1, 5), (16, 2, 1), (257, 3, 40), (1000, 8, 300), (700, 17, 24), (256, 1, 2000))
    for at, (rows, group, samples) in enumerate(sizes):
        SETTINGS[at % len(SETTINGS)].use()
        for density in DENSITIES:
            weights = density(2, 2 * group, rows)
            for method in DRAWING:
                arguments: dict[str, Any] = {
                    "seed": torch.tensor([at, -(2**62) - at]),
                    "position": torch.tensor([2**40 + rows]),
                    **{"samples": samples, "kv_heads": 2, "layer": at, "head_offset": 4 * at},
                }
                if at % 2:
                    arguments["row_mass"] = torch.rand(2, 2 * group).clamp(min=1e-6)
                expected = CPU.draw(weights, method=method, **arguments)
                got = operators.draw(weights, method=method, **arguments)
                for name, x, y in zip(("rows", "counts", "num_rows"), got, expected, strict=True):
                    assert_equal(f"{name} of {method}, {density.__name__} {rows}", x, y)


@pytest.mark.parametrize("cpu_level", FUSED_LEVELS, indirect=True)
def test_weights_are_those_of_the_cpu(cpu_level: str) -> None:
    operators = simt_library.load()
    random = torch.Generator().manual_seed(3)
    for at, rows in enumerate((1, 31, 255, 256, 1000)):
        SETTINGS[at % len(SETTINGS)].use()
        scores = torch.randn(3, 9, rows, generator=random)
        scores *= torch.tensor([0.0, 1e-39, 1e-3, 1, 8, 30, 1e4, 1e30, 3e38])[:, None]
        scores[1] = scores[1].masked_fill(torch.rand(9, rows, generator=random) < 0.5, -torch.inf)
        scores[2, 0], scores[2, 1, 0], scores[2, 2, -1] = -torch.inf, torch.nan, torch.inf
        maxima = scores.amax(-1)
        assert_equal("weights", operators.weigh(scores, maxima), CPU.weigh(scores, maxima))


@pytest.mark.parametrize("cpu_level", FUSED_LEVELS, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gathered_sums_are_those_of_the_cpu(cpu_level: str, dtype: torch.dtype) -> None:
    operators = simt_library.load()
    random = torch.Generator().manual_seed(4)
    shapes = ((1, 1, 1, 1), (3, 65, 8, 1), (8, 200, 33, 1), (17, 130, 128, 2), (5, 64, 100, 3))
    for at, (group, drawn, dim, lists_per_group) in enumerate(shapes):
        SETTINGS[at % len(SETTINGS)].use()
        v = torch.randn(2, 2, 900, dim, generator=random).to(dtype)
        v[:, :, 7] = torch.nan
        lists = 2 if lists_per_group == 1 else 2 * group
        rows = torch.stack(
            [torch.randperm(900, generator=random)[:drawn] for _ in range(2 * lists)]
        )
        rows = rows.sort(-1).values.view(2, lists, drawn)
        of_head = rows.repeat_interleave(2 * group // lists, 1)
        coefficients = torch.randn(2, 2 * group, drawn, generator=random)
        coefficients = coefficients.masked_fill(of_head == 7, 0.0)  # not used, even where it is NaN
        num_rows = torch.tensor([0, drawn, drawn // 2, 1])[torch.arange(2 * lists) % 4].int()
        arguments = (rows, coefficients, num_rows.view(2, lists), v)
        expected = CPU.gather(*arguments)
        assert expected.isfinite().all()
        assert_equal("out", operators.gather(*arguments), expected)


# ---- launches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stats", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_launches_of_a_step(method: str, stats: bool) -> None:
    """At most 2 for dense, 4 for a sample per head, 5 for one per group, whatever else is asked."""
    operators = simt_library.load()
    Setting().use()
    operators.launches()
    for case in (Case(1, 1, 71, 40, 8, 8), Case(2, 2, 3, 600, 8, 8, mask="heads", sinks="float32")):
        decode(operators, case.inputs(), method, return_stats=stats)
        assert operators.launches() == LAUNCHES[method]
    empty = [x[:0] for x in Case(rows=5).inputs()[:3]]
    decode(operators, Inputs(*empty, None, None), method, return_stats=stats)
    assert operators.launches() == ""


def test_launches_of_the_stages() -> None:
    operators = simt_library.load()
    Setting().use()
    operators.launches()
    inputs = Case(1, 1, 3, 300, 8, 8).inputs()
    scores, maxima = operators.score(inputs.q, inputs.k)
    assert operators.launches() == "score,finish_maxima"
    weights = operators.weigh(scores, maxima)
    assert operators.launches() == "weigh"
    where = torch.tensor([1])
    for method in DRAWING:
        rows, counts, num_rows = operators.draw(
            weights, samples=4, method=method, kv_heads=1, seed=where, position=where
        )
        expected = "weigh,include,draw" if method == "shared" else "weigh,draw"
        assert operators.launches() == expected
        coefficients = counts.float().expand(1, 3, -1)
        operators.gather(rows, coefficients, num_rows, inputs.v)
        assert operators.launches() == "gather"


# ---- values that only the device sees: cut, since nothing on the host may look -------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rule16_lengths_are_cut(method: str, dtype: torch.dtype) -> None:
    operators = simt_library.load()
    Setting(2, 1, 2, 4).use()
    inputs = Case(4, 1, 2, 70, 8, 8).inputs()
    info = torch.iinfo(dtype)
    wild = torch.tensor([-1, 71, info.min, info.max], dtype=dtype)
    right = torch.tensor([0, 70, 0, 70], dtype=dtype)
    got = decode(operators, inputs._replace(seq_lens=wild), method)
    assert_results(got, decode(operators, inputs._replace(seq_lens=right), method))
    assert not got.out[::2].any()


@pytest.mark.parametrize("method", DRAWING)
def test_rule16_weights_are_cut(method: str) -> None:
    operators = simt_library.load()
    Setting().use()
    weights = peaked(1, 4, 300)
    wild = torch.where(weights == ONE, 2**31 - 1, torch.where(weights == 0, -(2**31), weights))
    wild[0, 1, ::3] = -5
    where = torch.tensor([2])
    arguments: dict[str, Any] = {"samples": 50, "method": method, "kv_heads": 2, "seed": where}
    got = operators.draw(wild, position=where, **arguments)
    expected = operators.draw(wild.clamp(0, ONE), position=where, **arguments)
    for name, x, y in zip(("rows", "counts", "num_rows"), got, expected, strict=True):
        assert_equal(name, x, y)


def test_rule16_scores_above_their_maximum_are_cut() -> None:
    operators = simt_library.load()
    Setting().use()
    scores = torch.linspace(-3, 5, 200).expand(1, 2, 200)
    maxima = torch.tensor([[0.0, 5.0]])
    expected = operators.weigh(scores.minimum(maxima[..., None]), maxima)
    assert_equal("weights", operators.weigh(scores, maxima), expected)
    assert int(expected.max()) == ONE


def test_rule16_scores_that_are_no_numbers_weigh_nothing() -> None:
    Setting().use()
    scores = torch.tensor([[[torch.nan, -1.0, 0.0]]])
    weights = simt_library.load().weigh(scores, torch.zeros(1, 1))
    assert weights[0, 0, 0] == 0
    assert weights[0, 0, 2] == ONE


def test_rule16_shares_of_rows_are_cut() -> None:
    operators = simt_library.load()
    Setting().use()
    weights = torch.randint(0, ONE, (1, 4, 300), generator=torch.Generator().manual_seed(3)).int()
    where = torch.tensor([1])
    given = {"samples": 20, "kv_heads": 1, "seed": where, "position": where}
    got = operators.draw(weights, row_mass=torch.tensor([[2.0, -1.0, torch.nan, 0.5]]), **given)
    cut = operators.draw(weights, row_mass=torch.tensor([[1.0, 0.0, 0.0, 0.5]]), **given)
    for a, b in zip(got, cut, strict=True):
        assert_equal("draw", a, b)


def test_rule19_keys_between_two_numbers_are_refused() -> None:
    """Bytes of a file may begin anywhere; a GPU stops at such an address, for good."""
    Setting().use()
    raw = torch.zeros(2 * 30 * 8 * 2 + 1, dtype=torch.uint8)
    k = torch.frombuffer(raw.numpy(), dtype=torch.float16, count=2 * 30 * 8, offset=1)
    k = k.view(1, 2, 30, 8)
    q = torch.zeros(1, 2, 8, dtype=torch.float16)
    with pytest.raises(ValueError, match="k must begin at a multiple of 2 bytes"):
        simt_library.load().score(q, k)


def test_rule16_lists_are_cut() -> None:
    operators = simt_library.load()
    Setting().use()
    v = torch.randn(1, 1, 30, 8)
    rows = torch.tensor([[[-(2**63), -1, 29, 30, 2**62]]])
    coefficients = torch.randn(1, 2, 5)

    def gather(rows: torch.Tensor, count: int) -> torch.Tensor:
        return operators.gather(rows, coefficients, torch.tensor([[count]], dtype=torch.int32), v)

    assert_equal("out", gather(rows, 5), gather(rows.clamp(0, 29), 5))
    assert_equal("out", gather(rows, 2**31 - 1), gather(rows, 5))
    assert_equal("out", gather(rows, -(2**31)), torch.zeros(1, 2, 8))


def test_rule16_lists_of_values_without_rows() -> None:
    """There is nothing that a row could be cut to: no list has any."""
    operators = simt_library.load()
    Setting().use()
    for batch, kv_heads, dim in ((2, 1, 8), (1, 2, 8), (1, 1, 40)):
        rows = torch.zeros(batch, kv_heads, 3, dtype=torch.int64)
        num_rows = torch.full((batch, kv_heads), 3, dtype=torch.int32)
        coefficients = torch.ones(batch, 2 * kv_heads, 3)
        got = operators.gather(rows, coefficients, num_rows, torch.empty(batch, kv_heads, 0, dim))
        assert_equal("out", got, torch.zeros(batch, 2 * kv_heads, dim))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e9, -3.0])
def test_rule16_shares_of_rows_overrun_nothing(value: float) -> None:
    """The sample means nothing then; it holds ascending rows that exist, and not too many."""
    operators = simt_library.load()
    Setting().use()
    row_mass = torch.ones(1, 4)
    row_mass[0, 1] = value
    where = torch.tensor([1])
    rows, _, num_rows = operators.draw(
        torch.full((1, 4, 300), ONE, dtype=torch.int32),
        **{"samples": 5, "kv_heads": 2, "seed": where, "position": where, "row_mass": row_mass},
    )
    for listed, n in zip(rows[0], num_rows[0].tolist(), strict=True):
        assert 0 < n <= rows.shape[2]
        assert (listed[:n].diff() > 0).all()
        assert 0 <= int(listed[0]) <= int(listed[n - 1]) < 300
