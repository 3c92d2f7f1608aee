// Checksums of the elements of an array, as publication/manifest.py defines them. Called from Python, not by XLA.

#ifndef AREAL_JAX_NATIVE_DIGEST_H_
#define AREAL_JAX_NATIVE_DIGEST_H_

#include <cstdint>
#include <cstring>

namespace areal_jax {

// MurmurHash3's 32-bit finalizer (Appleby).
inline uint32_t Mix(uint32_t word) {
  word = (word ^ (word >> 16)) * 0x85EBCA6Bu;
  word = (word ^ (word >> 13)) * 0xC2B2AE35u;
  return word ^ (word >> 16);
}

// sums[3]: of the words, of the words mixed with their positions, of those whose bits under `exponent` are all set (NaN
// and infinity; 0 = the words are no floats). The first two are modulo 2^32. The words are `rows` runs of `width`; the
// positions of a run begin at `first`, and `stride` after the run before. With a `target` the words are also written
// there, to their positions. Sums stay in lanes from run to run, since runs may be short.
template <typename Word>
void Digest(const Word* words, int64_t rows, int64_t width, int64_t first, int64_t stride, uint32_t exponent,
            Word* target, uint64_t* sums) {
  constexpr int kLanes = 16;
  constexpr uint32_t kSpread = 0x9E3779B9u;
  typedef uint32_t Lanes __attribute__((vector_size(kLanes * sizeof(uint32_t))));
  typedef Word Words __attribute__((vector_size(kLanes * sizeof(Word))));
  Lanes plain{}, mixed{}, wrong{}, steps{};
  for (int lane = 0; lane < kLanes; ++lane) steps[lane] = lane * kSpread;
  uint64_t rest[3] = {0, 0, 0};
  for (int64_t row = 0; row < rows; ++row) {
    const Word* run = words + row * width;
    const int64_t begin = first + row * stride;
    Word* place = target ? target + begin : nullptr;
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
      Words read;
      std::memcpy(&read, run + i, sizeof read);
      if (place) std::memcpy(place + i, &read, sizeof read);
      const Lanes word = __builtin_convertvector(read, Lanes);
      Lanes hash = word + (static_cast<uint32_t>(begin + i) * kSpread + steps);
      hash = (hash ^ (hash >> 16)) * 0x85EBCA6Bu;
      hash = (hash ^ (hash >> 13)) * 0xC2B2AE35u;
      plain += word;
      mixed += hash ^ (hash >> 16);
      wrong -= (word & exponent) == exponent;  // -1 where it holds
    }
    for (; i < width; ++i) {
      const uint32_t word = run[i];
      if (place) place[i] = run[i];
      rest[0] += word;
      rest[1] += Mix(word + static_cast<uint32_t>(begin + i) * kSpread);
      rest[2] += (word & exponent) == exponent;
    }
  }
  uint32_t totals[2] = {static_cast<uint32_t>(rest[0]), static_cast<uint32_t>(rest[1])};
  for (int lane = 0; lane < kLanes; ++lane) {
    totals[0] += plain[lane], totals[1] += mixed[lane], rest[2] += wrong[lane];
  }
  sums[0] = totals[0], sums[1] = totals[1], sums[2] = exponent ? rest[2] : 0;
}

}  // namespace areal_jax

#endif  // AREAL_JAX_NATIVE_DIGEST_H_
