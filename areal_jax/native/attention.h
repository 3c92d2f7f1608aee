// Attention of queries over a cache of blocks that is read in place.
//
// H heads, K key-value heads, D head size, T positions of a block. Keys and values of a layer are [blocks, T, K, D]: a
// token is written as one piece, and a row reads its positions in the order of memory.

#ifndef AREAL_JAX_NATIVE_ATTENTION_H_
#define AREAL_JAX_NATIVE_ATTENTION_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "products.h"

namespace areal_jax {

constexpr int64_t kTogether = 4;  // positions whose scores are computed together
constexpr int64_t kScoreLanes = 16;  // scores of a head are so many times a whole number
constexpr int64_t kRunPositions = 16;  // whose keys or values stay in L1 for all heads and queries
constexpr int64_t kMostQueries = 4;  // of a sequence, which read its positions together
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

// Places for the scores of so many positions: those that are computed together may end behind the last one.
inline int64_t ScorePlaces(int64_t positions) {
  return (positions + kTogether - 1 + kScoreLanes - 1) / kScoreLanes * kScoreLanes;
}

// Softmax of scores in place: weights that are not normalised, and their sum. What lies behind `count` in the n places
// weighs nothing: whole vectors, because the rest of a loop one by one costs as much as all the vectors of a short row.
// A weight is relative to the largest score, which is stored where `largest` points.
inline float Soften(float* scores, int64_t count, int64_t n, float* largest = nullptr) {
  std::fill(scores + count, scores + n, -std::numeric_limits<float>::infinity());
  float top = scores[0], total = 0;
#pragma omp simd reduction(max : top)
  for (int64_t i = 0; i < n; ++i) top = std::max(top, scores[i]);
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < n; ++i) {
    scores[i] = Exp(scores[i] - top);
    total += scores[i];
  }
  if (largest) *largest = top;
  return total;
}

// Calls run(the first position, pointer to its K * D numbers, positions) for runs of up to kRunPositions positions that
// lie one after the other.
template <typename Run>
inline void Visit(const float* side, const int32_t* table, int64_t first, int64_t length, const Sizes& s,
                  const Run& run) {
  const int64_t stride = s.kv_heads * s.head_dim;
  for (int64_t p = first; p < length;) {
    const int64_t offset = p % s.block_tokens;
    const int64_t count = std::min({kRunPositions, length - p, s.block_tokens - offset});
    const float* at = side + (table[p / s.block_tokens] * s.block_tokens + offset) * stride;
    run(p, at, count);
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

// Queries of kHeads heads of kVectors vectors, times the keys of a run; scores [kHeads, places].
template <typename Vector, int kVectors, int kHeads>
inline void Score(const float* q, const float* keys, int64_t stride, int64_t count, float scale, float* scores,
                  int64_t places) {
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
      std::memcpy(scores + h * places + p, found, sizeof found);  // those behind the run are set by the next one
    }
  }
}

// Adds the values of a run, weighted, to the outputs of kHeads heads; weights [kHeads, places].
template <typename Vector, int kVectors, int kHeads>
inline void Accumulate(const float* weights, int64_t places, const float* values, int64_t stride, int64_t count,
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
        sums[h][v] = MultiplyAdd(weights[h * places + p] - Vector{}, value, sums[h][v]);
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
             int64_t places) const {
    for (int h = 0; h < kHeads; ++h) {
      for (int64_t p = 0; p < count; ++p) {
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t d = 0; d < dim; ++d) sum += q[h * dim + d] * keys[p * stride + d];
        scores[h * places + p] = sum * scale;
      }
    }
  }

  template <int kHeads>
  void Accumulate(const float* weights, int64_t places, const float* values, int64_t stride, int64_t count,
                  float* out) const {
    for (int h = 0; h < kHeads; ++h) {
      for (int64_t p = 0; p < count; ++p) {
#pragma omp simd
        for (int64_t d = 0; d < dim; ++d) out[h * dim + d] += weights[h * places + p] * values[p * stride + d];
      }
    }
  }
};

// And for a head size of so many vectors.
template <typename Vector, int kVectors>
struct OneSize {
  template <int kHeads>
  void Score(const float* q, const float* keys, int64_t stride, int64_t count, float scale, float* scores,
             int64_t places) const {
    areal_jax::Score<Vector, kVectors, kHeads>(q, keys, stride, count, scale, scores, places);
  }

  template <int kHeads>
  void Accumulate(const float* weights, int64_t places, const float* values, int64_t stride, int64_t count,
                  float* out) const {
    areal_jax::Accumulate<Vector, kVectors, kHeads>(weights, places, values, stride, count, out);
  }
};

// Calls work(heads together, first of them) for all heads that share a key head.
template <typename Work>
inline void VisitHeads(int64_t heads, const Work& work) {
  int64_t h = 0;
  for (; h + kMostHeads <= heads; h += kMostHeads) work(std::integral_constant<int, kMostHeads>{}, h);
  if constexpr (kMostHeads > 2) {
    if (heads - h == 2) return work(std::integral_constant<int, 2>{}, h);
  }
  for (; h < heads; ++h) work(std::integral_constant<int, 1>{}, h);
}

// Queries of one sequence: row r sees the first lengths[r] positions of the table, or the last `window` of them.
struct Queries {
  const float* q;  // [rows, H, D]
  const int32_t* table;
  const int32_t* lengths;  // [rows]; 0 = the row sees nothing, and its result is 0
  int64_t rows;  // up to kMostQueries
  int64_t window;  // 0 = all positions
  float* out;  // [rows, H, D]
  const float* sinks = nullptr;  // [H], one more score of each head, without a value; null = none
};

template <typename Size>
void AttendWith(const Size& size, const Queries& queries, const float* keys, const float* values, const Sizes& s) {
  const int64_t width = s.heads * s.head_dim, group = s.heads / s.kv_heads, stride = s.kv_heads * s.head_dim;
  const float scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
  struct Row {
    const float* q;
    float* out;
    int64_t first, length, places;
    float* scores;  // [H, places]
  } rows[kMostQueries];
  int64_t begin = queries.lengths[0], end = 0, total = 0;
  for (int64_t r = 0; r < queries.rows; ++r) {
    const int64_t length = queries.lengths[r];
    const int64_t first = queries.window > 0 ? std::max<int64_t>(0, length - queries.window) : 0;
    rows[r] = {queries.q + r * width, queries.out + r * width, first, length, ScorePlaces(length - first), nullptr};
    begin = std::min(begin, first), end = std::max(end, length), total += s.heads * rows[r].places;
  }
  static thread_local std::vector<float> buffer, totals;  // of all rows; [rows, H]
  if (static_cast<int64_t>(buffer.size()) < total) buffer.resize(total);
  totals.resize(queries.rows * s.heads);
  float* next = buffer.data();
  for (int64_t r = 0; r < queries.rows; ++r) {
    rows[r].scores = next;
    next += s.heads * rows[r].places;
  }

  // work(heads together, row, the first of them, their part of the keys or values of a run, its positions, their weights)
  const auto visit = [&](const float* side, const auto& work) {
    Visit(side, queries.table, begin, end, s, [&](int64_t p, const float* at, int64_t count) {
      for (int64_t r = 0; r < queries.rows; ++r) {
        const Row& row = rows[r];
        const int64_t from = std::max(p, row.first), seen = std::min(p + count, row.length) - from;
        if (seen <= 0) continue;
        for (int64_t k = 0; k < s.kv_heads; ++k) {
          const float* part = at + (from - p) * stride + k * s.head_dim;
          VisitHeads(group, [&](auto together, int64_t in_group) {
            const int64_t h = k * group + in_group;
            work(together, row, h * s.head_dim, part, seen, row.scores + h * row.places + from - row.first);
          });
        }
      }
    });
  };
  visit(keys, [&](auto together, const Row& row, int64_t head, const float* part, int64_t count, float* scores) {
    size.template Score<decltype(together)::value>(row.q + head, part, stride, count, scale, scores, row.places);
  });
  std::fill(queries.out, queries.out + queries.rows * width, 0.0f);
  for (int64_t i = 0; i < queries.rows * s.heads; ++i) {
    const Row& row = rows[i / s.heads];
    const int64_t seen = row.length - row.first;
    float top = 0;
    totals[i] = seen ? Soften(row.scores + i % s.heads * row.places, seen, row.places, &top) : 1.0f;
    if (queries.sinks) totals[i] += std::exp(queries.sinks[i % s.heads] - top);  // infinite: the result is 0
  }
  visit(values, [&](auto together, const Row& row, int64_t head, const float* part, int64_t count, float* weights) {
    size.template Accumulate<decltype(together)::value>(weights, row.places, part, stride, count, row.out + head);
  });
  for (int64_t i = 0; i < queries.rows * s.heads; ++i) {
    for (int64_t d = 0; d < s.head_dim; ++d) queries.out[i * s.head_dim + d] /= totals[i];
  }
}

// softmax(q k' / sqrt(D)) v; the result of a row does not depend on the others.
inline void Attend(const Queries& queries, const float* keys, const float* values, const Sizes& s) {
  const auto attend = [&](const auto& size) { AttendWith(size, queries, keys, values, s); };
  constexpr int64_t kLanes = sizeof(Widest) / sizeof(float);
  if (s.head_dim == 64) return attend(OneSize<Widest, 64 / kLanes>{});
  if (s.head_dim == 128) return attend(OneSize<Widest, 128 / kLanes>{});
  attend(AnySize{s.head_dim});
}

}  // namespace areal_jax

#endif  // AREAL_JAX_NATIVE_ATTENTION_H_
