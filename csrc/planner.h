#pragma once

#include <cstdint>
#include <string>

#include "params.h"

namespace santa {

// How the CPU backend lays out its scratch memory for one decode step: byte offsets from one aligned buffer.
// Pure and printable. The kernels carve the buffer by this plan and by nothing else.
struct CpuPlan {
  int64_t rows;          // rows scored: the longest sequence of the batch
  int64_t chunks;        // of kChunkRows rows each, per sequence
  int64_t query_stride;  // floats between heads of the fp32 query
  int64_t value_stride;  // floats between heads of partial outputs

  int64_t query;           // float    [B, Hq, query_stride]
  int64_t chunk_maxima;    // float    [B, Hq, chunks]
  int64_t maxima;          // float    [B, Hq]
  int64_t totals;          // uint64   [B, Hq]: sums of weights; sampled methods
  int64_t row_mass;        // float    [B, Hq]: share of the softmax that lies on rows; sampled methods
  int64_t scores;          // float, then uint32 weights in place [B, Hq, chunks * kChunkRows]; sampled methods
  int64_t weight_sums;     // uint64   [B, Hq, chunks]; sampled methods
  int64_t inclusion;       // uint32   [B, Hkv, chunks * kChunkRows]; shared
  int64_t inclusion_sums;  // uint64   [B, Hkv, chunks]; shared
  int64_t block_sums;      // uint64   [B, draw heads, chunks * kChunkRows / kBlockRows]; sampled methods
  int64_t partial_sums;    // float    [B, Hq, chunks]; dense
  int64_t partial_out;     // float    [B, Hq, chunks, value_stride]; dense
  int64_t bytes;

  std::string to_string() const;
};

CpuPlan plan_cpu(const DecodeShape& shape, Method method, int64_t rows);

// Names as users write them: "dense", "multinomial", "stratified", "systematic", "shared".
// Throws std::invalid_argument naming `op` and the value.
Method parse_method(const std::string& name, const std::string& op);
const char* method_name(Method method);

}  // namespace santa
