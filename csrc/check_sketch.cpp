#include "check_sketch.h"

#include <torch/headeronly/core/ScalarType.h>

#include "math/bernoulli.h"

namespace santa {
namespace {

using torch::headeronly::ScalarType;

constexpr const char* kBlocksLayout = "[B, Hkv, C, D, 64]";

// A block is read and written as one piece of memory.
void check_blocks(const std::string& op, const Tensor& key_blocks, const Tensor& k) {
  check_dim(op, "key_blocks", key_blocks, 5, kBlocksLayout);
  check_device(op, "key_blocks", key_blocks, k);
  check_same_dtype(op, "key_blocks", key_blocks, "k", k);
  if (key_blocks.size(0) != k.size(0) || key_blocks.size(1) != k.size(1) || key_blocks.size(3) != k.size(3) ||
      key_blocks.size(4) != kSketchRows) {
    fail(op, "key_blocks must have shape ", kBlocksLayout, " with the batch, KV heads and head dim of k ",
         shape_text(k), ", got ", shape_text(key_blocks));
  }
  if (key_blocks.stride(4) != 1 || (key_blocks.size(3) > 1 && key_blocks.stride(3) != kSketchRows)) {
    fail(op, "key_blocks must have blocks that are contiguous, strides 64 and 1, got ", key_blocks.stride(3),
         " and ", key_blocks.stride(4));
  }
}

PerSequence check_block_rows(const std::string& op, const Tensor& block_rows, const Tensor& k) {
  if (block_rows.defined() && (block_rows.dim() != 1 || block_rows.size(0) != k.size(0))) {
    fail(op, "block_rows must have shape [B] = [", k.size(0), "], got ", shape_text(block_rows));
  }
  return check_per_sequence(op, "block_rows", block_rows, k.size(0), k);
}

}  // namespace

KeyBlocks check_key_blocks(const std::string& op, const std::optional<Tensor>& key_blocks,
                           const std::optional<Tensor>& block_rows, const DecodeShape& shape, const Tensor& k) {
  if (key_blocks.has_value() != block_rows.has_value()) {
    fail(op, "key_blocks and block_rows must be given together, got ",
         key_blocks.has_value() ? "key_blocks" : "block_rows", " alone");
  }
  if (!key_blocks.has_value()) return {};
  check_blocks(op, *key_blocks, k);
  const PerSequence rows = check_block_rows(op, *block_rows, k);
  if (shape.batch == 0 || key_blocks->size(2) == 0) return {};
  return {.data = key_blocks->const_data_ptr(),
          .batch_stride = key_blocks->stride(0),
          .head_stride = key_blocks->stride(1),
          .block_stride = key_blocks->stride(2),
          .capacity = key_blocks->size(2),
          .rows = rows.data,
          .rows_stride = rows.stride};
}

BernoulliParams check_bernoulli(const std::string& op, const char* name, int64_t draws, bool shared) {
  if (draws < 0 || draws > kMaxBernoulliDraws) {
    fail(op, name, " must be between 1 and ", kMaxBernoulliDraws, " (0: none), got ", draws);
  }
  return {.draws = draws, .shared = shared};
}

DecodeParams check_bernoulli_query(const Tensor& q, int64_t draws, bool shared, int64_t kv_heads,
                                   const Tensor& seed, const Tensor& position, int64_t layer,
                                   int64_t head_offset) {
  const std::string op = "santa::bernoulli_query";
  DecodeParams params{};
  params.q_dtype = check_dtype(op, "q", q);
  check_dim(op, "q", q, 3, "[B, Hq, D]");
  check_last_stride(op, "q", q);
  if (q.size(2) < 1) fail(op, "q must have a head dim of at least 1, got ", shape_text(q));
  if (kv_heads < 1 || q.size(1) < 1 || q.size(1) % kv_heads != 0) {
    fail(op, "kv_heads must be at least 1 and divide the query heads of q ", shape_text(q), ", got ", kv_heads);
  }
  params.shape = {.batch = q.size(0),
                  .query_heads = q.size(1),
                  .kv_heads = kv_heads,
                  .rows = 0,
                  .head_dim = q.size(2),
                  .value_dim = 1,
                  .dtype = params.q_dtype};
  params.q = q.const_data_ptr();
  params.q_batch_stride = q.stride(0);
  params.q_head_stride = q.stride(1);
  params.bernoulli = check_bernoulli(op, "draws", draws, shared);
  if (draws == 0) fail(op, "draws must be between 1 and ", kMaxBernoulliDraws, ", got 0");
  params.draw = check_draw(op, "shared", 1, seed, position, layer, head_offset, q.size(0), q.size(1), q);
  return params;
}

AppendParams check_sketch_append(const Tensor& key_blocks, const Tensor& open_rows, const Tensor& block_rows,
                                 const Tensor& k, const std::optional<Tensor>& num_rows) {
  const std::string op = "santa::sketch_append";
  const Dtype dtype = check_dtype(op, "k", k);
  check_dim(op, "k", k, 4, "[B, Hkv, n, D]");
  check_last_stride(op, "k", k);
  check_blocks(op, key_blocks, k);
  check_dim(op, "open_rows", open_rows, 4, "[B, Hkv, 64, D]");
  check_device(op, "open_rows", open_rows, k);
  check_same_dtype(op, "open_rows", open_rows, "k", k);
  if (open_rows.size(0) != k.size(0) || open_rows.size(1) != k.size(1) || open_rows.size(2) != kSketchRows ||
      open_rows.size(3) != k.size(3) || !open_rows.is_contiguous()) {
    fail(op, "open_rows must be contiguous [B, Hkv, 64, D] for k ", shape_text(k), ", got ",
         shape_text(open_rows));
  }
  AppendParams params{};
  params.shape = {.batch = k.size(0),
                  .query_heads = k.size(1),
                  .kv_heads = k.size(1),
                  .rows = k.size(2),
                  .head_dim = k.size(3),
                  .value_dim = 1,
                  .dtype = dtype};
  params.k = {.data = k.const_data_ptr(),
              .page_stride = k.stride(0),
              .head_stride = k.stride(1),
              .row_stride = k.stride(2),
              .page_rows = k.size(2)};
  params.blocks = key_blocks.mutable_data_ptr();
  params.batch_stride = key_blocks.stride(0);
  params.head_stride = key_blocks.stride(1);
  params.block_stride = key_blocks.stride(2);
  params.capacity = key_blocks.size(2);
  params.open = open_rows.mutable_data_ptr();
  check_block_rows(op, block_rows, k);
  if (k.size(0) > 1 && block_rows.stride(0) != 1) {
    fail(op, "block_rows must be contiguous, got stride ", block_rows.stride(0));
  }
  params.rows = block_rows.mutable_data_ptr<int64_t>();
  if (num_rows.has_value()) {
    if (num_rows->dim() != 1 || num_rows->size(0) != k.size(0)) {
      fail(op, "num_rows must have shape [B] = [", k.size(0), "], got ", shape_text(*num_rows));
    }
    params.num_rows = check_per_sequence(op, "num_rows", *num_rows, k.size(0), k);
  }
  return params;
}

}  // namespace santa
