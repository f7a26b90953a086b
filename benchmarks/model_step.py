"""Time one decode step of SmolLM2-135M: attention by cache by mode, and the cost of an append.

    python benchmarks/model_step.py [--context 4096] [--attention sdpa dense shared]
        [--caches dynamic static santa santa-static] [--modes eager compiled] [--json FILE]

All variants run interleaved in one process, and the table gives ratios of lower quartiles: the
machine's drift and its neighbours hit all variants alike. Every variant's logits are compared with
eager SDPA (or, where it samples, with its own eager form) before anything is timed. Compiling takes
about a minute for each compiled variant.

The context is prefilled once; a step is undone (cropped) outside of the timed part.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo
import transformers
from torch._inductor.compile_fx import compile_fx
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, StaticLayer

from santa_torch import SantaConfig, hf
from santa_torch.bench import machine, steps
from santa_torch.bench.timing import lower_quartile
from santa_torch.demo import options, subject
from santa_torch.hf.layer_growing import SantaLayer
from santa_torch.hf.layer_static import SantaStaticLayer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

#: Rows that caches have room for beyond the context.
SPARE = 64

CACHES: dict[str, Callable[[Any, int], Any]] = {
    "dynamic": lambda config, _: DynamicCache(config=config),
    "static": lambda config, rows: StaticCache(config=config, max_cache_len=rows),
    "santa": lambda config, rows: hf.SantaCache(config, reserve=rows),
    "santa-static": lambda config, rows: hf.SantaCache(config, max_cache_len=rows),
}

LAYERS: dict[str, Callable[[int], Any]] = {
    "DynamicCache": lambda _: DynamicLayer(),
    "StaticCache": StaticLayer,
    "SantaCache": lambda rows: SantaLayer(reserve=rows),
    "static SantaCache": SantaStaticLayer,
}


class Variant(NamedTuple):
    """One line of the table."""

    attention: str
    cache: str
    mode: str

    def __str__(self) -> str:
        return f"{self.attention:8s}{self.cache:14s}{self.mode}"


class Inductor:
    """torch's default backend, a new one for each variant.

    Compiled code is looked up by backend first. With one backend for all, each step would pay for
    the guards of every other variant.
    """

    def __call__(self, graph: Any, inputs: Any) -> Any:
        """Compile one graph."""
        return compile_fx(graph, inputs)


class Bench:
    """A model, a filled cache of each kind, and its steps."""

    def __init__(self, args: argparse.Namespace) -> None:
        given = ["--context", str(args.context), "--tokens", "2"]
        loaded = subject.load(options.parse(given))
        self.model = loaded.model.to(DTYPES[args.dtype])
        self.tokens = loaded.tokens
        self.context = args.context
        self.configs = {
            "sdpa": None,
            "dense": SantaConfig("dense"),
            "shared": SantaConfig("shared", samples=args.samples),
        }
        self.caches = self._fill(args.caches)
        self.steps = {}
        torch._dynamo.config.recompile_limit = 100
        for attention in args.attention:
            for cache in args.caches:
                for mode in args.modes:
                    run = self.model
                    if mode == "compiled":
                        run = torch.compile(self.model, backend=Inductor(), fullgraph=True)
                    self.steps[Variant(attention, cache, mode)] = run

    @torch.no_grad()
    def _fill(self, names: list[str]) -> dict[str, Any]:
        first = DynamicCache(config=self.model.config)
        tokens = self.tokens[:, : self.context]
        steps.prefill(self.model, tokens, first, lambda done: None)
        caches = {}
        for name in names:
            caches[name] = CACHES[name](self.model.config, self.context + SPARE)
            places = {"cache_position": torch.arange(self.context)}
            for index, layer in enumerate(first.layers):
                caches[name].update(layer.keys, layer.values, index, places)
        return caches

    def step(self, variant: Variant, offset: int = 0) -> tuple[torch.Tensor, float]:
        """Logits of one token after ``context + offset``, and the milliseconds that it took."""
        token = self.tokens[:, self.context : self.context + 1].contiguous()
        run, cache = self.steps[variant], self.caches[variant.cache]
        start = time.perf_counter()
        logits = steps.forward(self.model, run, token, self.context + offset, cache)
        return logits, 1e3 * (time.perf_counter() - start)

    def attention(self, name: str) -> Any:
        """The model with this attention, as a context."""
        return steps.attention(self.model, self.configs[name])

    def undo(self, variant: Variant, count: int = 1) -> None:
        """Take the last rows back."""
        steps.undo(self.caches[variant.cache], count)

    def warm_up(self) -> None:
        """Compile, at two lengths so that growing shapes are known to grow; check the logits."""
        exact: torch.Tensor | None = None
        for variant in self.steps:
            start = time.perf_counter()
            with self.attention(variant.attention):
                logits, _ = self.step(variant)
                self.step(variant, 1)
                self.undo(variant, 2)
            print(f"  {variant}: ready after {time.perf_counter() - start:.0f} s", flush=True)
            if variant.attention == "shared":
                assert torch.isfinite(logits).all(), f"{variant}: logits are not finite"
                continue
            exact = logits if exact is None else exact
            error = float((logits - exact).abs().max() / exact.abs().max())
            assert error < 0.05, f"{variant}: logits are off by {error:.3g}"

    def measure(self, repeats: int) -> dict[Variant, list[float]]:
        """Milliseconds per step, variants interleaved."""
        times: dict[Variant, list[float]] = {variant: [] for variant in self.steps}
        for repeat in range(repeats + 1):  # the first round warms up
            for variant in self.steps:
                with self.attention(variant.attention):
                    _, taken = self.step(variant)
                    self.undo(variant)
                if repeat:
                    times[variant].append(taken)
        return times


@torch.no_grad()
def appends(lengths: list[int], dtype: torch.dtype, repeats: int) -> dict[str, dict[int, float]]:
    """Lower quartile of microseconds to append one row to a layer of 3 heads, D = 64.

    Layers take turns of several appends: after each turn of DynamicCache the processor's caches
    hold nothing else, which the first append of the next layer pays for.
    """
    times: dict[str, dict[int, list[float]]] = {name: {} for name in LAYERS}
    new, turns = torch.randn(1, 3, 1, 64).to(dtype), 5
    for length in lengths:
        layers = {name: make(length + turns * repeats) for name, make in LAYERS.items()}
        rows = torch.randn(1, 3, length, 64).to(dtype)
        for layer in layers.values():
            layer.update(rows, rows, {"cache_position": torch.arange(length)})
        for turn in range(turns):
            for name, layer in layers.items():
                for repeat in range(repeats):
                    place = {"cache_position": torch.tensor([length + turn * repeats + repeat])}
                    start = time.perf_counter()
                    layer.update(new, new, place)
                    taken = 1e6 * (time.perf_counter() - start)
                    times[name].setdefault(length, []).append(taken)
    return {
        name: {length: lower_quartile(taken) for length, taken in by_length.items()}
        for name, by_length in times.items()
    }


def report_steps(times: dict[Variant, list[float]]) -> None:
    """Print the table of steps."""
    quartiles = {variant: lower_quartile(taken) for variant, taken in times.items()}
    first = next(iter(quartiles))
    print(f"{'':32s}{'ms':>8s}{'median':>8s}{'vs first':>10s}{'vs eager':>10s}")
    for variant, ms in quartiles.items():
        eager = quartiles.get(variant._replace(mode="eager"))
        ratio = f"{eager / ms:9.2f}x" if eager and variant.mode != "eager" else ""
        print(
            f"{variant!s:32s}{ms:8.2f}{statistics.median(times[variant]):8.2f}"
            f"{quartiles[first] / ms:9.2f}x{ratio}"
        )


def report_appends(costs: dict[str, dict[int, float]]) -> None:
    """Print the table of appends."""
    lengths = list(next(iter(costs.values())))
    print("us to append one row to one layer after" + "".join(f"{n:>9d}" for n in lengths))
    for name, by_length in costs.items():
        print(f"{name:39s}" + "".join(f"{by_length[n]:9.1f}" for n in lengths))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    attentions = ("sdpa", "dense", "shared")
    modes = ("eager", "compiled")
    parser.add_argument("--context", type=int, default=4096, help="rows in the cache")
    parser.add_argument("--attention", nargs="+", choices=attentions, default=attentions)
    parser.add_argument("--caches", nargs="+", choices=CACHES, default=list(CACHES))
    parser.add_argument("--modes", nargs="+", choices=modes, default=modes)
    parser.add_argument("--samples", type=int, default=256, help="S of shared")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--wait", type=float, default=30.0, help="seconds, for a quiet machine")
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 8192, 65536])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


def main() -> None:
    """Run the benchmark and print its tables."""
    args = parse()
    torch.set_num_threads(args.threads)
    facts = {**machine.facts(), "transformers": transformers.__version__}
    print(
        f"SmolLM2-135M {args.dtype} context={args.context} S={args.samples} "
        f"threads={args.threads} torch={facts['torch']} transformers="
        f"{facts['transformers']} level={facts['cpu_level']}"
    )
    bench = Bench(args)
    bench.warm_up()
    with machine.Watch().over(args.wait) as disturbance:
        times = bench.measure(args.repeats)
    if not disturbance.quiet:
        print(f"not quiet: others used {disturbance.cores:.2f} cores meanwhile")
    report_steps(times)
    costs = appends(args.lengths, DTYPES[args.dtype], args.repeats) if args.lengths else {}
    if costs:
        report_appends(costs)
    if args.json:
        report = {
            "settings": {key: value for key, value in vars(args).items() if key != "json"},
            "machine": facts,
            "cores_of_others": disturbance.cores,
            "milliseconds": {
                " ".join(variant): {"lower_quartile": lower_quartile(taken), "all": taken}
                for variant, taken in times.items()
            },
            "append_microseconds": costs,
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
