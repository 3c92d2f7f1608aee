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
// So do those of kFewRows rows of kWideVectors.
#ifdef __AVX512F__
using Lanes = Whole;
constexpr int kTileRows = 12, kWideVectors = 8;
#else
using Lanes = Half;
constexpr int kTileRows = 6, kWideVectors = 4;
#endif
constexpr int kFewRows = 3;
constexpr int64_t kLanes = sizeof(Lanes) / sizeof(float), kPair = 2 * kLanes, kWide = kWideVectors * kLanes;
constexpr int64_t kDepth = 128;  // summands of a tile that are computed at a time: their panel fits into L1
constexpr int64_t kWideAhead = 8;  // rows of a matrix that are fetched ahead where it is read as it lies
constexpr int64_t kRounded = 32;  // the width of an expert is rounded up to a multiple of this in rows of its products

inline int64_t RoundUp(int64_t number, int64_t multiple) { return (number + multiple - 1) / multiple * multiple; }

// The choices of all tokens, sorted by expert. An expert outside [0, E) stands for none.
struct Choices {
  int64_t tokens, choices, experts;
  std::vector<int64_t> first;  // [E + 1], the first row of each expert
  std::vector<int32_t> choice;  // of each row, t * k + j
  std::vector<int32_t> token;  // of each row
  std::vector<int32_t> row;  // of each choice; -1 = none
  std::vector<int32_t> order;  // [E], experts, those that have rows before the others

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
    order.reserve(experts);
    for (bool used : {true, false}) {
      for (int64_t e = 0; e < experts; ++e) {
        if ((first[e] < first[e + 1]) == used) order.push_back(e);
      }
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

// Half of the panels of a matrix: kLanes columns of [in, out] of which `count` exist, or the rows of its transpose
// where only that is stored. Rows of what is stored are `stride` apart.
struct Side {
  const float* from;  // the first number of the first column
  int64_t stride, count;
  bool turned;

  const float* At(int64_t first) const { return from + first * (turned ? 1 : stride); }
};

inline int64_t CountColumns(int64_t first, int64_t width) { return std::clamp<int64_t>(width - first, 0, kLanes); }

inline Side Straight(const float* matrix, int64_t out, int64_t column) {
  return {matrix + column, out, CountColumns(column, out), false};
}
inline Side Turned(const float* matrix, int64_t in, int64_t out, int64_t column) {
  return {matrix + column * in, in, CountColumns(column, out), true};
}

// Lines of the panel that is needed next, which go to L1 or L2 while a tile is computed: one of each side for every
// summand. Memory is a strided stream here, which the hardware does not fetch ahead.
struct Ahead {
  const float* at[2];
  int64_t stride, first, lines;
  bool turned;

  void Fetch(int64_t i) const {
    constexpr int64_t kLine = 64 / sizeof(float), kLines = kDepth / kLine;
    const int64_t line = first + i;
    const int64_t offset = turned ? line / kLines * stride + line % kLines * kLine : line * stride;
    __builtin_prefetch(at[0] + offset, 0, 3);
    __builtin_prefetch(at[1] + offset, 0, 3);
  }
};

// Where a tile goes: rows `stride` apart of two groups of columns, set or added to. With `streamed` what is set goes
// past the caches, which need not read these lines before they are written.
struct Tile {
  float* out[2];
  int64_t columns[2], stride;
  bool add, streamed;
};

inline void PackRow(const float* row, int64_t columns, float* panel) {
  if (columns == kLanes) {
    std::memcpy(panel, row, sizeof(Lanes));
  } else {
    std::fill(panel, panel + kLanes, 0.0f);
    if (columns) std::memcpy(panel, row, columns * sizeof(float));
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

// Rows [first, first + depth) of a side into one half of a panel [depth, kPair], zeros behind the last column.
inline void PackSide(const Side& side, int64_t first, int64_t depth, float* panel) {
  const float* from = side.At(first);
  if (side.turned) {
    for (int64_t i = 0; i < depth; i += kLanes) {
      TurnTile(from + i, side.stride, side.count, std::min(kLanes, depth - i), panel + i * kPair);
    }
  } else {
    for (int64_t i = 0; i < depth; ++i) PackRow(from + i * side.stride, side.count, panel + i * kPair);
  }
}

inline void StoreLanes(Lanes sums, float* out, int64_t columns, bool add, bool streamed) {
  if (columns == kLanes) {
    if (add) sums += Load<Lanes>(out);
#ifdef __AVX512F__
    if (streamed) return _mm512_stream_ps(out, reinterpret_cast<__m512>(sums));
#endif
    std::memcpy(out, &sums, sizeof sums);
  } else {
    for (int64_t c = 0; c < columns; ++c) out[c] = add ? out[c] + sums[c] : sums[c];
  }
}

// kRows rows times a panel [depth, kPair]. Entry (r, i) of the first operand is rows[r][first + i], or with kOuter
// rows[i][first + r]. Each number is the sum over i in order, whatever kRows.
template <int kRows, bool kOuter>
__attribute__((noinline)) void MultiplyTile(const float* const* rows, int64_t first, const float* panel, int64_t depth,
                                            const Ahead& ahead, const Tile& tile) {
  Lanes sums[kRows][2] = {};
  if (!kOuter && tile.add) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      sums[r][0] = Load<Lanes>(tile.out[0] + r * tile.stride), sums[r][1] = Load<Lanes>(tile.out[1] + r * tile.stride);
    }
  }
  for (int64_t i = 0; i < depth; ++i) {
    if (!kOuter && i < ahead.lines) ahead.Fetch(i);
    const Lanes left = Load<Lanes>(panel + i * kPair), right = Load<Lanes>(panel + i * kPair + kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Lanes entry = (kOuter ? rows[i][first + r] : rows[r][first + i]) - Lanes{};  // in every place
      sums[r][0] = MultiplyAdd(entry, left, sums[r][0]);
      sums[r][1] = MultiplyAdd(entry, right, sums[r][1]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int side : {0, 1}) {
      StoreLanes(sums[r][side], tile.out[side] + r * tile.stride, tile.columns[side], kOuter && tile.add,
                 kOuter && tile.streamed);
    }
  }
}

template <bool kOuter, int kRows = kTileRows>
inline void MultiplyTile(int64_t height, const float* const* rows, int64_t first, const float* panel, int64_t depth,
                         const Ahead& ahead, const Tile& tile) {
  if constexpr (kRows > 1) {
    if (height < kRows) return MultiplyTile<kOuter, kRows - 1>(height, rows, first, panel, depth, ahead, tile);
  }
  MultiplyTile<kRows, kOuter>(rows, first, panel, depth, ahead, tile);
}

// Calls run(tile, tiles, first, height) for tiles of nearly the same height: a low one has as many loads of the panel
// for fewer products.
template <typename Run>
inline void CutRows(int64_t count, const Run& run) {
  const int64_t tiles = (count + kTileRows - 1) / kTileRows;
  for (int64_t tile = 0, first = 0; tile < tiles; ++tile) {
    const int64_t height = (count - first + tiles - tile - 1) / (tiles - tile);
    run(tile, tiles, first, height);
    first += height;
  }
}

// Two groups of kLanes columns of a product, rows `stride` apart.
struct Outputs {
  float* out[2];
  int64_t stride;
};

// Rows from `begin` on [count, in] times both sides of a matrix, set or added to. The sides are those of one column and
// of another; `next` columns on are those of the product that this thread computes next.
inline void MultiplyChosen(const RowsOf& rows, int64_t begin, int64_t count, int64_t in, const Side& left,
                           const Side& right, int64_t next, const Outputs& to, bool add = false) {
  alignas(64) float panel[kDepth * kPair];
  for (int64_t first = 0; first < in && count > 0; first += kDepth) {
    const int64_t depth = std::min(kDepth, in - first);
    PackSide(left, first, depth, panel), PackSide(right, first, depth, panel + kLanes);
    const bool is_last = first + kDepth >= in;
    const int64_t ahead = is_last ? next * (left.turned ? left.stride : 1) : left.At(first + kDepth) - left.from;
    CutRows(count, [&](int64_t tile, int64_t tiles, int64_t r, int64_t height) {
      const float* some[kTileRows];
      for (int64_t i = 0; i < height; ++i) some[i] = rows.At(begin + r + i);
      const int64_t line = kDepth * tile / tiles, lines = kDepth * (tile + 1) / tiles - line;
      MultiplyTile<false>(height, some, first, panel, depth,
                          {{left.from + ahead, right.from + ahead}, left.stride, line, lines, left.turned},
                          {{to.out[0] + r * to.stride, to.out[1] + r * to.stride},
                           {kLanes, kLanes}, to.stride, add || first > 0, false});
    });
  }
}

// kRows rows times kWide columns of a matrix [in, ..], rows `stride` apart; the sums are those of MultiplyTile.
template <int kRows>
inline void MultiplyWide(const float* const* rows, int64_t in, const float* matrix, int64_t stride, float* out,
                         int64_t out_stride) {
  Lanes sums[kRows][kWideVectors] = {};
  for (int64_t i = 0; i < in; ++i, matrix += stride) {
    Lanes entries[kWideVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kWideVectors; ++v) {
      __builtin_prefetch(matrix + kWideAhead * stride + v * kLanes, 0, 3);
      entries[v] = Load<Lanes>(matrix + v * kLanes);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Lanes entry = rows[r][i] - Lanes{};  // in every place
#pragma GCC unroll 8
      for (int v = 0; v < kWideVectors; ++v) sums[r][v] = MultiplyAdd(entry, entries[v], sums[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r) std::memcpy(out + r * out_stride, sums[r], sizeof sums[r]);
}

// Rows from `begin` on [count, in] times `columns` columns, kWide or a smaller multiple of kPair, of a matrix
// [in, width]; zeros behind `width`. Few rows read the matrix as it lies: packing it costs more than their product.
inline void MultiplyColumns(const RowsOf& rows, int64_t begin, int64_t count, int64_t in, const float* matrix,
                            int64_t width, int64_t column, int64_t columns, float* out, int64_t out_stride) {
  if (count <= kFewRows && columns == kWide && column + kWide <= width) {
    const float* some[kFewRows];
    for (int64_t r = 0; r < count; ++r) some[r] = rows.At(begin + r);
    const float* from = matrix + column;
    switch (count) {
      case 1: return MultiplyWide<1>(some, in, from, width, out, out_stride);
      case 2: return MultiplyWide<2>(some, in, from, width, out, out_stride);
      case 3: return MultiplyWide<3>(some, in, from, width, out, out_stride);
    }
    return;
  }
  for (int64_t c = 0; c < columns; c += kPair) {
    MultiplyChosen(rows, begin, count, in, Straight(matrix, width, column + c),
                   Straight(matrix, width, column + c + kLanes), kPair, {{out + c, out + c + kLanes}, out_stride});
  }
}

// left' [height, count] times columns column[0] and column[1] of right [count, ..], both of rows from `begin` on, of
// which `columns` are set. Zeros where count is 0.
inline void MultiplyOuter(const RowsOf& left, const RowsOf& right, int64_t begin, int64_t count, int64_t height,
                          const int64_t (&column)[2], const int64_t (&columns)[2], const Outputs& to) {
  alignas(64) float panel[kDepth * kPair];
  const float* some[kDepth];
  const auto is_aligned = [](const float* at) { return reinterpret_cast<uintptr_t>(at) % sizeof(Lanes) == 0; };
  const bool streamed =
      count <= kDepth && to.stride % kLanes == 0 && is_aligned(to.out[0]) && is_aligned(to.out[1]);
  for (int64_t first = 0; first == 0 || first < count; first += kDepth) {
    const int64_t depth = std::min(kDepth, count - first);
    for (int64_t i = 0; i < depth; ++i) {
      some[i] = left.At(begin + first + i);
      for (int side : {0, 1}) {
        PackRow(right.At(begin + first + i) + column[side], columns[side], panel + i * kPair + side * kLanes);
      }
    }
    CutRows(height, [&](int64_t, int64_t, int64_t r, int64_t rows) {
      MultiplyTile<true>(rows, some, r, panel, depth, {},
                         {{to.out[0] + r * to.stride, to.out[1] + r * to.stride},
                          {columns[0], columns[1]}, to.stride, first > 0, streamed});
    });
  }
#ifdef __AVX512F__
  if (streamed) _mm_sfence();  // such stores are not ordered by what tells other threads that the work is done
#endif
}

}  // namespace areal_jax

#endif  // AREAL_JAX_NATIVE_EXPERTS_H_
