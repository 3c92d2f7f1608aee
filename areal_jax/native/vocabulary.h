// Sums over blocks of the vocabulary, from which tokens are drawn and their log-probs taken.

#ifndef AREAL_JAX_NATIVE_VOCABULARY_H_
#define AREAL_JAX_NATIVE_VOCABULARY_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "attention.h"

namespace areal_jax {

constexpr int64_t kVocabularyBlock = 256;  // entries; models/logprobs.py has the same

// Of kLanes columns of logits [entries, stride], over their temperatures: the largest, and the log of the sum of e^z.
template <int kLanes>
inline void SumLanes(const float* logits, int64_t stride, int64_t entries, const float* temperatures, float* largest,
                     float* logsumexp) {
  float top[kLanes], scale[kLanes], total[kLanes] = {};
  std::memcpy(top, logits, sizeof top);
  for (int c = 0; c < kLanes; ++c) scale[c] = 1.0f / temperatures[c];
  for (int64_t i = 1; i < entries; ++i) {
#pragma omp simd
    for (int c = 0; c < kLanes; ++c) top[c] = std::max(top[c], logits[i * stride + c]);
  }
  for (int64_t i = 0; i < entries; ++i) {
#pragma omp simd
    for (int c = 0; c < kLanes; ++c) total[c] += Exp((logits[i * stride + c] - top[c]) * scale[c]);
  }
  for (int c = 0; c < kLanes; ++c) {
    largest[c] = top[c] / temperatures[c];
    logsumexp[c] = largest[c] + std::log(total[c]);
  }
}

// The same of `columns`, each by itself.
inline void SumBlock(const float* logits, int64_t columns, int64_t entries, const float* temperatures, float* largest,
                     float* logsumexp) {
  constexpr int kMany = 16, kFew = 8;
  int64_t c = 0;
  for (; c + kMany <= columns; c += kMany) {
    SumLanes<kMany>(logits + c, columns, entries, temperatures + c, largest + c, logsumexp + c);
  }
  for (; c < columns; c += kFew) {
    const int64_t count = std::min<int64_t>(kFew, columns - c);
    float lanes[kVocabularyBlock][kFew] = {}, ones[kFew], found[2][kFew];
    for (int64_t i = 0; i < entries; ++i) std::memcpy(lanes[i], logits + i * columns + c, count * sizeof(float));
    std::fill(std::copy(temperatures + c, temperatures + c + count, ones), ones + kFew, 1.0f);
    SumLanes<kFew>(lanes[0], kFew, entries, ones, found[0], found[1]);
    std::copy(found[0], found[0] + count, largest + c);
    std::copy(found[1], found[1] + count, logsumexp + c);
  }
}

}  // namespace areal_jax

#endif  // AREAL_JAX_NATIVE_VOCABULARY_H_
