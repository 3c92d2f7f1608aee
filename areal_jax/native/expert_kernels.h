// Kernels of a mixture of experts, as XLA calls them (models/expert_products.py): its two products and their gradient.
//
//   h = x gate, u = x up, inner = silu(h) * u, y[t] = sum over j of weights[t, j] * (inner of choice j) down
//
// T tokens, k choices of each, E experts, d model width, F width of an expert, F' = F rounded up to kRounded. N = T k
// rows, of which those are used that have an expert, see experts.h. A row of products is [h of kLanes features, u of
// these, h of the next kLanes, ..]: [N, 2 F'].

#ifndef AREAL_JAX_NATIVE_EXPERT_KERNELS_H_
#define AREAL_JAX_NATIVE_EXPERT_KERNELS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "attention.h"
#include "experts.h"
#include "threads.h"
#include "weights.h"
#include "xla/ffi/api/ffi.h"

namespace areal_jax {

constexpr int64_t kMixedNumbers = 1 << 22;  // of all rows that wait to be summed by token: bounds the kept memory
constexpr int64_t kUnitRows = 16;  // rows or tokens that a thread takes at a time

struct ExpertSizes {
  int64_t d, width, rounded;  // d, F, F'
};

inline const Choices& KeepChoices(Phases& phases, Integers experts, int64_t count) {
  const auto shape = experts.dimensions();
  return phases.Keep(Choices(experts.typed_data(), shape[0], shape[1], count));
}

// Calls run(expert, first column, first row, rows) for each expert and each group of `columns` of `width` columns.
template <typename Run>
inline void AddExperts(Phases& phases, const Choices& choices, int64_t width, int64_t columns, const Run& run) {
  const int64_t groups = (width + columns - 1) / columns;
  phases.Add(choices.experts * groups, [=, &choices](int64_t i) {
    const int64_t expert = i / groups, begin = choices.first[expert];
    run(expert, i % groups * columns, begin, choices.first[expert + 1] - begin);
  });
}

// Calls run(i) for every i < count, some at a time.
template <typename Run>
inline void AddRows(Phases& phases, int64_t count, const Run& run) {
  phases.Add((count + kUnitRows - 1) / kUnitRows, [=](int64_t unit) {
    for (int64_t i = unit * kUnitRows; i < std::min(count, (unit + 1) * kUnitRows); ++i) run(i);
  });
}

// out[t] = the sum over j, in order, of row (t, j) of a product, times weights[t, j] where there are weights.
// multiply(expert, first column, first row, rows, to, stride) computes kPair columns of the rows.
template <typename Multiply>
inline void AddMix(Phases& phases, const Choices& choices, const float* weights, int64_t d, float* out,
                   const Multiply& multiply) {
  const int64_t rows = std::max<int64_t>(1, choices.Rows());
  const int64_t most = std::max(kPair, kMixedNumbers / rows / kPair * kPair), stride = std::min(most, RoundUp(d, kPair));
  float* parts = phases.Reserve(rows * stride);
  for (int64_t first = 0; first < d; first += stride) {
    const int64_t width = std::min(stride, d - first);
    AddExperts(phases, choices, width, kPair, [=](int64_t expert, int64_t column, int64_t begin, int64_t count) {
      multiply(expert, first + column, begin, count, parts + begin * stride + column, stride);
    });
    AddRows(phases, choices.tokens, [=, &choices](int64_t t) {
      for (int64_t c = 0; c < width; c += kLanes) {
        Lanes sum{};
        for (int64_t j = t * choices.choices; j < (t + 1) * choices.choices; ++j) {
          if (choices.row[j] < 0) continue;
          const Lanes part = Load<Lanes>(parts + choices.row[j] * stride + c);
          sum = MultiplyAdd((weights ? weights[j] : 1.0f) - Lanes{}, part, sum);
        }
        std::memcpy(out + t * d + first + c, &sum, std::min(kLanes, width - c) * sizeof(float));
      }
    });
  }
}

inline float Sigmoid(float x) {
  const float e = Exp(-std::fabs(x));
  return (x < 0 ? e : 1.0f) / (1.0f + e);
}

// silu(h) * u of a row of products.
inline void Activate(const float* products, int64_t rounded, float* inner) {
  for (int64_t f = 0; f < rounded; f += kLanes, products += kPair) {
#pragma omp simd
    for (int64_t i = 0; i < kLanes; ++i) {
      inner[f + i] = products[i] * Sigmoid(products[i]) * products[kLanes + i];
    }
  }
}

// The gradient of a row's h and u. `inner` holds the gradient of silu(h) * u before it is weighted, and holds the
// weighted silu(h) * u afterwards. Returns the gradient of the weight. `products` may be `gradient`.
inline float ActivateBack(const float* products, float weight, int64_t rounded, float* gradient, float* inner) {
  float sums[kLanes] = {};
  for (int64_t f = 0; f < rounded; f += kLanes, products += kPair, gradient += kPair) {
#pragma omp simd
    for (int64_t i = 0; i < kLanes; ++i) {
      const float h = products[i], u = products[kLanes + i], sigmoid = Sigmoid(h), silu = h * sigmoid;
      const float back = inner[f + i];
      sums[i] += back * (silu * u);
      gradient[i] = weight * back * u * (sigmoid + silu * (1.0f - sigmoid));
      gradient[kLanes + i] = weight * back * silu;
      inner[f + i] = weight * (silu * u);
    }
  }
  float total = 0;
  for (int64_t i = 0; i < kLanes; ++i) total += sums[i];
  return total;
}

// x [T, d], experts [T, k], gate and up [E, d, F] -> products [N, 2 F'].
inline ffi::Future MultiplyExperts(ffi::ThreadPool pool, Floats x, Integers experts, Floats gate, Floats up,
                                   ffi::Result<Floats> products) {
  const auto shape = gate.dimensions();
  const int64_t d = shape[1], width = shape[2], stride = products->dimensions()[1];
  Phases phases;
  const Choices& choices = KeepChoices(phases, experts, shape[0]);
  const RowsOf rows{x.typed_data(), d, choices.token.data()};
  AddExperts(phases, choices, stride / 2, kLanes,
             [=, gate = gate.typed_data(), up = up.typed_data(), out = products->typed_data()](
                 int64_t expert, int64_t column, int64_t begin, int64_t count) {
               const auto pack = [=](int64_t first, int64_t depth, float* panel) {
                 const int64_t from = (expert * d + first) * width;
                 const Columns columns(column, width);
                 PackRows([=](int64_t i) { return gate + from + i * width; }, columns, depth, panel);
                 PackRows([=](int64_t i) { return up + from + i * width; }, columns, depth, panel + kLanes);
               };
               MultiplyChosen(rows, begin, count, d, pack, out + begin * stride + 2 * column, stride);
             });
  return phases.Run(pool);
}

// products [N, 2 F'], experts and weights [T, k], down [E, F, d] -> y [T, d]; memory for [N, F'] numbers.
inline ffi::Future MixExperts(ffi::ThreadPool pool, Floats products, Integers experts, Floats weights, Floats down,
                              ffi::Result<Floats> y, ffi::Result<Floats> inner) {
  const auto shape = down.dimensions();
  const int64_t width = shape[1], d = shape[2], rounded = inner->dimensions()[1];
  Phases phases;
  const Choices& choices = KeepChoices(phases, experts, shape[0]);
  AddRows(phases, choices.Rows(), [=, from = products.typed_data(), to = inner->typed_data()](int64_t r) {
    Activate(from + r * 2 * rounded, rounded, to + r * rounded);
  });
  const RowsOf rows{inner->typed_data(), rounded, nullptr};
  AddMix(phases, choices, weights.typed_data(), d, y->typed_data(),
         [=, down = down.typed_data()](int64_t expert, int64_t column, int64_t begin, int64_t count, float* to,
                                       int64_t stride) {
           const auto pack = [=](int64_t first, int64_t depth, float* panel) {
             const auto row = [=](int64_t i) { return down + (expert * width + first + i) * d; };
             PackRows(row, Columns(column, d), depth, panel);
             PackRows(row, Columns(column + kLanes, d), depth, panel + kLanes);
           };
           MultiplyChosen(rows, begin, count, width, pack, to, stride);
         });
  return phases.Run(pool);
}

// The gradient of MixExperts(MultiplyExperts(..)) for dy [T, d]: dx, d_weights, d_gate, d_up and d_down. Memory for the
// gradient of the products, which may be the products themselves, and for [N, F'] numbers.
inline ffi::Future DifferentiateExperts(ffi::ThreadPool pool, Floats x, Integers experts, Floats weights, Floats gate,
                                        Floats up, Floats down, Floats products, Floats dy, ffi::Result<Floats> dx,
                                        ffi::Result<Floats> d_weights, ffi::Result<Floats> d_gate,
                                        ffi::Result<Floats> d_up, ffi::Result<Floats> d_down,
                                        ffi::Result<Floats> d_products, ffi::Result<Floats> inner) {
  const auto shape = gate.dimensions();
  const int64_t d = shape[1], width = shape[2], rounded = inner->dimensions()[1], wide = 2 * rounded;
  Phases phases;
  const Choices& choices = KeepChoices(phases, experts, shape[0]);
  float *back = inner->typed_data(), *d_product = d_products->typed_data(), *d_weight = d_weights->typed_data();
  const RowsOf dy_rows{dy.typed_data(), d, choices.token.data()}, x_rows{x.typed_data(), d, choices.token.data()};
  const float *gates = gate.typed_data(), *ups = up.typed_data(), *downs = down.typed_data();

  AddExperts(phases, choices, rounded, kPair, [=](int64_t expert, int64_t column, int64_t begin, int64_t count) {
    const float* matrix = downs + expert * width * d;
    const auto pack = [=](int64_t first, int64_t depth, float* panel) {
      PackTurned(matrix, d, Columns(column, width), first, depth, panel);
      PackTurned(matrix, d, Columns(column + kLanes, width), first, depth, panel + kLanes);
    };
    MultiplyChosen(dy_rows, begin, count, d, pack, back + begin * rounded + column, rounded);
  });
  std::fill(d_weight, d_weight + choices.row.size(), 0.0f);
  AddRows(phases, choices.Rows(),
          [=, &choices, from = products.typed_data(), weight = weights.typed_data()](int64_t r) {
            const int64_t choice = choices.choice[r];
            d_weight[choice] =
                ActivateBack(from + r * wide, weight[choice], rounded, d_product + r * wide, back + r * rounded);
          });
  AddExperts(phases, choices, width, kLanes,
             [=, to_gate = d_gate->typed_data(), to_up = d_up->typed_data()](int64_t expert, int64_t column,
                                                                             int64_t begin, int64_t count) {
               const auto pack = [=](int64_t first, int64_t depth, float* panel) {
                 const float* from = d_product + (begin + first) * wide + 2 * column;
                 for (int64_t i = 0; i < depth; ++i) std::memcpy(panel + i * kPair, from + i * wide, 2 * sizeof(Lanes));
               };
               const int64_t to = expert * d * width + column, columns = Columns(column, width).count;
               MultiplyOuter(x_rows, begin, count, d, pack,
                             {{to_gate + to, to_up + to}, {columns, columns}, width, false});
             });
  const RowsOf inner_rows{back, rounded, nullptr};
  AddExperts(phases, choices, d, kPair,
             [=, to_down = d_down->typed_data()](int64_t expert, int64_t column, int64_t begin, int64_t count) {
               const Columns left(column, d), right(column + kLanes, d);
               const auto pack = [=](int64_t first, int64_t depth, float* panel) {
                 const auto row = [=](int64_t i) { return dy_rows.At(begin + first + i); };
                 PackRows(row, left, depth, panel);
                 PackRows(row, right, depth, panel + kLanes);
               };
               float* to = to_down + expert * width * d + column;
               MultiplyOuter(inner_rows, begin, count, width, pack,
                             {{to, to + kLanes}, {left.count, right.count}, d, false});
             });
  const RowsOf product_rows{d_product, wide, nullptr};
  AddMix(phases, choices, nullptr, d, dx->typed_data(),
         [=](int64_t expert, int64_t column, int64_t begin, int64_t count, float* to, int64_t stride) {
           const auto pack = [=](int64_t first, int64_t depth, float* panel) {
             // features of h and u alternate as in the rows: kLanes of gate, kLanes of up
             for (int64_t i = 0; i < depth; i += kPair) {
               const int64_t feature = (first + i) / 2, there = Columns(feature, width).count;
               for (int64_t half : {0, 1}) {
                 const int64_t sides[] = {0, kLanes};
                 for (int64_t side : sides) {
                   const Columns columns(column + side, d);
                   float* at = panel + (i + half * kLanes) * kPair + side;
                   const float* from = (half ? ups : gates) + (expert * d + columns.first) * width + feature;
                   TurnTile(from, width, columns.count, there, at);
                   for (int64_t f = there; f < kLanes; ++f) std::fill(at + f * kPair, at + f * kPair + kLanes, 0.0f);
                 }
               }
             }
           };
           MultiplyChosen(product_rows, begin, count, wide, pack, to, stride);
         });
  return phases.Run(pool);
}

}  // namespace areal_jax

#endif  // AREAL_JAX_NATIVE_EXPERT_KERNELS_H_
