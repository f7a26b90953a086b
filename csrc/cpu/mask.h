#pragma once

#include <cstring>

#include "../math/softmax.h"
#include "../params.h"
#include "convert.h"

namespace santa::cpu {

// Reads a mask of any kind and stride. A row is selected or it is not: what an additive mask holds for a row that
// it does not select is never added to anything.
class Mask {
 public:
  explicit Mask(const MaskParams& params) : params_(params) {}

  bool present() const { return params_.kind != MaskParams::Kind::kNone; }
  bool same_for_all_heads() const { return params_.head_stride == 0; }

  // Whether head h of sequence b attends row j, and the number to add to its score.
  bool attends(int64_t b, int64_t h, int64_t j, float* bias) const {
    const int64_t at = b * params_.batch_stride + h * params_.head_stride + j * params_.row_stride;
    *bias = 0.0f;
    switch (params_.kind) {
      case MaskParams::Kind::kNone:
        return true;
      case MaskParams::Kind::kBool:
        return static_cast<const uint8_t*>(params_.data)[at] != 0;
      case MaskParams::Kind::kFloat32:
        *bias = static_cast<const float*>(params_.data)[at];
        break;
      case MaskParams::Kind::kFloat16:
        *bias = to_float(static_cast<const Half*>(params_.data)[at]);
        break;
      case MaskParams::Kind::kBFloat16:
        *bias = to_float(static_cast<const BFloat*>(params_.data)[at]);
        break;
    }
    return !(*bias <= params_.lowest());  // NaN is attended, and surfaces
  }

  bool attends(int64_t b, int64_t h, int64_t j) const {
    float bias;
    return attends(b, h, j, &bias);
  }

  // Whether every head attends every one of rows [begin, end), nothing added: the fast path. Cheap for the
  // masks that decoding meets (bool, broadcast over heads); false is always a safe answer.
  bool selects_all(int64_t b, int64_t begin, int64_t end) const {
    if (!present()) return true;
    if (params_.kind != MaskParams::Kind::kBool || !same_for_all_heads()) return false;
    const uint8_t* row = static_cast<const uint8_t*>(params_.data) + b * params_.batch_stride;
    if (params_.row_stride == 1) return std::memchr(row + begin, 0, end - begin) == nullptr;
    for (int64_t j = begin; j < end; ++j) {
      if (row[j * params_.row_stride] == 0) return false;
    }
    return true;
  }

  // One past the last of the first `rows` rows that any of the heads attends; 0 if none does.
  int64_t attended_end(int64_t b, int64_t heads, int64_t rows) const {
    if (!present()) return rows;
    int64_t end = 0;
    for (int64_t h = 0; h < (same_for_all_heads() ? 1 : heads); ++h) {
      int64_t j = rows;
      while (j > end && !attends(b, h, j - 1)) --j;
      end = j > end ? j : end;
    }
    return end;
  }

 private:
  MaskParams params_;
};

}  // namespace santa::cpu
