"""Time one decode step of each method against what plain PyTorch offers for the same inputs.

    python benchmarks/operator_speed.py [--rows 32768] [--samples 128] [--threads 2] [--json FILE]

All variants run interleaved in one process over several sets of K and V, together larger than the
caches of the processor, and the table gives ratios of lower quartiles: the machine's drift and its
neighbours hit all variants alike. Outputs are compared with float64 before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

import santa_torch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Inputs(NamedTuple):
    """Queries ``[B, Hq, D]`` and a list of caches ``[B, Hkv, L, D]``, one per repeat in turn."""

    q: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[1] // self.keys[0].shape[1]

    @property
    def kv_bytes(self) -> int:
        """Bytes of one cache."""
        return 2 * self.keys[0].numel() * self.keys[0].element_size()


def make_inputs(args: argparse.Namespace) -> Inputs:
    """Seeded inputs whose softmax is neither flat nor one row.

    Scores have a standard deviation of 2.6, so that a few dozen rows of a 32k cache carry the mass,
    as in the heads of trained models; a flat softmax over random values has an output near zero,
    against which no relative error says anything.
    """
    torch.manual_seed(0)
    dtype = DTYPES[args.dtype]
    shape = (args.batch, args.kv_heads, args.rows, args.head_dim)
    q = (2.6 * torch.randn(args.batch, args.heads, args.head_dim)).to(dtype)
    keys = [torch.randn(shape).to(dtype) for _ in range(args.caches)]
    values = [torch.randn(shape).to(dtype) for _ in range(args.caches)]
    return Inputs(q, keys, values)


def variants(inputs: Inputs, args: argparse.Namespace) -> dict[str, Callable[[int], torch.Tensor]]:
    """Functions of the index of a cache, by name."""
    q, keys, values = inputs
    batch, heads, dim = q.shape
    grouped_q = q.view(batch, heads // inputs.group, inputs.group, dim)
    seed = torch.zeros(1, dtype=torch.int64)

    def read(i: int) -> torch.Tensor:
        return keys[i].view(torch.int64).sum() + values[i].view(torch.int64).sum()

    def grouped(i: int) -> torch.Tensor:
        scores = (grouped_q @ keys[i].transpose(-1, -2)).float() * dim**-0.5
        return (scores.softmax(-1).to(q.dtype) @ values[i]).view(batch, heads, dim)

    def folded_sdpa(i: int) -> torch.Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(grouped_q, keys[i], values[i])
        return out.reshape(batch, heads, dim)

    def santa(method: str) -> Callable[[int], torch.Tensor]:
        def run(i: int) -> torch.Tensor:
            out = santa_torch.decode(
                q, keys[i], values[i], samples=args.samples, method=method, seed=seed
            )
            assert isinstance(out, torch.Tensor)
            return out

        return run

    names: dict[str, Callable[[int], torch.Tensor]] = {
        "read K and V once": read,
        "PyTorch grouped matmul": grouped,
        "PyTorch SDPA, group folded": folded_sdpa,
    }
    for method in santa_torch.METHODS:
        names[f"santa {method}"] = santa(method)
    return names


def check(inputs: Inputs, functions: dict[str, Callable[[int], torch.Tensor]]) -> dict[str, float]:
    """Relative RMS error against float64; raises where an exact variant is wrong."""
    batch, heads, dim = inputs.q.shape
    q = inputs.q.double().view(batch, -1, inputs.group, dim)
    p = (q @ inputs.keys[0].double().transpose(-1, -2) * dim**-0.5).softmax(-1)
    exact = (p @ inputs.values[0].double()).view(batch, heads, dim)
    errors = {}
    for name, function in functions.items():
        if name.startswith("read"):
            continue
        difference = function(0).double() - exact
        errors[name] = float(difference.square().mean().sqrt() / exact.square().mean().sqrt())
        if not name.startswith("santa") or name.endswith("dense"):
            assert errors[name] < 0.02, f"{name} is off by {errors[name]:.3g}"
    return errors


def measure(
    functions: dict[str, Callable[[int], torch.Tensor]], caches: int, repeats: int
) -> dict[str, float]:
    """Lower quartile of milliseconds per call, variants interleaved."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(repeats + 1):  # the first round warms up
        for name, function in functions.items():
            for i in range(caches):
                start = time.perf_counter()
                function(i)
                if repeat:
                    times[name].append(1e3 * (time.perf_counter() - start))
    return {name: sorted(values)[len(values) // 4] for name, values in times.items()}


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=32, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rows", type=int, default=32768, help="rows of the KV cache")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--caches", type=int, default=4, help="sets of K and V used in turn")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    inputs = make_inputs(args)
    functions = variants(inputs, args)
    errors = check(inputs, functions)
    times = measure(functions, args.caches, args.repeats)

    dense, floor = times["santa dense"], times["read K and V once"]
    gigabytes = inputs.kv_bytes / 1e9
    print(
        f"B={args.batch} Hq={args.heads} Hkv={args.kv_heads} D={args.head_dim} L={args.rows} "
        f"{args.dtype} S={args.samples} threads={args.threads} "
        f"level={santa_torch.build_info().cpu_level} load={os.getloadavg()[0]:.1f}"
    )
    print(f"{'':28s}{'ms':>8s}{'vs dense':>10s}{'vs read':>9s}{'KV GB/s':>9s}{'error':>9s}")
    for name, ms in times.items():
        error = f"{errors[name]:9.4f}" if name in errors else f"{'':9s}"
        print(
            f"{name:28s}{ms:8.2f}{dense / ms:9.2f}x{floor / ms:8.2f}x"
            f"{gigabytes / ms * 1e3:9.1f}{error}"
        )
    if args.json:
        settings = {key: value for key, value in vars(args).items() if key != "json"}
        report = {
            "settings": settings,
            "machine": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "milliseconds": times,
            "relative_rms_error": errors,
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
