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

namespace areal_jax {

constexpr int64_t kUnroll = 4;  // positions whose products are computed together

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

// kDim is the head size, or 0 where it is known at run time only.
template <int kDim, int64_t kPositions>
inline void Score(const float* q, const float* k, int64_t stride, float scale, int64_t dim, float* scores) {
  const int64_t size = kDim ? kDim : dim;
  float sums[kPositions] = {};
  for (int64_t p = 0; p < kPositions; ++p) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < size; ++d) sum += q[d] * k[p * stride + d];
    sums[p] = sum;
  }
  for (int64_t p = 0; p < kPositions; ++p) scores[p] = sums[p] * scale;
}

template <int kDim, int64_t kPositions>
inline void Accumulate(const float* weights, const float* v, int64_t stride, int64_t dim, float* out) {
  const int64_t size = kDim ? kDim : dim;
#pragma omp simd
  for (int64_t d = 0; d < size; ++d) {
    float sum = out[d];
    for (int64_t p = 0; p < kPositions; ++p) sum += weights[p] * v[p * stride + d];
    out[d] = sum;
  }
}

// Calls visit(index of the position in the row, pointer to its K * D numbers, positions) for runs of positions.
template <typename Four, typename One>
inline void Visit(const float* side, const int32_t* table, int64_t first, int64_t length, const Sizes& s,
                  const Four& four, const One& one) {
  const int64_t stride = s.kv_heads * s.head_dim;
  for (int64_t p = first; p < length;) {
    const int64_t offset = p % s.block_tokens;
    const int64_t end = std::min(length, p - offset + s.block_tokens);
    const float* at = side + (table[p / s.block_tokens] * s.block_tokens + offset) * stride;
    for (; p + kUnroll <= end; p += kUnroll, at += kUnroll * stride) {
      // the hardware's own prefetch stops at the end of a page; into L2, because L1 holds the queries and scores
      const char* next = reinterpret_cast<const char*>(at + kUnroll * stride);
      for (int64_t byte = 0; byte < kUnroll * stride * 4; byte += 64) __builtin_prefetch(next + byte, 0, 2);
      four(p - first, at);
    }
    for (; p < end; ++p, at += stride) one(p - first, at);
  }
}

template <int kDim>
void AttendRow(const float* q, const float* keys, const float* values, const int32_t* table, int64_t first,
               int64_t length, const Sizes& s, float* out) {
  const int64_t seen = length - first, group = s.heads / s.kv_heads, stride = s.kv_heads * s.head_dim;
  const float scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
  static thread_local std::vector<float> buffer;  // [H, seen]
  if (static_cast<int64_t>(buffer.size()) < s.heads * seen) buffer.resize(s.heads * seen);
  float* scores = buffer.data();
  const auto score = [&](auto positions, int64_t p, const float* k) {
    for (int64_t h = 0; h < s.heads; ++h) {
      Score<kDim, decltype(positions)::value>(q + h * s.head_dim, k + h / group * s.head_dim, stride, scale,
                                              s.head_dim, scores + h * seen + p);
    }
  };
  using Four = std::integral_constant<int64_t, kUnroll>;
  using One = std::integral_constant<int64_t, 1>;
  Visit(keys, table, first, length, s, [&](int64_t p, const float* k) { score(Four{}, p, k); },
        [&](int64_t p, const float* k) { score(One{}, p, k); });
  std::fill(out, out + s.heads * s.head_dim, 0.0f);
  static thread_local std::vector<float> totals;
  totals.resize(s.heads);
  for (int64_t h = 0; h < s.heads; ++h) totals[h] = Soften(scores + h * seen, seen);
  const auto accumulate = [&](auto positions, int64_t p, const float* v) {
    for (int64_t h = 0; h < s.heads; ++h) {
      Accumulate<kDim, decltype(positions)::value>(scores + h * seen + p, v + h / group * s.head_dim, stride,
                                                   s.head_dim, out + h * s.head_dim);
    }
  };
  Visit(values, table, first, length, s, [&](int64_t p, const float* v) { accumulate(Four{}, p, v); },
        [&](int64_t p, const float* v) { accumulate(One{}, p, v); });
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
  const auto attend = s.head_dim == 64 ? AttendRow<64> : s.head_dim == 128 ? AttendRow<128> : AttendRow<0>;
  attend(q, keys, values, table, window > 0 ? std::max<int64_t>(0, length - window) : 0, length, s, out);
}

}  // namespace areal_jax

#endif  // AREAL_JAX_NATIVE_ATTENTION_H_
