#pragma once

#include <optional>
#include <string>

#include "check.h"

// Checks of what concerns stochastic queries and keys that lie in blocks of rows, feature by feature.
namespace santa {

// Both tensors of a sketch, or neither.
KeyBlocks check_key_blocks(const std::string& op, const std::optional<Tensor>& key_blocks,
                           const std::optional<Tensor>& block_rows, const DecodeShape& shape, const Tensor& k);

// draws 0: no stochastic query.
BernoulliParams check_bernoulli(const std::string& op, const char* name, int64_t draws, bool shared);

// Stage "bernoulli_query": a step without rows.
DecodeParams check_bernoulli_query(const Tensor& q, int64_t draws, bool shared, int64_t kv_heads,
                                   const Tensor& seed, const Tensor& position, int64_t layer, int64_t head_offset);

// Rows on their way into a sketch.
AppendParams check_sketch_append(const Tensor& key_blocks, const Tensor& open_rows, const Tensor& block_rows,
                                 const Tensor& k, const std::optional<Tensor>& num_rows);

}  // namespace santa
