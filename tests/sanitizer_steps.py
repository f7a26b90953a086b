"""Small steps of every operator, for compute-sanitizer to watch: scripts/gpu_check.sh runs it.

    compute-sanitizer --tool memcheck python tests/sanitizer_steps.py

With PYTORCH_NO_CUDA_MEMORY_CACHING=1 every tensor is an allocation of its own, so that a read past
its end is seen.
Inputs are made on the CPU and copied: only kernels of santa_torch run, and what initcheck and
racecheck report is theirs. What comes back is compared, since a step that did nothing is clean too.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from cases import DRAWING, DTYPES, Case, Inputs
from compare import assert_equal

import santa_torch

OPS = torch.ops.santa
SAMPLES = 24

#: Together they take the aligned and the narrow loads, ragged chunks, masks, sinks and an odd D.
CASES = (
    Case(rows=300, seq_lens=(300, 33)),
    Case(rows=600, mask="heads", sinks="float32", seq_lens=(0, 600)),
    Case(rows=515, group=5, layout="offset", mask="additive", softcap=20.0),
    Case(rows=259, head_dim=33, value_dim=100, group=1, layout="interleaved", mask="nothing"),
)


def steps() -> Iterator[Case]:
    """Every case in every dtype."""
    for case in CASES:
        for dtype in DTYPES:
            yield case.but(dtype=dtype)


def send(x: Any, device: str) -> Any:
    """A tensor on the device by one copy of its whole storage: strides and odd addresses stay."""
    if not isinstance(x, torch.Tensor) or x.device.type == device:
        return x
    stored = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    return stored.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def check(case: Case, device: str) -> int:
    """Run one case and compare with the CPU kernels; the number of operator calls."""
    here = case.inputs()
    there = Inputs(*(send(x, device) for x in here))
    address = {"seed": torch.tensor([5]), "position": torch.tensor([case.rows]), "layer": 3}
    away = {name: send(value, device) for name, value in address.items()}

    exact = OPS.decode(**here.arguments(), samples=1, method="dense", seed=address["seed"])
    got = OPS.decode(
        **there.arguments(), samples=1, method="dense", seed=away["seed"], return_stats=True
    )
    close(case, "out", got[0], exact[0])
    close(case, "lse", got[1], exact[1])

    scores, maxima = OPS.score(there.q, there.k, **there.scoring())
    weights = OPS.weigh(scores, maxima)
    for method in DRAWING:
        settings = {"samples": SAMPLES, "method": method}
        OPS.decode(**there.arguments(), **settings, **away, return_stats=True)
        step = OPS.decode(**there.arguments(), **settings, **away)
        assert not step[0].cpu().isnan().any(), f"{case}, {method}: NaN"
        settings["kv_heads"] = case.kv_heads
        drawn = OPS.draw(weights, **settings, **away)
        expected = OPS.draw(weights.cpu(), **settings, **address)
        for name, one, other in zip(("rows", "counts", "num_rows"), drawn, expected, strict=True):
            assert_equal(f"{case}, {method}, {name}", one.cpu(), other)
        coefficients = torch.randn(case.batch, case.heads, expected[0].shape[2])
        sums = OPS.gather(drawn[0], send(coefficients, device), drawn[2], there.v)
        close(case, "gather", sums, OPS.gather(expected[0], coefficients, expected[2], here.v))
    return 4 + 4 * len(DRAWING)


def close(case: Case, name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """The kernels of two devices add in different orders, and round to the same dtype."""
    room = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}[got.dtype]
    torch.testing.assert_close(
        got.cpu(), expected, rtol=room, atol=room, msg=lambda text: f"{case}, {name}: {text}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Small steps of every operator on a device.")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    device = parser.parse_args().device
    if device == "cuda" and santa_torch.build_info().cuda_module != "loaded":
        parser.exit(1, f"error: no CUDA operators: {santa_torch.build_info().cuda_module}\n")
    calls = 0
    with torch.no_grad():
        for case in steps():
            calls += check(case, device)
    if device == "cuda":
        torch.cuda.synchronize()
    print(f"{calls} operator calls on {device}: as expected")


if __name__ == "__main__":
    main()
