// Log-sum-exp, target and most likely entries of each token, from its hidden state, without logits of the whole vocabulary.
//
// d model width, V vocabulary, K entries that are ranked. models/logprobs.py has the same in JAX.

#ifndef AREAL_JAX_NATIVE_RANKING_H_
#define AREAL_JAX_NATIVE_RANKING_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "layer.h"
#include "products.h"
#include "threads.h"
#include "vocabulary.h"

namespace areal_jax {

// The largest entries seen, in descending order; of equal ones the first that was seen.
inline void Insert(float value, int32_t id, int64_t most, float* values, int32_t* ids) {
  int64_t at = most - 1;
  for (; at > 0 && value > values[at - 1]; --at) values[at] = values[at - 1], ids[at] = ids[at - 1];
  values[at] = value, ids[at] = id;
}

// What is known of some columns: of each block of the vocabulary, and of the whole.
struct Ranks {
  float *largest, *logsumexp;  // [blocks, columns], of logits over temperatures
  float* values;  // [blocks, columns, K], logits
  int32_t* ids;  // [blocks, columns, K]
  int64_t columns, most;
};

// A block of the vocabulary for the columns of a sheet. `chosen` gets the logits of targets in the block.
inline void RankBlock(const Matrix& head, int64_t index, const std::vector<Block>& blocks, const Sheet& x,
                      const int32_t* targets, const float* temperatures, const Ranks& ranks, float* chosen) {
  const int64_t first = index * kVocabularyBlock, entries = std::min(kVocabularyBlock, head.out - first);
  alignas(64) float tile[kVocabularyBlock * kWidest];
  for (const Block& block : blocks) {
    const int64_t width = block.width;
    for (int64_t row = 0; row < entries; row += kUnitPanels * kPanelRows) {
      const int64_t panels = std::min(kUnitPanels, (entries - row) / kPanelRows);
      MultiplyBlock(head.panels + (first + row) * head.in, {block.first, width, width}, x.At(block), head.in,
                    {tile + row * width, width, false}, panels);
    }
    float own[kWidest], largest[kWidest], logsumexp[kWidest];
    for (int64_t c = 0; c < width; ++c) own[c] = c < block.columns ? temperatures[block.first + c] : 1.0f;
    SumBlock(tile, width, entries, own, largest, logsumexp);
    for (int64_t c = 0; c < block.columns; ++c) {
      const int64_t column = block.first + c, at = index * ranks.columns + column;
      ranks.largest[at] = largest[c], ranks.logsumexp[at] = logsumexp[c];
      const int64_t target = targets[column] - first;
      if (target >= 0 && target < entries) chosen[column] = tile[target * width + c];
    }
    if (ranks.most == 1) {
      float best[kWidest];
      int32_t where[kWidest] = {};
      std::copy(tile, tile + width, best);
      for (int32_t i = 1; i < entries; ++i) {
        const float* row = tile + i * width;
#pragma omp simd
        for (int64_t c = 0; c < width; ++c) {
          const bool more = row[c] > best[c];
          best[c] = more ? row[c] : best[c];
          where[c] = more ? i : where[c];
        }
      }
      for (int64_t c = 0; c < block.columns; ++c) {
        const int64_t at = index * ranks.columns + block.first + c;
        ranks.values[at] = best[c], ranks.ids[at] = static_cast<int32_t>(first) + where[c];
      }
      continue;
    }
    for (int64_t c = 0; c < block.columns; ++c) {
      const int64_t at = (index * ranks.columns + block.first + c) * ranks.most;
      float* values = ranks.values + at;
      int32_t* ids = ranks.ids + at;
      std::fill(values, values + ranks.most, -std::numeric_limits<float>::infinity());
      std::fill(ids, ids + ranks.most, -1);
      for (int64_t i = 0; i < entries; ++i) {
        const float value = tile[i * width + c];
        if (value > values[ranks.most - 1]) Insert(value, static_cast<int32_t>(first + i), ranks.most, values, ids);
      }
    }
  }
}

// The log-sum-exp of a column over all blocks, and its largest entries [K].
inline float MergeRanks(const Ranks& ranks, int64_t blocks, int64_t column, float* values, int32_t* ids) {
  const float none = -std::numeric_limits<float>::infinity();
  std::fill(values, values + ranks.most, none);
  std::fill(ids, ids + ranks.most, 0);
  float top = none;
  for (int64_t b = 0; b < blocks; ++b) top = std::max(top, ranks.largest[b * ranks.columns + column]);
  double total = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t at = b * ranks.columns + column;
    total += std::exp(static_cast<double>(ranks.logsumexp[at]) - top);
    for (int64_t i = 0; i < ranks.most; ++i) {
      const float value = ranks.values[at * ranks.most + i];
      if (!(value > values[ranks.most - 1])) break;
      Insert(value, ranks.ids[at * ranks.most + i], ranks.most, values, ids);
    }
  }
  return top + static_cast<float>(std::log(total));
}

}  // namespace areal_jax

#endif  // AREAL_JAX_NATIVE_RANKING_H_
