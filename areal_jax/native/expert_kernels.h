// Kernels of a mixture of experts, as XLA calls them (models/expert_products.py): its two products and their gradient.
//
//   h = x gate, u = x up, inner = silu(h) * u, y[t] = sum over j of weights[t, j] * (inner of choice j) down
//
// T tokens, k choices of each, E experts, d model width, F width of an expert, F' = F rounded up to kRounded. N = T k
// rows, of which those are used that have an expert, see experts.h. A row of products [2 F'] is h [F'] and u [F'], with
// zeros behind F.

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

inline const Choices& KeepChoices(Phases& phases, Integers experts, int64_t count) {
  const auto shape = experts.dimensions();
  return phases.Keep(Choices(experts.typed_data(), shape[0], shape[1], count));
}

// Calls run(expert, first column, first row, rows) for each group of `columns` of `width` columns and each of `most`
// experts, those that have rows before the others. The choices may be made by a phase before this one.
template <typename Run>
inline void AddExperts(Phases& phases, const Choices& choices, int64_t most, int64_t width, int64_t columns,
                       const Run& run) {
  const int64_t groups = (width + columns - 1) / columns;
  phases.Add(most * groups, [=, &choices](int64_t i) {
    const int64_t expert = choices.order[i / groups], begin = choices.first[expert];
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

// Memory for some columns of the products of up to `rows` rows that wait to be summed by token.
struct Parts {
  float* data;
  int64_t rows, stride;

  static Parts Fit(int64_t rows, int64_t d) {
    rows = std::max<int64_t>(1, rows);
    const int64_t most = std::max(kPair, kMixedNumbers / rows / kPair * kPair);
    return {nullptr, rows, std::min(most, RoundUp(d, kPair))};
  }
  int64_t Size() const { return rows * stride; }
};

// out[t] = the sum over j, in order, of row (t, j) of a product, times weights[t, j] where there are weights.
// multiply(expert, first column, columns, first row, rows, output) computes up to `together` columns of the rows, a
// multiple of kPair; rows of the output are parts.stride apart. `most` as in AddExperts.
template <typename Multiply>
inline void AddMix(Phases& phases, const Choices& choices, int64_t most, int64_t tokens, const float* weights,
                   int64_t d, float* out, const Parts& parts, int64_t together, const Multiply& multiply) {
  for (int64_t first = 0; first < d; first += parts.stride) {
    const int64_t width = std::min(parts.stride, d - first), rounded = RoundUp(width, kPair);
    AddExperts(phases, choices, most, width, together,
               [=](int64_t expert, int64_t column, int64_t begin, int64_t count) {
                 multiply(expert, first + column, std::min(together, rounded - column), begin, count,
                          parts.data + begin * parts.stride + column);
               });
    AddRows(phases, tokens, [=, &choices](int64_t t) {
      for (int64_t c = 0; c < width; c += kLanes) {
        Lanes sum{};
        for (int64_t j = t * choices.choices; j < (t + 1) * choices.choices; ++j) {
          if (choices.row[j] < 0) continue;
          const Lanes part = Load<Lanes>(parts.data + choices.row[j] * parts.stride + c);
          sum = MultiplyAdd((weights ? weights[j] : 1.0f) - Lanes{}, part, sum);
        }
        std::memcpy(out + t * d + first + c, &sum, std::min(kLanes, width - c) * sizeof(float));
      }
    });
  }
}

// The same of choices that are known; multiply(expert, first column, first row, rows, outputs) computes kPair columns.
template <typename Multiply>
inline void AddMix(Phases& phases, const Choices& choices, const float* weights, int64_t d, float* out,
                   const Multiply& multiply) {
  Parts parts = Parts::Fit(choices.Rows(), d);
  parts.data = phases.Reserve(parts.Size());
  AddMix(phases, choices, choices.experts, choices.tokens, weights, d, out, parts, kPair,
         [=](int64_t expert, int64_t column, int64_t, int64_t begin, int64_t count, float* to) {
           multiply(expert, column, begin, count, Outputs{{to, to + kLanes}, parts.stride});
         });
}

inline float Sigmoid(float x) {
  const float e = Exp(-std::fabs(x));
  return (x < 0 ? e : 1.0f) / (1.0f + e);
}

// silu(h) * u of so many products; `inner` may be h.
inline void Activate(const float* h, const float* u, int64_t count, float* inner) {
#pragma omp simd
  for (int64_t f = 0; f < count; ++f) inner[f] = h[f] * Sigmoid(h[f]) * u[f];
}

// The gradient of a row's h and u, in place. `inner` holds the gradient of silu(h) * u before it is weighted, and holds
// the weighted silu(h) * u afterwards. Returns the gradient of the weight.
inline float ActivateBack(float* products, float weight, int64_t rounded, float* inner) {
  float *hs = products, *us = products + rounded, total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t f = 0; f < rounded; ++f) {
    const float h = hs[f], u = us[f], back = inner[f], sigmoid = Sigmoid(h), silu = h * sigmoid;
    total += back * (silu * u);
    hs[f] = weight * back * u * (sigmoid + silu * (1.0f - sigmoid));
    us[f] = weight * back * silu;
    inner[f] = weight * (silu * u);
  }
  return total;
}

// x [T, d], experts [T, k], gate and up [E, d, F] -> products [N, 2 F'].
inline ffi::Future MultiplyExperts(ffi::ThreadPool pool, Floats x, Integers experts, Floats gate, Floats up,
                                   ffi::Result<Floats> products) {
  const auto shape = gate.dimensions();
  const int64_t d = shape[1], width = shape[2], wide = products->dimensions()[1];
  const float *gates = gate.typed_data(), *ups = up.typed_data();
  float* out = products->typed_data();
  Phases phases;
  const Choices& choices = KeepChoices(phases, experts, shape[0]);
  const RowsOf rows{x.typed_data(), d, choices.token.data()};
  const int64_t most = shape[0];
  AddExperts(phases, choices, most, wide / 2, kLanes, [=](int64_t expert, int64_t column, int64_t begin,
                                                          int64_t count) {
    const int64_t matrix = expert * d * width;
    float* to = out + begin * wide + column;
    MultiplyChosen(rows, begin, count, d, Straight(gates + matrix, width, column),
                   Straight(ups + matrix, width, column), kLanes, {{to, to + wide / 2}, wide});
  });
  return phases.Run(pool);
}

// products [N, 2 F'], experts and weights [T, k], down [E, F, d] -> y [T, d]; memory for [N, F'] numbers.
inline ffi::Future MixExperts(ffi::ThreadPool pool, Floats products, Integers experts, Floats weights, Floats down,
                              ffi::Result<Floats> y, ffi::Result<Floats> inner) {
  const auto shape = down.dimensions();
  const int64_t width = shape[1], d = shape[2], rounded = inner->dimensions()[1];
  const float *from = products.typed_data(), *downs = down.typed_data();
  float* activated = inner->typed_data();
  Phases phases;
  const Choices& choices = KeepChoices(phases, experts, shape[0]);
  AddRows(phases, choices.Rows(), [=](int64_t r) {
    const float* h = from + r * 2 * rounded;
    Activate(h, h + rounded, rounded, activated + r * rounded);
  });
  const RowsOf rows{activated, rounded, nullptr};
  AddMix(phases, choices, weights.typed_data(), d, y->typed_data(),
         [=](int64_t expert, int64_t column, int64_t begin, int64_t count, const Outputs& to) {
           const float* matrix = downs + expert * width * d;
           MultiplyChosen(rows, begin, count, width, Straight(matrix, d, column), Straight(matrix, d, column + kLanes),
                          kPair, to);
         });
  return phases.Run(pool);
}

// What the phases of the gradient share: matrices [E, d, F] or [E, F, d], products and their gradient [N, 2 F'], the
// gradient of silu(h) * u and later its weighted value, `inner` [N, F'].
struct Backward {
  int64_t d, width, rounded;
  const float *gate, *up, *down;
  float *products, *inner;
  RowsOf x, dy;

  int64_t Matrix(int64_t expert) const { return expert * d * width; }
  RowsOf Inner() const { return {inner, rounded, nullptr}; }
  RowsOf Half(bool of_up) const { return {products + (of_up ? rounded : 0), 2 * rounded, nullptr}; }
};

// inner = dy down'.
inline void AddInnerGradient(Phases& phases, const Choices& choices, const Backward& b) {
  AddExperts(phases, choices, choices.experts, b.rounded, kPair, [=](int64_t expert, int64_t column, int64_t begin,
                                                                     int64_t count) {
    const float* matrix = b.down + b.Matrix(expert);
    float* to = b.inner + begin * b.rounded + column;
    MultiplyChosen(b.dy, begin, count, b.d, Turned(matrix, b.d, b.width, column),
                   Turned(matrix, b.d, b.width, column + kLanes), kPair, {{to, to + kLanes}, b.rounded});
  });
}

inline void AddMatrixGradients(Phases& phases, const Choices& choices, const Backward& b, float* gate, float* up,
                               float* down) {
  AddExperts(phases, choices, choices.experts, b.width, kLanes, [=](int64_t expert, int64_t column, int64_t begin,
                                                                    int64_t count) {
    const int64_t to = b.Matrix(expert) + column, columns = CountColumns(column, b.width);
    MultiplyOuter(b.x, b.Half(false), begin, count, b.d, {column, b.rounded + column}, {columns, columns},
                  {{gate + to, up + to}, b.width});
  });
  AddExperts(phases, choices, choices.experts, b.d, kPair, [=](int64_t expert, int64_t column, int64_t begin,
                                                               int64_t count) {
    float* to = down + b.Matrix(expert) + column;
    MultiplyOuter(b.Inner(), b.dy, begin, count, b.width, {column, column + kLanes},
                  {CountColumns(column, b.d), CountColumns(column + kLanes, b.d)}, {{to, to + kLanes}, b.d});
  });
}

inline void AddInputGradient(Phases& phases, const Choices& choices, const Backward& b, float* dx) {
  AddMix(phases, choices, nullptr, b.d, dx,
         [=](int64_t expert, int64_t column, int64_t begin, int64_t count, const Outputs& to) {
           for (bool of_up : {false, true}) {
             const float* matrix = (of_up ? b.up : b.gate) + b.Matrix(expert);
             MultiplyChosen(b.Half(of_up), begin, count, b.width, Turned(matrix, b.width, b.d, column),
                            Turned(matrix, b.width, b.d, column + kLanes), kPair, to, of_up);
           }
         });
}

// The gradient of MixExperts(MultiplyExperts(..)) for dy [T, d]: dx, d_weights, d_gate, d_up and d_down. The products
// are overwritten; memory for [N, F'] numbers.
inline ffi::Future DifferentiateExperts(ffi::ThreadPool pool, Floats x, Integers experts, Floats weights, Floats gate,
                                        Floats up, Floats down, Floats products, Floats dy, ffi::Result<Floats> dx,
                                        ffi::Result<Floats> d_weights, ffi::Result<Floats> d_gate,
                                        ffi::Result<Floats> d_up, ffi::Result<Floats> d_down,
                                        ffi::Result<Floats> overwritten, ffi::Result<Floats> inner) {
  if (overwritten->typed_data() != products.typed_data()) {
    return Fail("areal_jax_expert_gradient: the products are not overwritten in place");
  }
  Phases phases;
  const Choices& choices = KeepChoices(phases, experts, gate.dimensions()[0]);
  const int64_t d = gate.dimensions()[1], width = gate.dimensions()[2], rounded = inner->dimensions()[1];
  const int32_t* token = choices.token.data();
  const Backward b{d, width, rounded, gate.typed_data(), up.typed_data(), down.typed_data(), products.typed_data(),
                   inner->typed_data(), {x.typed_data(), d, token}, {dy.typed_data(), d, token}};
  float* d_weight = d_weights->typed_data();
  std::fill(d_weight, d_weight + choices.row.size(), 0.0f);
  AddInnerGradient(phases, choices, b);
  AddRows(phases, choices.Rows(), [=, &choices, weight = weights.typed_data()](int64_t r) {
    const int64_t c = choices.choice[r];
    d_weight[c] = ActivateBack(b.products + 2 * r * rounded, weight[c], rounded, b.inner + r * rounded);
  });
  AddMatrixGradients(phases, choices, b, d_gate->typed_data(), d_up->typed_data(), d_down->typed_data());
  AddInputGradient(phases, choices, b, dx->typed_data());
  return phases.Run(pool);
}

inline auto BindExpertProducts() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<Floats>()
      .Arg<Integers>()
      .Arg<Floats>()
      .Arg<Floats>()
      .Ret<Floats>();
}

inline auto BindExpertMix() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<Floats>()
      .Arg<Integers>()
      .Arg<Floats>()
      .Arg<Floats>()
      .Ret<Floats>()
      .Ret<Floats>();
}

inline auto BindExpertGradient() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<Floats>()
      .Arg<Integers>()
      .Arg<Floats>()
      .Arg<Floats>()
      .Arg<Floats>()
      .Arg<Floats>()
      .Arg<Floats>()
      .Arg<Floats>()
      .Ret<Floats>()
      .Ret<Floats>()
      .Ret<Floats>()
      .Ret<Floats>()
      .Ret<Floats>()
      .Ret<Floats>()
      .Ret<Floats>();
}

}  // namespace areal_jax

#endif  // AREAL_JAX_NATIVE_EXPERT_KERNELS_H_
