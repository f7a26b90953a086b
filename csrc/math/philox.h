#pragma once

#include <cstdint>

#include "host_device.h"

namespace santa {

// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
// Counter-based: a draw is a pure function of where it is used, so no thread, tile or batch slot can change it.
struct Philox4x32 {
  uint32_t word[4];
};

SANTA_HD Philox4x32 philox4x32(Philox4x32 counter, uint32_t key0, uint32_t key1) {
  constexpr int kRounds = 10;
  constexpr uint64_t kMultiplier0 = 0xD2511F53u;
  constexpr uint64_t kMultiplier1 = 0xCD9E8D57u;
  constexpr uint32_t kWeyl0 = 0x9E3779B9u;  // fractional part of the golden ratio
  constexpr uint32_t kWeyl1 = 0xBB67AE85u;  // fractional part of sqrt(3)
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t product0 = kMultiplier0 * counter.word[0];
    const uint64_t product1 = kMultiplier1 * counter.word[2];
    counter = {{static_cast<uint32_t>(product1 >> 32) ^ counter.word[1] ^ key0, static_cast<uint32_t>(product1),
                static_cast<uint32_t>(product0 >> 32) ^ counter.word[3] ^ key1, static_cast<uint32_t>(product0)}};
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return counter;
}

// What the random bits are for. Streams never share a counter, so a later use cannot disturb an earlier one.
enum class Stream : uint32_t { kValues = 0, kFeatures = 1 };

// Everything that addresses one random number except the index of the draw.
struct DrawKey {
  int64_t seed;
  int64_t position;
  int64_t layer;        // below 2^24
  int64_t global_head;  // query head counted over all tensor-parallel ranks
};

SANTA_HD Philox4x32 random_words(const DrawKey& key, uint32_t draw, Stream stream) {
  const uint64_t seed = static_cast<uint64_t>(key.seed);
  const Philox4x32 counter = {{static_cast<uint32_t>(key.position), draw,
                               static_cast<uint32_t>(stream) << 24 | static_cast<uint32_t>(key.layer),
                               static_cast<uint32_t>(key.global_head)}};
  return philox4x32(counter, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
}

SANTA_HD uint64_t random64(const DrawKey& key, uint32_t draw, Stream stream = Stream::kValues) {
  const Philox4x32 bits = random_words(key, draw, stream);
  return static_cast<uint64_t>(bits.word[1]) << 32 | bits.word[0];
}

}  // namespace santa
