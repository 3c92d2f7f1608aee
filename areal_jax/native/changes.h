// Elements of 16 bits that differ between two versions of an array, as publication/delta.py defines them. Called from
// Python, not by XLA.

#ifndef AREAL_JAX_NATIVE_CHANGES_H_
#define AREAL_JAX_NATIVE_CHANGES_H_

#include <algorithm>
#include <cstdint>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "digest.h"

namespace areal_jax {

// The list of changes: one entry for each changed element, in ascending order of the positions.
struct ChangeList {
  uint8_t* gaps;    // elements between this one and the last; kLargeGap: the next entry of `large`
  uint32_t* large;
  uint8_t* low;     // of the difference of the bits, in zigzag order: 0, -1, 1, -2, ...
  uint8_t* high;
};

constexpr uint32_t kLargeGap = 255;
constexpr uint32_t kSpread = 0x9E3779B9u;  // of positions, in the digest

inline uint16_t Zigzag(uint16_t change) { return static_cast<uint16_t>((change << 1) ^ -(change >> 15)); }
inline uint16_t Unzigzag(uint16_t code) { return static_cast<uint16_t>((code >> 1) ^ -(code & 1)); }

// How the two sums of digest.h change.
struct DigestChange {
  uint32_t plain = 0, mixed = 0;
  void Move(uint32_t position, uint16_t before, uint16_t after) {
    plain += static_cast<uint32_t>(after) - before;
    mixed += Mix(after + position * kSpread) - Mix(before + position * kSpread);
  }
};

constexpr int64_t kBlock = 64;  // elements that are compared at once

// Bit i says that element i of the two blocks differs.
inline uint64_t CompareBlock(const uint16_t* one, const uint16_t* other) {
  uint64_t mask = 0;
#ifdef __AVX2__
  for (int64_t half = 0; half < 2; ++half) {
    __m256i equal[2];
    for (int64_t i = 0; i < 2; ++i) {
      const auto at = 32 * half + 16 * i;
      equal[i] = _mm256_cmpeq_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(one + at)),
                                    _mm256_loadu_si256(reinterpret_cast<const __m256i*>(other + at)));
    }
    // packing works within each half of a register: put the quarters in order again
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(equal[0], equal[1]), 0xD8);
    mask |= static_cast<uint64_t>(~static_cast<uint32_t>(_mm256_movemask_epi8(bytes))) << 32 * half;
  }
#else
  for (int64_t i = 0; i < kBlock; ++i) mask |= static_cast<uint64_t>(one[i] != other[i]) << i;
#endif
  return mask;
}

// Lists what changed, and makes `base` equal to `current`. found[5]: changes, entries of `large`, new values whose bits
// under `exponent` are all set, and the change of the digest.
inline void FindChanges(uint16_t* base, const uint16_t* current, int64_t count, uint32_t exponent, ChangeList list,
                        uint64_t* found) {
  int64_t changes = 0, large = 0, wrong = 0, last = -1;
  DigestChange digest;
  const auto note = [&](int64_t i) {
    const uint16_t before = base[i], after = current[i];
    const auto gap = static_cast<uint32_t>(i - last - 1);
    list.gaps[changes] = static_cast<uint8_t>(std::min(gap, kLargeGap));
    if (gap >= kLargeGap) list.large[large++] = gap;
    const uint16_t code = Zigzag(static_cast<uint16_t>(after - before));
    list.low[changes] = static_cast<uint8_t>(code), list.high[changes] = static_cast<uint8_t>(code >> 8);
    digest.Move(static_cast<uint32_t>(i), before, after);
    wrong += (after & exponent) == exponent;
    base[i] = after, last = i, ++changes;
  };
  int64_t start = 0;
  for (; start + kBlock <= count; start += kBlock) {
    for (uint64_t mask = CompareBlock(base + start, current + start); mask; mask &= mask - 1) {
      note(start + __builtin_ctzll(mask));
    }
  }
  for (int64_t i = start; i < count; ++i) {
    if (base[i] != current[i]) note(i);
  }
  found[0] = changes, found[1] = large, found[2] = exponent ? wrong : 0;
  found[3] = digest.plain, found[4] = digest.mixed;
}

// Adds the changes to `words`, or with `back` subtracts them; found[2]: the change of the digest. Positions are
// row-major in an array of `count` elements; with `rows` > 0 it is a matrix of so many rows, and the words lie as its
// transpose.
// False where a position is outside: then only changes before it were made.
inline bool ApplyChanges(uint16_t* words, int64_t count, int64_t rows, ChangeList list, int64_t changes, int64_t n_large,
                         bool back, uint64_t* found) {
  const int64_t columns = rows ? count / rows : 0;
  int64_t position = -1, large = 0;
  DigestChange digest;
  for (int64_t k = 0; k < changes; ++k) {
    uint32_t gap = list.gaps[k];
    if (gap == kLargeGap) {
      if (large == n_large) return false;
      gap = list.large[large++];
    }
    position += int64_t{1} + gap;
    if (position >= count) return false;
    const uint16_t change = Unzigzag(static_cast<uint16_t>(list.low[k] | list.high[k] << 8));
    uint16_t* word = words + (rows ? position % columns * rows + position / columns : position);
    const uint16_t before = *word;
    *word = static_cast<uint16_t>(back ? before - change : before + change);
    digest.Move(static_cast<uint32_t>(position), before, *word);
  }
  found[0] = digest.plain, found[1] = digest.mixed;
  return large == n_large;
}

}  // namespace areal_jax

#endif  // AREAL_JAX_NATIVE_CHANGES_H_
