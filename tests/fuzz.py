"""Calls with random arguments, good and bad: ``python fuzz.py SEED CALLS``.

Runs in a process of its own, since what it looks for may kill it. Prints how many calls were
accepted and how many refused. An accepted call with ordinary numbers must give ordinary numbers;
any error but a refusal by the operators ends the run.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

import santa_torch
from santa_torch import ops

REFUSED = (ValueError, RuntimeError, NotImplementedError, MemoryError)
SIZES = (0, 1, 1, 2, 2, 3, 4, 7, 8, 16, 17, 33)
ROWS = (0, 1, 2, 15, 16, 17, 31, 33, 255, 256, 257, 300, 513)
INTEGERS = (-(2**63), -1, 0, 1, 2, 3, 17, 255, 2**24, 2**24 + 1, 2**31, 2**32, 2**62, 2**63 - 1)
FLOATS = (0.0, 0.125, 1.0, -1.0, 3e38, 1e39, float("nan"), float("inf"))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OTHERS = (torch.float64, torch.int32, torch.int64, torch.bool, torch.uint8, torch.complex64)


class Fuzzer:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.torch_random = torch.Generator().manual_seed(seed)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def tensor(self, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        """Random numbers behind random strides; now and then a wrong shape or dtype."""
        shape = list(shape)
        if self.chance(0.03) and shape:
            shape[self.random.randrange(len(shape))] = self.random.choice(SIZES)
        if self.chance(0.01):
            shape.insert(self.random.randrange(len(shape) + 1), self.random.choice((1, 2)))
        if self.chance(0.01) and shape:
            del shape[self.random.randrange(len(shape))]
        if self.chance(0.01):
            dtype = self.random.choice(OTHERS)
        value = torch.randn(shape, generator=self.torch_random)
        value = (4 * value).to(dtype) if dtype != torch.bool else value > -0.5
        kind = self.random.choice(("plain", "plain", "transposed", "offset", "expanded", "step"))
        if kind == "transposed" and value.dim() > 2:
            order = [*self.random.sample(range(value.dim() - 1), value.dim() - 1), value.dim() - 1]
            inverse = sorted(range(value.dim()), key=order.__getitem__)
            return value.permute(order).contiguous().permute(inverse)
        if kind == "offset":
            return torch.cat([value.flatten()[:1], value.flatten()])[-value.numel() :].view(shape)
        if kind == "expanded" and value.dim() > 1 and 0 not in shape:
            return value[:1].expand(shape)
        if kind == "step" and value.dim() > 1:
            return value.repeat_interleave(2, -2)[..., ::2, :]
        return value

    def integers(self, shape: list[int], low: int, high: int, dtype: torch.dtype) -> torch.Tensor:
        value = torch.randint(low, max(high, low + 1), shape, generator=self.torch_random)
        if self.chance(0.03) and value.numel():
            value.view(-1)[self.random.randrange(value.numel())] = self.random.choice(INTEGERS)
        return value.to(dtype if not self.chance(0.02) else torch.int64)

    def drawing(self, batch: int) -> dict[str, Any]:
        pick = self.random.choice
        arguments: dict[str, Any] = {
            "samples": self.random.randrange(1, 70) if self.chance(0.95) else pick(INTEGERS),
            "method": pick(santa_torch.METHODS) if self.chance(0.98) else "other",
            "seed": torch.tensor([pick(INTEGERS)] * pick((1, 1, 1, batch))),
            "position": torch.tensor([pick(INTEGERS)] * pick((1, 1, 1, batch))),
        }
        if arguments["samples"] > 2**20:
            arguments["method"] = "systematic"
        if self.chance(0.1):
            arguments["layer"] = pick(INTEGERS)
        if self.chance(0.1):
            arguments["head_offset"] = pick(INTEGERS)
        return arguments

    def selection(self, batch: int, heads: int, rows: int) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        if self.chance(0.4):
            shape = [n if self.chance(0.7) else 1 for n in (batch, heads, rows)]
            dtype = self.random.choice((torch.bool, torch.bool, *DTYPES))
            arguments["mask"] = self.tensor(shape[self.random.randrange(3) :], dtype)
        if self.chance(0.4):
            dtype = self.random.choice((torch.int32, torch.int64))
            arguments["seq_lens"] = self.integers([batch], 0, rows + 1, dtype)
        if self.chance(0.2):
            arguments["scale"] = self.random.choice(FLOATS)
        if self.chance(0.2):
            arguments["softcap"] = self.random.choice((*FLOATS, 0.5, 30.0, 1e30))
        return arguments

    def shape(self) -> tuple[int, int, int, int, int, int]:
        pick = self.random.choice
        kv_heads = pick((1, 1, 2, 3))
        group = pick((0, 1, 2, 3, 5, 8))
        return (
            pick((0, 1, 1, 2, 3)),
            kv_heads * group,
            kv_heads,
            pick(ROWS),
            pick(SIZES),
            pick(SIZES),
        )

    def call(self) -> None:
        batch, heads, kv_heads, rows, dim, value_dim = self.shape()
        dtype = self.random.choice(DTYPES)
        q = self.tensor([batch, heads, dim], dtype)
        k = self.tensor([batch, kv_heads, rows, dim], dtype)
        v = self.tensor([batch, kv_heads, rows, value_dim], dtype)
        direct = self.chance(0.5)
        door: Any = torch.ops.santa if direct else ops
        stage = self.random.choice(
            ("decode", "decode", "decode", "score", "weigh", "draw", "gather")
        )
        selection = self.selection(batch, heads, rows)
        if stage == "decode":
            flags: dict[str, Any] = {"return_stats": self.chance(0.5)}
            if self.chance(0.3):
                flags["sinks"] = self.tensor([heads], self.random.choice(DTYPES))
            result = door.decode(q, k, v, **self.drawing(batch), **selection, **flags)
            out = result if isinstance(result, torch.Tensor) else result[0]
            assert out.shape == (*q.shape[:2], v.shape[3])
            ordinary = "scale" not in selection and selection.get("mask", q).dtype == torch.bool
            if (ordinary or not selection) and out.dtype != torch.float16:
                assert out.isfinite().all(), f"{q.shape} {k.shape} {selection}"
        elif stage == "score":
            scores, maxima = door.score(q, k, **selection)
            assert scores.shape == (*q.shape[:2], k.shape[2])
            assert maxima.shape == q.shape[:2]
        elif stage == "weigh":
            scores = self.tensor([batch, heads, rows], torch.float32)
            none = torch.zeros(scores.shape[:-1])
            largest = scores.amax(-1) if scores.numel() else none
            door.weigh(scores, largest)
        elif stage == "draw":
            weights = self.integers([batch, heads, rows], 0, 2**30 + 1, torch.int32)
            split = kv_heads if self.chance(0.95) else self.random.choice(INTEGERS)
            drawing = self.drawing(batch)
            if self.chance(0.3):
                drawing["row_mass"] = self.tensor([batch, heads], torch.float32).clamp(0, 1)
            got, _, num_rows = door.draw(weights, kv_heads=split, **drawing)
            assert (num_rows <= got.shape[2]).all()
            assert ((got >= 0) & (got < max(rows, 1))).all()
        else:
            lists = self.random.choice((heads, kv_heads))
            capacity = self.random.choice(SIZES)
            listed = self.integers([batch, lists, capacity], 0, rows, torch.int64)
            num_rows = self.integers([batch, lists], 0, capacity + 1, torch.int32)
            weight = self.tensor([batch, heads, capacity], torch.float32)
            out = door.gather(listed, weight, num_rows, v)
            assert out.shape == (*weight.shape[:2], v.shape[3])


def main(seed: int, calls: int) -> None:
    torch.set_num_threads(1 + seed % 2)
    fuzzer = Fuzzer(seed)
    levels = santa_torch.build_info().cpu_levels
    accepted = refused = 0
    for i in range(calls):
        torch.ops.santa.set_cpu_level(levels[i % len(levels)])
        state = fuzzer.random.getstate()
        try:
            fuzzer.call()
            accepted += 1
        except REFUSED:
            refused += 1
        except BaseException:
            print(f"seed {seed}, call {i}, state {hash(state)}", file=sys.stderr)
            raise
    print(accepted, refused)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
