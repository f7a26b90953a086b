"""More faults to plant in the CUDA kernels; see cuda_faults.py."""

from __future__ import annotations

from cuda_faults import Fault

WAIT = "  wait_for_previous_grid();\n"
START = "  let_next_grid_start();\n"

MORE_FAULTS = [
    # ---- launches that overlap, stages
    Fault(
        "weights are made before all scores are there",
        "weigh.cu",
        f"{WAIT}  if (step.weight_sums",
        "  if (step.weight_sums",
        races=True,
    ),
    Fault(
        "rows are sized before all weights are there",
        "weigh.cu",
        f"{WAIT}{START}  constexpr int kRows",
        f"{START}  constexpr int kRows",
        races=True,
    ),
    Fault(
        "rows are gathered before they are drawn",
        "gather.cu",
        f"{WAIT}  const LaunchPlan& plan",
        "  const LaunchPlan& plan",
        races=True,
    ),
    Fault(
        "chunks are merged before all are there",
        "dense.cu",
        f"{WAIT}  auto& factors",
        "  auto& factors",
        races=True,
    ),
    Fault(
        "a stage fewer than are in flight",
        "score.cuh",
        "layout_.stages + t % kStages",
        "layout_.stages + t % (kStages - 1)",
    ),
    # ---- rows and heads
    Fault(
        "a query's features past the head dim are the next head's",
        "score.cuh",
        "query(h)[d] = d < params_.shape.head_dim ? to_float(",
        "query(h)[d] = local_head(h) + 1 < params_.shape.query_heads ||\n"
        "    d < params_.shape.head_dim ? to_float(",
    ),
    Fault(
        "every block scores the first heads of its group",
        "score.cuh",
        "first_(range_.unit % step.plan.head_blocks * step.plan.heads_per_block)",
        "first_(0)",
    ),
    Fault(
        "rows of K that a mask leaves out count as read",
        "score.cuh",
        "    to[0] = count;\n",
        "    to[0] = static_cast<int32_t>(min(kChunkRows, length_ - begin));\n",
    ),
    Fault(
        "the last attended row is taken for their number",
        "score.cuh",
        "    to[1] = last;\n",
        "    to[1] = count;\n",
    ),
    Fault(
        "rows past the scores' last weigh",
        "weigh.cu",
        "row < step.scores_rows ? weight_of",
        "row <= step.scores_rows ? weight_of",
    ),
    Fault(
        "weights past the last row are written",
        "weigh.cu",
        "      if (row < step.weights_rows) to[row] = weight;\n",
        "      to[row] = weight;\n",
    ),
    Fault(
        "heads past the group have an output",
        "gather.cu",
        "    if (slot_ + h * slots_ >= heads_ || feature_ >= features_) return;\n",
        "    if (feature_ >= features_) return;\n",
    ),
    Fault(
        "the last row of a list is not gathered",
        "gather.cu",
        "min(drawn_.size - t * kGatherRows, int64_t{kGatherRows})",
        "min(drawn_.size - 1 - t * kGatherRows, int64_t{kGatherRows})",
    ),
    Fault(
        "lists longer than their memory are believed",
        "gather_stats.cuh",
        "max(min(static_cast<int64_t>(step.num_rows[list]), step.plan.capacity), int64_t{0})",
        "static_cast<int64_t>(step.num_rows[list])",
    ),
    # ---- numbers
    Fault(
        "NaN is lost between warps",
        "step.cuh",
        "return a > b || a != a ? a : b; });",
        "return a > b ? a : b; });",
    ),
    Fault(
        "a sink of NaN or infinity is like any other",
        "step.cuh",
        "  return sink < -kNegativeInfinity ? maximum : sink;\n",
        "  return maximum;\n",
    ),
    Fault(
        "where nothing is attended the log-sum-exp forgets the sink",
        "step.cuh",
        "  return sinks ? sink_of(params.sinks, h) : kNegativeInfinity;\n",
        "  return kNegativeInfinity;\n",
    ),
    Fault(
        "dense: weights of chunks are added in fp32",
        "dense.cu",
        "total = __dadd_rn(total, __dmul_rn(factor, static_cast<double>(sums[i])));",
        "total = static_cast<float>(__dadd_rn(total, __dmul_rn(factor, "
        "static_cast<double>(sums[i]))));",
    ),
    # ---- draws and statistics
    Fault(
        "lists of multinomial draws lie over each other",
        "draw.cu",
        "step.drawn + at * plan.picks * (sorted ? 1 : 2);",
        "step.drawn + at * plan.picks;",
    ),
    Fault(
        "places of a list that no row takes keep what was there",
        "draw.cu",
        "  if (step.clear_rest) {",
        "  if (false) {",
    ),
    Fault(
        "strata are covered from their beginning",
        "draw.cu",
        "1.0 - (to - from)",
        "1.0 - to",
    ),
    Fault(
        "systematic draws of whole numbers are uncertain",
        "draw.cu",
        "static_cast<double>(count) > whole ?",
        "static_cast<double>(count) >= whole ?",
    ),
    Fault(
        "the variance of draws is divided by their number",
        "draw.cu",
        "static_cast<double>(count) * samples / (samples - 1.0);",
        "static_cast<double>(count);",
    ),
    Fault(
        "rows of uncertain weight are certain",
        "draw.cu",
        "return 1.0 - mass / kWeightOne;",
        "return mass / kWeightOne;",
    ),
]
