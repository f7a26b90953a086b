#pragma once

#include <cstdint>

#include "math/host_device.h"
#include "math/layout.h"

// Plain structs that carry a decode step below torch: pointers with their shapes beside them. Nothing under
// this line of includes knows torch. All strides count elements and are 64-bit before the first product.
namespace santa {

enum class Dtype : uint8_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };
constexpr int kDtypes = 3;

SANTA_HD constexpr int64_t element_size(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

enum class Method : uint8_t { kDense, kMultinomial, kStratified, kSystematic, kShared };

// Sizes of one decode step.
struct DecodeShape {
  int64_t batch;        // B
  int64_t query_heads;  // Hq
  int64_t kv_heads;     // Hkv
  int64_t rows;         // L: capacity of the cache; a sequence may be shorter
  int64_t head_dim;     // D
  int64_t value_dim;    // Dv
  Dtype dtype;          // of q, k and v

  SANTA_HD int64_t group_size() const { return query_heads / kv_heads; }  // G
};

// Where row j of sequence b and KV head h lies. A row lives on a page: page_table[b][j / page_rows] when the
// cache is paged, and page b, holding every row, when it is not. One form serves both.
struct RowAddress {
  const void* data;  // [pages, Hkv, page_rows, D] with any strides but the last
  int64_t page_stride;
  int64_t head_stride;
  int64_t row_stride;
  int64_t page_rows;                    // rows a page holds; at least L when there is no table
  const int32_t* page_table = nullptr;  // [B, max_pages], or null
  int64_t page_table_stride = 0;

  SANTA_HD int64_t offset(int64_t b, int64_t h, int64_t j) const {
    if (page_table == nullptr) return b * page_stride + h * head_stride + j * row_stride;
    const int64_t page = page_table[b * page_table_stride + j / page_rows];
    return page * page_stride + h * head_stride + (j % page_rows) * row_stride;
  }

  // Offsets of rows [begin, begin + n).
  void offsets(int64_t b, int64_t h, int64_t begin, int64_t n, int64_t* to) const {
    if (page_table == nullptr) {
      const int64_t first = offset(b, h, begin);
      for (int64_t i = 0; i < n; ++i) to[i] = first + i * row_stride;
    } else {
      for (int64_t i = 0; i < n; ++i) to[i] = offset(b, h, begin + i);
    }
  }
};

// An int64 per sequence, or one for all (stride 0).
struct PerSequence {
  const int64_t* data = nullptr;  // [B] or [1]
  int64_t stride = 0;

  SANTA_HD int64_t operator[](int64_t b) const { return data[b * stride]; }
};

// Keys once more, in blocks of kSketchRows rows that lie feature by feature.
struct KeyBlocks {
  const void* data = nullptr;  // [B, Hkv, capacity, D, kSketchRows] in the dtype of the keys, or null; a block
                               // is one piece of memory
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t block_stride = 0;
  int64_t capacity = 0;           // blocks
  const int64_t* rows = nullptr;  // [B]: rows held; those past the last whole block are not in `data`
  int64_t rows_stride = 0;

  SANTA_HD bool present() const { return data != nullptr; }
  // Rows of whole blocks: they are scored from here, all others from the keys.
  SANTA_HD int64_t packed_rows(int64_t b) const {
    if (!present()) return 0;
    const int64_t held = rows[b * rows_stride];
    const int64_t blocks = held < 0 ? 0 : held / kSketchRows;
    return (blocks < capacity ? blocks : capacity) * kSketchRows;
  }
  SANTA_HD int64_t offset(int64_t b, int64_t h, int64_t block) const {
    return b * batch_stride + h * head_stride + block * block_stride;
  }
};

// Rows on their way into such blocks.
struct AppendParams {
  DecodeShape shape;  // its batch, KV heads, rows (those of k), head dim and dtype
  RowAddress k;       // [B, Hkv, n, D]
  void* blocks;       // [B, Hkv, capacity, D, kSketchRows]
  int64_t batch_stride;
  int64_t head_stride;
  int64_t block_stride;
  int64_t capacity;
  void* open;            // [B, Hkv, kSketchRows, D], contiguous: rows of the block that is not whole yet
  int64_t* rows;         // [B], contiguous: rows held, before and after
  PerSequence num_rows;  // null data: all rows of k
};

// The stochastic query that takes the place of q in every score.
struct BernoulliParams {
  int64_t draws = 0;  // 0: the query itself
  bool shared = true;
};

// Which rows a head attends. A mask selects rows; an additive mask moves the scores of those it selects.
struct MaskParams {
  enum class Kind : uint8_t { kNone, kBool, kFloat32, kFloat16, kBFloat16 };
  Kind kind = Kind::kNone;
  const void* data = nullptr;  // [B, Hq, L], broadcast dimensions have stride 0
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t row_stride = 0;

  // The lowest finite number of the mask's type means "not attended", as -inf does. Masks made in bfloat16 and
  // then widened carry bfloat16's lowest, which in float32 is a little above float32's own.
  SANTA_HD float lowest() const { return kind == Kind::kFloat16 ? -65504.0f : -3.3895313892515355e38f; }
};

// A logit per query head that takes part in the softmax and has no value row.
struct SinkParams {
  const void* data = nullptr;  // [Hq], or null without sinks
  int64_t stride = 0;
  Dtype dtype = Dtype::kFloat32;
};

// Rows of each sequence, int32 or int64.
struct Lengths {
  const void* data = nullptr;  // [B], or null: every sequence has L rows
  int64_t stride = 0;
  bool wide = false;  // int64

  SANTA_HD int64_t operator[](int64_t b) const {
    return wide ? static_cast<const int64_t*>(data)[b * stride] : static_cast<const int32_t*>(data)[b * stride];
  }
};

// How rows are drawn.
struct DrawParams {
  Method method;
  int64_t samples;  // S
  PerSequence seed;
  PerSequence position;  // null data: the last attended row plus one
  int64_t layer;
  int64_t head_offset;  // global index of the first query head
};

// What a step reads of the keys of one KV head.
struct KeysRead {
  int64_t rows;      // attended by some head
  int64_t features;  // used by the query of some head
  int64_t bytes;
};

struct DecodeParams {
  DecodeShape shape;
  const void* q;  // [B, Hq, D]
  Dtype q_dtype;  // that of the keys, or float32
  int64_t q_batch_stride;
  int64_t q_head_stride;
  RowAddress k;  // [B, Hkv, L, D]
  RowAddress v;  // [B, Hkv, L, Dv]
  KeyBlocks key_blocks;
  BernoulliParams bernoulli;
  bool sparse_query = false;  // features that no head of a group uses are not read from key_blocks
  float scale;
  float softcap = 0.0f;  // c: scores become c tanh(score / c) before the mask; 0 leaves them
  MaskParams mask;       // [B, Hq, L]
  Lengths seq_lens;
  SinkParams sinks;  // [Hq]
  DrawParams draw;

  void* out;                       // [B, Hq, Dv], contiguous, of the inputs' dtype
  float* lse;                      // [B, Hq]
  KeysRead* keys_read = nullptr;   // [B, Hkv], null without statistics
  int64_t* value_rows = nullptr;   // [B, Hkv]
  float* squared_error = nullptr;  // [B, Hq]
};

}  // namespace santa
