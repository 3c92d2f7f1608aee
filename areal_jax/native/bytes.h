// Products of matrices and tokens in 8 bits, with sums that are exact.
//
// A row of a matrix and a token have a scale each, the largest magnitude over 127, and whole numbers from -127 to 127
// that times the scale are near their entries. models/quantized.py has the same arithmetic for XLA.

#ifndef AREAL_JAX_NATIVE_BYTES_H_
#define AREAL_JAX_NATIVE_BYTES_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace areal_jax {

constexpr int64_t kByteRows = 16;  // of a panel
constexpr int64_t kGroup = 4;  // entries of a row that lie side by side, and are multiplied by one instruction
constexpr int64_t kPanelBytes = kByteRows * kGroup;
constexpr int kUnsigned = 128;  // is added to weights: the instruction multiplies an unsigned by a signed byte

// Panels [out / 16, groups of 4 entries, 16, 4], rounded up; entries that fill the last ones are 0, stored as 128.
struct ByteMatrix {
  const uint8_t* panels;
  const float* scales;  // [out]
  const float* bias;  // [out]; null = none
  int64_t groups, out;

  int64_t Panels() const { return (out + kByteRows - 1) / kByteRows; }
};

// Tokens [tokens, groups * 4].
struct ByteRows {
  int8_t* bytes;
  float* scales;
  int32_t* offsets;  // what sums over unsigned weights have too much, negated: -128 times the token's sum
  int64_t groups;
};

// The scale of numbers with this largest magnitude, and what they are multiplied by. NaN stays NaN in the scale.
inline float ScaleOf(float largest) { return largest * (1.0f / 127); }
inline float InverseOf(float largest) { return 127 / (largest > 1e-30f ? largest : 1e-30f); }

inline float LargestOf(const float* x, int64_t count) {
  uint32_t largest = 0;  // bits of magnitudes are in the order of the numbers, NaN above all
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    largest = std::max(largest, bits & 0x7fffffffu);
  }
  float magnitude;
  std::memcpy(&magnitude, &largest, sizeof magnitude);
  return magnitude;
}

inline void QuantizeRow(const float* x, int64_t count, const ByteRows& rows, int64_t token) {
  const float largest = LargestOf(x, count), inverse = InverseOf(largest);
  int8_t* bytes = rows.bytes + token * rows.groups * kGroup;
  int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) {
    const auto whole = static_cast<int32_t>(std::nearbyint(x[i] * inverse));
    bytes[i] = static_cast<int8_t>(whole);
    sum += static_cast<int8_t>(whole);
  }
  std::fill(bytes + count, bytes + rows.groups * kGroup, 0);
  rows.scales[token] = ScaleOf(largest);
  rows.offsets[token] = -kUnsigned * sum;
}

// Ways to sum the products of a panel's rows with one token: Add, those of a group.
struct Plain {
  struct Sums {
    int32_t rows[kByteRows];
  };
  static void Add(Sums& sums, const uint8_t* weights, int32_t group) {
    int8_t entries[kGroup];
    std::memcpy(entries, &group, sizeof entries);
    for (int64_t r = 0; r < kByteRows; ++r) {
      for (int64_t i = 0; i < kGroup; ++i) sums.rows[r] += weights[r * kGroup + i] * entries[i];
    }
  }
  static void Store(const Sums& sums, int32_t* out) { std::memcpy(out, &sums, sizeof sums); }
};

#ifdef __AVX2__
typedef int32_t EightSums __attribute__((vector_size(32)));

// Bytes are widened to 16 bits, whose products are added in pairs to 32: none of these is cut off.
struct Widened {
  struct Sums {
    EightSums pairs[4];
  };
  static void Add(Sums& sums, const uint8_t* weights, int32_t group) {
    const __m256i entries = _mm256_cvtepi8_epi16(_mm_set1_epi32(group));
    for (int i = 0; i < 4; ++i) {
      const __m256i four = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(weights + 16 * i)));
      sums.pairs[i] += reinterpret_cast<EightSums>(_mm256_madd_epi16(four, entries));
    }
  }
  static void Store(const Sums& sums, int32_t* out) {
    int32_t pairs[2 * kByteRows];
    std::memcpy(pairs, &sums, sizeof sums);
    for (int r = 0; r < kByteRows; ++r) out[r] = pairs[2 * r] + pairs[2 * r + 1];
  }
};
using Portable = Widened;
#else
using Portable = Plain;
#endif

#if defined(__AVX512VNNI__)
typedef int32_t SixteenSums __attribute__((vector_size(64)));

struct Vnni {
  using Sums = SixteenSums;
  static void Add(Sums& sums, const uint8_t* weights, int32_t group) {
    sums = reinterpret_cast<Sums>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sums), _mm512_loadu_si512(weights),
                                                      _mm512_set1_epi32(group)));
  }
  static void Store(const Sums& sums, int32_t* out) { std::memcpy(out, &sums, sizeof sums); }
};
using Fastest = Vnni;
#elif defined(__AVXVNNI__)
struct Vnni {
  struct Sums {
    EightSums halves[2];
  };
  static void Add(Sums& sums, const uint8_t* weights, int32_t group) {
    for (int i = 0; i < 2; ++i) {
      const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights + 32 * i));
      sums.halves[i] = reinterpret_cast<EightSums>(_mm256_dpbusd_avx_epi32(
          reinterpret_cast<__m256i>(sums.halves[i]), half, _mm256_set1_epi32(group)));
    }
  }
  static void Store(const Sums& sums, int32_t* out) { std::memcpy(out, &sums, sizeof sums); }
};
using Fastest = Vnni;
#else
using Fastest = Portable;
#endif

// Where the products of a token go: `stride` apart, set or added to.
struct ByteTarget {
  float* out;  // of the matrix' first row
  int64_t stride;
  bool add;
};

// Products of one token with `rows` rows from `first` on.
inline void ScaleSums(const int32_t* sums, const ByteMatrix& matrix, int64_t first, int64_t rows, const ByteRows& x,
                      int64_t token, float* products) {
  const float scale = x.scales[token];
  const int32_t offset = x.offsets[token];
  const float* scales = matrix.scales + first;
#pragma omp simd
  for (int64_t r = 0; r < rows; ++r) products[r] = static_cast<float>(sums[r] + offset) * (scales[r] * scale);
  if (!matrix.bias) return;
#pragma omp simd
  for (int64_t r = 0; r < rows; ++r) products[r] += matrix.bias[first + r];
}

// The same, where they go. Whole panels have their own loops, whose number of rows is known.
inline void StoreRows(const int32_t* sums, const ByteMatrix& matrix, int64_t first, const ByteRows& x, int64_t token,
                      const ByteTarget& target) {
  const int64_t rows = std::min(kByteRows, matrix.out - first);
  float products[kByteRows];
  float* out = target.out + first * target.stride;
  if (rows == kByteRows && target.stride == 1) {
    ScaleSums(sums, matrix, first, kByteRows, x, token, products);
    if (target.add) {
#pragma omp simd
      for (int64_t r = 0; r < kByteRows; ++r) products[r] += out[r];
    }
    std::memcpy(out, products, sizeof products);
    return;
  }
  ScaleSums(sums, matrix, first, rows, x, token, products);
  for (int64_t r = 0; r < rows; ++r) {
    float& at = out[r * target.stride];
    at = target.add ? at + products[r] : products[r];
  }
}

// Panels from `panel` on times tokens from `token` on; target(token) says where they go.
template <typename Way, int kPanels, int kTokens, typename Place>
inline void MultiplyTile(const ByteMatrix& matrix, int64_t panel, const ByteRows& x, int64_t token,
                         const Place& target) {
  const int64_t groups = matrix.groups, row = groups * kGroup;
  const uint8_t* w = matrix.panels + panel * groups * kPanelBytes;
  const uint8_t* next = w + kPanels * groups * kPanelBytes;  // what is behind goes to L2 meanwhile
  const int8_t* entries = x.bytes + token * row;
  typename Way::Sums sums[kPanels][kTokens] = {};
  for (int64_t g = 0; g < groups; ++g) {
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) __builtin_prefetch(next + (p * groups + g) * kPanelBytes, 0, 2);
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
      int32_t group;
      std::memcpy(&group, entries + t * row + g * kGroup, sizeof group);
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p) Way::Add(sums[p][t], w + (p * groups + g) * kPanelBytes, group);
    }
  }
  int32_t whole[kTokens][kPanels][kByteRows];
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {  // unrolled, so that the sums are in registers
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) Way::Store(sums[p][t], whole[t][p]);
  }
  for (int t = 0; t < kTokens; ++t) {
    const ByteTarget to = target(token + t);
    for (int p = 0; p < kPanels; ++p) StoreRows(whole[t][p], matrix, (panel + p) * kByteRows, x, token + t, to);
  }
}

template <typename Way, int kPanels, typename Place>
inline void MultiplyTokens(const ByteMatrix& matrix, int64_t panel, const ByteRows& x, int64_t tokens,
                           const Place& target) {
  int64_t t = 0;
  for (; t + 8 <= tokens; t += 8) MultiplyTile<Way, kPanels, 8>(matrix, panel, x, t, target);
  for (; t + 4 <= tokens; t += 4) MultiplyTile<Way, kPanels, 4>(matrix, panel, x, t, target);
  for (; t < tokens; ++t) MultiplyTile<Way, kPanels, 1>(matrix, panel, x, t, target);
}

// `panels` from `panel` on times all tokens.
template <typename Way, typename Place>
inline void MultiplyBytes(const ByteMatrix& matrix, int64_t panel, int64_t panels, const ByteRows& x, int64_t tokens,
                          const Place& target) {
  constexpr int kMost = 3;  // with 8 tokens, sums that fit into 24 of 32 registers
  for (; panels >= kMost; panels -= kMost, panel += kMost) {
    MultiplyTokens<Way, kMost>(matrix, panel, x, tokens, target);
  }
  for (; panels > 0; --panels, ++panel) MultiplyTokens<Way, 1>(matrix, panel, x, tokens, target);
}

// A float matrix [in, out], or [out, in] where `by_rows`, as panels and scales.
inline void PackBytes(const float* matrix, int64_t in, int64_t out, bool by_rows, uint8_t* panels, float* scales) {
  const int64_t row = by_rows ? in : 1, entry = by_rows ? 1 : out, groups = (in + kGroup - 1) / kGroup;
  std::fill(panels, panels + (out + kByteRows - 1) / kByteRows * groups * kPanelBytes, uint8_t{kUnsigned});
  for (int64_t first = 0; first < out; first += kByteRows, panels += groups * kPanelBytes) {
    const int64_t rows = std::min(kByteRows, out - first);
    uint32_t largest[kByteRows] = {};
    for (int64_t i = 0; i < in; ++i) {
      for (int64_t r = 0; r < rows; ++r) {
        uint32_t bits;
        std::memcpy(&bits, matrix + (first + r) * row + i * entry, sizeof bits);
        largest[r] = std::max(largest[r], bits & 0x7fffffffu);
      }
    }
    float inverse[kByteRows];
    for (int64_t r = 0; r < rows; ++r) {
      float magnitude;
      std::memcpy(&magnitude, &largest[r], sizeof magnitude);
      scales[first + r] = ScaleOf(magnitude), inverse[r] = InverseOf(magnitude);
    }
    for (int64_t i = 0; i < in; ++i) {
      uint8_t* to = panels + i / kGroup * kPanelBytes + i % kGroup;
      for (int64_t r = 0; r < rows; ++r) {
        const float number = matrix[(first + r) * row + i * entry] * inverse[r];
        to[r * kGroup] = static_cast<uint8_t>(kUnsigned + static_cast<int32_t>(std::nearbyint(number)));
      }
    }
  }
}

}  // namespace areal_jax

#endif  // AREAL_JAX_NATIVE_BYTES_H_
