"""Rules 27 and 32 to 34: schemas, fakes, torch.compile, torch.export, no backward, no leak."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import DRAWING, LAYOUTS, METHODS, Case, Inputs
from compare import OPS, assert_equal
from spies import assert_memory_flat
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import santa_torch

SAMPLES = 12
SEED = torch.tensor([5])


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()
    counters.clear()


def step(inputs: Inputs, seed: torch.Tensor, method: str = "shared") -> torch.Tensor:
    out = santa_torch.decode(**inputs.arguments(), samples=SAMPLES, method=method, seed=seed)
    assert isinstance(out, torch.Tensor)
    return out


# ---- rule 32: schemas and fakes ------------------------------------------------------------------


OPCHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", ["dense", "systematic", "shared"])
def test_rule32_opcheck_decode(method: str, layout: str) -> None:
    case = Case(rows=50, layout=layout, mask="heads", seq_lens=(50, 0), dtype=torch.bfloat16)
    if layout != "contiguous":
        case = case.but(softcap=20.0, sinks="stride2")
    arguments = {
        **case.inputs().arguments(),
        "samples": SAMPLES,
        "method": method,
        "seed": SEED,
        "position": torch.tensor([3, 4]),
        "return_stats": layout != "contiguous",
    }
    torch.library.opcheck(OPS.decode.default, (), arguments, test_utils=OPCHECKS)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "expanded"])
def test_rule32_opcheck_stages(layout: str) -> None:
    inputs = Case(rows=50, layout=layout, mask="stride0").inputs()
    arguments = {"q": inputs.q, "k": inputs.k, **inputs.scoring()}
    torch.library.opcheck(OPS.score.default, (), arguments, test_utils=OPCHECKS)
    scores, maxima = OPS.score(**arguments)
    permuted = scores.transpose(1, 2).contiguous().transpose(1, 2)
    torch.library.opcheck(OPS.weigh.default, (permuted, maxima), test_utils=OPCHECKS)
    weights = OPS.weigh(permuted, maxima)
    for method in DRAWING:
        drawing = {"samples": SAMPLES, "method": method, "kv_heads": 2, "seed": SEED}
        arguments = {"weights": weights, **drawing, "position": SEED}
        if layout == "expanded":
            arguments["row_mass"] = torch.full((2, 6), 0.5)
        torch.library.opcheck(OPS.draw.default, (), arguments, test_utils=OPCHECKS)
        rows, counts, num_rows = OPS.draw(**arguments)
        coefficients = torch.ones(2, 6, counts.shape[2])
        listed = rows.transpose(0, 2).contiguous().transpose(0, 2)
        gathering = (listed, coefficients, num_rows, inputs.v)
        torch.library.opcheck(OPS.gather.default, gathering, test_utils=OPCHECKS)


@pytest.mark.parametrize("name", ["decode", "score", "weigh", "draw", "gather"])
def test_rule32_fakes_say_what_comes_out(name: str) -> None:
    """Shape, dtype, strides and device of every output, for permuted inputs too."""
    for case in (
        Case(rows=40, layout="transposed", dtype=torch.float16, value_dim=24),
        Case(rows=0),
        Case(batch=0, rows=5),
        Case(rows=3, group=1, mask="heads"),
    ):
        inputs = case.inputs()
        scored = {"q": inputs.q, "k": inputs.k, **inputs.scoring()}
        scores, maxima = OPS.score(**scored)
        weights = OPS.weigh(scores, maxima)
        for method in DRAWING:
            drawing = {"samples": SAMPLES, "method": method, "seed": SEED, "position": SEED}
            rows, _, num_rows = OPS.draw(weights, kv_heads=2, **drawing)
            ones = torch.ones(case.batch, case.heads, rows.shape[2])
            arguments: dict[str, Any] = {
                "decode": {**inputs.arguments(), **drawing, "return_stats": True},
                "score": scored,
                "weigh": {"scores": scores, "maxima": maxima},
                "draw": {"weights": weights, "kv_heads": 2, **drawing},
                "gather": {
                    "rows": rows,
                    "coefficients": ones,
                    "num_rows": num_rows,
                    "v": inputs.v,
                },
            }[name]
            real = getattr(OPS, name)(**arguments)
            meta = {
                key: value.to("meta") if isinstance(value, torch.Tensor) else value
                for key, value in arguments.items()
            }
            fake = getattr(OPS, name)(**meta)
            for got, expected in zip(as_tuple(fake), as_tuple(real), strict=True):
                assert got.shape == expected.shape
                assert got.dtype == expected.dtype
                assert got.stride() == expected.stride()
                assert got.device.type == "meta"


def as_tuple(value: Any) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


# ---- compile -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dynamic", [None, True])
def test_rule32_compiled_equals_eager(method: str, dynamic: bool | None) -> None:
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for case in (
        Case(rows=300, mask="heads"),
        Case(rows=300, layout="interleaved", dtype=torch.bfloat16),
        Case(rows=200, seq_lens=(200, 7), layout="transposed"),
    ):
        inputs = case.inputs()
        expected = step(inputs, SEED, method)
        for _ in range(2):
            assert_equal("out", compiled(inputs, SEED, method), expected)


def test_compiled_with_everything_returned() -> None:
    def everything(inputs: Inputs, seed: torch.Tensor) -> Any:
        return santa_torch.decode(
            **inputs.arguments(), samples=SAMPLES, seed=seed, return_lse=True, return_stats=True
        )

    inputs = Case(rows=300, mask="heads").inputs()
    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager")
    got, expected = compiled(inputs, SEED), everything(inputs, SEED)
    assert_equal("out", got.out, expected.out)
    assert_equal("lse", got.lse, expected.lse)
    for one, other in zip(got.stats, expected.stats, strict=True):
        assert_equal("stats", one, other)


def test_compiled_stages() -> None:
    def stages(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        weights = santa_torch.ops.weigh(*santa_torch.ops.score(q, k))
        rows, counts, num_rows = santa_torch.ops.draw(
            weights, samples=SAMPLES, method="systematic", kv_heads=2, seed=at, position=at
        )
        return santa_torch.ops.gather(rows, counts.float() / SAMPLES, num_rows, v)

    inputs = Case(rows=300).inputs()
    for dynamic in (None, True):
        compiled = torch.compile(stages, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        for case in (Case(rows=300), Case(rows=5)):
            inputs = case.inputs()
            expected = stages(*inputs[:3], SEED)
            assert_equal("out", compiled(*inputs[:3], SEED), expected)


def test_inductor() -> None:
    """The operator between generated code, which hands it its own buffers."""

    def layer(x: torch.Tensor, inputs: Inputs, seed: torch.Tensor) -> torch.Tensor:
        q = (2 * x).sin() + inputs.q
        return step(inputs._replace(q=q), seed).relu() + 1

    inputs = Case(rows=300).inputs()
    x = torch.randn(2, 6, 64)
    got = torch.compile(layer, fullgraph=True)(x, inputs, SEED)
    assert torch.allclose(got, layer(x, inputs, SEED), atol=1e-5)


def count_compiles(function: Callable[..., Any]) -> tuple[Any, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=counter), counter


def test_rule27_seed_and_position_tensors_do_not_recompile() -> None:
    def draw(inputs: Inputs, seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return santa_torch.decode(
            **inputs.arguments(), samples=SAMPLES, seed=seed, position=position
        )

    compiled, counter = count_compiles(draw)
    inputs = Case(rows=500).inputs()
    seen = set()
    for at in range(12):
        seed, position = torch.tensor([at // 4]), torch.tensor([at % 4])
        out = compiled(inputs, seed, position)
        assert_equal("out", out, draw(inputs, seed, position))
        assert (seed, position) == (torch.tensor([at // 4]), torch.tensor([at % 4]))
        seen.add(float(out.sum()))
    assert counter.frame_count == 1
    assert len(seen) == 12


def test_rule33_lengths_are_tensors() -> None:
    compiled, counter = count_compiles(step)
    inputs = Case(rows=300).inputs()
    for length in range(0, 300, 23):
        cut = inputs._replace(seq_lens=torch.tensor([length, 300 - length]))
        assert_equal("out", compiled(cut, SEED), step(cut, SEED))
    assert counter.frame_count == 1


@pytest.mark.parametrize("method", ["systematic", "shared"])
def test_rule32_growing_by_64_steps_compiles_at_most_twice(method: str) -> None:
    compiled, counter = count_compiles(step)
    inputs = Case(batch=1, rows=364).inputs()
    for rows in range(300, 364):
        cut = inputs._replace(k=inputs.k[:, :, :rows], v=inputs.v[:, :, :rows])
        assert_equal("out", compiled(cut, SEED, method), step(cut, SEED, method))
    assert counter.frame_count <= 2


def test_rule32_growing_stages_compile_at_most_twice() -> None:
    """The capacity min(L, S) passes from one branch to the other on the way."""

    def drawn(weights: torch.Tensor) -> torch.Tensor:
        rows, counts, _ = santa_torch.ops.draw(
            weights, samples=20, method="systematic", kv_heads=2, seed=SEED, position=SEED
        )
        return rows * counts

    compiled, counter = count_compiles(drawn)
    weights = torch.randint(0, 2**30, (1, 2, 64), dtype=torch.int32)
    for rows in range(5, 64):
        assert_equal("rows", compiled(weights[..., :rows]), drawn(weights[..., :rows]))
    assert counter.frame_count <= 3


# ---- export --------------------------------------------------------------------------------------


class Attention(torch.nn.Module):
    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seed: torch.Tensor
    ) -> torch.Tensor:
        return santa_torch.decode(q, k, v, samples=SAMPLES, method=self.method, seed=seed)


@pytest.mark.parametrize("method", ["dense", "stratified", "shared"])
def test_export_round_trip(method: str, tmp_path: Path) -> None:
    inputs = Case(rows=300).inputs()
    rows = torch.export.Dim("rows", min=2, max=4096)
    shapes = {"q": None, "k": {2: rows}, "v": {2: rows}, "seed": None}
    program = torch.export.export(
        Attention(method), (*inputs[:3], SEED), dynamic_shapes=shapes, strict=True
    )
    torch.export.save(program, tmp_path / "step.pt2")
    loaded = torch.export.load(tmp_path / "step.pt2").module()
    for case in (Case(rows=300), Case(rows=17), Case(rows=999)):
        other = case.inputs()
        expected = Attention(method)(*other[:3], SEED)
        assert_equal("out", loaded(*other[:3], SEED), expected)


# ---- no backward ---------------------------------------------------------------------------------


@pytest.mark.parametrize("leaf", ["q", "k", "v", "mask", "sinks"])
def test_backward_raises(leaf: str) -> None:
    inputs = Case(rows=30, mask="additive", sinks="float32").inputs()
    inputs = inputs._replace(**{leaf: getattr(inputs, leaf).requires_grad_()})
    for method in METHODS:
        out = step(inputs, SEED, method)
        with torch.no_grad():
            assert_equal("out", out.detach(), step(inputs, SEED, method))
        with pytest.raises(RuntimeError, match="backward"):
            out.sum().backward()
        more = santa_torch.decode(
            **inputs.arguments(), method=method, samples=SAMPLES, return_lse=True, return_stats=True
        )
        with pytest.raises(RuntimeError, match="backward"):
            more.lse.sum().backward()
        assert not more.stats.squared_error.requires_grad
        with torch.no_grad():
            assert not step(inputs, SEED, method).requires_grad
    if leaf not in ("v", "sinks"):
        for stage in santa_torch.ops.score(inputs.q, inputs.k, **inputs.scoring()):
            with pytest.raises(RuntimeError, match="backward"):
                stage.sum().backward()


def test_backward_raises_when_compiled() -> None:
    inputs = Case(rows=30).inputs()
    inputs = inputs._replace(q=inputs.q.requires_grad_())
    out = torch.compile(step, backend="aot_eager")(inputs, SEED)
    with pytest.raises(RuntimeError, match="backward"):
        out.sum().backward()


def test_inference_mode_and_no_grad() -> None:
    inputs = Case(rows=30).inputs()
    expected = step(inputs, SEED)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            assert_equal("out", step(inputs, SEED), expected)


# ---- rule 34: memory -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["eager", "compiled", "refused"])
def test_rule34_a_thousand_calls_are_memory_flat(mode: str) -> None:
    inputs = Case(batch=1, rows=600, seq_lens=(600,), mask="heads").inputs()

    def everything(inputs: Inputs, seed: torch.Tensor, method: str) -> Any:
        return santa_torch.decode(
            **inputs.arguments(), samples=100, method=method, seed=seed, return_stats=True
        )

    function = everything
    if mode == "compiled":
        function = torch.compile(everything, fullgraph=True, backend="aot_eager")

    def calls(n: int) -> None:
        for i in range(n):
            if mode == "refused":
                with pytest.raises(ValueError, match="method"):
                    function(inputs, SEED, "none")
            else:
                function(inputs, SEED, METHODS[i % 5])

    assert_memory_flat(calls)
