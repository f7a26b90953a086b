"""How a decode step is cut on a GPU: `plan`, and ``python -m santa_torch plan``.

The planner is pure: it wants figures of a device, not the device, so that the plan for any GPU can
be read anywhere.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

import torch

from santa_torch import _load
from santa_torch.config import METHODS

__all__ = ["DEVICES", "DeviceFigures", "plan", "this_device"]


@dataclass(frozen=True)
class DeviceFigures:
    """What the planner wants to know of a GPU.

    Attributes
    ----------
    name : str
        Name of the product.
    multiprocessors : int
        Streaming multiprocessors.
    shared_bytes, shared_bytes_per_multiprocessor : int
        Shared memory that one block may have, and all blocks on a multiprocessor together, in
        bytes.
    compute_capability : int
        90 stands for 9.0.
    bytes_per_second : float
        Bandwidth of global memory; enters predictions only, 0 where unknown.
    """

    name: str
    multiprocessors: int
    shared_bytes: int
    shared_bytes_per_multiprocessor: int
    compute_capability: int
    bytes_per_second: float = 0.0


# Multiprocessors and bandwidth: NVIDIA's data sheets. Shared memory: CUDA C++ Programming Guide,
# technical specifications per compute capability.
DEVICES: dict[str, DeviceFigures] = {
    "rtx6000ada": DeviceFigures("RTX 6000 Ada", 142, 99 << 10, 100 << 10, 89, 960e9),
    "a100": DeviceFigures("A100 80GB SXM", 108, 163 << 10, 164 << 10, 80, 2039e9),
    "h100": DeviceFigures("H100 SXM", 132, 227 << 10, 228 << 10, 90, 3350e9),
    "h200": DeviceFigures("H200", 132, 227 << 10, 228 << 10, 90, 4800e9),
    "b200": DeviceFigures("B200", 148, 227 << 10, 228 << 10, 100, 8000e9),
}


def this_device(index: int | None = None) -> DeviceFigures:
    """Figures of a GPU of this machine, as the operators ask for them.

    Raises
    ------
    RuntimeError
        There is no GPU, or torch has no CUDA.
    """
    if not torch.cuda.is_available():
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "has no CUDA"
        raise RuntimeError(f"no GPU: torch {torch.__version__} {built} and finds no device")
    found = torch.cuda.get_device_properties(
        torch.cuda.current_device() if index is None else index
    )
    return DeviceFigures(
        found.name,
        found.multi_processor_count,
        getattr(found, "shared_memory_per_block_optin"),  # noqa: B009  torch's stubs lack it
        found.shared_memory_per_multiprocessor,
        10 * found.major + found.minor,
    )


def plan(
    device: DeviceFigures,
    *,
    method: str = "shared",
    samples: int = 128,
    batch: int = 1,
    query_heads: int = 32,
    kv_heads: int = 8,
    rows: int = 32768,
    head_dim: int = 128,
    value_dim: int | None = None,
    dtype: str = "bfloat16",
    statistics: bool = False,
) -> dict[str, Any]:
    """Launches, splits, shared memory, scratch memory and predicted bytes of a decode step.

    Parameters
    ----------
    device : DeviceFigures
        Of ``DEVICES``, or from ``this_device``.
    method, samples
        As in ``decode``.
    batch, query_heads, kv_heads, rows, head_dim, value_dim : int
        B, Hq, Hkv, L, D and Dv; ``value_dim`` defaults to ``head_dim``. L is the capacity of the
        cache: lengths are known to the device alone.
    dtype : str
        "float32", "float16" or "bfloat16".
    statistics : bool
        Plan for ``return_stats=True``.

    Returns
    -------
    dict
        ``text`` is for people; beside it the numbers it shows. Sizes are in bytes, times in
        microseconds at the device's bandwidth with nothing else counted.

    Raises
    ------
    ValueError
        A size is out of range, or a row of K does not fit into shared memory.
    """
    sizes = [
        batch,
        query_heads,
        kv_heads,
        rows,
        head_dim,
        head_dim if value_dim is None else value_dim,
    ]
    # What the planner multiplies stays within 62 bits below this: at worst every head of q reads K
    # by itself.
    elements = batch * query_heads * max(rows, 1) * max(head_dim + sizes[-1], 1)
    if max(map(abs, (elements, samples, *sizes))) >= 2**56:
        raise ValueError(f"plan: sizes are too large together: B, Hq, Hkv, L, D, Dv = {sizes}")
    figures = [
        device.multiprocessors,
        device.shared_bytes,
        device.shared_bytes_per_multiprocessor,
        device.compute_capability,
    ]
    found: dict[str, Any] = _load.C.plan_launch(
        sizes, dtype, method, samples, statistics, figures, device.bytes_per_second
    )
    return found


def main(argv: list[str]) -> int:
    """Run ``python -m santa_torch plan``."""
    parser = argparse.ArgumentParser("python -m santa_torch plan", description=__doc__)
    parser.add_argument(
        "--device",
        choices=[*DEVICES, "this"],
        default="h100",
        help="figures of a known GPU, or of the one in this machine (default: %(default)s)",
    )
    parser.add_argument(
        "--method", choices=METHODS, action="append", help="may be given again (default: all)"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--statistics", action="store_true", help="plan for return_stats=True")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    numbers = {"samples": 128, "batch": 1, "query-heads": 32, "kv-heads": 8, "rows": 32768}
    for name, value in {**numbers, "head-dim": 128}.items():
        parser.add_argument(f"--{name}", type=int, default=value, help="default: %(default)s")
    parser.add_argument("--value-dim", type=int, help="default: the head dim")
    arguments = vars(parser.parse_args(argv))
    as_json, methods = arguments.pop("json"), arguments.pop("method") or METHODS
    name = arguments.pop("device")
    try:
        device = this_device() if name == "this" else DEVICES[name]
        plans = {method: plan(device, method=method, **arguments) for method in methods}
    except (ValueError, RuntimeError) as error:
        parser.exit(1, f"error: {error}\n")
    if as_json:
        print(json.dumps({"device": device.name, **plans}, indent=2))
        return 0
    print(f"{device.name}: {arguments}")
    for found in plans.values():
        print(found["text"])
    return 0
