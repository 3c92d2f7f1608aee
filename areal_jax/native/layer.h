// The layer of the decoder as phases of work: norms, projections, rotation and MLP. models/block.py is the same layer in
// JAX.
//
// d model width, H heads, K key-value heads, D head size, F width of the MLP. Tokens are columns of sheets, and rows where
// attention sees them.

#ifndef AREAL_JAX_NATIVE_LAYER_H_
#define AREAL_JAX_NATIVE_LAYER_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "attention.h"
#include "products.h"
#include "threads.h"

namespace areal_jax {

constexpr int64_t kUnitPanels = 6;  // of a matrix that a thread takes at a time
constexpr int64_t kChunkTokens = 960;  // that a layer takes at a time: bounds what it needs beside its result
constexpr int64_t kGroupTokens = 16;  // whose columns a thread turns at a time: those of a cache line
constexpr int64_t kTile = 8;  // columns and features that are turned together

struct Matrix {
  const float* panels;  // [out / 8, in, 8]
  const float* bias;  // [out]; null = none
  int64_t in, out;
};

// The experts in the place of an MLP (mixture.h): E of them, of width F, of which a token reaches k.
struct Mixture {
  Matrix router;
  const float *gate, *up, *down;  // [E, d, F] and [E, F, d]
  int64_t experts, choices, width;  // E = 0: the layer has an MLP
  bool normalised;
};

template <typename AnyMatrix>
struct LayerOf {
  const float *attention_norm, *mlp_norm;  // [d]
  AnyMatrix query, key, value, output, gate, up, down;
  Mixture mixture;
  const float *query_norm, *key_norm;  // [D], or where `whole_norm` of all heads together; null = none
  bool whole_norm;
  int64_t head_dim;
  float eps;
};
using Layer = LayerOf<Matrix>;

// Cosine and sine of the angles of each token, [tokens, D / 2].
struct Rotation {
  const float *cosine, *sine;
};

// The blocks of some columns, and the groups of tokens in them.
struct Tokens {
  struct Group {
    Block block;
    int64_t column, width, token, count;  // columns of the block, of which `count` are tokens from `token` on
  };
  std::vector<Block> blocks;
  std::vector<Group> groups;

  explicit Tokens(int64_t columns) : blocks(CutColumns(columns)) {
    for (const Block& block : blocks) {
      for (int64_t c = 0; c < block.width; c += kGroupTokens) {
        const int64_t width = std::min(kGroupTokens, block.width - c);
        groups.push_back({block, c, width, block.first + c, std::min(width, block.columns - c)});
      }
    }
  }

  int64_t Count() const { return blocks.back().first + blocks.back().columns; }
};

// Where a token's row of numbers begins.
using Place = std::function<float*(int64_t token)>;

// x / sqrt(mean(x^2) + eps) * scale of columns [d], `width` apart (models/block.py, rms_norm).
template <typename Vector>
inline void NormalizeColumns(const float* x, const float* scale, float eps, int64_t d, int64_t width, float* y) {
  constexpr int kSums = 4;  // one sum would wait for itself
  Vector sums[kSums] = {};
  for (int64_t i = 0; i < d; ++i) {
    const Vector entry = Load<Vector>(x + i * width);
    sums[i % kSums] = MultiplyAdd(entry, entry, sums[i % kSums]);
  }
  Vector factor = ((sums[0] + sums[1]) + (sums[2] + sums[3])) / static_cast<float>(d) + eps;
  for (size_t c = 0; c < sizeof(Vector) / sizeof(float); ++c) factor[c] = 1.0f / std::sqrt(factor[c]);
  for (int64_t i = 0; i < d; ++i) {
    const Vector entry = Load<Vector>(x + i * width) * factor * scale[i];
    std::memcpy(y + i * width, &entry, sizeof entry);
  }
}

inline void AddNorm(Phases& phases, const Tokens& tokens, const Sheet& x, const float* scale, float eps,
                    const Sheet& y) {
  phases.Add(tokens.groups.size(), [=, &tokens](int64_t g) {
    const auto& group = tokens.groups[g];
    const float* from = x.At(group.block) + group.column;
    float* to = y.At(group.block) + group.column;
    int64_t c = 0;
#ifdef __AVX512F__
    for (; c + 16 <= group.width; c += 16) {
      NormalizeColumns<Whole>(from + c, scale, eps, x.features, group.block.width, to + c);
    }
#endif
    for (; c < group.width; c += kTile) {
      NormalizeColumns<Half>(from + c, scale, eps, x.features, group.block.width, to + c);
    }
  });
}

// Panels of a matrix from `first` on.
struct Unit {
  size_t matrix;
  int64_t first, panels;
};

inline std::vector<Unit> CutMatrices(const std::vector<Matrix>& matrices) {
  std::vector<Unit> units;
  for (size_t m = 0; m < matrices.size(); ++m) {
    const int64_t panels = matrices[m].out / kPanelRows;
    for (int64_t first = 0; first < panels; first += kUnitPanels) {
      units.push_back({m, first, std::min(kUnitPanels, panels - first)});
    }
  }
  return units;
}

inline void MultiplyUnit(const Matrix& matrix, const Unit& unit, const Block& block, const Sheet& x,
                         const Target& target) {
  MultiplyBlock(matrix.panels + unit.first * kPanelRows * matrix.in, block, x.At(block), matrix.in, target,
                unit.panels);
}

// x times matrices; set in sheets of their own, or added to them.
inline void AddProducts(Phases& phases, const Tokens& tokens, const Sheet& x, std::vector<Matrix> matrices,
                        std::vector<Sheet> products, bool add = false) {
  const auto units = CutMatrices(matrices);
  phases.Add(units.size(), [=, &tokens](int64_t u) {
    const Unit& unit = units[u];
    const Matrix& matrix = matrices[unit.matrix];
    for (const Block& block : tokens.blocks) {
      float* out = products[unit.matrix].At(block) + unit.first * kPanelRows * block.width;
      const Block all{block.first, block.width, block.width};
      MultiplyUnit(matrix, unit, all, x, {out, block.width, add});
      if (!matrix.bias) continue;
      for (int64_t r = 0; r < unit.panels * kPanelRows; ++r) {
        const float bias = matrix.bias[unit.first * kPanelRows + r];
        for (int64_t c = 0; c < block.width; ++c) out[r * block.width + c] += bias;
      }
    }
  });
}

// x times matrices, each into rows of `columns` numbers.
inline void AddOutputs(Phases& phases, const std::vector<Block>& blocks, const Sheet& x,
                       const std::vector<Matrix>& matrices, const std::vector<float*>& outputs, int64_t columns) {
  const auto units = CutMatrices(matrices);
  phases.Add(units.size(), [=](int64_t u) {
    const Unit& unit = units[u];
    float* out = outputs[unit.matrix] + unit.first * kPanelRows * columns;
    for (const Block& block : blocks) {
      MultiplyUnit(matrices[unit.matrix], unit, block, x, {out + block.first, columns, false});
    }
  });
}

// inner = silu(gate x) * (up x); the product of `up` is left in `other`.
inline void AddGate(Phases& phases, const Tokens& tokens, const Sheet& x, const Matrix& gate, const Matrix& up,
                    const Sheet& inner, const Sheet& other) {
  const auto units = CutMatrices({gate});
  phases.Add(units.size(), [=, &tokens](int64_t u) {
    const Unit& unit = units[u];
    for (const Block& block : tokens.blocks) {
      const Block all{block.first, block.width, block.width};
      const int64_t from = unit.first * kPanelRows * block.width, size = unit.panels * kPanelRows * block.width;
      float* a = inner.At(block) + from;
      float* b = other.At(block) + from;
      MultiplyUnit(gate, unit, all, x, {a, block.width, false});
      MultiplyUnit(up, unit, all, x, {b, block.width, false});
#pragma omp simd
      for (int64_t i = 0; i < size; ++i) {
        const float e = Exp(-std::fabs(a[i]));
        a[i] = a[i] * ((a[i] < 0 ? e : 1.0f) / (1.0f + e)) * b[i];
      }
    }
  });
}

// The tokens of a group as rows of all features.
inline void TurnToRows(const Tokens::Group& group, const Sheet& sheet, float* const* rows) {
  const int64_t width = group.block.width;
  const float* from = sheet.At(group.block) + group.column;
  for (int64_t c = 0; c < group.count; c += kTile) {
    const int64_t count = std::min(kTile, group.count - c);
    for (int64_t i = 0; i < sheet.features; i += kTile) {
      float tile[kTile][kTile];
      for (int64_t r = 0; r < kTile; ++r) std::memcpy(tile[r], from + (i + r) * width + c, sizeof tile[r]);
      for (int64_t t = 0; t < count; ++t) {
        float turned[kTile];
        for (int64_t r = 0; r < kTile; ++r) turned[r] = tile[r][t];
        std::memcpy(rows[c + t] + i, turned, sizeof turned);
      }
    }
  }
}

// The reverse, with zeros for columns that are not tokens.
inline void TurnToColumns(const Tokens::Group& group, const float* const* rows, const Sheet& sheet) {
  const int64_t width = group.block.width;
  float* to = sheet.At(group.block) + group.column;
  for (int64_t c = 0; c < group.width; c += kTile) {
    const int64_t count = std::max<int64_t>(0, std::min(kTile, group.count - c));
    for (int64_t i = 0; i < sheet.features; i += kTile) {
      float tile[kTile][kTile] = {};
      for (int64_t t = 0; t < count; ++t) {
        for (int64_t r = 0; r < kTile; ++r) tile[r][t] = rows[c + t][i + r];
      }
      for (int64_t r = 0; r < kTile; ++r) std::memcpy(to + (i + r) * width + c, tile[r], sizeof tile[r]);
    }
  }
}

inline void NormalizeHead(float* head, int64_t dim, const float* norm, float eps) {
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < dim; ++i) squares += head[i] * head[i];
  const float factor = 1.0f / std::sqrt(squares / dim + eps);
  for (int64_t i = 0; i < dim; ++i) head[i] = head[i] * factor * norm[i];
}

// Norm of a head, where there is one, and rotation of its pairs (j, j + D / 2) (models/experts.py, rotate).
inline void TurnHead(float* head, int64_t dim, const float* norm, float eps, const float* cosine, const float* sine) {
  if (norm) NormalizeHead(head, dim, norm, eps);
  const int64_t half = dim / 2;
#pragma omp simd
  for (int64_t j = 0; j < half; ++j) {
    const float first = head[j], second = head[j + half];
    head[j] = first * cosine[j] - second * sine[j];
    head[j + half] = second * cosine[j] + first * sine[j];
  }
}

// q, k and v of every token as rows, q and k rotated.
inline void AddHeads(Phases& phases, const Tokens& tokens, const Layer& layer, const Rotation& rotation,
                     const Sheet& q, const Sheet& k, const Sheet& v, Place q_row, Place k_row, Place v_row) {
  phases.Add(tokens.groups.size(), [=, &tokens, &layer](int64_t g) {
    const auto& group = tokens.groups[g];
    const int64_t dim = layer.head_dim;
    const auto turn = [&](const Sheet& sheet, const Place& row, bool rotated, const float* norm) {
      float* rows[kGroupTokens];
      for (int64_t t = 0; t < group.count; ++t) rows[t] = row(group.token + t);
      TurnToRows(group, sheet, rows);
      if (!rotated) return;
      for (int64_t t = 0; t < group.count; ++t) {
        const int64_t angles = (group.token + t) * (dim / 2);
        if (layer.whole_norm) NormalizeHead(rows[t], sheet.features, norm, layer.eps);
        for (int64_t h = 0; h < sheet.features; h += dim) {
          TurnHead(rows[t] + h, dim, layer.whole_norm ? nullptr : norm, layer.eps, rotation.cosine + angles, rotation.sine + angles);
        }
      }
    };
    turn(q, q_row, true, layer.query_norm);
    turn(k, k_row, true, layer.key_norm);
    turn(v, v_row, false, nullptr);
  });
}

// Numbers of a layer between its input and its output, for `width` columns.
struct Scratch {
  Sheet x, normal, q, k, v, joined, inner, other;

  static int64_t Size(const Layer& layer, int64_t width) {
    const int64_t d = layer.query.in, heads = layer.query.out, kv = layer.key.out, ff = layer.gate.out;
    return width * (2 * d + 2 * heads + 2 * kv + 2 * ff);
  }

  Scratch(float* at, const Layer& layer, int64_t width) {
    const auto take = [&](int64_t features) {
      const Sheet sheet{at, features};
      at += features * width;
      return sheet;
    };
    x = take(layer.query.in), normal = take(layer.query.in);
    q = take(layer.query.out), k = take(layer.key.out), v = take(layer.key.out), joined = take(layer.query.out);
    inner = take(layer.gate.out), other = take(layer.gate.out);
  }
};

// The layer before attention: x -> rows q, k, v.
inline void AddProjections(Phases& phases, const Tokens& tokens, const Layer& layer, const Scratch& s,
                           const Rotation& rotation, Place q_row, Place k_row, Place v_row) {
  AddNorm(phases, tokens, s.x, layer.attention_norm, layer.eps, s.normal);
  AddProducts(phases, tokens, s.normal, {layer.query, layer.key, layer.value}, {s.q, s.k, s.v});
  AddHeads(phases, tokens, layer, rotation, s.q, s.k, s.v, std::move(q_row), std::move(k_row), std::move(v_row));
}

// Behind attention: rows `attended` are projected and added to x, and the sum is normalized for the MLP or the experts.
inline void AddAttended(Phases& phases, const Tokens& tokens, const Layer& layer, const Scratch& s,
                        std::function<const float*(int64_t)> attended) {
  phases.Add(tokens.groups.size(), [=, &tokens](int64_t g) {
    const auto& group = tokens.groups[g];
    const float* rows[kGroupTokens];
    for (int64_t t = 0; t < group.count; ++t) rows[t] = attended(group.token + t);
    TurnToColumns(group, rows, s.joined);
  });
  AddProducts(phases, tokens, s.joined, {layer.output}, {s.x}, true);
  AddNorm(phases, tokens, s.x, layer.mlp_norm, layer.eps, s.normal);
}

// The MLP of what is normalized, added to x.
inline void AddMlp(Phases& phases, const Tokens& tokens, const Layer& layer, const Scratch& s) {
  AddGate(phases, tokens, s.normal, layer.gate, layer.up, s.inner, s.other);
  AddProducts(phases, tokens, s.inner, {layer.down}, {s.x}, true);
}

}  // namespace areal_jax

#endif  // AREAL_JAX_NATIVE_LAYER_H_
