"""The demo's command line. Imports no torch, so that ``--help`` and mistakes answer at once."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from santa_torch.config import METHODS, BernoulliConfig, SantaConfig

DTYPES = ("float32", "bfloat16", "float16")

#: Defaults of (context, tokens), in full and with ``--quick``.
FULL, QUICK = (4096, 64), (1024, 16)

#: Seconds for each decoding stage where ``--tokens`` is left to the default, so that a slow or busy
#: machine gives fewer tokens rather than a long wait.
PATIENCE = 40.0


class DemoError(Exception):
    """What was asked for cannot be had; the message is one line for the user."""


@dataclass(frozen=True)
class Options:
    """A checked command line; see ``--help`` for the meaning of each field.

    ``patience`` is the time after which a decoding stage stops early, in seconds.
    """

    model: str | None
    text: str | None
    context: int
    tokens: int
    patience: float
    samples: int
    method: str
    bernoulli: BernoulliConfig | None
    sketch_bits: int | None
    dtype: str
    device: str
    seed: int
    out: Path

    @property
    def config(self) -> SantaConfig:
        """Settings of the last line of the table, in the dtype that is timed."""
        return SantaConfig(
            self.method,
            self.samples,
            seed=self.seed,
            bernoulli=self.bernoulli,
            sketch_bits=self.sketch_bits,
        )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"demo: error: {message}\n")  # one line, without the usage in front


def parse(argv: list[str]) -> Options:
    """Read the options; exits with code 2 and one line on standard error where they are wrong."""
    parser = _parser()
    given = parser.parse_args(argv)
    context, tokens = QUICK if given.quick else FULL
    try:
        SantaConfig(method=given.method, samples=given.samples, seed=given.seed)
    except ValueError as error:
        parser.error(f"argument --{error}")
    bernoulli = None
    if given.bernoulli is not None:
        try:
            bernoulli = BernoulliConfig(given.bernoulli, shared=not given.bernoulli_per_head)
        except ValueError as error:
            parser.error(f"argument --bernoulli: {error}")
    elif given.bernoulli_per_head:
        parser.error(
            "argument --bernoulli-per-head: says how --bernoulli N draws, and that is not given"
        )
    wanted = 32 if given.dtype == "float32" else 16
    if given.sketch_bits not in (None, wanted):
        parser.error(
            f"argument --sketch-bits: keys in {given.dtype} take {wanted}, got {given.sketch_bits}"
        )
    if given.out.exists() and not given.out.is_dir():
        parser.error(f"argument --out: {str(given.out)!r} is not a directory")
    return Options(
        model=given.model,
        text=given.text,
        context=given.context or context,
        tokens=given.tokens or tokens,
        patience=float("inf") if given.tokens else PATIENCE,
        samples=given.samples,
        method=given.method,
        bernoulli=bernoulli,
        sketch_bits=given.sketch_bits,
        dtype=given.dtype,
        device=given.device,
        seed=given.seed,
        out=given.out,
    )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        "python -m santa_torch demo",
        description="Let a Llama-like model continue a long text with exact and with sampled "
        "attention; compare text, speed, bytes of the KV cache read, and next-token probabilities.",
        epilog="Memory: the weights in float32 and one float32 KV cache for each line of the "
        "table, three in all; the heading of a run says how much that is. --dtype bfloat16 and "
        "float16 need the same, because the probabilities are compared in float32 first; then the "
        "weights are rounded in place, and the caches take half.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", help="hub name, directory or .gguf file (None: the packaged SmolLM2-135M)")
    add("--text", metavar="FILE", help="text to read (None: Python's own documentation topics)")
    add("--context", type=_positive, metavar="N", help=f"tokens read before decoding ({FULL[0]})")
    add(
        "--tokens", type=_positive, metavar="N", help=f"tokens decoded ({FULL[1]}, time permitting)"
    )
    add("--method", choices=METHODS, default="shared", help="how rows are sampled")
    add("--samples", type=_positive, metavar="S", default=256, help="number of samples")
    add(
        "--bernoulli",
        type=_positive,
        metavar="N",
        help="score with a stochastic query of N draws, which leaves out features of the keys",
    )
    add(
        "--bernoulli-per-head",
        action="store_true",
        help="draw features for each query head, as in the paper, not for each KV head",
    )
    add(
        "--sketch-bits",
        type=int,
        choices=(16, 32),
        help="keep the keys once more, feature by feature, so that features left out are not read; "
        "32 for float32, else 16",
    )
    add("--seed", type=int, metavar="N", default=0, help="seed of the draws")
    add(
        "--dtype",
        choices=DTYPES,
        default=DTYPES[0],
        help="of the timed model; probabilities are compared in float32 in any case, "
        "and in this dtype too",
    )
    add("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    add("--out", type=Path, metavar="DIR", default=Path("out/demo"), help="for PNG and JSON")
    add("--quick", action="store_true", help=f"{QUICK[0]} and {QUICK[1]} tokens by default")
    return parser


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return number
