"""Rule 16: a wrong argument raises, names itself and its value, through either door; no crash.

Each case spoils one argument of a call that works. ``torch.ops.santa.*`` has to refuse it without
help: whoever calls it directly has no Python between.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import METHODS, Case
from compare import OPS

import santa_torch
from santa_torch import _load, ops

INPUTS = Case(batch=2, kv_heads=2, group=3, rows=20, head_dim=16, value_dim=24).inputs()
WHERE = torch.tensor([3])
DECODE: dict[str, Any] = {
    "q": INPUTS.q,
    "k": INPUTS.k,
    "v": INPUTS.v,
    "samples": 4,
    "method": "shared",
    "seed": WHERE,
    "position": WHERE,
    "sinks": torch.zeros(6),
}
SCORE = {"q": INPUTS.q, "k": INPUTS.k}
WEIGH = dict(zip(("scores", "maxima"), OPS.score(INPUTS.q, INPUTS.k), strict=True))
DRAW: dict[str, Any] = {
    "weights": OPS.weigh(**WEIGH),
    "samples": 4,
    "method": "systematic",
    "kv_heads": 2,
    "seed": WHERE,
    "position": WHERE,
}
ROWS, COUNTS, NUM_ROWS = OPS.draw(**DRAW)
GATHER = {
    "rows": ROWS,
    "coefficients": COUNTS.float(),
    "num_rows": NUM_ROWS,
    "v": INPUTS.v,
}
CALLS = {"decode": DECODE, "score": SCORE, "weigh": WEIGH, "draw": DRAW, "gather": GATHER}
DOORS: dict[str, Callable[[str], Callable[..., Any]]] = {
    "santa_torch": lambda name: getattr(ops, name),
    "torch.ops.santa": lambda name: getattr(OPS, name),
}
REFUSED = (ValueError, RuntimeError, NotImplementedError)

q, k, v = INPUTS[:3]
bools = torch.ones(2, 6, 20, dtype=torch.bool)
sinks, row_mass = torch.zeros(6), torch.ones(2, 6)
weights, scores, maxima = DRAW["weights"], WEIGH["scores"], WEIGH["maxima"]


def put(tensor: torch.Tensor, at: tuple[int, ...], value: float) -> torch.Tensor:
    changed = tensor.clone()
    changed[at] = value
    return changed


# operator, what is changed, what the message must contain
BAD: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    # q
    ("decode", {"q": q[0]}, ("q", "[B, Hq, D]", "[6, 16]")),
    ("decode", {"q": q[:, :, None]}, ("q", "[2, 6, 1, 16]")),
    ("decode", {"q": q.double()}, ("q", "float64")),
    ("decode", {"q": q.long()}, ("q", "int64")),
    ("decode", {"q": q.to(torch.complex64)}, ("q",)),
    ("decode", {"q": q[:, :5]}, ("q", "[2, 5, 16]", "[2, 2, 20, 16]")),
    ("decode", {"q": q[:, :0]}, ("q", "[2, 0, 16]")),
    ("decode", {"q": q[:, :, :8]}, ("k", "head dim", "8", "[2, 2, 20, 16]")),
    ("decode", {"q": q[:, :, ::2], "k": k[..., :8]}, ("q", "stride 2", "[2, 6, 8]")),
    ("decode", {"q": q.transpose(1, 2).contiguous().transpose(1, 2)}, ("q", "stride 6")),
    ("decode", {"q": q[..., :1].expand(2, 6, 16)}, ("q", "stride 0")),
    ("decode", {"q": q[..., :0], "k": k[..., :0]}, ("q", "head dim", "[2, 6, 0]")),
    ("decode", {"q": q.bfloat16()}, ("k", "bfloat16", "float32")),
    ("decode", {"q": q[:1]}, ("k", "batch", "1", "[2, 2, 20, 16]")),
    # k, v
    ("decode", {"k": k[0]}, ("k", "[B, Hkv, L, D]", "[2, 20, 16]")),
    ("decode", {"k": k.half()}, ("k", "float16")),
    ("decode", {"k": k[:1]}, ("k", "batch", "[1, 2, 20, 16]")),
    ("decode", {"k": k[:, :0], "v": v[:, :0]}, ("k", "[2, 0, 20, 16]")),
    ("decode", {"k": k[..., ::2], "q": q[..., :8]}, ("k", "stride 2")),
    ("decode", {"k": k[:, :, :1].expand(2, 2, 2**31, 16)}, ("k", "2^31", "2147483648")),
    ("decode", {"k": k.to_sparse()}, ("parse",)),
    ("decode", {"v": v[0]}, ("v", "[B, Hkv, L, Dv]", "[2, 20, 24]")),
    ("decode", {"v": v[:, :, :19]}, ("v", "rows", "[2, 2, 19, 24]")),
    ("decode", {"v": v[:, :1]}, ("v", "heads", "[2, 1, 20, 24]")),
    ("decode", {"v": v[:1]}, ("v", "batch", "[1, 2, 20, 24]")),
    ("decode", {"v": v.half()}, ("v", "float16")),
    ("decode", {"v": v[..., :0]}, ("v", "head dim", "[2, 2, 20, 0]")),
    ("decode", {"v": v[..., ::2]}, ("v", "stride 2")),
    # how to draw
    ("decode", {"samples": 0}, ("samples", "2^24", "0")),
    ("decode", {"samples": -5}, ("samples", "-5")),
    ("decode", {"samples": 2**24 + 1}, ("samples", "16777217")),
    ("decode", {"samples": 2**63 - 1}, ("samples", "9223372036854775807")),
    ("decode", {"samples": 2**64}, ("samples", "18446744073709551616")),
    ("decode", {"samples": 2.5}, ("samples", "2.5")),
    ("decode", {"samples": "4"}, ("samples", "4")),
    ("decode", {"method": "gumbel"}, ("method", "gumbel", "systematic")),
    ("decode", {"method": ""}, ("method", "''")),
    ("decode", {"method": 3}, ("method", "3")),
    ("decode", {"layer": -1}, ("layer", "-1")),
    ("decode", {"layer": 2**24}, ("layer", "16777216")),
    ("decode", {"head_offset": -1}, ("head_offset", "-1")),
    ("decode", {"head_offset": 2**32 - 5}, ("head_offset", "4294967291")),
    ("decode", {"head_offset": 2**63 - 1}, ("head_offset", "9223372036854775807")),
    ("decode", {"scale": float("nan")}, ("scale", "nan")),
    ("decode", {"scale": float("inf")}, ("scale", "inf")),
    ("decode", {"scale": 1e300}, ("scale", "1e+300")),
    ("decode", {"scale": "big"}, ("scale", "big")),
    # tensors beside
    ("decode", {"seed": torch.tensor([1, 2, 3])}, ("seed", "[3]", "2")),
    ("decode", {"seed": WHERE.int()}, ("seed", "int64", "int32")),
    ("decode", {"seed": WHERE[None]}, ("seed", "[1, 1]")),
    ("decode", {"seed": WHERE[:0]}, ("seed", "[0]")),
    ("decode", {"position": torch.tensor([1, 2, 3])}, ("position", "[3]")),
    ("decode", {"position": WHERE.float()}, ("position", "float32")),
    ("decode", {"mask": bools[:, :, :19]}, ("mask", "[2, 6, 20]", "[2, 6, 19]")),
    ("decode", {"mask": bools[:, :5]}, ("mask", "[2, 5, 20]")),
    ("decode", {"mask": bools[None]}, ("mask", "[1, 2, 6, 20]")),
    ("decode", {"mask": bools.int()}, ("mask", "int32")),
    ("decode", {"mask": bools.double()}, ("mask", "float64")),
    ("decode", {"mask": bools.to(torch.uint8)}, ("mask",)),
    ("decode", {"mask": bools[:, :, :0]}, ("mask", "[2, 6, 0]")),
    ("decode", {"mask": True}, ("mask", "True")),
    ("decode", {"seq_lens": torch.tensor([20])}, ("seq_lens", "[2]", "[1]")),
    ("decode", {"seq_lens": torch.tensor([20.0, 20.0])}, ("seq_lens", "float32")),
    ("decode", {"seq_lens": torch.tensor([[20, 20]])}, ("seq_lens", "[1, 2]")),
    ("decode", {"seq_lens": torch.tensor([20, 20]).to(torch.int16)}, ("seq_lens",)),
    ("decode", {"seq_lens": [20, 20]}, ("seq_lens",)),
    # caps and sinks
    ("decode", {"softcap": 0.0}, ("softcap", "positive", "0")),
    ("decode", {"softcap": -50.0}, ("softcap", "-50")),
    ("decode", {"softcap": float("nan")}, ("softcap", "nan")),
    ("decode", {"softcap": float("inf")}, ("softcap", "inf")),
    ("decode", {"softcap": 1e39}, ("softcap", "1e+39")),
    ("decode", {"softcap": 1e-60}, ("softcap", "1e-60")),
    ("decode", {"softcap": "50"}, ("softcap", "50")),
    ("decode", {"softcap": 10**400}, ("softcap",)),
    ("decode", {"sinks": sinks[:5]}, ("sinks", "[Hq] = [6]", "[5]")),
    ("decode", {"sinks": sinks[None]}, ("sinks", "[1, 6]")),
    ("decode", {"sinks": sinks[:, None]}, ("sinks", "[6, 1]")),
    ("decode", {"sinks": sinks.double()}, ("sinks", "float64")),
    ("decode", {"sinks": sinks.long()}, ("sinks", "int64")),
    ("decode", {"sinks": 0.5}, ("sinks", "0.5")),
    # score
    ("score", {"softcap": 0}, ("softcap", "0")),
    ("score", {"softcap": [1.0]}, ("softcap", "1.0")),
    ("score", {"q": q[0]}, ("q", "[6, 16]")),
    ("score", {"q": q.half()}, ("k", "float16", "float32")),
    ("score", {"k": k[..., :8]}, ("k", "head dim", "[2, 2, 20, 8]")),
    ("score", {"scale": float("-inf")}, ("scale", "-inf")),
    ("score", {"mask": bools[..., :3]}, ("mask", "[2, 6, 3]")),
    # weigh
    ("weigh", {"scores": scores[0]}, ("scores", "[6, 20]")),
    ("weigh", {"scores": scores.double()}, ("scores", "float64")),
    ("weigh", {"maxima": maxima[:, :5]}, ("maxima", "[2, 5]")),
    ("weigh", {"maxima": maxima[..., None]}, ("maxima", "[2, 6, 1]")),
    ("weigh", {"maxima": maxima.half()}, ("maxima", "float16")),
    # draw
    ("draw", {"weights": weights[0]}, ("weights", "[6, 20]")),
    ("draw", {"weights": weights.long()}, ("weights", "int64")),
    ("draw", {"weights": weights.float()}, ("weights", "float32")),
    ("draw", {"kv_heads": 0}, ("kv_heads", "0")),
    ("draw", {"kv_heads": -2}, ("kv_heads", "-2")),
    ("draw", {"kv_heads": 4}, ("kv_heads", "4")),
    ("draw", {"kv_heads": 12}, ("kv_heads", "12")),
    ("draw", {"samples": 0}, ("samples", "0")),
    ("draw", {"samples": 2**24 + 1}, ("samples", "16777217")),
    ("draw", {"method": "dense"}, ("method", "dense")),
    ("draw", {"method": "none"}, ("method", "none")),
    ("draw", {"seed": torch.tensor([1, 2, 3])}, ("seed", "[3]")),
    ("draw", {"position": WHERE.int()}, ("position", "int32")),
    ("draw", {"layer": 2**40}, ("layer", "1099511627776")),
    ("draw", {"head_offset": 2**62}, ("head_offset", "4611686018427387904")),
    ("draw", {"row_mass": row_mass[:1]}, ("row_mass", "[2, 6]", "[1, 6]")),
    ("draw", {"row_mass": row_mass[0]}, ("row_mass", "[6]")),
    ("draw", {"row_mass": row_mass.half()}, ("row_mass", "float16")),
    # gather
    ("gather", {"rows": ROWS.int()}, ("rows", "int32")),
    ("gather", {"rows": ROWS[0]}, ("rows", "[6, 4]")),
    ("gather", {"rows": ROWS[:1]}, ("rows", "[1, 6, 4]")),
    ("gather", {"rows": ROWS[:, :4]}, ("rows", "[2, 4, 4]")),
    ("gather", {"rows": ROWS[..., :2]}, ("rows", "[2, 6, 2]")),
    ("gather", {"coefficients": COUNTS.double()}, ("coefficients", "float64")),
    ("gather", {"coefficients": COUNTS.float()[0]}, ("coefficients", "[6, 4]")),
    ("gather", {"num_rows": NUM_ROWS.long()}, ("num_rows", "int64")),
    ("gather", {"num_rows": NUM_ROWS[:, :2]}, ("num_rows", "[2, 2]")),
    ("gather", {"v": v[:1]}, ("v", "[1, 2, 20, 24]")),
    ("gather", {"v": v[0]}, ("v", "[2, 20, 24]")),
    ("gather", {"v": v.double()}, ("v", "float64")),
    ("gather", {"v": v[:, :, :, ::2]}, ("v", "stride 2")),
    ("gather", {"v": v[:, :1].expand(2, 4, 20, 24)}, ("v", "[2, 4, 20, 24]")),
]

# Wrong in what a tensor holds: refused where the host may look. CUDA kernels cut it instead, see
# test_cuda_kernels.py.
BAD_VALUES: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("decode", {"seq_lens": torch.tensor([20, 21])}, ("seq_lens[1]", "20", "21")),
    ("decode", {"seq_lens": torch.tensor([-1, 2])}, ("seq_lens[0]", "-1")),
    ("decode", {"seq_lens": torch.tensor([-(2**63), 2])}, ("seq_lens[0]", "-9223372036854775808")),
    ("score", {"seq_lens": torch.tensor([0, 99])}, ("seq_lens[1]", "99")),
    ("weigh", {"maxima": maxima - 1}, ("scores", "maximum")),
    ("weigh", {"scores": put(scores, (1, 3, 4), float("nan"))}, ("scores", "nan", "184")),
    ("weigh", {"scores": put(scores, (0, 0, 7), float("inf"))}, ("scores", "inf", "7")),
    ("draw", {"weights": put(weights, (1, 2, 3), -1)}, ("weights", "-1", "163")),
    ("draw", {"weights": put(weights, (0, 0, 1), 2**30 + 1)}, ("weights", "1073741825", "1")),
    ("draw", {"row_mass": put(row_mass, (1, 2), 1.0001)}, ("row_mass", "1.0001", "8")),
    ("draw", {"row_mass": put(row_mass, (0, 2), -0.5)}, ("row_mass", "-0.5", "2")),
    ("draw", {"row_mass": put(row_mass, (0, 2), float("nan"))}, ("row_mass", "nan", "2")),
    ("gather", {"rows": put(ROWS, (0, 0, 0), 20)}, ("rows", "20")),
    ("gather", {"rows": put(ROWS, (1, 5, 0), -1)}, ("rows", "-1")),
    ("gather", {"rows": put(ROWS, (1, 5, 0), 2**62)}, ("rows", "4611686018427387904")),
    ("gather", {"num_rows": NUM_ROWS + 4}, ("num_rows", "4")),
    ("gather", {"num_rows": NUM_ROWS - 9}, ("num_rows", "-")),
    ("gather", {"v": v[:, :, :0]}, ("rows", "0")),
]


def names_of(bad: list[tuple[str, dict[str, Any], tuple[str, ...]]]) -> list[str]:
    return [f"{name}-{next(iter(change))}" for name, change, _ in bad]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("name", "change", "words"), BAD, ids=names_of(BAD))
def test_rule16_bad_argument(
    backend: str, door: str, name: str, change: dict[str, Any], words: tuple[str, ...]
) -> None:
    assert_refused(door, name, change, words)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("name", "change", "words"), BAD_VALUES, ids=names_of(BAD_VALUES))
def test_rule16_bad_value(
    door: str, name: str, change: dict[str, Any], words: tuple[str, ...]
) -> None:
    assert_refused(door, name, change, words)


def assert_refused(door: str, name: str, change: dict[str, Any], words: tuple[str, ...]) -> None:
    function = DOORS[door](name)
    good = CALLS[name]
    function(**good)
    with pytest.raises(REFUSED) as caught:
        function(**{**good, **change})
    message = str(caught.value)
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"
    function(**good)  # and the next call is as good as before


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("value", [None, 3, "x", [[1.0]], np.zeros((2, 6, 16), np.float32)])
def test_tensors_must_be_tensors(backend: str, name: str, value: Any) -> None:
    for argument, good in CALLS[name].items():
        if not isinstance(good, torch.Tensor):
            continue
        for where, door in DOORS.items():
            optional = argument in ("position", "sinks") and name == "decode" and value is None
            if optional or (where == "santa_torch" and argument in ("seed", "position")):
                continue
            with pytest.raises((*REFUSED, TypeError)) as caught:
                door(name)(**{**CALLS[name], argument: value})
            assert argument in str(caught.value)


@pytest.mark.parametrize("name", CALLS)
def test_missing_arguments(backend: str, name: str) -> None:
    for door in DOORS.values():
        with pytest.raises((TypeError, RuntimeError)):
            door(name)()


@pytest.mark.parametrize("method", [m for m in METHODS if m != "dense"])
def test_samples_must_be_given(method: str) -> None:
    with pytest.raises(ValueError, match=f"samples must be given.*{method}"):
        santa_torch.decode(q, k, v, method=method)
    assert santa_torch.decode(q, k, v, method="dense").shape == (2, 6, 24)


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 10**30, 1.5, "1", [1]])
def test_integers_that_are_no_seed(seed: Any) -> None:
    for name in ("seed", "position"):
        with pytest.raises(ValueError, match=name) as caught:
            santa_torch.decode(q, k, v, samples=2, **{name: seed})
        assert str(seed) in str(caught.value)


@pytest.mark.parametrize("name", ["block_table", "target_error"])
def test_arguments_of_later_versions_are_refused(name: str) -> None:
    for value in (0, 0.5, torch.zeros(2, 3, dtype=torch.int32), False):
        with pytest.raises(NotImplementedError, match=name):
            santa_torch.decode(q, k, v, samples=2, **{name: value})


def test_tensors_on_several_devices(backend: str) -> None:
    """Meta stands for any other device: no memory behind it may be read."""
    for name, arguments in CALLS.items():
        for argument, value in arguments.items():
            if not isinstance(value, torch.Tensor):
                continue
            mixed = {**arguments, argument: value.to("meta")}
            with pytest.raises(REFUSED, match=r"device|CPU") as caught:
                getattr(OPS, name)(**mixed)
            assert "meta" in str(caught.value)


def test_sparse_and_other_layouts(backend: str) -> None:
    for spoiled in (q.to_sparse(), torch.nested.nested_tensor(list(q)), q.to_mkldnn()):
        with pytest.raises(REFUSED):
            OPS.decode(**{**DECODE, "q": spoiled})


def test_views_that_torch_resolves_late(backend: str) -> None:
    """Negative and conjugate bits are folded in before the kernel reads memory."""
    assert torch._neg_view(q).is_neg()
    got = OPS.decode(**{**DECODE, "q": torch._neg_view(q)})
    assert torch.equal(got[0], OPS.decode(**{**DECODE, "q": -q})[0])


def test_too_much_memory_is_an_error() -> None:
    """Scores of 65,536 heads over 2^31 - 1 rows: no machine has the room, and none goes down."""
    big = k[:1, :1, :1].expand(1, 1, 2**31 - 1, 16)
    for method in ("shared", "systematic"):
        with pytest.raises(RuntimeError, match=r"cannot allocate \d+ bytes"):
            santa_torch.decode(torch.ones(1, 1 << 16, 16), big, big, samples=2, method=method)
    santa_torch.decode(q, k, v, samples=2)


@pytest.mark.parametrize("name", ["samples", "layer", "head_offset"])
@pytest.mark.parametrize("value", [True, 3.0, "3", 2**63, None, False, 0.0])
def test_integers_must_be_integers(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        santa_torch.decode(q, k, v, **{"samples": 3, name: value})
    assert str(value) in str(caught.value)


@pytest.mark.parametrize(
    "change", [{"method": None}, {"scale": "x"}, {"softcap": True}, {"seq_lens": [5, 6]}]
)
def test_arguments_of_another_type(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        santa_torch.decode(q, k, v, samples=3, **change)


def test_numpy_numbers_are_numbers() -> None:
    got = santa_torch.decode(q, k, v, samples=np.int32(3), scale=np.float32(0.5), layer=np.int64(2))
    assert torch.equal(got, santa_torch.decode(q, k, v, samples=3, scale=0.5, layer=2))


def test_a_plan_past_62_bits_is_an_error() -> None:
    """Broadcast inputs can ask for it without holding memory; a plan that wraps writes anywhere."""
    with pytest.raises(ValueError, match="2\\^62 bytes"):
        _load.C.plan_cpu(2**15, 2**16, 1, 2**31 - 256, 1, 1, "systematic")


def test_no_query_heads(backend: str) -> None:
    empty = torch.zeros(2, 0, 3)
    with pytest.raises(ValueError, match=r"coefficients.*got 0"):
        OPS.gather(empty.long(), empty, torch.zeros(2, 0, dtype=torch.int32), v)
    with pytest.raises(ValueError, match="kv_heads"):
        OPS.draw(empty.int(), **{name: DRAW[name] for name in DRAW if name != "weights"})


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"q": q[0]}, "q"),
        ({"k": k[0]}, "k"),
        ({"k": k[..., :8]}, "k"),
        ({"q": q[:, :5]}, "k"),
        ({"v": v[:, :1]}, "v"),
        ({"method": "nope"}, "nope"),
        ({"samples": -4}, "-4"),
    ],
)
def test_fakes_refuse_what_the_operator_refuses(change: dict[str, Any], word: str) -> None:
    arguments = {**DECODE, **change}
    on_meta = {
        name: value.to("meta") if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    OPS.decode(**DECODE)
    for given in (arguments, on_meta):
        with pytest.raises(ValueError, match=word):
            OPS.decode(**given)


@pytest.mark.parametrize("change", [{"method": "nope"}, {"samples": 0}, {"samples": 2**24 + 1}])
def test_the_reference_refuses_what_the_operator_refuses(change: dict[str, Any]) -> None:
    arguments = {"samples": 3, "method": "shared", **change}
    for function in (santa_torch.decode, santa_torch.reference.decode):
        with pytest.raises(ValueError, match=next(iter(change))):
            function(q, k, v, **arguments)


@pytest.mark.parametrize("level", ["", "sse9", "AVX2", "avx512 "])
def test_unknown_levels(level: str) -> None:
    before = OPS.cpu_level()
    with pytest.raises(ValueError, match="set_cpu_level.*" + level):
        OPS.set_cpu_level(level)
    assert OPS.cpu_level() == before


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )


def test_an_unknown_level_in_the_environment() -> None:
    code = (
        "import torch, santa_torch\n"
        "for _ in range(2):\n"
        "    try: santa_torch.decode(torch.ones(1, 1, 8),"
        " torch.ones(1, 1, 2, 8), torch.ones(1, 1, 2, 8), samples=1)\n"
        "    except (ValueError, RuntimeError) as error: print(error)\n"
    )
    result = run_python("-c", code, SANTA_CPU_LEVEL="avx1024")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("SANTA_CPU_LEVEL") == result.stdout.count("avx1024") == 2


@pytest.mark.parametrize("seed", [2])
def test_fuzz(seed: int) -> None:
    _fuzz(seed, 2500)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 108))
def test_fuzz_long(seed: int) -> None:
    _fuzz(seed, 40_000)


def _fuzz(seed: int, calls: int) -> None:
    result = run_python("fuzz.py", str(seed), str(calls), MALLOC_PERTURB_="165")
    assert result.returncode == 0, f"{result.returncode}\n{result.stdout}\n{result.stderr[-3000:]}"
    accepted, refused = map(int, result.stdout.split())
    assert accepted > calls / 10, "the fuzzer hardly ever makes a valid call"
    assert refused > calls / 10


def test_draw_wants_fewer_than_2_31_rows() -> None:
    where = torch.tensor([1])
    weights = torch.ones(1, 1, 1, dtype=torch.int32).expand(1, 1, 2**31)
    with pytest.raises(ValueError, match=r"weights must have fewer than 2\^31 rows, got \[1, 1, 2"):
        OPS.draw(weights, samples=1, kv_heads=1, seed=where, position=where)
