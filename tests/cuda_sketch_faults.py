"""Faults of blocks of keys and of stochastic queries, and the battery that has to find each.

The scheme, and the program, are those of cuda_faults.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cuda_faults import Fault, serve

WAIT = "  wait_for_previous_grid();\n"
START = "  let_next_grid_start();\n"

SKETCH_FAULTS = [
    # ---- the list of features
    Fault(
        "features of a part are listed backwards",
        "blocks.cuh",
        "__popc(those & ((1u << lane) - 1))",
        "__popc(those >> lane) - 1",
    ),
    Fault(
        "features are counted before all warps have listed theirs",
        "blocks.cuh",
        "= count;\n  __syncthreads();\n",
        "= count;\n",
        races=True,
    ),
    Fault(
        "the list is used before it is complete",
        "blocks.cuh",
        "  __syncthreads();\n  const int mine",
        "  const int mine",
        races=True,
    ),
    Fault(
        "where no feature is used none is read",
        "blocks.cuh",
        "if (all == 0) {",
        "if (false) {",
    ),
    Fault(
        "features past the head dim are read",
        "blocks.cuh",
        "i < places && d < head_dim && uses(d)",
        "i < places && uses(min(d, static_cast<int>(head_dim) - 1))",
    ),
    Fault(
        "all features are read, whatever the query",
        "score.cuh",
        "if (!params_.sparse_query) return true;",
        "return true;",
    ),
    Fault(
        "features that the query does not use are never read",
        "score.cuh",
        "    if (!params_.sparse_query) return true;\n",
        "",
    ),
    Fault(
        "only the heads of a block say what is used",
        "score.cuh",
        "    for (int64_t g = 0; g < group; ++g) {\n      const int64_t at",
        "    for (int64_t g = first_; g < first_ + heads_; ++g) {\n      const int64_t at",
    ),
    Fault(
        "a head that is NaN needs all features",
        "step.cuh",
        "return feature != 0.0f && feature == feature;",
        "return feature != 0.0f;",
    ),
    # ---- scores of a block
    Fault(
        "what is left of a list is not read",
        "blocks.cuh",
        "first < list.count; first += kAhead",
        "first + kAhead <= list.count; first += kAhead",
    ),
    Fault(
        "products are rounded before they are added",
        "blocks.cuh",
        "to = __fmaf_rn(feature[h], k[e], to);",
        "to = __fadd_rn(__fmul_rn(feature[h], k[e]), to);",
    ),
    Fault(
        "parts are handed to the wrong lanes",
        "blocks.cuh",
        "const float give = part % 2 == 0 ? half[r + kQuarter] : half[r];",
        "const float give = half[r];",
    ),
    Fault(
        "rows of a lane lie side by side whatever their type",
        "blocks.cuh",
        "(at / kElements<T> * kOctet + lane % kOctet) * kElements<T> + at % kElements<T>",
        "lane % kOctet * kLaneRows + at",
    ),
    Fault(
        "the tile before the last head is scored twice",
        "score.cuh",
        "score_block_for(first + i / head_tiles, i % head_tiles * kHeadTile, list);",
        "score_block_for(first + i / head_tiles, 0, list);",
    ),
    Fault(
        "heads past the group write scores of a block",
        "score.cuh",
        "      if (first_head + h >= heads_) return;\n",
        "",
    ),
    Fault(
        "offsets of blocks of 32 bits",
        "score.cuh",
        "keys + params_.key_blocks.offset(b_, kv_, block)",
        "keys + static_cast<int32_t>(params_.key_blocks.offset(b_, kv_, block))",
    ),
    Fault(
        "scores of a chunk are written while the one before is read",
        "score.cuh",
        "      __syncthreads();  // scores of the chunk before have been read\n",
        "",
        races=True,
    ),
    Fault(
        "a chunk is done before all of its blocks are",
        "score.cuh",
        "      __syncthreads();\n      if (block + kOfChunk <= blocks)",
        "      if (block + kOfChunk <= blocks)",
        races=True,
    ),
    Fault(
        "a chunk is done that has rows of both kinds",
        "score.cuh",
        "if (block + kOfChunk <= blocks) done",
        "done",
    ),
    Fault(
        "a block of threads goes on into the next one's chunks",
        "score.cuh",
        "min(params_.key_blocks.packed_rows(b_), end * kChunkRows)",
        "min(params_.key_blocks.packed_rows(b_), chunks_of(step_, b_) * kChunkRows)",
        races=True,
    ),
    Fault(
        "rows are scored from where the sketch begins",
        "score.cuh",
        "    return packed;\n",
        "    return max(packed - kChunkRows, begin);\n",
    ),
    Fault(
        "blocks without an attended row are loaded",
        "score.cuh",
        "if (attended == 0) {",
        "if (attended < 0) {",
    ),
    Fault(
        "masks do not say which blocks are loaded",
        "score.cuh",
        "    if (masked()) attended = warp_sum(int{loaded(begin + lane)} + "
        "int{loaded(begin + kWarpLanes + lane)});\n",
        "",
    ),
    Fault(
        "half of a block says whether it is attended",
        "score.cuh",
        "int{loaded(begin + lane)} + int{loaded(begin + kWarpLanes + lane)}",
        "int{loaded(begin + lane)}",
    ),
    Fault(
        "queries are taken for numbers of the keys' type",
        "score.cuh",
        "load_as_float(params_.q_dtype, params_.q, at) : 0.0f;",
        "load_as_float(params_.shape.dtype, params_.q, at) : 0.0f;",
    ),
    Fault(
        "queries are read before they are drawn",
        "score.cu",
        f"{WAIT}{START}  const Scorer",
        f"{START}  const Scorer",
        races=True,
    ),
    Fault(
        "dense: queries are read before they are drawn",
        "dense.cu",
        f"{WAIT}{START}  const Scorer",
        f"{START}  const Scorer",
        races=True,
    ),
    # ---- what was read
    Fault(
        "blocks that were not loaded count as read",
        "step.cuh",
        "blocks += attended != 0 ? 1 : 0;",
        "blocks += 1;",
    ),
    Fault(
        "packed rows count as read once more",
        "step.cuh",
        "(rows - packed) * shape.head_dim",
        "rows * shape.head_dim",
    ),
    Fault(
        "a stochastic query is said to use all features",
        "step.cuh",
        "if (step.params.bernoulli.draws == 0) read.features",
        "read.features",
    ),
    # ---- stochastic queries
    Fault(
        "the position of a query forgets the mask",
        "bernoulli.cu",
        "  if (params.mask.kind == MaskParams::Kind::kNone) return length;\n",
        "  if (params.mask.kind != MaskParams::Kind::kFloat32) return length;\n",
    ),
    Fault(
        "the position of a query forgets the length",
        "bernoulli.cu",
        "const int64_t length = length_of(params, b);",
        "const int64_t length = params.shape.rows;",
    ),
    Fault(
        "only the first head says where rows end",
        "bernoulli.cu",
        "params.mask.head_stride == 0 ? 1 : params.shape.query_heads;",
        "1;",
    ),
    Fault(
        "rows between two looks at the mask are left out",
        "bernoulli.cu",
        "end -= kRows * kThreads",
        "end -= (kRows + 1) * kThreads",
    ),
    Fault(
        "all heads of a group draw the same numbers",
        "bernoulli.cu",
        "      key.global_head += h;\n",
        "",
    ),
    Fault(
        "queries of the wrong group",
        "bernoulli.cu",
        "q_(b * params_.q_batch_stride + kv * heads_ * params_.q_head_stride)",
        "q_(b * params_.q_batch_stride + kv * params_.q_head_stride)",
    ),
    Fault(
        "a head of infinities weighs on its group",
        "bernoulli.cu",
        "if (is_finite(of_head)) most = max(most, of_head);",
        "if (of_head == of_head) most = max(most, of_head);",
    ),
    Fault(
        "heads that are not finite have a size",
        "bernoulli.cu",
        "if (is_finite(step_.query_maxima[first_ + h])) square",
        "square",
    ),
    Fault(
        "every round of features begins at no mass",
        "bernoulli.cu",
        "      before += scan.total;\n",
        "",
    ),
    Fault(
        "sizes of features are not their roots",
        "bernoulli.cu",
        "return __fsqrt_rn(square);",
        "return square;",
    ),
    Fault(
        "NaN among features is lost in their largest",
        "bernoulli.cu",
        "if (!(size <= largest)) largest = size;",
        "if (size > largest) largest = size;",
    ),
    Fault(
        "features are counted before all are drawn",
        "bernoulli.cu",
        "  __syncthreads();\n  const int64_t used",
        "  const int64_t used",
        races=True,
    ),
    Fault(
        "four features have one random number",
        "bernoulli.cu",
        "feature_word(key, d)",
        "feature_word(key, d / 4 * 4)",
    ),
    # ---- appending
    Fault(
        "there is room for one block more than there is",
        "sketch.cu",
        "(params.capacity + 1) * kSketchRows - 1;",
        "(params.capacity + 1) * kSketchRows;",
    ),
    Fault(
        "rows that k does not have are appended",
        "sketch.cu",
        "min(max(min(wanted, params.shape.rows), int64_t{0}), room - held)",
        "min(max(wanted, int64_t{0}), room - held)",
    ),
    Fault(
        "fewer than no rows are appended",
        "sketch.cu",
        "min(max(min(wanted, params.shape.rows), int64_t{0}), room - held)",
        "min(min(wanted, params.shape.rows), room - held)",
    ),
    Fault(
        "rows held are taken from k",
        "sketch.cu",
        "return row < rows_.held ? open_",
        "return row + 1 < rows_.held ? open_",
    ),
    Fault(
        "a tile is filled while it is still read",
        "sketch.cu",
        "      __syncthreads();  // the tile before has been read\n",
        "",
        races=True,
    ),
    Fault(
        "a tile is read before its copies are there",
        "sketch.cu",
        "      wait_copies<0>();\n",
        "",
    ),
    Fault(
        "a tile is read before the copies of others are there",
        "sketch.cu",
        "      wait_copies<0>();\n      __syncthreads();\n",
        "      wait_copies<0>();\n",
    ),
    Fault(
        "rows of a pair are swapped",
        "sketch.cu",
        "at(2 * lane).bits | static_cast<uint32_t>(at(2 * lane + 1).bits) << 16",
        "at(2 * lane + 1).bits | static_cast<uint32_t>(at(2 * lane).bits) << 16",
    ),
    Fault(
        "as many blocks are completed as rows are whole blocks",
        "sketch.cu",
        "(shape.rows + kSketchRows - 1) / kSketchRows;",
        "max(shape.rows / kSketchRows, int64_t{1});",
    ),
    Fault(
        "open rows are kept by every block",
        "sketch.cu",
        "  if (i == 0) packer.keep_open();\n",
        "  packer.keep_open();\n",
        races=True,
    ),
    Fault(
        "rows are counted while they are packed",
        "sketch.cu",
        f"{WAIT}  const int64_t b = int64_t",
        "  const int64_t b = int64_t",
        races=True,
    ),
]


def battery() -> Callable[[Any], None]:
    """Make the checks; they raise where a library is wrong."""
    import test_cuda_sketch as sketch
    import torch
    from cases import Case
    from compare import assert_equal
    from simt_library import Setting
    from test_cuda_kernels import decode
    from test_cuda_memory import fenced

    torch.set_num_threads(1)
    torch.manual_seed(0)
    cpu = torch.ops.santa
    settings = [
        Setting(),
        # Too little shared memory for all heads of the largest group.
        Setting(order=1, multiprocessors=4, overlap=True, shared_bytes=81 << 9),
        Setting(order=2, seed=7, resident_blocks=3, multiprocessors=1, overlap=True),
        Setting(order=3, seed=3, resident_blocks=2, multiprocessors=132, overlap=True),
    ]
    base = Case(batch=2, kv_heads=2, group=3, rows=700, head_dim=20, value_dim=8)
    cases = [
        base.but(seq_lens=(700, 290)),
        base.but(dtype=torch.bfloat16, mask="heads", group=5, head_dim=80, rows=400),
        base.but(dtype=torch.float16, mask="additive_heads", layout="offset", head_dim=5),
        base.but(kv_heads=1, group=24, rows=515, mask="prefix", batch=1),
        base.but(mask="sparse", rows=300, dtype=torch.bfloat16),
        base.but(mask="heads", rows=520, group=2),
    ]
    inputs_of = [case.inputs() for case in cases]
    queries = []
    for dim, group, draws in ((20, 3, 3), (300, 2, 8), (64, 5, 4)):
        q = torch.randn(2, 2 * group, dim)
        q[0, 1, dim - 1] = torch.nan
        q[0, 2, 0] = torch.inf
        q[1, 0] = 0.0
        for shared in (False, True):
            given = {
                "draws": draws, "shared": shared, "kv_heads": 2, "seed": torch.tensor([7, 8]),
                "position": torch.tensor([3, 2**33]),
            }  # fmt: skip
            queries.append((q, given, cpu.bernoulli_query(q, **given)))
    # Blocks beyond 2^31 elements from their beginning, in memory that is never touched.
    flat = torch.empty(2**31 + 2**16, dtype=torch.float16)
    far_k = torch.randn(2, 1, 64, 8).half()
    far = flat.as_strided((2, 1, 1, 8, 64), (2**31 + 64, 8 * 64, 8 * 64, 64, 1))
    far.copy_(far_k.view(2, 1, 1, 64, 8).transpose(3, 4))

    def check_appending(ops: Any, turn: int) -> None:
        for case in (
            base,
            base.but(head_dim=70, layout="offset", dtype=torch.float16),
            base.but(head_dim=130, dtype=torch.bfloat16, batch=1, kv_heads=1),
        )[turn % 2 :: 2]:
            k = case.inputs().k[:, :, :300]
            got = sketch.Sketch.empty(k, 4)
            begin = 0
            for n in (1, 62, 65, 40, 0, 132):
                part = k[:, :, begin : begin + n]
                # Before a copy there is not the row that comes before it.
                ops.sketch_append(*got, part.clone() if case.layout == "contiguous" else part)
                begin += n
                rows = [begin] * case.batch
                sketch.assert_sketch(got, sketch.sketch_of(k[:, :, :begin], rows))
            if case.batch == 1:
                continue
            got = sketch.Sketch.empty(k, 2)
            got = got._replace(key_blocks=fenced(got.key_blocks))
            for n in (torch.tensor([10**9, 30]), torch.tensor([10, -3])):
                ops.sketch_append(*got, k, num_rows=n)
            sketch.assert_sketch(got, sketch.sketch_of(k, [191, 30]))
            # As many rows as k has, from memory that ends with them.
            got = sketch.Sketch.empty(k, 4)
            ops.sketch_append(*got, fenced(k[:, :, :100]), num_rows=torch.tensor([10**9, 100]))
            sketch.assert_sketch(got, sketch.sketch_of(k, [100, 100]))

    def check_features(ops: Any) -> None:
        inputs = Case(1, 2, 4, 150, 40, 8).inputs()
        q = inputs.q.view(1, 2, 4, 40).clone()
        q[..., 3:30] = 0.0
        q[0, 1, :, :] = 0.0
        q[0, 1, 0] = torch.nan
        given = inputs._replace(q=q.flatten(1, 2))
        want = sketch.score(ops, given)
        made = sketch.sketch_of(inputs.k, [150])
        made.key_blocks[:, :, :, 3:30] = torch.nan
        got = sketch.score(ops, given, **made.keys(), sparse_query=True)
        for x, y in zip(got, want, strict=True):
            assert_equal("scores of used features", x, y)
        noticed = sketch.score(ops, given, **made.keys())[0][:, 1, :128]
        assert noticed.isnan().all(), "features that are asked for are not read"
        large = cases[3].but(head_dim=32, rows=64).inputs()
        large.q[:, :, 7] = 0.0
        large.q[:, 23, 7] = 1.0
        made = sketch.sketch_of(large.k, [64])
        made.key_blocks[:, :, :, 7, 0] = torch.nan
        bare = large._replace(mask=None)
        scores, _ = sketch.score(ops, bare, **made.keys(), sparse_query=True)
        assert scores[:, :, 0].isnan().all(), "heads of one group look at different keys"

    def check_blocks(ops: Any) -> None:
        inputs = Case(1, 1, 3, 512, 24, 8, torch.bfloat16).inputs()
        made = sketch.sketch_of(inputs.k, [512])
        blocks = fenced(made.key_blocks[:, :, :8], 3 * 24 * sketch.BLOCK)
        for row in (0, 130, 191):
            masked = inputs._replace(mask=torch.arange(512) == row)
            got = sketch.score(ops, masked, key_blocks=blocks, block_rows=made.block_rows)
            assert_equal("scores of one row", got[0], sketch.score(ops, masked)[0])
        q = torch.randn(2, 1, 8).half()
        rows = torch.tensor([64, 64])
        scores, _ = ops.score(q, far_k, key_blocks=far, block_rows=rows)
        assert_equal("scores of far blocks", scores, ops.score(q, far_k)[0])

    def check_steps(ops: Any, at: int, method: str) -> None:
        case, inputs = cases[at], inputs_of[at]
        rows = sketch.ragged(case)
        made = sketch.sketch_of(inputs.k, rows).keys()
        sketch.assert_same_scores(ops, inputs, rows)
        wide = inputs._replace(q=inputs.q.float() + 1e-6)
        sketch.assert_same_scores(ops, wide, rows)
        want = decode(ops, inputs, method)
        got = decode(ops, inputs, method, **made)
        assert_equal("keys_read", got.keys_read, sketch.expected_reads(inputs, rows, None))
        for name in ("out", "lse", "value_rows", "squared_error"):
            assert_equal(f"{method}: {name}", getattr(got, name), getattr(want, name))
        ends = sketch.expected_ends(inputs)
        shared = method != "systematic"
        query = cpu.bernoulli_query(
            inputs.q,
            draws=3,
            shared=shared,
            kv_heads=case.kv_heads,
            position=ends,
            **sketch.WHERE,
        )
        given = {"bernoulli_draws": 3, "bernoulli_shared": shared}
        got = decode(ops, inputs, method, **given, **made)
        assert_equal("keys_read", got.keys_read, sketch.expected_reads(inputs, rows, query))
        if case.dtype == torch.float32:
            want = decode(ops, inputs._replace(q=query), method, position=ends)
        else:
            want = decode(ops, inputs, method, **given)
        assert_equal(f"{method}: stochastic out", got.out, want.out)

    def check_positions(ops: Any) -> None:
        long = Case(1, 1, 2, 3000, 8, 8).inputs()
        for length in (1, 1900):
            mask = (torch.arange(3000) < length).expand(1, 2, 3000).clone()
            mask[:, 0] = False
            masked = long._replace(mask=mask)
            given = {"bernoulli_draws": 2, "bernoulli_shared": False}
            got = decode(ops, masked, "systematic", **given)
            want = decode(ops, masked, "systematic", position=torch.tensor([length]), **given)
            assert_equal("query of a position", got.out, want.out)

    def check(ops: Any) -> None:
        methods = ("dense", "systematic", "shared")
        for turn, setting in enumerate(settings):
            ops.configure(*setting)
            check_appending(ops, turn)
            check_features(ops)
            check_blocks(ops)
            for q, given, want in queries:
                assert_equal("stochastic query", ops.bernoulli_query(q, **given), want)
            if turn == 0:
                check_positions(ops)
            for at in range(turn % 2, len(cases), 2):
                check_steps(ops, at, methods[(at + turn // 2) % 3])

    return check


if __name__ == "__main__":
    serve(battery())
