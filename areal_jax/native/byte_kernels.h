// Kernels of decoding with matrices and tokens in 8 bits, as XLA calls them. Those of kernels.cc in float32 have the
// same parts and arguments; here each matrix is a quantized one, and tokens are rows [T, d].
//
// T tokens, B rows of a batch, d model width, H heads, K key-value heads, D head size, V vocabulary.

#ifndef AREAL_JAX_NATIVE_BYTE_KERNELS_H_
#define AREAL_JAX_NATIVE_BYTE_KERNELS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "attention.h"
#include "byte_layer.h"
#include "bytes.h"
#include "threads.h"
#include "vocabulary.h"
#include "weights.h"
#include "xla/ffi/api/ffi.h"

namespace areal_jax {

// x [T, I] and a matrix -> [T, O]. Tests ask for the ways of other processors: 1, without VNNI, and 2, without AVX2.
inline ffi::Future MultiplyRows(ffi::ThreadPool pool, Floats x, Bytes panels, Floats scales, int64_t way,
                                ffi::Result<Floats> out) {
  const int64_t tokens = x.dimensions()[0], in = x.dimensions()[1];
  const ByteMatrix matrix{panels.typed_data(), scales.typed_data(), nullptr,
                          static_cast<int64_t>(panels.dimensions()[1]), static_cast<int64_t>(scales.element_count())};
  if ((in + kGroup - 1) / kGroup != matrix.groups) {
    return Fail("areal_jax_byte_multiply: tokens and matrix have other numbers of features");
  }
  Phases phases;
  float* memory = phases.Reserve(tokens * (matrix.groups + 2));
  const ByteRows rows{reinterpret_cast<int8_t*>(memory), memory + tokens * matrix.groups,
                      reinterpret_cast<int32_t*>(memory + tokens * (matrix.groups + 1)), matrix.groups};
  phases.Add(tokens, [=, from = x.typed_data()](int64_t t) { QuantizeRow(from + t * in, in, rows, t); });
  phases.Add((matrix.Panels() + kByteUnit - 1) / kByteUnit, [=, to = out->typed_data()](int64_t u) {
    const auto target = [=](int64_t t) { return ByteTarget{to + t * matrix.out, 1, false}; };
    const int64_t first = u * kByteUnit, panels = std::min(kByteUnit, matrix.Panels() - first);
    if (way == 1) return MultiplyBytes<Portable>(matrix, first, panels, rows, tokens, target);
    if (way == 2) return MultiplyBytes<Plain>(matrix, first, panels, rows, tokens, target);
    MultiplyBytes<Fastest>(matrix, first, panels, rows, tokens, target);
  });
  return phases.RunBehindPreferred(pool);
}

// Calls add(first token, scratch) for chunks of the first `wanted` tokens, which share the memory of the first one.
template <typename Add>
inline void AddByteChunks(Phases& phases, const ByteLayer& layer, Integers wanted, const Add& add) {
  const int64_t tokens = wanted.typed_data()[0];
  float* memory = nullptr;
  for (int64_t first = 0; first < tokens; first += kChunkTokens) {
    const int64_t count = std::min(kChunkTokens, tokens - first);
    if (!memory) memory = phases.Reserve(ByteScratch::Size(layer, count));
    add(first, ByteScratch(memory, layer, count));
  }
}

inline void AddCopy(Phases& phases, const float* from, int64_t numbers, float* to) {
  phases.Add(1, [=](int64_t) { std::memcpy(to, from, numbers * sizeof(float)); });
}

inline ffi::Future ByteProject(ffi::ThreadPool pool, Floats x, Integers wanted, Floats cosine, Floats sine,
                               ffi::RemainingArgs args, ffi::Dictionary attributes, ffi::Result<Floats> q,
                               ffi::Result<Floats> k, ffi::Result<Floats> v) {
  Phases phases;
  const ByteLayer& layer = phases.Keep(Weights(args, attributes).TakeLayer<ByteMatrix>());
  for (auto [out, features] : {std::pair(&q, layer.query.out), {&k, layer.key.out}, {&v, layer.value.out}}) {
    float* data = (*out)->typed_data();
    std::fill(data + wanted.typed_data()[0] * features, data + (*out)->element_count(), 0.0f);
  }
  AddByteChunks(phases, layer, wanted, [&](int64_t first, const ByteScratch& s) {
    const auto rows = [&](ffi::Result<Floats>& out, int64_t features) -> Place {
      return [=, data = out->typed_data() + first * features](int64_t t) { return data + t * features; };
    };
    const int64_t angles = first * layer.head_dim / 2;
    AddCopy(phases, x.typed_data() + first * s.d, s.tokens * s.d, s.x);
    AddByteProjections(phases, layer, s, {cosine.typed_data() + angles, sine.typed_data() + angles},
                       rows(q, layer.query.out), rows(k, layer.key.out), rows(v, layer.value.out));
  });
  return phases.RunBehindPreferred(pool);
}

inline ffi::Future ByteFinish(ffi::ThreadPool pool, Floats x, Integers wanted, Floats attended, ffi::RemainingArgs args,
                              ffi::Dictionary attributes, ffi::Result<Floats> out) {
  Phases phases;
  const ByteLayer& layer = phases.Keep(Weights(args, attributes).TakeLayer<ByteMatrix>());
  AddByteChunks(phases, layer, wanted, [&](int64_t first, const ByteScratch& s) {
    const int64_t features = layer.query.out;
    AddCopy(phases, x.typed_data() + first * s.d, s.tokens * s.d, s.x);
    phases.Add(s.tokens, [=, rows = attended.typed_data() + first * features, groups = layer.output.groups](int64_t t) {
      QuantizeRow(rows + t * features, features, s.RowsOf(groups), t);
    });
    AddByteRest(phases, layer, s);
    AddCopy(phases, s.x, s.tokens * s.d, out->typed_data() + first * s.d);
  });
  return phases.RunBehindPreferred(pool);
}

// logits [V, B] of the final states of B rows, and their sums by block of the vocabulary.
inline void AddByteHead(Phases& phases, const ByteScratch& s, const float* norm, float eps, const ByteMatrix& head,
                        const float* temperatures, float* logits, float* largest, float* logsumexp) {
  const int64_t rows = s.tokens;
  AddByteNorm(phases, s, norm, eps, head.groups);
  phases.Add((head.out + kVocabularyBlock - 1) / kVocabularyBlock, [=](int64_t b) {
    const int64_t first = b * kVocabularyBlock, entries = std::min(kVocabularyBlock, head.out - first);
    MultiplyBytes<Fastest>(head, first / kByteRows, (entries + kByteRows - 1) / kByteRows, s.RowsOf(head.groups), rows,
                           [=](int64_t t) { return ByteTarget{logits + t, rows, false}; });
    SumBlock(logits + first * rows, rows, entries, temperatures, largest + b * rows, logsumexp + b * rows);
  });
}

inline ffi::Future ByteStep(ffi::ThreadPool pool, Floats x, Floats cosine, Floats sine, Floats temperatures,
                            Integers tables, Integers lengths, Integers blocks, Integers offsets,
                            ffi::RemainingArgs args, ffi::Dictionary attributes, ffi::RemainingRets results) {
  constexpr size_t kSums = 3;  // results before the keys and values
  const auto windows = *attributes.get<ffi::Span<const int64_t>>("windows");
  Phases phases;
  Weights weights(args, attributes);
  auto& layers = phases.Keep(std::vector<ByteLayer>());
  for (size_t i = 0; i < windows.size(); ++i) layers.push_back(weights.TakeLayer<ByteMatrix>());
  const float* final_norm = weights.TakeVector();
  const ByteMatrix head = weights.TakeMatrix<ByteMatrix>();

  const int64_t rows = lengths.element_count(), table = tables.dimensions()[1];
  const int64_t pools = blocks.element_count() / rows;  // 2: layers with a window have their own
  const int64_t width_q = layers[0].query.out, width_k = layers[0].key.out;
  const int64_t size = ByteScratch::Size(layers[0], rows);
  float* memory = phases.Reserve(size + 2 * rows * width_q);
  const ByteScratch s(memory, layers[0], rows);
  float *queries = memory + size, *attended = queries + rows * width_q;

  AddCopy(phases, x.typed_data(), rows * s.d, s.x);
  for (size_t i = 0; i < layers.size(); ++i) {
    const ByteLayer& layer = layers[i];
    const Floats keys = weights.Take(), values = weights.Take();
    float *k = keys.typed_data(), *v = values.typed_data();
    for (size_t side : {0, 1}) {
      if ((*results.get<Floats>(kSums + 2 * i + side))->typed_data() != (side ? v : k)) {
        return Fail("areal_jax_byte_step: the cache is not written in place");
      }
    }
    const auto cache = keys.dimensions();
    const Sizes sizes{width_q / layer.head_dim, width_k / layer.head_dim, layer.head_dim, cache[1]};
    const int64_t window = windows[i], pool = pools > 1 && window > 0;
    const auto places = [=](float* side) {
      return [=, at = blocks.typed_data() + pool, offset = offsets.typed_data()](int64_t row) {
        return side + (at[row * pools] * sizes.block_tokens + offset[row]) * width_k;
      };
    };
    AddByteProjections(phases, layer, s, {cosine.typed_data(), sine.typed_data()},
                       [=](int64_t row) { return queries + row * width_q; }, places(k), places(v));
    phases.Add(rows, [=, groups = layer.output.groups, read = tables.typed_data() + pool * (table / pools),
                      seen = lengths.typed_data()](int64_t row) {
      float* out = attended + row * width_q;
      Attend({queries + row * width_q, read + row * table, seen + row, 1, window, out}, k, v, sizes);
      QuantizeRow(out, width_q, s.RowsOf(groups), row);
    });
    AddByteRest(phases, layer, s);
  }
  const auto result = [&](size_t i) { return (*results.get<Floats>(i))->typed_data(); };
  AddByteHead(phases, s, final_norm, layers[0].eps, head, temperatures.typed_data(), result(0), result(1), result(2));
  return phases.RunBehindPreferred(pool);
}

}  // namespace areal_jax

#endif  // AREAL_JAX_NATIVE_BYTE_KERNELS_H_
