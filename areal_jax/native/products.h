// Products of matrices with tokens as columns.

#ifndef AREAL_JAX_NATIVE_PRODUCTS_H_
#define AREAL_JAX_NATIVE_PRODUCTS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace areal_jax {

// Products. A matrix is stored in panels of kPanelRows rows, [O / 8, I, 8], which a thread reads as one stream: rows that
// are read side by side are as many streams, more than the hardware fetches ahead. The result of one or two panels and
// of a block of columns stays in registers.

constexpr int kPanelRows = 8;
constexpr int64_t kFetchAhead = 2048 / sizeof(float);

typedef float Half __attribute__((vector_size(32)));
#ifdef __AVX512F__
typedef float Whole __attribute__((vector_size(64)));
constexpr int64_t kWidest = 48;  // columns whose results fit into 24 of 32 registers
#else
constexpr int64_t kWidest = 8;
#endif

// Columns need not be aligned: that of a template argument is the type's own.
template <typename Vector>
inline Vector Load(const float* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

// a * b + c with one rounding, said explicitly: compilers fuse some of these products with their sums and not others.
inline Half MultiplyAdd(Half a, Half b, Half c) {
#ifdef __FMA__
  return reinterpret_cast<Half>(_mm256_fmadd_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b),
                                                reinterpret_cast<__m256>(c)));
#else
  return a * b + c;
#endif
}
#ifdef __AVX512F__
inline Whole MultiplyAdd(Whole a, Whole b, Whole c) {
  return reinterpret_cast<Whole>(_mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b),
                                                 reinterpret_cast<__m512>(c)));
}
#endif

// A block of columns: `width` of them are computed, one of 8, 16, 24, 32, 48, and `columns` of these wanted.
struct Block {
  int64_t first, width, columns;
};

// Columns cut into blocks, which lie one behind the other, [features, width] each.
struct Sheet {
  float* data;
  int64_t features;

  float* At(const Block& block) const { return data + block.first * features; }
};

// Where products of a block go: rows `stride` apart, set or added to.
struct Target {
  float* out;
  int64_t stride;
  bool add;
};

template <typename Vector, int kVectors>
inline void Store(Vector (&sums)[kVectors], int64_t columns, bool add, float* out) {
  constexpr int kLanes = sizeof(Vector) / sizeof(float);
  if (add) {
    for (int v = 0; v < kVectors; ++v) sums[v] += Load<Vector>(out + v * kLanes);
  }
  std::memcpy(out, sums, columns * sizeof(float));
}

// `panels` from w on times x [in, width of the block].
template <typename Vector, int kVectors, int kPanels>
inline void MultiplyPanels(const float* w, const float* x, int64_t columns, int64_t in, const Target& target) {
  constexpr int kLanes = sizeof(Vector) / sizeof(float), kWidth = kVectors * kLanes, kRows = kPanels * kPanelRows;
  Vector sums[kRows][kVectors] = {};
  // Few columns wait for memory, and what is behind goes to L2 meanwhile; many wait for products.
  constexpr bool kWaits = sizeof(Vector) * kVectors <= sizeof(Half);
  const float* next = w + kPanels * in * kPanelRows;
  for (int64_t i = 0; i < in; ++i) {
    Vector entries[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) entries[v] = Load<Vector>(x + i * kWidth + v * kLanes);
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) {
      const int64_t at = (p * in + i) * kPanelRows;
      if (kWaits && i % 2 == 0) __builtin_prefetch(next + at, 0, 2);
      __builtin_prefetch(w + at + kFetchAhead, 0, 3);
    }
#pragma GCC unroll 32
    for (int r = 0; r < kRows; ++r) {
      const float entry = w[(r / kPanelRows * in + i) * kPanelRows + r % kPanelRows];
      const Vector weight = entry - Vector{};  // in every place
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sums[r][v] = MultiplyAdd(weight, entries[v], sums[r][v]);
    }
  }
  if (columns == kWidth && !target.add) {
#pragma GCC unroll 32
    for (int r = 0; r < kRows; ++r) std::memcpy(target.out + r * target.stride, sums[r], sizeof sums[r]);
  } else {
    for (int r = 0; r < kRows; ++r) Store(sums[r], columns, target.add, target.out + r * target.stride);
  }
}

// Two panels at a time where a block has few columns: one panel's sums would wait for each other.
template <typename Vector, int kVectors, int kPanels>
void MultiplyRange(const float* w, const float* x, int64_t columns, int64_t in, Target target, int64_t panels) {
  const int64_t panel = in * kPanelRows, rows = kPanelRows * target.stride;
  for (; panels >= kPanels; panels -= kPanels, w += kPanels * panel, target.out += kPanels * rows) {
    MultiplyPanels<Vector, kVectors, kPanels>(w, x, columns, in, target);
  }
  for (; panels > 0; --panels, w += panel, target.out += rows) {
    MultiplyPanels<Vector, kVectors, 1>(w, x, columns, in, target);
  }
}

// `panels` from w on times x [in, width]; only the columns that are wanted reach the target. What is added to has all.
inline void MultiplyBlock(const float* w, const Block& block, const float* x, int64_t in, const Target& target,
                          int64_t panels) {
  const int64_t columns = target.add ? block.width : block.columns;
#ifdef __AVX512F__
  switch (block.width) {
    case 48: return MultiplyRange<Whole, 3, 1>(w, x, columns, in, target, panels);
    case 32: return MultiplyRange<Whole, 2, 1>(w, x, columns, in, target, panels);
    case 24: return MultiplyRange<Half, 3, 1>(w, x, columns, in, target, panels);
    case 16: return MultiplyRange<Whole, 1, 2>(w, x, columns, in, target, panels);
  }
  return MultiplyRange<Half, 1, 2>(w, x, columns, in, target, panels);
#else
  return MultiplyRange<Half, 1, 1>(w, x, columns, in, target, panels);
#endif
}

// The blocks of so many columns, the widest first. Only the last one may have columns that are not wanted.
inline std::vector<Block> CutColumns(int64_t columns) {
  std::vector<Block> blocks;
  for (int64_t first = 0; first < columns;) {
    const int64_t left = columns - first, rounded = (left + 7) / 8 * 8;
    const int64_t width = rounded == 40 ? std::min<int64_t>(24, kWidest) : std::min(rounded, kWidest);
    blocks.push_back({first, width, std::min(left, width)});
    first += width;
  }
  return blocks;
}

// Numbers that computed columns of these blocks take for each feature.
inline int64_t TotalWidth(const std::vector<Block>& blocks) { return blocks.back().first + blocks.back().width; }

// Columns of x [features, stride] from `first` on as a block of a sheet, with zeros for those that are not wanted.
inline void CopyIn(const float* x, int64_t stride, int64_t first, const Block& block, const Sheet& sheet) {
  float* copy = sheet.At(block);
  for (int64_t i = 0; i < sheet.features; ++i, copy += block.width) {
    std::memcpy(copy, x + i * stride + first + block.first, block.columns * sizeof(float));
    std::fill(copy + block.columns, copy + block.width, 0.0f);
  }
}

// A matrix as panels: from [in, out], or from [out, in] where `by_rows`.
inline void PackPanels(const float* matrix, int64_t in, int64_t out, bool by_rows, float* panels) {
  constexpr int64_t kTogether = 16;  // features whose entries are read side by side
  for (int64_t panel = 0; panel < out; panel += kPanelRows, panels += in * kPanelRows) {
    if (!by_rows) {
      for (int64_t i = 0; i < in; ++i) std::memcpy(panels + i * kPanelRows, matrix + i * out + panel, sizeof(Half));
      continue;
    }
    for (int64_t i = 0; i < in; i += kTogether) {
      const int64_t last = std::min(i + kTogether, in);
      for (int64_t row = 0; row < kPanelRows; ++row) {
        const float* from = matrix + (panel + row) * in;
        for (int64_t j = i; j < last; ++j) panels[j * kPanelRows + row] = from[j];
      }
    }
  }
}

// The reverse of CopyIn.
inline void CopyOut(const Sheet& sheet, const Block& block, float* x, int64_t stride, int64_t first) {
  const float* copy = sheet.At(block);
  for (int64_t i = 0; i < sheet.features; ++i, copy += block.width) {
    std::memcpy(x + i * stride + first + block.first, copy, block.columns * sizeof(float));
  }
}

}  // namespace areal_jax

#endif  // AREAL_JAX_NATIVE_PRODUCTS_H_
