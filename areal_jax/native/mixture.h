// Experts in the place of an MLP, as phases of work behind those of layer.h: the router, its choice, and the products
// of the tokens with the experts that they chose. models/experts.py chooses likewise.
//
// T tokens, E experts, k choices of a token, d model width, F' width of an expert, rounded up. The cost follows the
// experts that are chosen, whatever the number of tokens.

#ifndef AREAL_JAX_NATIVE_MIXTURE_H_
#define AREAL_JAX_NATIVE_MIXTURE_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <utility>
#include <vector>

#include "attention.h"
#include "expert_kernels.h"
#include "layer.h"
#include "ranking.h"
#include "threads.h"

namespace areal_jax {

// What a mixture needs beside the memory of its layer, for so many tokens. Layers of the same sizes may share it.
struct MixtureScratch {
  int64_t tokens, rounded;
  Sheet logits;  // of the router
  float* rows;  // [T, d], the tokens, and later what is added to them
  float* scores;  // [T, E]
  float* weights;  // [T, k]
  int32_t* reached;  // [T, k], E = none
  float* products;  // [T k, 2 F'], see expert_kernels.h
  Parts parts;
  Choices* choices;  // made by a phase

  MixtureScratch(Phases& phases, const Mixture& m, int64_t tokens, int64_t width)
      : tokens(tokens), rounded(RoundUp(m.width, kRounded)), parts(Parts::Fit(tokens * m.choices, m.router.in)) {
    const int64_t d = m.router.in, chosen = tokens * m.choices;
    float* next = phases.Reserve(parts.Size() + 2 * chosen * (1 + rounded) + m.experts * (width + tokens) + tokens * d);
    const auto take = [&](int64_t numbers) { return std::exchange(next, next + numbers); };
    parts.data = take(parts.Size()), products = take(2 * chosen * rounded);
    logits = {take(m.experts * width), m.experts}, scores = take(tokens * m.experts), rows = take(tokens * d);
    weights = take(chosen), reached = reinterpret_cast<int32_t*>(take(chosen));
    choices = &phases.Keep(Choices(nullptr, 0, m.choices, m.experts));
  }
};

// Which tokens reach experts, and where it is said what the router chose for each, reached or not.
struct Routes {
  const int32_t* counts;  // [T], 0: the token reaches none
  int32_t* live;  // [T, k], in descending order of the scores
};

// The experts [k] with the largest scores, of equal ones the first, from logits [E], which become scores; and their
// weights [k].
inline void Choose(float* logits, const Mixture& m, int32_t* chosen, float* weights) {
  const float total = Soften(logits, m.experts, m.experts);
#pragma omp simd
  for (int64_t e = 0; e < m.experts; ++e) logits[e] /= total;
  std::iota(chosen, chosen + m.choices, 0);  // NaN is larger than nothing
  std::fill(weights, weights + m.choices, -1.0f);
  for (int64_t e = 0; e < m.experts; ++e) {
    if (logits[e] > weights[m.choices - 1]) Insert(logits[e], static_cast<int32_t>(e), m.choices, weights, chosen);
  }
  float sum = 0;
  for (int64_t j = 0; j < m.choices; ++j) sum += weights[j] = logits[chosen[j]];
  for (int64_t j = 0; j < m.choices && m.normalised; ++j) weights[j] /= sum;
}

// The choices of the tokens of a sheet, which become rows.
inline void AddChoices(Phases& phases, const Tokens& tokens, const Mixture& m, const Sheet& x, const MixtureScratch& s,
                       const Routes& routes) {
  AddProducts(phases, tokens, x, {m.router}, {s.logits});
  phases.Add(tokens.groups.size(), [=, &tokens](int64_t g) {
    const auto& group = tokens.groups[g];
    float *rows[kGroupTokens], *scores[kGroupTokens];
    for (int64_t t = 0; t < group.count; ++t) {
      rows[t] = s.rows + (group.token + t) * x.features, scores[t] = s.scores + (group.token + t) * m.experts;
    }
    TurnToRows(group, x, rows), TurnToRows(group, s.logits, scores);
    for (int64_t t = 0; t < group.count; ++t) {
      const int64_t token = group.token + t, first = token * m.choices;
      int32_t* live = routes.live + first;
      Choose(scores[t], m, live, s.weights + first);
      for (int64_t j = 0; j < m.choices; ++j) {
        s.reached[first + j] = routes.counts[token] ? live[j] : static_cast<int32_t>(m.experts);
      }
    }
  });
  phases.Add(1, [=](int64_t) { *s.choices = Choices(s.reached, s.tokens, m.choices, m.experts); });
}

// The experts of what is normalized, added to x.
inline void AddMixture(Phases& phases, const Tokens& tokens, const Mixture& m, const Scratch& layer,
                       const MixtureScratch& s, const Routes& routes) {
  AddChoices(phases, tokens, m, layer.normal, s, routes);
  const Choices& choices = *s.choices;
  const int64_t d = m.router.in, wide = 2 * s.rounded, most = std::min(m.experts, s.tokens * m.choices);
  AddExperts(phases, choices, most, s.rounded, kWide, [=, &choices](int64_t expert, int64_t column, int64_t begin,
                                                                    int64_t count) {
    const RowsOf rows{s.rows, d, choices.token.data()};
    const int64_t matrix = expert * d * m.width, columns = std::min(kWide, s.rounded - column);
    float *h = s.products + begin * wide + column, *u = h + s.rounded;
    MultiplyColumns(rows, begin, count, d, m.gate + matrix, m.width, column, columns, h, wide);
    MultiplyColumns(rows, begin, count, d, m.up + matrix, m.width, column, columns, u, wide);
    for (int64_t r = 0; r < count; ++r) Activate(h + r * wide, u + r * wide, columns, h + r * wide);
  });
  AddMix(phases, choices, most, s.tokens, s.weights, d, s.rows, s.parts, kWide,
         [=](int64_t expert, int64_t column, int64_t columns, int64_t begin, int64_t count, float* to) {
           MultiplyColumns({s.products, wide, nullptr}, begin, count, m.width, m.down + expert * m.width * d, d, column,
                           columns, to, s.parts.stride);
         });
  phases.Add(tokens.groups.size(), [=, &tokens](int64_t g) {
    const auto& group = tokens.groups[g];
    const float* rows[kGroupTokens];
    for (int64_t t = 0; t < group.count; ++t) rows[t] = s.rows + (group.token + t) * d;
    TurnToColumns(group, rows, layer.normal);
    const int64_t width = group.block.width;
    float* to = layer.x.At(group.block) + group.column;
    const float* from = layer.normal.At(group.block) + group.column;
    for (int64_t i = 0; i < d; ++i) {
#pragma omp simd
      for (int64_t c = 0; c < group.width; ++c) to[i * width + c] += from[i * width + c];
    }
  });
}

// The layer behind attention, whose output for a token `attended` returns; `mixture` is that of a layer with experts.
inline void AddRest(Phases& phases, const Tokens& tokens, const Layer& layer, const Scratch& s,
                    const MixtureScratch* mixture, const Routes& routes,
                    std::function<const float*(int64_t)> attended) {
  AddAttended(phases, tokens, layer, s, std::move(attended));
  if (layer.mixture.experts) return AddMixture(phases, tokens, layer.mixture, s, *mixture, routes);
  AddMlp(phases, tokens, layer, s);
}

}  // namespace areal_jax

#endif  // AREAL_JAX_NATIVE_MIXTURE_H_
