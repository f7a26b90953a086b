// The matrix unit (AMX) and how rows of K and V reach it; a part of kernels_amx.cpp, which see.

#include "prefetch-inl.h"

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileLanes = 16;     // fp32 numbers, or pairs of bfloat16, in a row of a tile, which is a line
constexpr int64_t kTileFeatures = 32;  // bfloat16 numbers in it
constexpr int64_t kHeld = 4;           // tiles of one operand that stay in registers

constexpr int64_t kNearBytes = 8192;  // how far ahead of the reads rows are asked for into the first-level cache
constexpr int64_t kFarBytes = 32768;  // and into the second (both measured)

using Lines = float[kTileRows][kTileLanes];

constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t steps_of(int64_t features) { return (features + kTileFeatures - 1) / kTileFeatures; }

// ---- instructions ------------------------------------------------------------------------------------------

// Not the compilers' own: those of GCC 12 do not tell that they read memory, so that stores to an operand may be
// left out.
template <int kTo>
inline void load(const void* lines, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(lines), "r"(stride), "i"(kTo) : "memory");
}
template <int kFrom>
inline void store(void* lines, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(lines), "r"(stride), "i"(kFrom) : "memory");
}
template <int kTile>
inline void clear() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
// to[m][n] += a[m][p] * b[p][n], summed over both numbers of every pair p
template <int kTo, int kA, int kB>
inline void multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kTo), "i"(kA), "i"(kB));
}

// The shapes of the eight tiles, while it lives.
class TileShapes {
 public:
  struct Shape {
    int64_t rows;
    int64_t bytes;  // of a row
  };

  explicit TileShapes(const Shape (&shapes)[8]) {
    Operand operand;
    for (int tile = 0; tile < 8; ++tile) {
      operand.rows[tile] = static_cast<uint8_t>(shapes[tile].rows);
      operand.row_bytes[tile] = static_cast<uint16_t>(shapes[tile].bytes);
    }
    asm volatile("ldtilecfg %0" ::"m"(operand));
  }
  ~TileShapes() { asm volatile("tilerelease"); }
  TileShapes(const TileShapes&) = delete;
  TileShapes& operator=(const TileShapes&) = delete;

 private:
  struct Operand {  // of ldtilecfg
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  };
};

// Exchanges rows and columns of 16 x 16.
inline void transpose(__m512 (&line)[kTileRows]) {
  __m512i four[kTileRows];  // [4 lines a + c]: column c of each quarter, of those four lines
  for (int64_t a = 0; a < kTileRows; a += 4) {
    const __m512i low01 = _mm512_castps_si512(_mm512_unpacklo_ps(line[a], line[a + 1]));
    const __m512i high01 = _mm512_castps_si512(_mm512_unpackhi_ps(line[a], line[a + 1]));
    const __m512i low23 = _mm512_castps_si512(_mm512_unpacklo_ps(line[a + 2], line[a + 3]));
    const __m512i high23 = _mm512_castps_si512(_mm512_unpackhi_ps(line[a + 2], line[a + 3]));
    four[a] = _mm512_unpacklo_epi64(low01, low23);
    four[a + 1] = _mm512_unpackhi_epi64(low01, low23);
    four[a + 2] = _mm512_unpacklo_epi64(high01, high23);
    four[a + 3] = _mm512_unpackhi_epi64(high01, high23);
  }
  for (int64_t c = 0; c < 4; ++c) {
    const __m512i even_low = _mm512_shuffle_i32x4(four[c], four[4 + c], 0x88);
    const __m512i odd_low = _mm512_shuffle_i32x4(four[c], four[4 + c], 0xDD);
    const __m512i even_high = _mm512_shuffle_i32x4(four[8 + c], four[12 + c], 0x88);
    const __m512i odd_high = _mm512_shuffle_i32x4(four[8 + c], four[12 + c], 0xDD);
    line[c] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(even_low, even_high, 0x88));
    line[4 + c] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(odd_low, odd_high, 0x88));
    line[8 + c] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(even_low, even_high, 0xDD));
    line[12 + c] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(odd_low, odd_high, 0xDD));
  }
}

// ---- rows ------------------------------------------------------------------------------------------------

// 16 rows at equal distances.
struct RowBlock {
  const char* data;
  int64_t stride;  // in bytes
};

inline bool evenly_spaced(const int64_t* offsets) {
  const __m512i numbers = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i distance = _mm512_set1_epi64(offsets[1] - offsets[0]);
  const __m512i low = _mm512_add_epi64(_mm512_set1_epi64(offsets[0]), _mm512_mullo_epi64(distance, numbers));
  const __m512i high = _mm512_add_epi64(low, _mm512_slli_epi64(distance, 3));
  return (_mm512_cmpneq_epi64_mask(low, _mm512_loadu_si512(offsets)) |
          _mm512_cmpneq_epi64_mask(high, _mm512_loadu_si512(offsets + 8))) == 0;
}

inline RowBlock in_place(const BFloat* data, const int64_t* offsets) {
  return {reinterpret_cast<const char*>(data + offsets[0]),
          (offsets[1] - offsets[0]) * static_cast<int64_t>(sizeof(BFloat))};
}

// Rows of K or V as tile loads want them: in place where they lie evenly, else copied. Past the last row the last
// one stands in, past the last feature 0.
class RowBlocks {
 public:
  RowBlocks(const void* data, const int64_t* offsets, int64_t rows, int64_t length)
      : data_(static_cast<const BFloat*>(data)), offsets_(offsets), rows_(rows), length_(length) {}

  // Rows i to i + 15, until the next call.
  RowBlock from(int64_t i) {
    if (length_ % kTileFeatures == 0 && i + kTileRows <= rows_ && evenly_spaced(offsets_ + i)) {
      return in_place(data_, offsets_ + i);
    }
    const int64_t stride = steps_of(length_) * kTileFeatures;
    for (int64_t r = 0; r < kTileRows; ++r) {
      BFloat* to = copy_ + r * stride;
      __builtin_memcpy(to, data_ + offsets_[smaller(i + r, rows_ - 1)], static_cast<size_t>(length_) * sizeof *to);
      __builtin_memset(to + length_, 0, static_cast<size_t>(stride - length_) * sizeof *to);
    }
    return {reinterpret_cast<const char*>(copy_), stride * static_cast<int64_t>(sizeof(BFloat))};
  }

 private:
  const BFloat* data_;
  const int64_t* offsets_;
  const int64_t rows_;
  const int64_t length_;
  alignas(kLineBytes) BFloat copy_[kTileRows * kMaxSteps * kTileFeatures];
};

// What is read a while after a block of rows: a line of each of its 16 rows is asked for with every tile loaded.
class BlockAhead {
 public:
  BlockAhead(const RowBlock& near, const RowBlock& far) : near_(near), far_(far) {}

  [[gnu::always_inline]] void ask(int64_t step) const {
    const char* near = near_.data + step * kLineBytes;
    const char* far = far_.data + step * kLineBytes;
    for (int64_t r = 0; r < kTileRows; r += 4) {
      for (int64_t at = 0; at < 4; ++at) {
        prefetch_near(near + at * near_.stride);
        prefetch_far(far + at * far_.stride);
      }
      near += 4 * near_.stride;
      far += 4 * far_.stride;
    }
  }

 private:
  RowBlock near_;
  RowBlock far_;
};

// The rows of a tile followed by those ahead of it. Blocks that do not lie evenly are left to the processor: one
// of their lines stands in, as it does past the end.
class Upcoming {
 public:
  Upcoming(const void* data, const int64_t* offsets, int64_t rows, int64_t row_length, const RowsAhead& ahead)
      : data_(static_cast<const BFloat*>(data)),
        offsets_(offsets),
        rows_(rows),
        ahead_(ahead),
        near_(rows_spanning<BFloat>(kNearBytes, row_length)),
        far_(rows_spanning<BFloat>(kFarBytes, row_length)) {}

  BlockAhead after(int64_t i) const { return {block(i, near_), block(i, far_)}; }

 private:
  RowBlock block(int64_t i, int64_t distance) const {
    int64_t at = i + distance;
    if (at + kTileRows <= rows_ && evenly_spaced(offsets_ + at)) return in_place(data_, offsets_ + at);
    at -= rows_;
    if (at >= 0 && at + kTileRows <= ahead_.rows && evenly_spaced(ahead_.offsets + at)) {
      return in_place(static_cast<const BFloat*>(ahead_.data), ahead_.offsets + at);
    }
    return {reinterpret_cast<const char*>(data_ + offsets_[smaller(i, rows_ - 1)]), 0};
  }

  const BFloat* data_;
  const int64_t* offsets_;
  const int64_t rows_;
  const RowsAhead& ahead_;
  const int64_t near_;
  const int64_t far_;
};
