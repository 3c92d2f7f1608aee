// Checksums of the elements of an array, as publication/manifest.py defines them. Called from Python, not by XLA.

#ifndef AREAL_JAX_NATIVE_DIGEST_H_
#define AREAL_JAX_NATIVE_DIGEST_H_

#include <algorithm>
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
// there, to their positions, while a block of them is in the cache.
template <typename Word>
void Digest(const Word* words, int64_t rows, int64_t width, int64_t first, int64_t stride, uint32_t exponent,
            Word* target, uint64_t* sums) {
  constexpr int64_t kBlock = 1 << 14;  // so that a block's count of bad words fits 32 bits
  uint32_t plain = 0, mixed = 0;
  uint64_t wrong = 0;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t start = 0; start < width; start += kBlock) {
      const Word* block = words + row * width + start;
      const auto begin = static_cast<uint32_t>(first + row * stride + start);
      const auto size = static_cast<uint32_t>(std::min(kBlock, width - start));
      uint32_t bad = 0;
#pragma omp simd reduction(+ : plain, mixed, bad)
      for (uint32_t i = 0; i < size; ++i) {
        const uint32_t word = block[i];
        plain += word;
        mixed += Mix(word + (begin + i) * 0x9E3779B9u);
        bad += (word & exponent) == exponent;
      }
      wrong += bad;
      if (target) std::memcpy(target + first + row * stride + start, block, size * sizeof(Word));
    }
  }
  sums[0] = plain, sums[1] = mixed, sums[2] = exponent ? wrong : 0;
}

}  // namespace areal_jax

#endif  // AREAL_JAX_NATIVE_DIGEST_H_
