// Products of the experts of a mixture. Tokens are rows here, and every expert multiplies exactly those that chose it.
//
// T tokens, k choices of each, E experts, d model width, F width of an expert. A "row" is a choice that has an expert:
// rows are sorted by expert, and within an expert by token.

#ifndef AREAL_JAX_NATIVE_EXPERTS_H_
#define AREAL_JAX_NATIVE_EXPERTS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "products.h"

namespace areal_jax {

// A tile of a product is kTileRows rows of two vectors: its sums fill 24 of 32 registers of AVX-512, 12 of 16 of AVX2.
#ifdef __AVX512F__
using Lanes = Whole;
constexpr int kTileRows = 12;
#else
using Lanes = Half;
constexpr int kTileRows = 6;
#endif
constexpr int64_t kLanes = sizeof(Lanes) / sizeof(float), kPair = 2 * kLanes;
constexpr int64_t kDepth = 128;  // summands of a tile that are computed at a time: their panel fits into L1
constexpr int64_t kRounded = 32;  // the width of an expert is rounded up to a multiple of this in rows of its products

inline int64_t RoundUp(int64_t number, int64_t multiple) { return (number + multiple - 1) / multiple * multiple; }

// The choices of all tokens, sorted by expert. An expert outside [0, E) stands for none.
struct Choices {
  int64_t tokens, choices, experts;
  std::vector<int64_t> first;  // [E + 1], the first row of each expert
  std::vector<int32_t> choice;  // of each row, t * k + j
  std::vector<int32_t> token;  // of each row
  std::vector<int32_t> row;  // of each choice; -1 = none

  Choices(const int32_t* expert, int64_t tokens, int64_t choices, int64_t experts)
      : tokens(tokens), choices(choices), experts(experts), first(experts + 1), row(tokens * choices, -1) {
    const auto is_one = [=](int32_t e) { return e >= 0 && e < experts; };
    for (size_t c = 0; c < row.size(); ++c) {
      if (is_one(expert[c])) ++first[expert[c] + 1];
    }
    for (int64_t e = 0; e < experts; ++e) first[e + 1] += first[e];
    choice.resize(first[experts]), token.resize(first[experts]);
    std::vector<int64_t> next(first.begin(), first.end() - 1);
    for (size_t c = 0; c < row.size(); ++c) {
      if (!is_one(expert[c])) continue;
      row[c] = next[expert[c]]++;
      choice[row[c]] = c;
      token[row[c]] = c / choices;
    }
  }

  int64_t Rows() const { return first.back(); }
};

// Rows of numbers, `stride` apart: row r itself, or where `token` is given, that of the token of row r.
struct RowsOf {
  const float* data;
  int64_t stride;
  const int32_t* token;

  const float* At(int64_t r) const { return data + (token ? token[r] : r) * stride; }
};

// Columns [first, first + kLanes) of a matrix, some of which may lie behind its last one.
struct Columns {
  int64_t first, count;

  Columns(int64_t first, int64_t width) : first(first), count(std::clamp<int64_t>(width - first, 0, kLanes)) {}
};

// Where a tile goes: rows `stride` apart of two groups of columns, set or added to.
struct Tile {
  float* out[2];
  int64_t columns[2], stride;
  bool add;
};

// Columns of `depth` rows into one half of a panel [depth, kPair], zeros behind the last one.
template <typename Row>
inline void PackRows(const Row& row, const Columns& columns, int64_t depth, float* panel) {
  for (int64_t i = 0; i < depth; ++i, panel += kPair) {
    if (columns.count == kLanes) {
      std::memcpy(panel, row(i) + columns.first, sizeof(Lanes));
    } else {
      std::fill(panel, panel + kLanes, 0.0f);
      if (columns.count) std::memcpy(panel, row(i) + columns.first, columns.count * sizeof(float));
    }
  }
}

// The transpose of `count` <= kLanes rows of `depth` <= kLanes numbers, into one half of a panel, zeros where there are
// no rows.
inline void TurnTile(const float* rows, int64_t stride, int64_t count, int64_t depth, float* panel) {
#ifdef __AVX512F__
  __m512 tile[kLanes];
  const __mmask16 wanted = (1u << depth) - 1;
  for (int64_t r = 0; r < kLanes; ++r) {
    tile[r] = r < count ? _mm512_maskz_loadu_ps(wanted, rows + r * stride) : _mm512_setzero_ps();
  }
  // Blocks beside the diagonal change places, first of 8 x 8 numbers, then of 4 x 4 and so on.
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
#pragma GCC unroll 4
  for (int size = 8; size > 0; size /= 2) {
    const __mmask16 high = _mm512_test_epi32_mask(lane, _mm512_set1_epi32(size));
    // an index of 16 and more is a lane of the second operand
    const __m512i above = _mm512_mask_add_epi32(lane, high, lane, _mm512_set1_epi32(16 - size));
    const __m512i below = _mm512_mask_add_epi32(_mm512_add_epi32(lane, _mm512_set1_epi32(size)), high, lane,
                                                _mm512_set1_epi32(16));
#pragma GCC unroll 16
    for (int r = 0; r < kLanes; ++r) {
      if (r & size) continue;
      const __m512 a = tile[r], b = tile[r + size];
      tile[r] = _mm512_permutex2var_ps(a, above, b);
      tile[r + size] = _mm512_permutex2var_ps(a, below, b);
    }
  }
#pragma GCC unroll 16
  for (int64_t i = 0; i < kLanes; ++i) {
    if (i < depth) _mm512_storeu_ps(panel + i * kPair, tile[i]);
  }
#else
  for (int64_t i = 0; i < depth; ++i) {
    for (int64_t r = 0; r < kLanes; ++r) panel[i * kPair + r] = r < count ? rows[r * stride + i] : 0.0f;
  }
#endif
}

// Rows `columns` of a matrix [.., stride], from `first` on, as columns of one half of a panel of `depth` rows.
inline void PackTurned(const float* matrix, int64_t stride, const Columns& columns, int64_t first, int64_t depth,
                       float* panel) {
  const float* from = matrix + columns.first * stride + first;
  for (int64_t i = 0; i < depth; i += kLanes) {
    TurnTile(from + i, stride, columns.count, std::min(kLanes, depth - i), panel + i * kPair);
  }
}

inline void StoreTile(Lanes sums, float* out, int64_t columns, bool add) {
  if (columns == kLanes) {
    if (add) sums += Load<Lanes>(out);
    std::memcpy(out, &sums, sizeof sums);
  } else {
    for (int64_t c = 0; c < columns; ++c) out[c] = add ? out[c] + sums[c] : sums[c];
  }
}

// kRows rows times a panel [depth, kPair]. Entry (r, i) of the first operand is rows[r][first + i], or with kTurned
// rows[i][first + r]. Each number is the sum over i in order, whatever kRows.
template <int kRows, bool kTurned>
inline void MultiplyTile(const float* const* rows, int64_t first, const float* panel, int64_t depth,
                         const Tile& tile) {
  Lanes sums[kRows][2] = {};
  if (!kTurned && tile.add) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      sums[r][0] = Load<Lanes>(tile.out[0] + r * tile.stride), sums[r][1] = Load<Lanes>(tile.out[1] + r * tile.stride);
    }
  }
  for (int64_t i = 0; i < depth; ++i) {
    const Lanes left = Load<Lanes>(panel + i * kPair), right = Load<Lanes>(panel + i * kPair + kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Lanes entry = (kTurned ? rows[i][first + r] : rows[r][first + i]) - Lanes{};  // in every place
      sums[r][0] = MultiplyAdd(entry, left, sums[r][0]);
      sums[r][1] = MultiplyAdd(entry, right, sums[r][1]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int side : {0, 1}) {
      StoreTile(sums[r][side], tile.out[side] + r * tile.stride, tile.columns[side], kTurned && tile.add);
    }
  }
}

template <bool kTurned, int kRows = kTileRows>
inline void MultiplyTile(int64_t height, const float* const* rows, int64_t first, const float* panel, int64_t depth,
                         const Tile& tile) {
  if constexpr (kRows > 1) {
    if (height < kRows) return MultiplyTile<kTurned, kRows - 1>(height, rows, first, panel, depth, tile);
  }
  MultiplyTile<kRows, kTurned>(rows, first, panel, depth, tile);
}

// Calls run(first, height) for tiles of nearly the same height: a low tile is as many loads for fewer products.
template <typename Run>
inline void CutRows(int64_t count, const Run& run) {
  for (int64_t first = 0, tiles = (count + kTileRows - 1) / kTileRows; tiles > 0; --tiles) {
    const int64_t height = (count - first + tiles - 1) / tiles;
    run(first, height);
    first += height;
  }
}

// out [count, kPair], rows `stride` apart = rows from `begin` on [count, in] times the matrix [in, kPair] of which
// pack(first, depth, panel) makes rows.
template <typename Pack>
inline void MultiplyChosen(const RowsOf& rows, int64_t begin, int64_t count, int64_t in, const Pack& pack, float* out,
                           int64_t stride) {
  alignas(64) float panel[kDepth * kPair];
  for (int64_t first = 0; first < in && count > 0; first += kDepth) {
    const int64_t depth = std::min(kDepth, in - first);
    pack(first, depth, panel);
    CutRows(count, [&](int64_t r, int64_t height) {
      const float* some[kTileRows];
      for (int64_t i = 0; i < height; ++i) some[i] = rows.At(begin + r + i);
      float* to = out + r * stride;
      MultiplyTile<false>(height, some, first, panel, depth, {{to, to + kLanes}, {kLanes, kLanes}, stride, first > 0});
    });
  }
}

// The transpose of left [count, height] times right: out [height, ..] at two groups of columns. Zeros where count is 0.
template <typename Pack>
inline void MultiplyOuter(const RowsOf& left, int64_t begin, int64_t count, int64_t height, const Pack& pack,
                          Tile out) {
  alignas(64) float panel[kDepth * kPair];
  const float* some[kDepth];
  for (int64_t first = 0; first == 0 || first < count; first += kDepth) {
    const int64_t depth = std::min(kDepth, count - first);
    for (int64_t i = 0; i < depth; ++i) some[i] = left.At(begin + first + i);
    pack(first, depth, panel);
    out.add = first > 0;
    CutRows(height, [&](int64_t r, int64_t rows) {
      Tile tile = out;
      for (int side : {0, 1}) tile.out[side] += r * out.stride;
      MultiplyTile<true>(rows, some, r, panel, depth, tile);
    });
  }
}

}  // namespace areal_jax

#endif  // AREAL_JAX_NATIVE_EXPERTS_H_
