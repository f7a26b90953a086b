"""What only a GPU can show: graphs, streams, devices, memory, synchronisation, compiled steps.

The numbers are tested elsewhere: on a machine with a GPU the whole suite runs on the CUDA kernels
under level "gpu". ``SANTA_REQUIRE_GPU=1`` makes a missing GPU a failure, so that a run that is
meant to prove something cannot pass by skipping.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cases import DTYPES, METHODS, Case, Inputs
from compare import assert_equal, assert_same

import santa_torch

SAMPLES = 24
EVERYTHING = {"return_lse": True, "return_stats": True}
RAGGED = Case(batch=4, rows=1500, seq_lens=(1500, 0, 257, 1100))


def missing() -> str | None:
    """Why nothing here can run; None where it can."""
    if not torch.cuda.is_available():
        return "no GPU that torch can use"
    module = santa_torch.build_info().cuda_module
    return None if module == "loaded" else f"no CUDA operators in this build: {module}"


REQUIRED = os.environ.get("SANTA_REQUIRE_GPU") == "1"
needs_gpu = pytest.mark.skipif(missing() is not None and not REQUIRED, reason=missing() or "")
pytestmark = needs_gpu


@pytest.fixture(autouse=True)
def _gpu() -> Iterator[None]:
    assert missing() is None, missing()
    device = torch.cuda.current_device()
    yield
    torch.cuda.set_device(device)


def moved(inputs: Inputs, device: str = "cuda") -> Inputs:
    """The inputs of a case on a device."""
    return Inputs(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in inputs))


def number(*values: int, device: str = "cuda") -> torch.Tensor:
    return torch.tensor(values, device=device)


def decode(inputs: Inputs, method: str, **arguments: Any) -> santa_torch.DecodeOutput:
    arguments = {"samples": SAMPLES, "layer": 3, **EVERYTHING, **arguments}
    out = santa_torch.decode(**inputs.arguments(), method=method, **arguments)
    assert isinstance(out, santa_torch.DecodeOutput)
    return out


def clone(result: santa_torch.DecodeOutput) -> santa_torch.DecodeOutput:
    """A copy that the next replay does not overwrite."""
    assert result.stats is not None
    stats = type(result.stats)(*(value.clone() for value in result.stats))
    return santa_torch.DecodeOutput(result.out.clone(), result.lse.clone(), stats)  # type: ignore


def capture(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of ``step`` and its results, after a few calls on a stream apart."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result


@contextmanager
def syncs_are_errors() -> Iterator[None]:
    """Let torch raise where the host waits for the device."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


# ---- graphs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rule27_replays_follow_seed_and_position(method: str, dtype: torch.dtype) -> None:
    """Advanced in place, they draw anew, and every replay has the bits of an eager call."""
    inputs = moved(RAGGED.but(dtype=dtype, mask="heads", sinks="float32").inputs())
    seed, position = number(5), number(1500)
    graph, result = capture(lambda: decode(inputs, method, seed=seed, position=position))
    seen = []
    for seed_now, position_now in ((5, 1500), (5, 1501), (6, 1501), (5, 1500)):
        seed.fill_(seed_now)
        position.fill_(position_now)
        graph.replay()
        seen.append(clone(result))
        assert_same(seen[-1], decode(inputs, method, seed=seed, position=position))
    assert_same(seen[0], seen[3])
    if method != "dense":
        assert not torch.equal(seen[0].out, seen[1].out)
        assert not torch.equal(seen[1].out, seen[2].out)


@pytest.mark.parametrize("method", METHODS)
def test_rule33_replays_follow_lengths(method: str) -> None:
    inputs = moved(Case(batch=3, rows=900, seq_lens=(900, 900, 900)).inputs())
    assert inputs.seq_lens is not None
    seed = number(5)
    graph, result = capture(lambda: decode(inputs, method, seed=seed))
    for lengths in ((900, 1, 0), (0, 0, 0), (257, 256, 899)):
        inputs.seq_lens.copy_(torch.tensor(lengths))
        graph.replay()
        assert_same(clone(result), decode(inputs, method, seed=seed))


@pytest.mark.parametrize("method", METHODS)
def test_rule36_replays_leave_nothing_behind(method: str) -> None:
    """A counter that is not reset, or scratch memory that is assumed clean, shows at the second."""
    inputs, seed = moved(RAGGED.inputs()), number(5)
    graph, result = capture(lambda: decode(inputs, method, seed=seed))
    graph.replay()
    first = clone(result)
    for _ in range(20):
        graph.replay()
    assert_same(clone(result), first)


# ---- streams and devices -------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_rule31_two_streams_at_once(method: str) -> None:
    """Steps of different sizes, in flight together, have the bits that they have alone."""
    cases = (Case(batch=1, rows=20000), RAGGED)
    steps = [(moved(case.inputs()), number(5)) for case in cases]
    alone = [decode(inputs, method, seed=seed) for inputs, seed in steps]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in steps]
    got: list[list[santa_torch.DecodeOutput]] = [[] for _ in steps]
    for _ in range(20):
        for (inputs, seed), stream, results in zip(steps, streams, got, strict=True):
            with torch.cuda.stream(stream):
                results.append(decode(inputs, method, seed=seed))
    torch.cuda.synchronize()
    for results, expected in zip(got, alone, strict=True):
        for result in results:
            assert_same(result, expected)


def test_rule31_work_is_on_the_current_stream() -> None:
    """Inputs that arrive late on the stream are waited for."""
    inputs, seed = moved(Case(batch=1, rows=3000).inputs()), number(5)
    expected = decode(inputs, "shared", seed=seed)
    late = inputs._replace(k=torch.zeros_like(inputs.k))
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        late.k.copy_(inputs.k)
        got = decode(late, "shared", seed=seed)
    torch.cuda.synchronize()
    assert_same(got, expected)


@pytest.mark.parametrize("method", METHODS)
def test_rule31_second_device(method: str) -> None:
    """Tensors on device 1 while device 0 is the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, there is {torch.cuda.device_count()}")
    torch.cuda.set_device(0)
    inputs = RAGGED.inputs()
    one, other = (
        decode(moved(inputs, device), method, seed=number(5, device=device))
        for device in ("cuda:0", "cuda:1")
    )
    assert other.out.device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
    assert_equal("lse", other.lse.cpu(), one.lse.cpu())  # type: ignore[union-attr]
    assert_equal("out", other.out.cpu(), one.out.cpu())


@pytest.mark.parametrize("stranger", ["k", "v", "mask", "seq_lens", "sinks", "seed", "position"])
def test_rule16_mixed_devices_are_named(stranger: str) -> None:
    case = Case(mask="heads", seq_lens=(300, 200), sinks="float32")
    inputs = moved(case.inputs())
    arguments = {**inputs.arguments(), "seed": number(5), "position": number(9)}
    arguments[stranger] = arguments[stranger].cpu()
    with pytest.raises((ValueError, RuntimeError), match=stranger):
        santa_torch.decode(**arguments, samples=SAMPLES)
    torch.cuda.synchronize()


# ---- what decides the bits -----------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rule37_batch_and_capacity_change_no_bit(method: str, dtype: torch.dtype) -> None:
    inputs, seed = moved(RAGGED.but(dtype=dtype).inputs()), number(5)
    together = decode(inputs, method, seed=seed)
    assert inputs.seq_lens is not None
    for i, length in enumerate(RAGGED.seq_lens or ()):
        for capacity in {max(length, 1), 1500}:
            one = inputs._replace(
                q=inputs.q[i : i + 1],
                k=inputs.k[i : i + 1, :, :capacity],
                v=inputs.v[i : i + 1, :, :capacity],
                seq_lens=inputs.seq_lens[i : i + 1],
            )
            alone = decode(one, method, seed=seed)
            assert_equal("out", alone.out, together.out[i : i + 1])
            assert_equal("lse", alone.lse, together.lse[i : i + 1])  # type: ignore


# ---- memory and synchronisation ------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_rule34_a_thousand_calls_are_memory_flat(method: str) -> None:
    inputs, seed = moved(RAGGED.inputs()), number(5)

    def used() -> tuple[int, int, int]:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total - free

    for _ in range(10):
        decode(inputs, method, seed=seed)
    before = used()
    for _ in range(1000):
        decode(inputs, method, seed=seed)
    allocated, reserved, taken = used()
    assert (allocated, reserved) == before[:2]
    assert taken <= before[2] + 16 * 2**20  # others may use the GPU; a leak per call is more


@pytest.mark.parametrize("method", METHODS)
def test_rule31_the_host_never_waits(method: str) -> None:
    inputs = moved(RAGGED.but(mask="heads", sinks="float32").inputs())
    seed, position = number(5), number(1500)
    with syncs_are_errors():
        with pytest.raises(RuntimeError, match="synchroniz"):
            seed.item()  # the mode is in force
        decode(inputs, method, seed=seed, position=position)
        if method != "dense":
            weights = santa_torch.ops.weigh(
                *santa_torch.ops.score(inputs.q, inputs.k, **inputs.scoring())
            )
            rows, counts, num_rows = santa_torch.ops.draw(
                weights, samples=SAMPLES, method=method, kv_heads=2, seed=seed, position=position
            )
            lists = rows.shape[1]
            coefficients = counts.float().repeat_interleave(weights.shape[1] // lists, 1)
            santa_torch.ops.gather(rows, coefficients, num_rows, inputs.v)


# ---- torch.compile and a model -------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_rule32_fullgraph(method: str) -> None:
    inputs = moved(Case(rows=300, mask="heads").inputs())

    def step(inputs: Inputs, seed: torch.Tensor) -> torch.Tensor:
        out = santa_torch.decode(**inputs.arguments(), samples=SAMPLES, method=method, seed=seed)
        assert isinstance(out, torch.Tensor)
        return out

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for value in (5, 6):
        assert_equal("out", compiled(inputs, number(value)), step(inputs, number(value)))


def test_rule27_compiled_graphs_follow_the_seed() -> None:
    """Inductor's own CUDA graphs, between generated kernels."""
    inputs = moved(Case(rows=300).inputs())

    def step(x: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        q = inputs.q + (2 * x).sin()
        out = santa_torch.decode(q, inputs.k, inputs.v, samples=SAMPLES, seed=seed)
        assert isinstance(out, torch.Tensor)
        return out.relu() + 1

    compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    x, seen = torch.zeros(2, 6, 64, device="cuda"), []
    for value in (5, 6, 7, 5):
        seed = number(value)
        seen.append(compiled(x, seed).clone())
        torch.testing.assert_close(seen[-1], step(x, seed), rtol=1e-4, atol=1e-4)
    assert_equal("out", seen[0], seen[3])
    assert not torch.equal(seen[0], seen[1])


def test_a_model_generates_what_it_does_on_the_cpu() -> None:
    transformers = pytest.importorskip("transformers")
    from tiny_models import DENSE, generate, tiny_llama, tokens

    from santa_torch import hf

    assert transformers
    model, prompt = tiny_llama(), tokens(1, 21)
    with hf.use(model, DENSE):
        expected = generate(model, prompt, new=12)
    model.cuda()
    with hf.use(model, DENSE):
        got = generate(model, prompt.cuda(), new=12)
    assert torch.equal(got.cpu(), expected)


# ---- limits of launches and offsets --------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("batch", "kv_heads"), [(65_537, 1), (1, 65_537)])
def test_rule22_grids_beyond_16_bits(method: str, batch: int, kv_heads: int) -> None:
    case = Case(batch=batch, kv_heads=kv_heads, group=1, rows=3, head_dim=8, value_dim=8)
    inputs = case.inputs()
    # Products and sums of these are exact: scores, hence draws, do not depend on their order.
    inputs = inputs._replace(q=inputs.q.round(), k=(4 * inputs.k).round())
    given = {"method": method, "samples": 2, "scale": 2.0**-5}
    expected = santa_torch.decode(**inputs.arguments(), **given)
    got = santa_torch.decode(**moved(inputs).arguments(), **given)
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_rule21_strides_beyond_32_bits(method: str) -> None:
    """Two sequences 2^31 elements apart; what lies between them is never touched."""
    if torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("less than 6 GiB of free memory on this GPU")
    case = Case(batch=2, kv_heads=1, group=2, rows=300, head_dim=8, value_dim=8)
    inputs = case.but(dtype=torch.bfloat16).inputs()
    near = moved(inputs)
    memory = torch.empty(2**31 + 2**16, dtype=torch.bfloat16, device="cuda")
    far = memory.as_strided((2, 1, 300, 8), (2**31 + 64, 2400, 8, 1))
    for name in ("k", "v"):
        far.copy_(getattr(near, name))
        given = near._replace(**{name: far})
        got = santa_torch.decode(**given.arguments(), method=method, samples=SAMPLES)
        same = santa_torch.decode(**near.arguments(), method=method, samples=SAMPLES)
        assert_equal(name, got, same)


# ---- shared memory beyond 48 KiB -----------------------------------------------------------------

# Heads of a group, head dim, dtype: what a block that scores needs beside its own static memory.
# One just under 48 KiB, one at it with that memory, two well above.
WIDE = [(4, 64, torch.float16), (17, 56, torch.float16), (27, 40, torch.float32)]
WIDE += [(40, 128, torch.bfloat16), (71, 64, torch.bfloat16)]


def wide(group: int, dim: int, dtype: torch.dtype) -> Inputs:
    case = Case(batch=1, kv_heads=1, group=group, rows=300, head_dim=dim, value_dim=dim)
    return moved(case.but(dtype=dtype).inputs())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", WIDE, ids=str)
def test_rule10_groups_that_want_much_shared_memory(method: str, shape: Any) -> None:
    inputs = wide(*shape)
    got = decode(inputs, method)
    assert got.out.isfinite().all()
    expected = decode(moved(inputs, "cpu"), "dense")
    torch.testing.assert_close(got.lse.cpu(), expected.lse, rtol=1e-4, atol=1e-4)


def test_threads_that_want_different_amounts() -> None:
    """The limit belongs to the function: a thread must not lower what another counts on."""
    inputs = [wide(*shape) for shape in WIDE]
    expected = [decode(each, "dense").out for each in inputs]

    def work(at: int) -> None:
        for _ in range(50):
            assert_equal("out", decode(inputs[at], "dense").out, expected[at])

    with ThreadPoolExecutor(len(inputs)) as pool:
        list(pool.map(work, range(len(inputs))))


def test_a_graph_of_steps_that_want_different_amounts() -> None:
    inputs = [wide(*shape) for shape in reversed(WIDE)]
    expected = [decode(each, "shared").out.clone() for each in inputs]
    graph, results = capture(lambda: [decode(each, "shared").out for each in inputs])
    graph.replay()
    for got, want in zip(results, expected, strict=True):
        assert_equal("out", got, want)
