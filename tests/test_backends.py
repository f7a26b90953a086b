"""``backends``: calls of ``torch.ops.santa`` reach the kernels of a level while it is in use."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import simt_library
import torch
from backends import HAS_CUDA, LEVELS, OPERATORS, setting_for, transplant, use
from cases import CPU_LEVELS, DRAWING, LAYOUTS, METHODS, Case
from compare import OPS, assert_equal

import santa_torch

ONE = torch.tensor([1])
OPCHECKS = (
    *("test_schema", "test_autograd_registration", "test_faketensor"),
    "test_aot_dispatch_dynamic",
)
pytestmark = pytest.mark.usefixtures("one_thread")


def launched() -> str:
    return str(simt_library.load().launches())


@pytest.fixture(autouse=True)
def nothing_before() -> None:
    launched()


def call_all() -> dict[str, str]:
    """Launches of the emulator for each of the operators."""
    q, k, v = Case(1, 1, 2, 30, 8, 8).inputs()[:3]
    seen = {}
    OPS.decode(q, k, v, samples=3, seed=ONE)
    seen["decode"] = launched()
    scores, maxima = OPS.score(q, k)
    seen["score"] = launched()
    weights = OPS.weigh(scores, maxima)
    seen["weigh"] = launched()
    rows, counts, num_rows = OPS.draw(weights, samples=3, kv_heads=1, seed=ONE, position=ONE)
    seen["draw"] = launched()
    OPS.gather(rows, counts.float().expand(1, 2, -1), num_rows, v)
    seen["gather"] = launched()
    return seen


def is_python(name: str) -> bool:
    """Whether the kernel for the CPU was registered by Python."""
    lines = torch._C._dispatch_dump(f"santa::{name}").splitlines()
    (line,) = [line for line in lines if line.startswith("CPU:")]
    return "backends.py" in line


# ---- in use, and no longer -----------------------------------------------------------------------


def test_every_operator_is_redirected_and_given_back() -> None:
    for _ in range(2):
        assert not any(call_all().values())
        assert not any(is_python(name) for name in OPERATORS)
        with use("simt", "a test"):
            assert all(is_python(name) for name in OPERATORS)
            assert all(call_all().values())
        assert not any(is_python(name) for name in OPERATORS)
        assert not any(call_all().values())


def test_an_error_gives_the_operators_back() -> None:
    def failing() -> None:
        with use("simt", "a test"):
            assert all(call_all().values())
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert not any(call_all().values())
    assert not any(is_python(name) for name in OPERATORS)


def test_errors_of_operators_come_through() -> None:
    q, k, v = Case(1, 1, 2, 30, 8, 8).inputs()[:3]
    with use("simt", "a test"), pytest.raises(ValueError, match=r"santa::decode: samples .*got 0"):
        OPS.decode(q, k, v, samples=0, seed=ONE)


@pytest.mark.parametrize("level", CPU_LEVELS)
def test_levels_of_the_cpu_are_in_use_and_given_back(level: str) -> None:
    before = OPS.cpu_level()
    with use(level, ""):
        assert OPS.cpu_level() == level
        assert not any(call_all().values())
    assert OPS.cpu_level() == before


def test_an_error_gives_the_level_of_the_cpu_back() -> None:
    before = OPS.cpu_level()
    for level in CPU_LEVELS:
        with pytest.raises(KeyError), use(level, ""):
            raise KeyError
        assert OPS.cpu_level() == before


def test_no_warning_of_the_override() -> None:
    """Torch gives it once in a process: it has to be asked for again."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with use("simt", "a test"):
                pass
    finally:
        torch.set_warn_always(before)


# ---- whoever calls -------------------------------------------------------------------------------


def test_python_functions_and_compiled_graphs_are_redirected() -> None:
    inputs = Case(1, 2, 3, 300, 16, 16).inputs()

    def step() -> torch.Tensor:
        return santa_torch.decode(*inputs[:3], samples=9, seed=ONE, position=ONE)

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    on_cpu = compiled()
    with use("simt", "a test"):
        first = step()
        assert launched() == "score,weigh,include,draw,gather"
        assert_equal("out", compiled(), first)
        assert launched() == "score,weigh,include,draw,gather"
    assert_equal("out", compiled(), on_cpu)
    assert launched() == ""
    torch._dynamo.reset()


def test_callers_in_several_threads() -> None:
    cases = [Case(1, 1, group, rows, 16, 16) for group, rows in ((1, 300), (3, 40), (8, 257))]
    jobs = [(case.inputs(), method) for case in cases for method in METHODS]

    def step(job: tuple) -> torch.Tensor:
        inputs, method = job
        return santa_torch.decode(*inputs[:3], samples=9, method=method)

    with use("simt", "a test"):
        expected = [step(job) for job in jobs]
        launched()
        with ThreadPoolExecutor(4) as pool:
            for got, first in zip(pool.map(step, jobs), expected, strict=True):
                assert_equal("out", got, first)
        assert len(launched().split(",")) == len(cases) * (2 + 3 * 4 + 5)


@pytest.mark.parametrize("method", METHODS)
def test_rule32_opcheck_decode(backend: str, method: str) -> None:
    case = Case(rows=50, layout="offset", mask="heads", seq_lens=(50, 0), dtype=torch.bfloat16)
    arguments = {**case.inputs().arguments(), "samples": 4, "method": method, "seed": ONE}
    for stats in (False, True):
        given = {**arguments, "return_stats": stats}
        torch.library.opcheck(OPS.decode.default, (), given, test_utils=OPCHECKS)
    assert bool(launched()) == (backend == "simt")


def test_rule32_opcheck_stages(backend: str) -> None:
    inputs = Case(rows=50, layout="transposed", mask="stride0").inputs()
    arguments = {"q": inputs.q, "k": inputs.k, **inputs.scoring()}
    torch.library.opcheck(OPS.score.default, (), arguments, test_utils=OPCHECKS)
    scores, maxima = OPS.score(**arguments)
    permuted = scores.transpose(1, 2).contiguous().transpose(1, 2)
    torch.library.opcheck(OPS.weigh.default, (permuted, maxima), test_utils=OPCHECKS)
    weights = OPS.weigh(permuted, maxima)
    for method in DRAWING:
        drawing = {"samples": 4, "method": method, "kv_heads": 2, "seed": ONE, "position": ONE}
        given = {"weights": weights, **drawing}
        torch.library.opcheck(OPS.draw.default, (), given, test_utils=OPCHECKS)
        rows, counts, num_rows = OPS.draw(**given)
        ones = torch.ones(2, 6, counts.shape[2])
        listed = rows.transpose(0, 2).contiguous().transpose(0, 2)
        gathering = (listed, ones, num_rows, inputs.v)
        torch.library.opcheck(OPS.gather.default, gathering, test_utils=OPCHECKS)
    assert bool(launched()) == (backend == "simt")


# ---- ways of running, and the GPU ----------------------------------------------------------------


def test_settings_are_repeatable_and_all_of_them_occur() -> None:
    names = [f"tests/test_x.py::test[{i}]" for i in range(2000)]
    settings = [setting_for(name) for name in names]
    assert settings == [setting_for(name) for name in names]
    ways = {(s.order, s.resident_blocks, s.multiprocessors, s.overlap) for s in settings}
    assert len(ways) == 4 * 3 * 3 * 2
    assert len({s.seed for s in settings}) > 1900


def test_the_level_fixture_has_every_level(level: str, request: pytest.FixtureRequest) -> None:
    assert level in request.node.nodeid
    assert "simt" in LEVELS
    assert any(call_all().values()) == (level == "simt")


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    if not HAS_CUDA:
        pytest.skip("no GPU here: nothing is moved to one")
    return str(request.param)


def test_rule18_moving_to_a_gpu_keeps_strides_and_gaps(layout: str) -> None:
    for x in Case(dtype=torch.bfloat16, layout=layout).inputs()[1:3]:
        moved = transplant(x)
        assert moved.is_cuda
        assert (moved.stride(), moved.storage_offset()) == (x.stride(), x.storage_offset())
        assert moved.untyped_storage().nbytes() == x.untyped_storage().nbytes()
        assert_equal("moved", moved.cpu(), x)
