// The layer of the decoder with matrices and tokens in 8 bits, as phases of work. layer.h has the same in float32.
//
// Tokens are rows throughout: the products of 16 rows of a matrix with a token lie side by side. A token's numbers are
// computed in one order of operations, whatever the other tokens.

#ifndef AREAL_JAX_NATIVE_BYTE_LAYER_H_
#define AREAL_JAX_NATIVE_BYTE_LAYER_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "attention.h"
#include "bytes.h"
#include "layer.h"
#include "threads.h"

namespace areal_jax {

using ByteLayer = LayerOf<ByteMatrix>;

constexpr int64_t kByteUnit = 3;  // panels of a matrix that a thread takes at a time

// x / sqrt(mean(x^2) + eps) * scale (models/block.py, rms_norm).
inline void NormalizeRow(const float* x, const float* scale, float eps, int64_t d, float* y) {
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < d; ++i) squares += x[i] * x[i];
  const float factor = 1.0f / std::sqrt(squares / d + eps);
#pragma omp simd
  for (int64_t i = 0; i < d; ++i) y[i] = x[i] * factor * scale[i];
}

// Numbers of a layer between its input and its output, for so many tokens; each array has a row for each token.
struct ByteScratch {
  int64_t tokens, d, ff;
  float *x, *normal, *inner, *other;
  ByteRows rows;  // of whatever is multiplied next

  static int64_t Widest(const ByteLayer& layer) {
    return std::max({layer.query.groups, layer.output.groups, layer.down.groups});
  }
  static int64_t Size(const ByteLayer& layer, int64_t tokens) {
    return tokens * (2 * layer.output.out + 2 * layer.gate.out + Widest(layer) + 2);
  }

  ByteScratch(float* at, const ByteLayer& layer, int64_t tokens)
      : tokens(tokens), d(layer.output.out), ff(layer.gate.out) {
    const auto take = [&](int64_t numbers) { return std::exchange(at, at + tokens * numbers); };
    x = take(d), normal = take(d), inner = take(ff), other = take(ff);
    rows.bytes = reinterpret_cast<int8_t*>(take(Widest(layer)));
    rows.scales = take(1);
    rows.offsets = reinterpret_cast<int32_t*>(take(1));
    rows.groups = 0;
  }

  // The same memory for tokens of so many groups.
  ByteRows RowsOf(int64_t groups) const { return {rows.bytes, rows.scales, rows.offsets, groups}; }
};

inline void AddByteNorm(Phases& phases, const ByteScratch& s, const float* scale, float eps, int64_t groups) {
  phases.Add(s.tokens, [=](int64_t t) {
    NormalizeRow(s.x + t * s.d, scale, eps, s.d, s.normal + t * s.d);
    QuantizeRow(s.normal + t * s.d, s.d, s.RowsOf(groups), t);
  });
}

// The tokens in `s.rows` times matrices, each into rows of its own, or added to them.
inline void AddByteProducts(Phases& phases, const ByteScratch& s, std::vector<ByteMatrix> matrices,
                            std::vector<Place> products, bool add = false) {
  std::vector<Unit> units;
  for (size_t m = 0; m < matrices.size(); ++m) {
    const int64_t panels = matrices[m].Panels();
    for (int64_t p = 0; p < panels; p += kByteUnit) units.push_back({m, p, std::min(kByteUnit, panels - p)});
  }
  const int64_t items = units.size();
  phases.Add(items, [=, units = std::move(units)](int64_t u) {
    const auto& [m, first, panels] = units[u];
    const Place& product = products[m];
    MultiplyBytes<Fastest>(matrices[m], first, panels, s.RowsOf(matrices[m].groups), s.tokens,
                           [&](int64_t t) { return ByteTarget{product(t), 1, add}; });
  });
}

// inner = silu(gate x) * (up x); the product of `up` is left in `other`.
inline void AddByteGate(Phases& phases, const ByteScratch& s, const ByteMatrix& gate, const ByteMatrix& up) {
  phases.Add((gate.Panels() + kByteUnit - 1) / kByteUnit, [=](int64_t u) {
    const int64_t first = u * kByteUnit, panels = std::min(kByteUnit, gate.Panels() - first);
    const auto into = [&](float* rows) {
      return [=](int64_t t) { return ByteTarget{rows + t * s.ff, 1, false}; };
    };
    MultiplyBytes<Fastest>(gate, first, panels, s.RowsOf(gate.groups), s.tokens, into(s.inner));
    MultiplyBytes<Fastest>(up, first, panels, s.RowsOf(up.groups), s.tokens, into(s.other));
    const int64_t from = first * kByteRows, size = std::min(panels * kByteRows, s.ff - from);
    for (int64_t t = 0; t < s.tokens; ++t) {
      float* a = s.inner + t * s.ff + from;
      const float* b = s.other + t * s.ff + from;
#pragma omp simd
      for (int64_t i = 0; i < size; ++i) {
        const float e = Exp(-std::fabs(a[i]));
        a[i] = a[i] * ((a[i] < 0 ? e : 1.0f) / (1.0f + e)) * b[i];
      }
    }
  });
}

// The layer before attention: s.x -> rows q, k, v, of which q and k are rotated.
inline void AddByteProjections(Phases& phases, const ByteLayer& layer, const ByteScratch& s, const Rotation& rotation,
                               Place q_row, Place k_row, Place v_row) {
  AddByteNorm(phases, s, layer.attention_norm, layer.eps, layer.query.groups);
  AddByteProducts(phases, s, {layer.query, layer.key, layer.value}, {q_row, k_row, v_row});
  const float eps = layer.eps;
  phases.Add(s.tokens, [=, &layer](int64_t t) {
    const int64_t dim = layer.head_dim, angles = t * (dim / 2);
    const auto turn = [&](float* row, int64_t features, const float* norm) {
      for (int64_t h = 0; h < features; h += dim) {
        TurnHead(row + h, dim, norm, eps, rotation.cosine + angles, rotation.sine + angles);
      }
    };
    turn(q_row(t), layer.query.out, layer.query_norm);
    turn(k_row(t), layer.key.out, layer.key_norm);
  });
}

// The layer behind attention, whose output is in s.rows: it is projected and added to s.x, then the MLP of the sum.
inline void AddByteRest(Phases& phases, const ByteLayer& layer, const ByteScratch& s) {
  const Place x = [=](int64_t t) { return s.x + t * s.d; };
  AddByteProducts(phases, s, {layer.output}, {x}, true);
  AddByteNorm(phases, s, layer.mlp_norm, layer.eps, layer.gate.groups);
  AddByteGate(phases, s, layer.gate, layer.up);
  phases.Add(s.tokens, [=, groups = layer.down.groups](int64_t t) {
    QuantizeRow(s.inner + t * s.ff, s.ff, s.RowsOf(groups), t);
  });
  AddByteProducts(phases, s, {layer.down}, {x}, true);
}

}  // namespace areal_jax

#endif  // AREAL_JAX_NATIVE_BYTE_LAYER_H_
