"""Faults to plant in the CUDA kernels, and the battery of checks that has to find each of them.

As a program it reads names of shared libraries from its standard input, one to a line, and answers
each with a line: ``ok`` when the battery passes, else what it found. Libraries are loaded in
children, since each registers the same operators; torch is imported once.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

LIMIT = 120  # seconds that one library may take


class Fault(NamedTuple):
    """Text of a file of csrc/cuda that stands there once, and what to put in its place."""

    name: str
    file: str
    old: str
    new: str
    races: bool = False  # seen by the race checker, not by results


FAULTS = [
    # ---- barriers and copies
    Fault(
        "tiles are used before every thread's copies are there",
        "tile.cuh",
        "    wait_copies<kStages - 2>();\n",
        "    wait_copies<kStages - 1>();\n",
    ),
    Fault(
        "no barrier between copies and their use",
        "tile.cuh",
        "    __syncthreads();\n    if (t + kStages - 1 < tiles)",
        "    if (t + kStages - 1 < tiles)",
    ),
    Fault(
        "a stage is filled while it is still read",
        "tile.cuh",
        "    if (t + kStages - 1 < tiles) issue(t + kStages - 1);\n    commit_copies();\n"
        "    use(t);",
        "    use(t);\n    if (t + kStages < tiles) issue(t + kStages);\n    commit_copies();",
    ),
    Fault(
        "scores of a chunk are read before all are written",
        "score.cuh",
        "__syncthreads();\n                        done(begin",
        "done(begin",
    ),
    Fault(
        "memory of a reduction is used again too early",
        "step.cuh",
        "  __syncthreads();  // the memory may still be read after a reduction before\n",
        "",
        races=True,
    ),
    Fault(
        "results of a reduction are read before all are there",
        "step.cuh",
        "= x;\n  __syncthreads();\n  x = of_warps[0];",
        "= x;\n  x = of_warps[0];",
    ),
    Fault(
        "memory of a scan is used again too early",
        "scan.cuh",
        "  __syncthreads();  // the memory may still be read after a scan before\n",
        "",
        races=True,
    ),
    Fault(
        "totals of a scan are read before all are there",
        "scan.cuh",
        "= sum;\n  __syncthreads();\n",
        "= sum;\n",
    ),
    Fault(
        "reciprocals are read before all are there",
        "weigh.cu",
        "  __syncthreads();\n}\n\n// Grid: groups times",
        "}\n\n// Grid: groups times",
    ),
    Fault(
        "draws are listed before all are drawn",
        "draw.cu",
        "  __syncthreads();\n  if (!sorted)",
        "  if (!sorted)",
    ),
    Fault(
        "a run is merged before the one below is complete",
        "draw.cu",
        "    __syncthreads();\n    int32_t* const sorted = to;",
        "    int32_t* const sorted = to;",
    ),
    Fault(
        "counts are made before all rows are listed",
        "draw.cu",
        "  __syncthreads();\n\n  // What each row brings along.",
        "\n  // What each row brings along.",
    ),
    Fault(
        "factors of a merge are overwritten while others read them",
        "dense.cu",
        "    __syncthreads();\n    const int64_t c = head * step.plan.chunks + base",
        "    const int64_t c = head * step.plan.chunks + base",
        races=True,
    ),
    Fault(
        "V is weighed before all weights are there",
        "dense.cu",
        "    __syncthreads();\n    for (int64_t feature",
        "    for (int64_t feature",
    ),
    Fault(
        "a launch that overlaps reads before the one before has ended",
        "draw.cu",
        "  wait_for_previous_grid();\n  if (step.coefficients",
        "  if (step.coefficients",
        races=True,
    ),
    Fault(
        "V rows counted by two blocks at once",
        "gather_stats.cuh",
        "    atomic_add(reinterpret_cast<uint64_t*>(step.params.value_rows + group), "
        "static_cast<uint64_t>(fresh));",
        "    step.params.value_rows[group] += fresh;",
        races=True,
    ),
    # ---- rows, chunks, tiles
    Fault(
        "the row past the last is read",
        "score.cuh",
        "loaded(row) == 0 : row >= length_",
        "loaded(row) == 0 : row > length_",
    ),
    Fault(
        "the row past the last has a score",
        "score.cuh",
        "if (row >= length_ || !attends",
        "if (row > length_ || !attends",
    ),
    Fault(
        "scores lie one row off from tile to tile",
        "score.cuh",
        "[(begin + r) % kChunkRows] = finish",
        "[(begin + r + begin / 64) % kChunkRows] = finish",
    ),
    Fault(
        "the last chunk of a split is left out",
        "step.cuh",
        "begin, begin + splits.chunks_per_split}",
        "begin, begin + splits.chunks_per_split - 1}",
    ),
    Fault(
        "a chunk too few where rows end within one",
        "step.cuh",
        ": chunk_count(length_of(step.params, b));",
        ": length_of(step.params, b) / kChunkRows;",
    ),
    Fault(
        "lengths beyond the cache are believed",
        "step.cuh",
        "return length < 0 ? 0 : length < params.shape.rows ? length : params.shape.rows;",
        "return length;",
    ),
    Fault(
        "offsets of 32 bits",
        "score.cuh",
        "keys + params_.k.offset(b_, kv_, row)",
        "keys + static_cast<int32_t>(params_.k.offset(b_, kv_, row))",
    ),
    Fault(
        "offsets of 32 bits in V",
        "gather_stats.cuh",
        "return step.params.v.offset(b_, kv_, row(i));",
        "return static_cast<int32_t>(step.params.v.offset(b_, kv_, row(i)));",
    ),
    # ---- heads
    Fault(
        "heads past the group are scored",
        "score.cuh",
        "query(min(first_head + h, heads_ - 1))",
        "query(first_head + h)",
        races=True,
    ),
    Fault(
        "heads past the group are written",
        "score.cuh",
        "    if (h >= heads_) return;\n",
        "",
    ),
    Fault(
        "masks of another group's heads",
        "score.cuh",
        "attends(params_.mask, b_, local_head(h), row, &bias)) return kNeg",
        "attends(params_.mask, b_, first_ + h, row, &bias)) return kNeg",
    ),
    Fault(
        "rows that only a later head attends are not read",
        "score.cuh",
        "params_.mask.head_stride == 0 ? 1 : group;",
        "1;",
    ),
    Fault(
        "K of the wrong group",
        "score.cuh",
        "kv_(group_ % params_.shape.kv_heads)",
        "kv_(group_ / params_.shape.kv_heads)",
    ),
    # ---- scores
    Fault(
        "what lies past the head dim is not zero",
        "tile.cuh",
        "max(tile.row_bytes - at, 0);",
        "max(tile.padded_bytes - at, 0);",
    ),
    Fault(
        "parts of a row are added in another order at another place",
        "score.cuh",
        "const float whole = warp_sum<kWarpLanes, kOctet>(sum[h]);",
        "const float whole = first_row % 16 == 0 ? warp_sum<kWarpLanes, kOctet>(sum[h])\n"
        "    : (sum[h] + __shfl_xor_sync(kAllLanes, sum[h], 8))\n"
        "    + __shfl_xor_sync(kAllLanes, sum[h] + __shfl_xor_sync(kAllLanes, sum[h], 8), 16);",
    ),
    Fault(
        "the cap comes after the mask",
        "score.cuh",
        "    return masked() ? __fadd_rn(score, bias) : score;",
        "    if (params_.softcap != 0.0f) {\n"
        "      return scalar::capped(product * params_.scale + bias, 0.5f / params_.softcap,\n"
        "                            params_.softcap);\n"
        "    }\n"
        "    return masked() ? __fadd_rn(score, bias) : score;",
    ),
    Fault(
        "additive masks at their lowest are added",
        "step.cuh",
        "return !(*bias <= mask.lowest());",
        "return true;",
    ),
    Fault(
        "NaN among scores is lost in their maximum",
        "score.cuh",
        "if (score > largest || score != score) largest = score;",
        "if (score > largest) largest = score;",
    ),
    # ---- weights and inclusion
    Fault(
        "a head without a maximum weighs",
        "weigh.cu",
        "    if (!is_live(maximum)) return 0;\n",
        "",
    ),
    Fault(
        "inclusion is fused",
        "step.cuh",
        "static __device__ F add(F a, F b) { return __fadd_rn(a, b); }\n"
        "  static __device__ F mul(F a, F b) { return __fmul_rn(a, b); }",
        "static __device__ F add(F a, F b) { return __fmaf_rn(last, last, a); }\n"
        "  static inline float last = 0;\n"
        "  static __device__ F mul(F a, F b) {\n"
        "    if (a == b) last = a;\n"
        "    return __fmul_rn(a, b);\n"
        "  }",
    ),
    Fault(
        "weights are cut instead of rounded",
        "step.cuh",
        "static_cast<I>(rintf(x));",
        "static_cast<I>(x);",
    ),
    Fault(
        "rows beside a sink are sized as if there were none",
        "weigh.cu",
        "reciprocals[h] = reciprocal_total(total, row_mass);",
        "reciprocals[h] = reciprocal_total(total, 1.0f);",
    ),
    Fault(
        "blocks of a density in the wrong order",
        "weigh.cu",
        "block_sums_[i * (kWarpLanes / kLanes) + lane / kLanes] = sum;",
        "block_sums_[i * (kWarpLanes / kLanes) + 1 - lane / kLanes] = sum;",
    ),
    Fault(
        "rows read are not counted from zero",
        "weigh.cu",
        "        step.params.value_rows[head / shape.group_size()] = 0;\n",
        "",
    ),
    # ---- draws
    Fault(
        "a threshold on the edge takes the row before",
        "draw.cu",
        "while (mass + values[row] <= threshold)",
        "while (mass + values[row] < threshold)",
    ),
    Fault(
        "a chunk's own mass counts as before it",
        "draw.cu",
        "density.prefix[c] = total + scan.before;",
        "density.prefix[c] = scan.before;",
    ),
    Fault(
        "heads of a group draw with one number",
        "draw.cu",
        "params.draw.head_offset + first % shape.query_heads};",
        "params.draw.head_offset + first % shape.query_heads / shape.group_size()};",
    ),
    Fault(
        "the position does not follow the mask",
        "draw.cu",
        "  if (step.params.mask.kind == MaskParams::Kind::kNone) return length;\n",
        "  return length;\n",
    ),
    Fault(
        "systematic draws have an offset each",
        "draw.cu",
        "method_ == Method::kSystematic ? bits_ : random64(",
        "random64(",
    ),
    Fault(
        "runs are merged without regard for equal rows",
        "draw.cu",
        "run % 2 == 0 ? from[middle] < x : from[middle] <= x;",
        "from[middle] < x;",
    ),
    Fault(
        "a row drawn last of its list counts once too few",
        "draw.cu",
        "begins[i + 1] : n;",
        "begins[i + 1] : n - 1;",
    ),
    Fault(
        "uncertain strata are not counted",
        "draw.cu",
        "for (int64_t m = begin; m < begin + count; ++m)",
        "for (int64_t m = begin + 1; m < begin + count; ++m)",
    ),
    Fault(
        "the log-sum-exp without its sink",
        "step.cuh",
        "sinks ? add_sink(lse, static_cast<double>(sink_of(params.sinks, h))) : lse",
        "lse",
    ),
    # ---- gathers and merges
    Fault(
        "0 times NaN",
        "gather.cu",
        "if (coefficient != 0.0f) sum[h] =",
        "sum[h] =",
    ),
    Fault(
        "chunks are merged in fp32",
        "gather.cu",
        "total[h] = __dadd_rn(total[h], static_cast<double>(sum[h]));",
        "total[h] = static_cast<float>(total[h]) + sum[h];",
    ),
    Fault(
        "chunks are not told apart",
        "gather.cu",
        "stage.ends_chunk[r] = i + 1 >= drawn_.size ||",
        "stage.ends_chunk[r] = i + 1 >= drawn_.size || i % 7 == 3 ||",
    ),
    Fault(
        "features past the last are written",
        "gather.cu",
        ">= heads_ || feature_ >= features_) return;",
        ">= heads_) return;",
    ),
    Fault(
        "a dead head has an output like any other",
        "gather.cu",
        "const double value = is_live(maximum) ? total : degenerate_value(maximum);",
        "const double value = total;",
    ),
    Fault(
        "rows of a list beyond V are read",
        "gather_stats.cuh",
        "return max(min(rows_[i], last_), int64_t{0});",
        "return rows_[i];",
    ),
    Fault(
        "rows that two heads draw count twice",
        "gather_stats.cuh",
        "    fresh += known ? 0 : 1;",
        "    fresh += 1;",
    ),
    Fault(
        "statistics of draws take a row's whole coefficient",
        "gather_stats.cuh",
        "const float coefficient = shared ? coefficients[i] : one_draw;",
        "const float coefficient = coefficients[i];",
    ),
    Fault(
        "dense: chunks are merged from the last to the first",
        "dense.cu",
        "head * step.plan.chunks + base + i;",
        "head * step.plan.chunks + (min(chunks, base + kThreads) - 1 - i);",
    ),
    Fault(
        "dense: V of rows that a head does not attend is used",
        "dense.cu",
        "      if (weights[h][i] >= 0.0f) sum[h] =",
        "      sum[h] =",
    ),
    Fault(
        "dense: infinity in a chunk that counts for nothing",
        "dense.cu",
        "      if (factor != 0.0) {",
        "      if (true) {",
    ),
]


# ---- the battery ---------------------------------------------------------------------------------


def battery() -> Callable[[Any], None]:
    """Make the checks, with what the CPU backend says; they raise where a library is wrong."""
    import torch
    from cases import METHODS, Case
    from simt_library import Setting
    from test_cuda_memory import fenced

    torch.set_num_threads(1)
    torch.manual_seed(0)
    cpu = torch.ops.santa
    settings = [
        Setting(),
        # Too little shared memory for all heads of the largest group.
        Setting(order=1, multiprocessors=4, overlap=True, shared_bytes=81 << 9),
        Setting(order=2, seed=7, resident_blocks=3, multiprocessors=1),
        Setting(order=3, seed=3, resident_blocks=2, multiprocessors=132, overlap=True),
    ]
    base = Case(batch=2, kv_heads=2, group=3, rows=700, head_dim=20, value_dim=33)
    cases = [
        base.but(head_dim=64, value_dim=64, sinks="float32", seq_lens=(700, 290)),
        base.but(dtype=torch.bfloat16, group=5, mask="heads", seq_lens=(0, 515)),
        base.but(dtype=torch.float16, layout="offset", mask="additive_heads", softcap=3.0),
        base.but(group=24, rows=257, mask="prefix", kv_heads=1, layout="sliced", sinks="some"),
        base.but(dtype=torch.bfloat16, batch=3, rows=1100, mask="sparse", layout="interleaved"),
        base.but(mask="per_head", rows=300, peak=1.0, sinks="strong"),
    ]
    where = torch.tensor([5])

    def steps() -> list[tuple[Case, Any]]:
        made = []
        for at, case in enumerate(cases):
            inputs = case.inputs()
            if at in (0, 1):  # rows past the length hold NaN
                for b, length in enumerate(case.seq_lens or ()):
                    inputs.k[b, :, length:] = torch.nan
                    inputs.v[b, :, length:] = torch.nan
            if at == 3:  # a head without a number, and a row of V that one head is masked off
                inputs.q[0, 1] = torch.nan
                inputs.sinks[2:4] = torch.tensor([torch.nan, torch.inf])
            if at == 1:  # a row's vectors are longer than it, and another head's query follows
                inputs.q[1, 4] = torch.nan
                inputs.v[1, 0, 3] = torch.nan
                inputs.mask[1, 0, 3] = False
            made.append((case, inputs))
        # K and V beyond 2^31 elements from their beginning, in memory that is never touched.
        flat = torch.empty(2**31 + 2**16, dtype=torch.float16)
        far = flat.as_strided((2, 1, 16, 8), (2**31 + 64, 8, 8, 1))
        far.copy_(torch.randn(2, 1, 16, 8, generator=torch.Generator().manual_seed(1)))
        small = Case(batch=2, kv_heads=1, group=2, rows=16, head_dim=8, value_dim=8)
        small = small.but(dtype=torch.float16)
        made.append((small, small.inputs()._replace(k=far, v=far)))
        # Memory that ends with the last row.
        inputs = small.inputs()
        made.append((small, inputs._replace(k=fenced(inputs.k), v=fenced(inputs.v))))
        # A chunk whose sums overflow, and whose share of the softmax is 0 in fp64.
        inputs = small.but(rows=300, dtype=torch.float32).inputs()
        inputs.k[:, :, 256:] = 0
        inputs.k[:, :, 0] = inputs.q[:, 0, None] * 1e4
        inputs.v[:, :, 256:] = 3e38
        made.append((small.but(rows=300, dtype=torch.float32), inputs))
        return made

    def decode(ops: Any, inputs: Any, method: str, **more: Any) -> Any:
        given = {"samples": 40, "method": method, "seed": where, "return_stats": True, **more}
        return ops.decode(**inputs.arguments(), **given)

    inputs_of = steps()
    expected = {
        (at, method): decode(cpu, inputs, method)
        for at, (_, inputs) in enumerate(inputs_of)
        for method in METHODS
    }
    clamped = base.but(seq_lens=(700, 0), sinks="float32").inputs()
    wild = clamped._replace(seq_lens=torch.tensor([10**6, -3]))
    expected_clamped = {method: decode(cpu, clamped, method) for method in METHODS}
    weights = [
        cpu.weigh(*cpu.score(inputs.q, inputs.k, **inputs.scoring())) for _, inputs in inputs_of
    ]
    scores = cpu.score(inputs_of[0][1].q, inputs_of[0][1].k)
    flat_weights = torch.tensor([0, 3, 0, 0, 2, 1, 0] * 100, dtype=torch.int32)[None, None]
    weights.append(flat_weights.expand(1, 2, 700).contiguous())
    weights.append(cpu.weigh(3 * torch.randn(1, 1, 70_000), torch.full((1, 1), 20.0)))
    drawn = {
        (at, method, samples): cpu.draw(
            w, samples=samples, method=method, kv_heads=1, seed=where, position=where
        )
        for at, w in enumerate(weights)
        for method in METHODS[1:]
        for samples in (1, 9, 700)
        if at != len(weights) - 1 or samples == 9
    }
    random = torch.Generator().manual_seed(2)
    v = torch.randn(1, 1, 1000, 19, generator=random)
    listed = torch.randperm(1000, generator=random)[:600].sort().values[None, None]
    coefficients = 2.0 ** torch.randint(-20, 3, (1, 5, 600), generator=random)
    coefficients[..., 7] = 0.0  # of a row that nobody uses
    v[0, 0, listed[0, 0, 7]] = torch.nan
    gathered = cpu.gather(listed, coefficients, torch.tensor([[600]], dtype=torch.int32), v)
    values, v = v, v.nan_to_num(0.5)
    long = Case(batch=1, kv_heads=1, group=1, rows=33_000, head_dim=8, value_dim=8).inputs()
    expected_long = decode(cpu, long, "dense")
    # One row with most of the softmax; what each later chunk adds to it is less than fp32 holds.
    steep = torch.zeros(1, 1, 33_000, 8)
    steep[0, 0, 0] = 22.5 / 8**0.5
    equal = torch.zeros(1, 1, 1100, 8)
    dense = cpu.decode(
        equal[:, :, 0], equal, v.repeat(1, 1, 2, 1)[:, :, :1100], samples=1, method="dense",
        seed=where,
    )  # fmt: skip

    def near(what: str, got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
        got, want = got.double(), want.double()
        special = [x.where(~x.isfinite(), 0.0).nan_to_num(1.0, 2.0, 3.0) for x in (got, want)]
        assert torch.equal(*special), f"{what}: NaN or infinity elsewhere"
        bound = tolerance * (want.abs().nan_to_num(0, 0, 0) + 1)
        worst = ((got - want).abs() - bound).nan_to_num(0, 0, 0)
        assert worst.numel() == 0 or float(worst.max()) <= 0, f"{what}: {got} {want}"

    def same(what: str, got: Any, want: Any) -> None:
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype, what
            assert torch.equal(a.nan_to_num(1e30), b.nan_to_num(1e30)), f"{what}: other bits"

    def check(ops: Any) -> None:
        first: dict[tuple[int, str], Any] = {}
        for setting in settings:
            ops.configure(*setting)
            for (at, method), want in expected.items():
                case, inputs = inputs_of[at]
                got = decode(ops, inputs, method)
                what = f"{method} of {case}, {setting}"
                same(what, got, first.setdefault((at, method), got))
                tolerance = 2e-5 if case.dtype == torch.float32 else 2.0**-7
                near(f"{what}: out", got[0], want[0], tolerance)
                near(f"{what}: lse", got[1], want[1], 1e-5)
                same(f"{what}: rows", got[2:4], want[2:4])
                near(f"{what}: error", got[4], want[4], 2e-3)
            for method, want in expected_clamped.items():
                for got, exact in zip(decode(ops, wild, method)[:2], want[:2], strict=True):
                    near(f"{method}: lengths", got, exact, 2e-5)
            for (at, method, samples), want in drawn.items():
                got = ops.draw(
                    weights[at], samples=samples, method=method, kv_heads=1, seed=where,
                    position=where,
                )  # fmt: skip
                same(f"draw {method} {samples} of {at}", got, want)
            same("weigh", [ops.weigh(*scores)], [cpu.weigh(*scores)])
            odd = torch.tensor([[[torch.nan, -1.0, 0.0]]])
            weighed = ops.weigh(odd, torch.zeros(1, 1))[0, 0]
            assert weighed[0] == 0, "a score of NaN weighs"
            assert weighed[2] == 2**30
            assert not ops.weigh(odd, torch.full((1, 1), -torch.inf)).any(), "a dead head weighs"
            q, k = inputs_of[0][1].q, inputs_of[0][1].k
            whole, part = ops.score(q, k)[0], ops.score(q, k[:, :, 5:])[0]
            same("scores of rows elsewhere", [part], [whole[..., 5:]])
            near("dense over many chunks", decode(ops, long, "dense")[0], expected_long[0], 1e-5)
            ones = torch.ones_like(steep)
            got = ops.decode(ones[:, :, 0], steep, ones, samples=1, method="dense", seed=where)
            same("dense of ones", [got[0]], [ones[:, :, 0]])
            num = torch.tensor([[600]], dtype=torch.int32)
            for more in (0, 1):  # a list has no more rows than places
                got = ops.gather(listed, coefficients, num + more, values)
                same("gather", [got], [gathered])
            far = listed.clone()
            far[0, 0, -1] = 2**40
            near("gather", ops.gather(far, coefficients, num, values), gathered, 1e9)
            got = ops.decode(
                equal[:, :, 0], equal, v.repeat(1, 1, 2, 1)[:, :, :1100], samples=1,
                method="dense", seed=where,
            )  # fmt: skip
            same("dense, equal scores", [got[0]], [dense[0]])

    return check


def serve(check: Callable[[Any], None]) -> None:
    """Answer for each library whose name comes in."""
    import torch

    for line in sys.stdin:
        path = line.strip()
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(LIMIT)
            try:
                torch.ops.load_library(path)
                check(getattr(torch.ops, os.path.basename(path).split(".")[0]))
                answer = "ok"
            except Exception as error:
                answer = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
            os.write(write, answer.encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            answer = pipe.read()
        os.waitpid(child, 0)
        print(answer or "crashed, or ran out of time", flush=True)


if __name__ == "__main__":
    serve(battery())
