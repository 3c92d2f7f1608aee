// Kernels of decoding on CPUs: attention over a cache of blocks that is read in place, and products of matrices. library.py
// compiles this file.
//
// Every number of a result is computed in one order of operations, whatever the threads, the other rows and their number.
//
// Attention: B rows, H heads, K key-value heads, D head size, T positions of a block, M blocks of a table row. Keys and
// values of a layer are [blocks, T, K, D]: a token is written as one piece, and a row reads its positions in the order
// of memory.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kUnroll = 4;  // positions whose products are computed together
constexpr int64_t kAhead = 4;  // tokens whose places in the cache are fetched before they are written
constexpr int64_t kUnitPanels = 12;  // of a matrix that a thread takes at a time

// Calls work(i) for every i < n on the threads of XLA's pool and on the caller's, which returns when all are done.
template <typename Work>
void ParallelFor(ffi::ThreadPool& pool, int64_t n, const Work& work) {
  struct State {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto state = std::make_shared<State>();
  // a task that begins after the last item was taken touches the state alone, which it owns
  auto run = [state, n, &work] {
    for (int64_t i; (i = state->next.fetch_add(1)) < n;) {
      work(i);
      state->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t i = 1; i < std::min<int64_t>(pool.num_threads(), n); ++i) pool.Schedule(decltype(run)(run));
  run();
  while (state->done.load(std::memory_order_acquire) < n) std::this_thread::yield();
}

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
float Soften(float* scores, int64_t n) {
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

using Floats = ffi::Buffer<ffi::F32>;
using Integers = ffi::Buffer<ffi::S32>;

// q [B, H, D], keys and values [blocks, T, K, D], tables [B, M], lengths [B] -> [B, H, D]; window 0 = all positions.
ffi::Error Attend(ffi::ThreadPool pool, Floats q, Floats keys, Floats values, Integers tables, Integers lengths,
                  int64_t window, ffi::Result<Floats> out) {
  const auto rows = q.dimensions(), cache = keys.dimensions();
  const Sizes sizes{rows[1], cache[2], cache[3], cache[1]};
  const int64_t row = rows[1] * rows[2], table = tables.dimensions()[1];
  const auto attend = sizes.head_dim == 64 ? AttendRow<64> : sizes.head_dim == 128 ? AttendRow<128> : AttendRow<0>;
  ParallelFor(pool, rows[0], [&](int64_t b) {
    float* result = out->typed_data() + b * row;
    const int64_t length = lengths.typed_data()[b];
    const int64_t first = window > 0 ? std::max<int64_t>(0, length - window) : 0;
    if (length <= 0) {
      std::fill(result, result + row, 0.0f);
    } else {
      attend(q.typed_data() + b * row, keys.typed_data(), values.typed_data(), tables.typed_data() + b * table, first,
             length, sizes, result);
    }
  });
  return ffi::Error::Success();
}

// The layer with k, v [N, K, D] of token n at place offsets[n] of block blocks[n]; the results are the arguments.
ffi::Error Write(Floats keys, Floats values, Floats k, Floats v, Integers blocks, Integers offsets,
                 ffi::Result<Floats> new_keys, ffi::Result<Floats> new_values) {
  if (new_keys->typed_data() != keys.typed_data() || new_values->typed_data() != values.typed_data()) {
    return ffi::Error::Internal("areal_jax_cache_write: the cache is not written in place");
  }
  const auto cache = keys.dimensions();
  const int64_t token = cache[2] * cache[3];
  const int64_t tokens = blocks.element_count();
  const auto place = [&](int64_t n) { return (blocks.typed_data()[n] * cache[1] + offsets.typed_data()[n]) * token; };
  for (int64_t n = 0; n < tokens; ++n) {
    if (n + kAhead < tokens) {
      const int64_t next = place(n + kAhead);
      for (int64_t i = 0; i < token; i += 64 / sizeof(float)) {
        __builtin_prefetch(new_keys->typed_data() + next + i, 1);
        __builtin_prefetch(new_values->typed_data() + next + i, 1);
      }
    }
    std::memcpy(new_keys->typed_data() + place(n), k.typed_data() + n * token, token * sizeof(float));
    std::memcpy(new_values->typed_data() + place(n), v.typed_data() + n * token, token * sizeof(float));
  }
  return ffi::Error::Success();
}

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
  const float* x;  // [I, width]
};

// `panels` from w on times the block; `out` is the first of their rows, which are `stride` apart.
template <typename Vector, int kVectors, int kPanels>
inline void MultiplyPanels(const float* w, const Block& block, int64_t in, float* out, int64_t stride) {
  constexpr int kLanes = sizeof(Vector) / sizeof(float), kWidth = kVectors * kLanes, kRows = kPanels * kPanelRows;
  Vector sums[kRows][kVectors] = {};
  for (int64_t i = 0; i < in; ++i) {
    Vector entries[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) entries[v] = Load<Vector>(block.x + i * kWidth + v * kLanes);
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) __builtin_prefetch(w + (p * in + i) * kPanelRows + kFetchAhead, 0, 3);
#pragma GCC unroll 32
    for (int r = 0; r < kRows; ++r) {
      const float entry = w[(r / kPanelRows * in + i) * kPanelRows + r % kPanelRows];
      const Vector weight = entry - Vector{};  // in every place
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sums[r][v] = MultiplyAdd(weight, entries[v], sums[r][v]);
    }
  }
  if (block.columns == kWidth) {
#pragma GCC unroll 32
    for (int r = 0; r < kRows; ++r) std::memcpy(out + r * stride, sums[r], sizeof sums[r]);
  } else {
    for (int r = 0; r < kRows; ++r) std::memcpy(out + r * stride, sums[r], block.columns * sizeof(float));
  }
}

// Two panels at a time where a block has few columns: one panel's sums would wait for each other.
template <typename Vector, int kVectors, int kPanels>
void MultiplyRange(const float* w, const Block& block, int64_t in, float* out, int64_t stride, int64_t panels) {
  const int64_t panel = in * kPanelRows, rows = kPanelRows * stride;
  int64_t p = 0;
  for (; p + kPanels <= panels; p += kPanels) {
    MultiplyPanels<Vector, kVectors, kPanels>(w + p * panel, block, in, out + p * rows, stride);
  }
  for (; p < panels; ++p) MultiplyPanels<Vector, kVectors, 1>(w + p * panel, block, in, out + p * rows, stride);
}

void MultiplyBlock(const float* w, const Block& block, int64_t in, float* out, int64_t stride, int64_t panels) {
#ifdef __AVX512F__
  switch (block.width) {
    case 48: return MultiplyRange<Whole, 3, 1>(w, block, in, out, stride, panels);
    case 32: return MultiplyRange<Whole, 2, 1>(w, block, in, out, stride, panels);
    case 24: return MultiplyRange<Half, 3, 1>(w, block, in, out, stride, panels);
    case 16: return MultiplyRange<Whole, 1, 2>(w, block, in, out, stride, panels);
  }
  return MultiplyRange<Half, 1, 2>(w, block, in, out, stride, panels);
#else
  return MultiplyRange<Half, 1, 1>(w, block, in, out, stride, panels);
#endif
}

// The blocks of so many columns, the widest first. Only the last one may have columns that are not wanted.
std::vector<Block> CutColumns(int64_t columns) {
  std::vector<Block> blocks;
  for (int64_t first = 0; first < columns;) {
    const int64_t left = columns - first, rounded = (left + 7) / 8 * 8;
    const int64_t width = rounded == 40 ? std::min<int64_t>(24, kWidest) : std::min(rounded, kWidest);
    blocks.push_back({first, width, std::min(left, width), nullptr});
    first += width;
  }
  return blocks;
}

// The columns of each block side by side, [I, width], with zeros for those that are not wanted.
void CopyColumns(ffi::ThreadPool& pool, const float* x, int64_t in, int64_t columns, std::vector<Block>& blocks,
                 float* copies) {
  for (auto& block : blocks) block.x = copies + block.first * in;
  ParallelFor(pool, blocks.size(), [&](int64_t b) {
    const Block& block = blocks[b];
    float* copy = copies + block.first * in;
    for (int64_t i = 0; i < in; ++i, copy += block.width) {
      std::memcpy(copy, x + i * columns + block.first, block.columns * sizeof(float));
      std::fill(copy + block.columns, copy + block.width, 0.0f);
    }
  });
}

// x [I, columns] and matrices [O / 8, I, 8] -> one [O, columns] for each matrix.
ffi::Error Multiply(ffi::ThreadPool pool, Floats x, ffi::RemainingArgs matrices, ffi::RemainingRets products) {
  struct Unit {
    const float* w;
    float* out;
    int64_t panels;
  };
  const int64_t in = x.dimensions()[0], columns = x.dimensions()[1];
  std::vector<Unit> units;
  for (size_t i = 0; i < matrices.size(); ++i) {
    auto w = matrices.get<Floats>(i);
    auto out = products.get<Floats>(i);
    if (!w || !out) return ffi::Error::InvalidArgument("areal_jax_multiply: matrices and products are float32");
    const int64_t panels = w->dimensions()[0];
    for (int64_t first = 0; first < panels; first += kUnitPanels) {
      units.push_back({w->typed_data() + first * in * kPanelRows, (*out)->typed_data() + first * kPanelRows * columns,
                       std::min(kUnitPanels, panels - first)});
    }
  }
  std::vector<Block> blocks = CutColumns(columns);
  static thread_local std::vector<float> copies;  // kept: pages of new memory cost more than the copy
  if (blocks.size() == 1 && blocks[0].width == columns) {
    blocks[0].x = x.typed_data();
  } else {
    const size_t size = in * (blocks.back().first + blocks.back().width);
    if (copies.size() < size) copies.resize(size);
    CopyColumns(pool, x.typed_data(), in, columns, blocks, copies.data());
  }
  ParallelFor(pool, units.size(), [&](int64_t u) {
    for (const Block& block : blocks) {
      MultiplyBlock(units[u].w, block, in, units[u].out + block.first, columns, units[u].panels);
    }
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(areal_jax_cache_attend, Attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Integers>()
                                  .Arg<Integers>()
                                  .Attr<int64_t>("window")
                                  .Ret<Floats>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(areal_jax_cache_write, Write,
                              ffi::Ffi::Bind()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Integers>()
                                  .Arg<Integers>()
                                  .Ret<Floats>()
                                  .Ret<Floats>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(areal_jax_multiply, Multiply,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().RemainingArgs().RemainingRets());
