#pragma once

#include <cstdint>
#include <string>

#include "params.h"

// Where the pieces of a step lie in memory and how its work is cut. Pure and printable: the kernels carve scratch
// memory and launch by these plans and by nothing else.
namespace santa {

// How the CPU backend lays out its scratch memory for one decode step: byte offsets from one aligned buffer.
struct CpuPlan {
  int64_t rows;          // rows scored: the longest sequence of the batch
  int64_t chunks;        // of kChunkRows rows each, per sequence
  int64_t query_stride;  // floats between heads of the fp32 query
  int64_t block_stride;  // floats between features of the queries beside key_blocks
  int64_t value_stride;  // floats between heads of partial outputs

  int64_t query;           // float    [B, Hq, query_stride]
  int64_t used_features;   // int64    [B, Hkv]: how many features of K the query uses
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
  int64_t block_query;     // float    [B, Hkv, D, block_stride]: feature by feature; with key_blocks
  int64_t features;        // int32    [B, Hkv, D]: features that are read of key_blocks, in their order
  int64_t ascending;       // int32    [B, Hkv, D]: the same features, ascending
  int64_t lane_ends;       // int32    [B, Hkv, kMaxLanes]: where each lane's features end among them
  int64_t bytes;

  std::string to_string() const;
};

// With `blocks` some rows are scored from key_blocks.
CpuPlan plan_cpu(const DecodeShape& shape, Method method, int64_t rows, bool blocks = false);

// What a plan wants to know of a GPU.
struct DeviceInfo {
  int64_t multiprocessors;
  int64_t shared_bytes;                     // of shared memory that a block may have
  int64_t shared_bytes_per_multiprocessor;  // for all blocks on one
  int compute_capability;                   // of the code that runs there; 90 stands for 9.0
  double bytes_per_second = 0.0;            // of global memory; for predictions only, 0 where unknown
};

// How the chunks of so many independent units (groups, heads) are cut among blocks. No bit of a result depends on
// it.
struct Splits {
  int64_t units;
  int64_t splits;            // blocks for one unit
  int64_t chunks_per_split;  // the last may have fewer

  int64_t blocks() const { return units * splits; }
};

// Launches, shared memory and scratch memory of one decode step on a GPU. Sizes of shared memory are per block.
struct LaunchPlan {
  Method method;
  int64_t chunks;        // of kChunkRows rows, by the capacity of the cache: lengths are known to the device alone
  int64_t padded_rows;   // chunks * kChunkRows
  int64_t draw_heads;    // that have a sample of their own: B * Hq, or B * Hkv with the shared method
  int64_t capacity;      // most rows of one sample
  int64_t picks;         // most draws of one sample, repeated rows counted
  int64_t value_stride;  // floats between partial outputs; dense

  // score, and dense: a block scores chunks of one group for some of its heads, from tiles of rows that it stages.
  int64_t heads_per_block;  // all of the group where they fit
  int64_t head_blocks;
  int64_t tile_rows;
  int64_t query_stride;    // floats between heads
  int64_t key_stride;      // bytes between staged rows
  int64_t score_shared;    // bytes
  int64_t score_resident;  // blocks that shared memory lets a multiprocessor hold
  Splits score;            // units: groups times head blocks
  Splits weigh;            // units: heads
  Splits include;          // units: groups
  int64_t value_slices;    // blocks that share the features of a sample's rows, or of a dense head's output
  int64_t slice_features;  // of the sample's blocks: a power of two
  int64_t gather_head_blocks;
  int launches;
  bool overlap;  // programmatic dependent launch

  // Scratch memory, byte offsets from one aligned buffer.
  int64_t query;           // float    [B, Hq, D]; stochastic queries
  int64_t query_maxima;    // float    [B, Hq]; stochastic queries
  int64_t block_rows;      // int32    [B, Hkv, chunks * kSketchesPerChunk]: attended ones; statistics of a sketch
  int64_t attended;        // int32    [B, Hkv, chunks, 2]: attended rows of a chunk, and one past the last of them
  int64_t chunk_maxima;    // float    [B, Hq, chunks]
  int64_t maxima;          // float    [B, Hq]
  int64_t scores;          // float, then uint32 weights in place [B, Hq, padded_rows]
  int64_t weight_sums;     // uint64   [B, Hq, chunks]
  int64_t totals;          // uint64   [B, Hq]
  int64_t row_mass;        // float    [B, Hq]
  int64_t inclusion;       // uint32   [B, Hkv, padded_rows]; shared
  int64_t inclusion_sums;  // uint64   [B, Hkv, chunks]; shared
  int64_t block_sums;      // uint64   [draw heads, padded_rows / kBlockRows]
  int64_t prefix;          // uint64   [draw heads, chunks]: mass before each chunk
  int64_t drawn;     // int32    [draw heads, picks, 1 or 2]: multinomial draws are sorted from one into the other
  int64_t begins;    // int32    [draw heads, capacity]: where the draws of each row begin among the sorted ones
  int64_t rows;      // int64    [draw heads, capacity]
  int64_t counts;    // int32    [draw heads, capacity]
  int64_t num_rows;  // int32    [draw heads]
  int64_t coefficients;  // float    [B, Hq, capacity]
  int64_t slack;         // double   [draw heads, capacity]; statistics
  int64_t partial_sums;  // float    [B, Hq, chunks]; dense
  int64_t partial_out;   // float    [B, Hq, chunks, value_stride]; dense
  int64_t bytes;

  // Of global memory for a full cache: what must be read of K and V, and all scratch memory written and read.
  int64_t predicted_kv_bytes;
  int64_t predicted_bytes;
  double predicted_microseconds;  // at the device's bandwidth, if known; nothing else counted

  std::string to_string() const;
};

// What a step reads besides rows of q, k and v.
struct KeyReading {
  bool sketch = false;     // blocks of keys
  bool bernoulli = false;  // a stochastic query
};

// Throws std::invalid_argument where a row does not fit into shared memory or a grid is too large.
LaunchPlan plan_launch(const DecodeShape& shape, Method method, int64_t samples, bool statistics,
                       const DeviceInfo& device, const KeyReading& reading = {});

// Names as users write them: "dense", "multinomial", "stratified", "systematic", "shared".
// Throws std::invalid_argument naming `op` and the value.
Method parse_method(const std::string& name, const std::string& op);
const char* method_name(Method method);

}  // namespace santa
