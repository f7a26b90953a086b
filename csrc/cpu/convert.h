#pragma once

#include <cstdint>
#include <cstring>

#include "../params.h"

namespace santa::cpu {

// Storage of 16-bit numbers. Distinct types, so that a template picks the conversion.
struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};

inline float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline uint32_t to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float to_float(float x) { return x; }

inline float to_float(BFloat x) { return from_bits(static_cast<uint32_t>(x.bits) << 16); }

inline float to_float(Half x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7FFFu;
  if (magnitude < 0x0400u) {  // zero and subnormals: multiples of 2^-24
    return from_bits(to_bits(static_cast<float>(magnitude) * from_bits(0x33800000u)) | sign);
  }
  // Exponents are biased by 15 and 127; infinity and NaN keep theirs at all ones.
  const uint32_t bias = magnitude >= 0x7C00u ? 0x70000000u : 0x38000000u;
  return from_bits(((magnitude << 13) + bias) | sign);
}

inline void store_as(float x, float* to) { *to = x; }

// Round to nearest, ties to even.
inline void store_as(float x, BFloat* to) {
  const uint32_t bits = to_bits(x);
  if (x != x) {
    to->bits = static_cast<uint16_t>(bits >> 16 | 0x0040u);  // keep a NaN from rounding to infinity
    return;
  }
  to->bits = static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

inline void store_as(float x, Half* to) {
  const uint32_t bits = to_bits(x);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) {
    to->bits = sign | 0x7E00u;
  } else if (magnitude >= 0x477FF000u) {  // 65520 and above round to infinity
    to->bits = sign | 0x7C00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: let fp32 addition round at the subnormal's last bit
    const float shifted = from_bits(magnitude) + 0.5f;
    to->bits = static_cast<uint16_t>(sign | (to_bits(shifted) - to_bits(0.5f)));
  } else {
    const uint32_t rounded = magnitude + 0xFFFu + (magnitude >> 13 & 1u);
    to->bits = static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
  }
}

// Picks the instance of a template for a dtype: f(T{}) with T the storage type.
template <class Function>
void with_dtype(Dtype dtype, const Function& f) {
  switch (dtype) {
    case Dtype::kFloat32:
      return f(float{});
    case Dtype::kFloat16:
      return f(Half{});
    case Dtype::kBFloat16:
      return f(BFloat{});
  }
}

}  // namespace santa::cpu
