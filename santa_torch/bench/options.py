"""The command line. Imports no torch, so that ``--help`` and mistakes answer at once."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from santa_torch.bench import cases
from santa_torch.bench.cases import Case
from santa_torch.config import MAX_SAMPLES, METHODS

#: Without importing the peers, which need torch.
PEERS = (
    "grouped",
    "sdpa-folded",
    "sdpa-gqa",
    "sdpa-repeated",
    "compiled",
    "flex",
    "onnxruntime",
    "openvino",
    "llama.cpp",
    "llama.cpp-bfloat16",
)

#: Peers that take a compiler and many seconds for each shape; ``--quick`` leaves them out.
COMPILED = ("compiled", "flex")

MODELS = ("smollm2", "llama-layers")

#: Rounds and counted calls of a turn, by suite.
ROUNDS = {"quick": (6, 2), "default": (12, 3), "full": (12, 3)}

#: Seconds to wait for a quiet machine, by suite.
WAIT = {"quick": 2.0, "default": 30.0, "full": 30.0}


class BenchError(Exception):
    """What was asked for cannot be had; the message is one line for the user."""


@dataclass(frozen=True)
class Options:
    """A checked command line; see ``--help`` for the meaning of each field.

    ``suite`` is "quick", "default", "full" or "by hand"; ``cases`` is what it lists.
    """

    suite: str
    cases: tuple[Case, ...]
    model: str | None
    context: int | None
    samples: int
    threads: tuple[int, ...]
    peers: tuple[str, ...]
    rounds: int
    calls: int
    wait: float
    seed: int
    memory: int | None
    stages: bool
    out: Path


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"bench: error: {message}\n")  # one line, without the usage in front


def parse(argv: Sequence[str]) -> Options:
    """Read the options; exits with code 2 and one line on standard error where they are wrong."""
    parser = _parser()
    given = parser.parse_args(argv)
    if given.quick and given.full:
        parser.error("argument --full: not allowed with argument --quick")
    if given.out.exists() and not given.out.is_dir():
        parser.error(f"argument --out: {str(given.out)!r} is not a directory")
    pace = "quick" if given.quick else "full" if given.full else "default"
    axes = ("batch", "heads", "head_dim", "rows", "dtype", "methods", "levels")
    by_hand = any(getattr(given, name) is not None for name in axes)
    if by_hand and given.full:
        parser.error(
            "argument --full: lists its own shapes; leave out --rows, --heads and the like"
        )
    if given.model and by_hand:
        parser.error("argument --model: shapes are the model's; only --context and --samples apply")
    if given.context and not given.model:
        parser.error("argument --context: is for --model; rows of operators are --rows")
    rounds, calls = ROUNDS[pace]
    threads = tuple(given.threads or (usable_cores(),))
    for word in ("all", "none"):
        if given.peers and word in given.peers and len(given.peers) > 1:
            parser.error(f"argument --peers: {word!r} stands alone, got {' '.join(given.peers)!r}")
    chosen = given.peers or [key for key in PEERS if not (given.quick and key in COMPILED)]
    return Options(
        suite="by hand" if by_hand else pace,
        cases=tuple(_cases(given, pace, threads)),
        model=given.model,
        context=given.context,
        samples=(given.samples or [256])[0],
        threads=threads,
        peers=tuple(key for key in PEERS if key in _names(chosen)),
        rounds=given.rounds or rounds,
        calls=calls,
        wait=WAIT[pace] if given.wait is None else given.wait,
        seed=given.seed,
        memory=None if given.memory is None else int(given.memory * cases.GIB),
        stages=given.stages,
        out=given.out,
    )


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _names(chosen: Sequence[str]) -> Sequence[str]:
    return {"all": PEERS, "none": ()}.get(chosen[0], chosen) if chosen else ()


def _cases(given: argparse.Namespace, pace: str, threads: Sequence[int]) -> list[Case]:
    suites = {
        "quick": cases.quick_suite,
        "default": cases.default_suite,
        "full": cases.full_suite,
    }
    by_hand = (given.batch, given.heads, given.head_dim, given.rows, given.dtype)
    if all(axis is None for axis in by_hand):
        found = [case for count in threads for case in suites[pace](count)]
    else:
        found = [
            Case(batch, heads, kv_heads, head_dim, rows, dtype, count)
            for count in threads
            for dtype in given.dtype or ["bfloat16"]
            for heads, kv_heads in given.heads or [(32, 8)]
            for head_dim in given.head_dim or [128]
            for batch in given.batch or [1]
            for rows in given.rows or [8192, 32768]
        ]
    return [cases.adapt(case, given.methods, given.samples, given.levels) for case in found]


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        "python -m santa_torch bench",
        description="Time decode steps of santa_torch against what people would use instead, and "
        "against the time it takes to read K and V once. All variants of a shape take turns in one "
        "process, every output is compared with float64 first, and the buffers are rotated so that "
        "none is still in the caches. Without options: the table of the README.",
        epilog="Any of the axes (--rows, --batch, --heads, --head-dim, --dtype) makes a suite by "
        "hand: all combinations of what is given. docs/benchmarks.md says how figures are formed.",
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="two shapes, no compiled peers: under a minute")
    add("--full", action="store_true", help="every shape that a target is about: tens of minutes")
    add("--rows", nargs="+", type=_positive, metavar="L", help="rows of the KV cache")
    add("--batch", nargs="+", type=_positive, metavar="B", help="sequences")
    add("--heads", nargs="+", type=_heads, metavar="Q/KV", help="query and KV heads, as 32/8")
    add("--head-dim", nargs="+", type=_positive, metavar="D", help="features of a head")
    add("--dtype", nargs="+", choices=tuple(cases.ITEM_BYTES), help="of q, K and V")
    add("--threads", nargs="+", type=_positive, metavar="T", help="of us and of peers (all cores)")
    add("--methods", nargs="+", choices=METHODS, help="of santa_torch (dense systematic shared)")
    add("--samples", nargs="+", type=_samples, metavar="S", help="of methods that sample (128)")
    levels = ("generic", "avx2", "avx512", "amx")
    add("--levels", nargs="+", choices=levels, help="to compare as well")
    add(
        "--peers",
        nargs="+",
        choices=(*PEERS, "all", "none"),
        metavar="PEER",
        help=f"{', '.join(PEERS)}, all or none (all; with --quick those that need no compiler)",
    )
    add("--model", choices=MODELS, help="time whole steps of a model instead of the operator")
    add("--context", type=_positive, metavar="N", help="rows in the model's cache")
    add("--rounds", type=_positive, metavar="N", help="turns of every variant")
    add("--wait", type=_seconds, metavar="SECONDS", help="at most, for a quiet machine")
    add("--seed", type=int, default=0, metavar="N", help="of the order of the variants (0)")
    add("--memory", type=_gibibytes, metavar="GIB", help="that may be used (70 %% of what is free)")
    add("--stages", action="store_true", help="print where our variants spend their time")
    add("--out", type=Path, metavar="DIR", default=Path("out/bench"), help="for tables and plots")
    return parser


def _positive(text: str) -> int:
    return _integer(text, 1, 2**40)


def _samples(text: str) -> int:
    return _integer(text, 1, MAX_SAMPLES)


def _integer(text: str, low: int, high: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = low - 1
    if not low <= number <= high:
        wanted = "a positive integer" if high == 2**40 else f"between {low} and {high}"
        raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}")
    return number


def _seconds(text: str) -> float:
    return _number(text, "seconds, 0 or more", 0.0)


def _gibibytes(text: str) -> float:
    return _number(text, "more than 0 GiB", 1e-6)


def _number(text: str, wanted: str, low: float) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not low <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}")
    return number


def _heads(text: str) -> tuple[int, int]:
    try:
        heads, kv_heads = (_positive(part) for part in text.split("/"))
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(
            f"must be query heads/KV heads, as 32/8, got {text!r}"
        ) from None
    if heads % kv_heads:
        raise argparse.ArgumentTypeError(f"{heads} query heads are no multiple of {kv_heads}")
    return heads, kv_heads
