// Attention of one query over a cache of blocks that is read in place.
//
// H heads, K key-value heads, D head size, T positions of a block. Keys and values of a layer are [blocks, T, K, D]: a
// token is written as one piece, and a row reads its positions in the order of memory.

#ifndef AREAL_JAX_NATIVE_ATTENTION_H_
#define AREAL_JAX_NATIVE_ATTENTION_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "products.h"

namespace areal_jax {

constexpr int64_t kTogether = 4;  // positions whose scores are computed together
constexpr int64_t kRunPositions = 16;  // whose keys or values stay in L1 for all heads
#ifdef __AVX512F__
using Widest = Whole;
constexpr int kMostHeads = 3;  // whose results stay in registers
#else
using Widest = Half;
constexpr int kMostHeads = 1;
#endif

// e^x for x <= 0 to about 1e-7 of the value, in operations that compilers turn into vectors.
inline float Exp(float x) {
  x = std::max(x, -87.0f);
  const float shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

struct Sizes {
  int64_t heads, kv_heads, head_dim, block_tokens;
};

// Softmax of scores in place: weights that are not normalised, and their sum.
inline float Soften(float* scores, int64_t n) {
  float top = scores[0], total = 0;
#pragma omp simd reduction(max : top)
  for (int64_t i = 0; i < n; ++i) top = std::max(top, scores[i]);
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < n; ++i) {
    scores[i] = Exp(scores[i] - top);
    total += scores[i];
  }
  return total;
}

// Calls run(index of the first position in the row, pointer to its K * D numbers, positions) for runs of up to
// kRunPositions positions that lie one after the other.
template <typename Run>
inline void Visit(const float* side, const int32_t* table, int64_t first, int64_t length, const Sizes& s,
                  const Run& run) {
  const int64_t stride = s.kv_heads * s.head_dim;
  for (int64_t p = first; p < length;) {
    const int64_t offset = p % s.block_tokens;
    const int64_t count = std::min({kRunPositions, length - p, s.block_tokens - offset});
    const float* at = side + (table[p / s.block_tokens] * s.block_tokens + offset) * stride;
    run(p - first, at, count);
    p += count;
  }
}

// Fetches numbers that lie kRunPositions positions on: the hardware's own prefetch stops at the end of a page. Into L2,
// because L1 holds the queries and scores.
inline void FetchAhead(const float* at, int64_t stride, int64_t count) {
  const char* next = reinterpret_cast<const char*>(at + kRunPositions * stride);
  for (int64_t byte = 0; byte < count * static_cast<int64_t>(sizeof(float)); byte += 64) __builtin_prefetch(next + byte, 0, 2);
}

// Keeps a vector in a register: compilers load it again for every use.
template <typename Vector>
inline void Hold(Vector& vector) {
#ifdef __AVX512F__
  asm("" : "+v"(vector));
#endif
}

// The sum of the places of each of four vectors; each is added up in one order.
inline void AddPlaces(const Half* vectors, float* sums) {
  for (int64_t p = 0; p < kTogether; ++p) {
    const Half& x = vectors[p];
    sums[p] = ((x[0] + x[2]) + (x[1] + x[3])) + ((x[4] + x[6]) + (x[5] + x[7]));
  }
}
#ifdef __AVX512F__
inline void AddPlaces(const Whole* vectors, float* sums) {
  const auto a = reinterpret_cast<const __m512*>(vectors);
  const __m512 left = _mm512_add_ps(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
  const __m512 right = _mm512_add_ps(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));
  const __m512d l = _mm512_castps_pd(left), r = _mm512_castps_pd(right);
  const __m512 fours =
      _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(l, r)), _mm512_castpd_ps(_mm512_unpackhi_pd(l, r)));
  const __m256 eights = _mm256_add_ps(_mm512_castps512_ps256(fours),
                                      _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(fours), 1)));
  _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(eights), _mm256_extractf128_ps(eights, 1)));
}
#endif

// Queries of kHeads heads of kVectors vectors, times the keys of a run; scores [kHeads, seen].
template <typename Vector, int kVectors, int kHeads>
inline void Score(const float* q, const float* keys, int64_t stride, int64_t count, float scale, float* scores,
                  int64_t seen) {
  constexpr int kLanes = sizeof(Vector) / sizeof(float);
  for (int64_t p = 0; p < count; p += kTogether) {
    for (int64_t i = 0; i < kTogether; ++i) FetchAhead(keys + (p + i) * stride, stride, kVectors * kLanes);
    const float* k[kTogether];  // the last one again where there are fewer
    for (int64_t i = 0; i < kTogether; ++i) k[i] = keys + std::min(p + i, count - 1) * stride;
    Vector sums[kHeads][kTogether] = {};
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 4
      for (int i = 0; i < kTogether; ++i) {
        Vector key = Load<Vector>(k[i] + v * kLanes);
        Hold(key);
#pragma GCC unroll 4
        for (int h = 0; h < kHeads; ++h) {
          sums[h][i] = MultiplyAdd(Load<Vector>(q + (h * kVectors + v) * kLanes), key, sums[h][i]);
        }
      }
    }
    for (int h = 0; h < kHeads; ++h) {
      float found[kTogether];
      AddPlaces(sums[h], found);
      for (int64_t i = 0; i < kTogether; ++i) found[i] *= scale;
      float* to = scores + h * seen + p;
      if (count - p >= kTogether) {
        std::memcpy(to, found, sizeof found);  // of a known size: no call
      } else {
        std::memcpy(to, found, (count - p) * sizeof(float));
      }
    }
  }
}

// Adds the values of a run, weighted, to the outputs of kHeads heads; weights [kHeads, seen].
template <typename Vector, int kVectors, int kHeads>
inline void Accumulate(const float* weights, int64_t seen, const float* values, int64_t stride, int64_t count,
                       float* out) {
  constexpr int kLanes = sizeof(Vector) / sizeof(float);
  Vector sums[kHeads][kVectors];
  std::memcpy(sums, out, sizeof sums);
  for (int64_t p = 0; p < count; ++p) {
    FetchAhead(values + p * stride, stride, kVectors * kLanes);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      Vector value = Load<Vector>(values + p * stride + v * kLanes);
      Hold(value);
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h) {
        sums[h][v] = MultiplyAdd(weights[h * seen + p] - Vector{}, value, sums[h][v]);
      }
    }
  }
  std::memcpy(out, sums, sizeof sums);
}

// The two above for any head size, head by head.
struct AnySize {
  int64_t dim;

  template <int kHeads>
  void Score(const float* q, const float* keys, int64_t stride, int64_t count, float scale, float* scores,
             int64_t seen) const {
    for (int h = 0; h < kHeads; ++h) {
      for (int64_t p = 0; p < count; ++p) {
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t d = 0; d < dim; ++d) sum += q[h * dim + d] * keys[p * stride + d];
        scores[h * seen + p] = sum * scale;
      }
    }
  }

  template <int kHeads>
  void Accumulate(const float* weights, int64_t seen, const float* values, int64_t stride, int64_t count,
                  float* out) const {
    for (int h = 0; h < kHeads; ++h) {
      for (int64_t p = 0; p < count; ++p) {
#pragma omp simd
        for (int64_t d = 0; d < dim; ++d) out[h * dim + d] += weights[h * seen + p] * values[p * stride + d];
      }
    }
  }
};

// And for a head size of so many vectors.
template <typename Vector, int kVectors>
struct OneSize {
  template <int kHeads>
  void Score(const float* q, const float* keys, int64_t stride, int64_t count, float scale, float* scores,
             int64_t seen) const {
    areal_jax::Score<Vector, kVectors, kHeads>(q, keys, stride, count, scale, scores, seen);
  }

  template <int kHeads>
  void Accumulate(const float* weights, int64_t seen, const float* values, int64_t stride, int64_t count,
                  float* out) const {
    areal_jax::Accumulate<Vector, kVectors, kHeads>(weights, seen, values, stride, count, out);
  }
};

// Calls work(heads together, first of them) for all heads that share a key head.
template <typename Work>
inline void VisitHeads(int64_t heads, const Work& work) {
  int64_t h = 0;
  for (; h + kMostHeads <= heads; h += kMostHeads) work(std::integral_constant<int, kMostHeads>{}, h);
  for (; h < heads; ++h) work(std::integral_constant<int, 1>{}, h);
}

template <typename Size>
void AttendRow(const Size& size, const float* q, const float* keys, const float* values, const int32_t* table,
               int64_t first, int64_t length, const Sizes& s, float* out) {
  const int64_t seen = length - first, group = s.heads / s.kv_heads, stride = s.kv_heads * s.head_dim;
  const float scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
  static thread_local std::vector<float> buffer, totals;  // [H, seen], [H]
  if (static_cast<int64_t>(buffer.size()) < s.heads * seen) buffer.resize(s.heads * seen);
  totals.resize(s.heads);
  float* scores = buffer.data();
  const auto each = [&](const auto& work) {  // work(heads together, the first, the place of their key head)
    for (int64_t k = 0; k < s.kv_heads; ++k) {
      VisitHeads(group, [&](auto together, int64_t h) { work(together, k * group + h, k * s.head_dim); });
    }
  };
  Visit(keys, table, first, length, s, [&](int64_t p, const float* at, int64_t count) {
    each([&](auto together, int64_t h, int64_t place) {
      size.template Score<decltype(together)::value>(q + h * s.head_dim, at + place, stride, count, scale,
                                                     scores + h * seen + p, seen);
    });
  });
  std::fill(out, out + s.heads * s.head_dim, 0.0f);
  for (int64_t h = 0; h < s.heads; ++h) totals[h] = Soften(scores + h * seen, seen);
  Visit(values, table, first, length, s, [&](int64_t p, const float* at, int64_t count) {
    each([&](auto together, int64_t h, int64_t place) {
      size.template Accumulate<decltype(together)::value>(scores + h * seen + p, seen, at + place, stride, count,
                                                          out + h * s.head_dim);
    });
  });
  for (int64_t h = 0; h < s.heads; ++h) {
    for (int64_t d = 0; d < s.head_dim; ++d) out[h * s.head_dim + d] /= totals[h];
  }
}

// q, out [H, D] of one row over its first `length` positions, or the last `window` of them; window 0 = all.
inline void Attend(const float* q, const float* keys, const float* values, const int32_t* table, int64_t length,
                   int64_t window, const Sizes& s, float* out) {
  if (length <= 0) {
    std::fill(out, out + s.heads * s.head_dim, 0.0f);
    return;
  }
  const int64_t first = window > 0 ? std::max<int64_t>(0, length - window) : 0;
  const auto attend = [&](const auto& size) { AttendRow(size, q, keys, values, table, first, length, s, out); };
  constexpr int64_t kLanes = sizeof(Widest) / sizeof(float);
  if (s.head_dim == 64) return attend(OneSize<Widest, 64 / kLanes>{});
  if (s.head_dim == 128) return attend(OneSize<Widest, 128 / kLanes>{});
  attend(AnySize{s.head_dim});
}

}  // namespace areal_jax

#endif  // AREAL_JAX_NATIVE_ATTENTION_H_
