// Kernels of decoding on CPUs, as XLA calls them. library.py compiles this file.
//
// Every number of a result is computed in one order of operations, whatever the threads, the other rows and their number.
//
// T tokens, B rows of a batch, d model width, H heads, K key-value heads, D head size, V vocabulary, M blocks of a table row.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "attention.h"
#include "blocks.h"
#include "byte_kernels.h"
#include "changes.h"
#include "digest.h"
#include "expert_kernels.h"
#include "layer.h"
#include "mixture.h"
#include "products.h"
#include "ranking.h"
#include "threads.h"
#include "vocabulary.h"
#include "weights.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace areal_jax {
namespace {

constexpr int64_t kAhead = 4;  // tokens whose places in the cache are fetched before they are written

// q [B, H, D], keys and values [blocks, T, K, D], tables one behind the other, the place among them where the table of each
// row starts [B], lengths [B], maybe sinks [H] -> [B, H, D]; window 0 = all positions. Rows of a table that stand side by
// side share reads.
ffi::Future AttendRows(ffi::ThreadPool pool, Floats q, Floats keys, Floats values, Integers tables, Integers starts,
                       Integers lengths, ffi::RemainingArgs args, int64_t window, ffi::Result<Floats> out) {
  const auto shape = q.dimensions(), cache = keys.dimensions();
  const Sizes sizes{shape[1], cache[2], cache[3], cache[1]};
  const int64_t rows = shape[0], width = shape[1] * shape[2];
  const int32_t* start = starts.typed_data();
  const float* sinks = nullptr;
  if (args.size()) {
    auto given = args.get<Floats>(0);
    if (!given) return Fail("areal_jax_cache_attend: sinks are float32");
    sinks = given->typed_data();
  }
  Phases phases;
  auto& queries = phases.Keep(std::vector<Queries>());
  for (int64_t b = 0, count; b < rows; b += count) {
    for (count = 1; count < kMostQueries && b + count < rows && start[b + count] == start[b];) ++count;
    queries.push_back({q.typed_data() + b * width, tables.typed_data() + start[b], lengths.typed_data() + b, count,
                       window, out->typed_data() + b * width, sinks});
  }
  phases.Add(queries.size(), [=, &queries, k = keys.typed_data(), v = values.typed_data()](int64_t i) {
    Attend(queries[i], k, v, sizes);
  });
  return phases.RunBehindPreferred(pool);
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

// x [I, columns] and matrices [O / 8, I, 8] -> one [O, columns] for each matrix.
ffi::Future Multiply(ffi::ThreadPool pool, Floats x, ffi::RemainingArgs matrices, ffi::RemainingRets products) {
  const int64_t in = x.dimensions()[0], columns = x.dimensions()[1];
  std::vector<Matrix> inputs;
  std::vector<float*> outputs;
  for (size_t i = 0; i < matrices.size(); ++i) {
    auto w = matrices.get<Floats>(i);
    auto out = products.get<Floats>(i);
    if (!w || !out) return Fail("areal_jax_multiply: matrices and products are float32");
    inputs.push_back({w->typed_data(), nullptr, in, static_cast<int64_t>(w->dimensions()[0]) * kPanelRows});
    outputs.push_back((*out)->typed_data());
  }
  const std::vector<Block> blocks = CutColumns(columns);
  Sheet sheet{x.typed_data(), in};
  Phases phases;
  if (blocks.size() > 1 || blocks[0].width > columns) {
    sheet.data = phases.Reserve(in * TotalWidth(blocks));
    phases.Add(blocks.size(),
               [=, from = x.typed_data()](int64_t b) { CopyIn(from, columns, 0, blocks[b], sheet); });
  }
  AddOutputs(phases, blocks, sheet, inputs, outputs, columns);
  return phases.RunBehindPreferred(pool);
}

// Calls add(tokens, first of them, their scratch) for chunks of the first `wanted` columns; the scratch is that of all.
template <typename Add>
void AddChunks(Phases& phases, const Layer& layer, Integers wanted, const Add& add) {
  const int64_t columns = wanted.typed_data()[0];
  float* memory = nullptr;
  for (int64_t first = 0; first < columns; first += kChunkTokens) {
    const Tokens& tokens = phases.Keep(Tokens(std::min(kChunkTokens, columns - first)));
    const int64_t width = TotalWidth(tokens.blocks);  // that of the first chunk is the largest
    if (!memory) memory = phases.Reserve(Scratch::Size(layer, width));
    add(tokens, first, Scratch(memory, layer, width));
  }
}

// x [d, T], of whose tokens the first `wanted` count, cosine and sine [T, D / 2], a layer -> q [T, H, D], k, v [T, K, D],
// q and k rotated; zeros for the other tokens.
ffi::Future Project(ffi::ThreadPool pool, Floats x, Integers wanted, Floats cosine, Floats sine, ffi::RemainingArgs args,
                    ffi::Dictionary attributes, ffi::Result<Floats> q, ffi::Result<Floats> k, ffi::Result<Floats> v) {
  Phases phases;
  const Layer& layer = phases.Keep(Weights(args, attributes).TakeLayer<Matrix>());
  const int64_t columns = x.dimensions()[1];
  for (auto* out : {&q, &k, &v}) {
    const int64_t features = (*out)->element_count() / columns;
    std::fill((*out)->typed_data() + wanted.typed_data()[0] * features,
              (*out)->typed_data() + (*out)->element_count(), 0.0f);
  }
  AddChunks(phases, layer, wanted, [&](const Tokens& tokens, int64_t first, const Scratch& s) {
    const auto rows = [&](ffi::Result<Floats>& out, int64_t features) {
      float* data = out->typed_data() + first * features;
      return [=](int64_t token) { return data + token * features; };
    };
    const int64_t angles = first * layer.head_dim / 2;
    phases.Add(tokens.blocks.size(), [=, &tokens, from = x.typed_data()](int64_t b) {
      CopyIn(from, columns, first, tokens.blocks[b], s.x);
    });
    AddProjections(phases, tokens, layer, s, {cosine.typed_data() + angles, sine.typed_data() + angles},
                   rows(q, layer.query.out), rows(k, layer.key.out), rows(v, layer.key.out));
  });
  return phases.RunBehindPreferred(pool);
}

// x [d, T], of whose tokens the first `wanted` count, the output of attention [T, H, D], a layer -> x behind the layer
// [d, T]; anything for the other tokens. Behind a layer with experts: which of these tokens reach them [T] -> what the
// router chose [T, k]; zeros for the others.
ffi::Future Finish(ffi::ThreadPool pool, Floats x, Integers wanted, Floats attended, ffi::RemainingArgs args,
                   ffi::Dictionary attributes, ffi::Result<Floats> out, ffi::RemainingRets chosen) {
  Phases phases;
  Weights weights(args, attributes);
  const Layer& layer = phases.Keep(weights.TakeLayer<Matrix>());
  const Mixture& mixture = layer.mixture;
  Routes routes{};
  if (mixture.experts) {
    ffi::Result<Integers> live = *chosen.get<Integers>(0);
    routes = {weights.TakeIntegers().typed_data(), live->typed_data()};
    std::fill(routes.live + wanted.typed_data()[0] * mixture.choices, routes.live + live->element_count(), 0);
  }
  std::optional<MixtureScratch> mixed;  // that of the first chunk is the largest
  AddChunks(phases, layer, wanted, [&](const Tokens& tokens, int64_t first, const Scratch& s) {
    const int64_t columns = x.dimensions()[1], features = layer.query.out;
    const float* rows = attended.typed_data() + first * features;
    phases.Add(tokens.blocks.size(), [=, &tokens, from = x.typed_data()](int64_t b) {
      CopyIn(from, columns, first, tokens.blocks[b], s.x);
    });
    Routes own{};
    if (mixture.experts) {
      if (!mixed) mixed.emplace(phases, mixture, tokens.Count(), TotalWidth(tokens.blocks));
      mixed->tokens = tokens.Count();
      own = {routes.counts + first, routes.live + first * mixture.choices};
    }
    AddRest(phases, tokens, layer, s, mixed ? &*mixed : nullptr, own,
            [=](int64_t token) { return rows + token * features; });
    phases.Add(tokens.blocks.size(), [=, &tokens, to = out->typed_data()](int64_t b) {
      CopyOut(s.x, tokens.blocks[b], to, columns, first);
    });
  });
  return phases.RunBehindPreferred(pool);
}

// One step: x [d, B], cosine and sine [B, D / 2], temperatures [B], the blocks of each row [B, M], positions that it sees
// [B], block and offset where its token is written [B]. If layers with a window have a pool of their own, the blocks are
// [B, 2 M] and [B, 2], those of the other layers first. Then the weights of all layers, final norm, head, and keys and
// values of each layer [blocks, T, K, D] -> logits [V, B]; the largest and the log-sum-exp of each block of the vocabulary
// of logits over temperatures [blocks of it, B]; of L layers with experts what their routers chose [L, B, k]; the keys and
// values, which are the arguments. Windows: one a layer, 0 = none. A row that sees no position reaches no expert.
ffi::Future Step(ffi::ThreadPool pool, Floats x, Floats cosine, Floats sine, Floats temperatures, Integers tables,
                 Integers lengths, Integers blocks, Integers offsets, ffi::RemainingArgs args, ffi::Dictionary attributes,
                 ffi::RemainingRets results) {
  const auto windows = *attributes.get<ffi::Span<const int64_t>>("windows");
  Phases phases;
  Weights weights(args, attributes);
  auto& layers = phases.Keep(std::vector<Layer>());
  Layer widest{};
  const Mixture* mixture = nullptr;  // all are of the same sizes
  for (size_t i = 0; i < windows.size(); ++i) layers.push_back(weights.TakeLayer<Matrix>());
  for (const Layer& layer : layers) {
    if (layer.gate.out >= widest.gate.out) widest = layer;
    if (layer.mixture.experts) mixture = &layer.mixture;
  }
  const size_t sums = mixture ? 4 : 3;  // results before the keys and values
  const float* final_norm = weights.TakeVector();
  const Matrix head = weights.TakeMatrix<Matrix>();

  const int64_t rows = lengths.element_count(), table = tables.dimensions()[1];
  const int64_t pools = blocks.element_count() / rows;  // 2: layers with a window have their own
  const int64_t width_q = layers[0].query.out, width_k = layers[0].key.out;
  const Tokens& tokens = phases.Keep(Tokens(rows));
  const int64_t width = TotalWidth(tokens.blocks);
  float* memory = phases.Reserve(Scratch::Size(widest, width) + 2 * rows * width_q);
  const Scratch s(memory, widest, width);
  float* queries = memory + Scratch::Size(widest, width);
  float* attended = queries + rows * width_q;
  std::optional<MixtureScratch> mixed;
  if (mixture) mixed.emplace(phases, *mixture, rows, width);
  int32_t* live = mixture ? (*results.get<Integers>(3))->typed_data() : nullptr;

  phases.Add(tokens.blocks.size(), [=, &tokens, from = x.typed_data()](int64_t b) {
    CopyIn(from, rows, 0, tokens.blocks[b], s.x);
  });
  for (size_t i = 0; i < layers.size(); ++i) {
    const Layer& layer = layers[i];
    const Floats keys = weights.Take(), values = weights.Take();
    float *k = keys.typed_data(), *v = values.typed_data();
    for (size_t side : {0, 1}) {
      if ((*results.get<Floats>(sums + 2 * i + side))->typed_data() != (side ? v : k)) {
        return Fail("areal_jax_step: the cache is not written in place");
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
    AddProjections(phases, tokens, layer, s, {cosine.typed_data(), sine.typed_data()},
                   [=](int64_t row) { return queries + row * width_q; }, places(k), places(v));
    phases.Add(rows, [=, read = tables.typed_data() + pool * (table / pools), seen = lengths.typed_data()](int64_t row) {
      Attend({queries + row * width_q, read + row * table, seen + row, 1, window, attended + row * width_q},
             k, v, sizes);
    });
    AddRest(phases, tokens, layer, s, mixed ? &*mixed : nullptr, {lengths.typed_data(), live},
            [=](int64_t row) { return attended + row * width_q; });
    if (layer.mixture.experts) live += rows * mixture->choices;
  }
  AddNorm(phases, tokens, s.x, final_norm, layers[0].eps, s.normal);
  const auto result = [&](size_t i) { return (*results.get<Floats>(i))->typed_data(); };
  float *logits = result(0), *largest = result(1), *logsumexp = result(2);
  AddOutputs(phases, tokens.blocks, s.normal, {head}, {logits}, rows);
  phases.Add((head.out + kVocabularyBlock - 1) / kVocabularyBlock, [=, heat = temperatures.typed_data()](int64_t b) {
    const int64_t first = b * kVocabularyBlock;
    SumBlock(logits + first * rows, rows, std::min(kVocabularyBlock, head.out - first), heat, largest + b * rows,
             logsumexp + b * rows);
  });
  return phases.RunBehindPreferred(pool);
}

// x [d, T], of whose tokens the first `wanted` count, targets and temperatures [T], head [V / 8, d, 8] -> logits of the
// targets over temperatures and log-sum-exp [T], the largest logits over temperatures and their ids [T, K], descending;
// zeros for the other tokens.
ffi::Future Rank(ffi::ThreadPool pool, Floats x, Integers wanted, Integers targets, Floats temperatures, Floats panels,
                 ffi::Result<Floats> chosen, ffi::Result<Floats> logsumexp, ffi::Result<Floats> values,
                 ffi::Result<Integers> ids) {
  const auto size = panels.dimensions();
  const Matrix head{panels.typed_data(), nullptr, static_cast<int64_t>(size[1]),
                    static_cast<int64_t>(size[0]) * kPanelRows};
  const int64_t columns = wanted.typed_data()[0], stride = x.dimensions()[1], most = values->dimensions()[1];
  const int64_t cuts = (head.out + kVocabularyBlock - 1) / kVocabularyBlock;
  for (auto* out : {&chosen, &logsumexp, &values}) {
    std::fill((*out)->typed_data(), (*out)->typed_data() + (*out)->element_count(), 0.0f);
  }
  std::fill(ids->typed_data(), ids->typed_data() + ids->element_count(), 0);
  Phases phases;
  float* memory = nullptr;
  for (int64_t first = 0; first < columns; first += kChunkTokens) {
    const int64_t count = std::min(kChunkTokens, columns - first);
    const auto& blocks = phases.Keep(CutColumns(count));
    const int64_t entries = head.in * TotalWidth(blocks);
    if (!memory) memory = phases.Reserve(entries + cuts * count * (2 + 2 * most));  // of the first chunk: the largest
    float* next = memory;
    const auto take = [&](int64_t numbers) { return std::exchange(next, next + numbers); };
    const Sheet sheet{take(entries), head.in};
    const Ranks ranks{take(cuts * count), take(cuts * count), take(cuts * count * most),
                      reinterpret_cast<int32_t*>(take(cuts * count * most)), count, most};
    const float* heat = temperatures.typed_data() + first;
    const int32_t* target = targets.typed_data() + first;
    float *own = chosen->typed_data() + first, *sums = logsumexp->typed_data() + first;
    phases.Add(blocks.size(), [=, &blocks, from = x.typed_data()](int64_t b) {
      CopyIn(from, stride, first, blocks[b], sheet);
    });
    phases.Add(cuts, [=, &blocks](int64_t i) { RankBlock(head, i, blocks, sheet, target, heat, ranks, own); });
    phases.Add(count, [=, top = values->typed_data(), id = ids->typed_data()](int64_t c) {
      float* largest = top + (first + c) * most;
      sums[c] = MergeRanks(ranks, cuts, c, largest, id + (first + c) * most);
      own[c] /= heat[c];
      for (int64_t i = 0; i < most; ++i) largest[i] /= heat[c];
    });
  }
  return phases.RunBehindPreferred(pool);
}

// The arguments of a layer before attention, behind it, and of a step: the same in float32 and in 8 bits.
auto BindProject() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<Floats>()
      .Arg<Integers>()
      .Arg<Floats>()
      .Arg<Floats>()
      .RemainingArgs()
      .Attrs()
      .Ret<Floats>()
      .Ret<Floats>()
      .Ret<Floats>();
}

auto BindFinish() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<Floats>()
      .Arg<Integers>()
      .Arg<Floats>()
      .RemainingArgs()
      .Attrs()
      .Ret<Floats>();
}

auto BindStep() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<Floats>()
      .Arg<Floats>()
      .Arg<Floats>()
      .Arg<Floats>()
      .Arg<Integers>()
      .Arg<Integers>()
      .Arg<Integers>()
      .Arg<Integers>()
      .RemainingArgs()
      .Attrs()
      .RemainingRets();
}

}  // namespace
}  // namespace areal_jax

// Called from Python, with no lock held and on no thread of XLA; `size` is that of a word in bytes.
extern "C" void areal_jax_digest(const void* words, int64_t rows, int64_t width, int64_t first, int64_t stride,
                                 int64_t size, uint32_t exponent, void* target, uint64_t* sums) {
  const auto digest = [&](auto word) {
    using Word = decltype(word);
    areal_jax::Digest(static_cast<const Word*>(words), rows, width, first, stride, exponent,
                      static_cast<Word*>(target), sums);
  };
  switch (size) {
    case 4: return digest(uint32_t{});
    case 2: return digest(uint16_t{});
    case 1: return digest(uint8_t{});
  }
}

// What changed between two versions of an array of 16 bits, see changes.h. Called from Python like the digest.
extern "C" void areal_jax_find_changes(uint16_t* base, const uint16_t* current, int64_t count, uint32_t exponent,
                                       uint8_t* gaps, uint32_t* large, uint8_t* low, uint8_t* high, uint64_t* found) {
  areal_jax::FindChanges(base, current, count, exponent, {gaps, large, low, high}, found);
}
extern "C" bool areal_jax_apply_changes(uint16_t* words, int64_t count, int64_t rows, uint8_t* gaps, uint32_t* large,
                                        uint8_t* low, uint8_t* high, int64_t changes, int64_t n_large, bool back,
                                        uint64_t* found) {
  return areal_jax::ApplyChanges(words, count, rows, {gaps, large, low, high}, changes, n_large, back, found);
}

// A matrix as panels of 8 rows: from [in, out], or [out, in] where `by_rows`, to [out / 8, in, 8].
extern "C" void areal_jax_panels(const float* matrix, int64_t in, int64_t out, bool by_rows, float* panels) {
  areal_jax::PackPanels(matrix, in, out, by_rows, panels);
}

// The arrays of a matrix in 8 bits, from float32 [in, out], or [out, in] where `by_rows`. Called from Python.
extern "C" void areal_jax_bytes(const float* matrix, int64_t in, int64_t out, bool by_rows, uint8_t* panels,
                                float* scales) {
  areal_jax::PackBytes(matrix, in, out, by_rows, panels, scales);
}

// Phases give way to other work of this process, between a call with 1 and one with -1.
extern "C" void areal_jax_prefer(int64_t change) { areal_jax::Preferred() += change; }

// Memory that XLA frees is given to it again, see blocks.h.
extern "C" bool areal_jax_keep_blocks(const char* part) { return areal_jax::KeepBlocksOf(part); }
extern "C" void areal_jax_free_kept_blocks() { areal_jax::FreeAll(areal_jax::KeptBlocks().Clear()); }
extern "C" void* areal_jax_allocate(uint64_t alignment, uint64_t bytes) {
  void* memory = nullptr;
  return areal_jax::AllocateAligned(&memory, alignment, bytes) ? nullptr : memory;
}
extern "C" void areal_jax_free(void* memory) { areal_jax::Free(memory); }
extern "C" void areal_jax_count_blocks(uint64_t* counts) { areal_jax::KeptBlocks().Count(counts); }

XLA_FFI_DEFINE_HANDLER_SYMBOL(areal_jax_cache_attend, areal_jax::AttendRows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<areal_jax::Floats>()
                                  .Arg<areal_jax::Floats>()
                                  .Arg<areal_jax::Floats>()
                                  .Arg<areal_jax::Integers>()
                                  .Arg<areal_jax::Integers>()
                                  .Arg<areal_jax::Integers>()
                                  .RemainingArgs()
                                  .Attr<int64_t>("window")
                                  .Ret<areal_jax::Floats>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(areal_jax_cache_write, areal_jax::Write,
                              ffi::Ffi::Bind()
                                  .Arg<areal_jax::Floats>()
                                  .Arg<areal_jax::Floats>()
                                  .Arg<areal_jax::Floats>()
                                  .Arg<areal_jax::Floats>()
                                  .Arg<areal_jax::Integers>()
                                  .Arg<areal_jax::Integers>()
                                  .Ret<areal_jax::Floats>()
                                  .Ret<areal_jax::Floats>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(areal_jax_multiply, areal_jax::Multiply,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<areal_jax::Floats>().RemainingArgs().RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(areal_jax_project, areal_jax::Project, areal_jax::BindProject());

XLA_FFI_DEFINE_HANDLER_SYMBOL(areal_jax_finish, areal_jax::Finish, areal_jax::BindFinish().RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(areal_jax_step, areal_jax::Step, areal_jax::BindStep());

XLA_FFI_DEFINE_HANDLER_SYMBOL(areal_jax_rank, areal_jax::Rank,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<areal_jax::Floats>()
                                  .Arg<areal_jax::Integers>()
                                  .Arg<areal_jax::Integers>()
                                  .Arg<areal_jax::Floats>()
                                  .Arg<areal_jax::Floats>()
                                  .Ret<areal_jax::Floats>()
                                  .Ret<areal_jax::Floats>()
                                  .Ret<areal_jax::Floats>()
                                  .Ret<areal_jax::Integers>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(areal_jax_byte_multiply, areal_jax::MultiplyRows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<areal_jax::Floats>()
                                  .Arg<areal_jax::Bytes>()
                                  .Arg<areal_jax::Floats>()
                                  .Attr<int64_t>("way")
                                  .Ret<areal_jax::Floats>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(areal_jax_byte_project, areal_jax::ByteProject, areal_jax::BindProject());

XLA_FFI_DEFINE_HANDLER_SYMBOL(areal_jax_byte_finish, areal_jax::ByteFinish, areal_jax::BindFinish());

XLA_FFI_DEFINE_HANDLER_SYMBOL(areal_jax_byte_step, areal_jax::ByteStep, areal_jax::BindStep());

XLA_FFI_DEFINE_HANDLER_SYMBOL(areal_jax_expert_products, areal_jax::MultiplyExperts, areal_jax::BindExpertProducts());

XLA_FFI_DEFINE_HANDLER_SYMBOL(areal_jax_expert_mix, areal_jax::MixExperts, areal_jax::BindExpertMix());

XLA_FFI_DEFINE_HANDLER_SYMBOL(areal_jax_expert_gradient, areal_jax::DifferentiateExperts,
                              areal_jax::BindExpertGradient());
