// Arguments of kernels: arrays, and the weights of layers.

#ifndef AREAL_JAX_NATIVE_WEIGHTS_H_
#define AREAL_JAX_NATIVE_WEIGHTS_H_

#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

#include "bytes.h"
#include "layer.h"
#include "xla/ffi/api/ffi.h"

namespace areal_jax {

namespace ffi = xla::ffi;

using Floats = ffi::Buffer<ffi::F32>;
using Integers = ffi::Buffer<ffi::S32>;
using Bytes = ffi::Buffer<ffi::U8>;

inline ffi::Future Fail(std::string message) {
  ffi::Promise promise;
  promise.SetError(ffi::Error::Internal(std::move(message)));
  return ffi::Future(promise);
}

// The weights of layers, one argument after the other, as models/native_layers.py lists them.
class Weights {
 public:
  Weights(ffi::RemainingArgs args, ffi::Dictionary attributes) : args_(args) {
    eps_ = *attributes.get<float>("eps");
    head_dim_ = *attributes.get<int64_t>("head_dim");
    qkv_bias_ = *attributes.get<bool>("qkv_bias");
    output_bias_ = *attributes.get<bool>("output_bias");
    qk_norm_ = *attributes.get<bool>("qk_norm");
    whole_norm_ = *attributes.get<bool>("whole_qk_norm");
    has_experts_ = *attributes.get<ffi::Span<const int64_t>>("has_experts");
    choices_ = *attributes.get<int64_t>("choices");
    normalised_ = *attributes.get<bool>("normalised");
  }

  const float* TakeVector() { return Take().typed_data(); }

  // A float matrix is one argument, a quantized one its panels and its scales.
  template <typename AnyMatrix>
  AnyMatrix TakeMatrix() {
    if constexpr (std::is_same_v<AnyMatrix, ByteMatrix>) {
      const Bytes panels = *args_.get<Bytes>(next_++);
      const Floats scales = Take();
      return {panels.typed_data(), scales.typed_data(), nullptr, static_cast<int64_t>(panels.dimensions()[1]),
              static_cast<int64_t>(scales.element_count())};
    } else {
      const Floats matrix = Take();
      const auto size = matrix.dimensions();
      return {matrix.typed_data(), nullptr, static_cast<int64_t>(size[1]), static_cast<int64_t>(size[0]) * kPanelRows};
    }
  }

  template <typename AnyMatrix>
  LayerOf<AnyMatrix> TakeLayer() {
    LayerOf<AnyMatrix> layer{};
    const auto take = [this](auto... matrices) { ((*matrices = TakeMatrix<AnyMatrix>()), ...); };
    layer.head_dim = head_dim_, layer.eps = eps_;
    layer.attention_norm = TakeVector();
    take(&layer.query, &layer.key, &layer.value, &layer.output);
    layer.mlp_norm = TakeVector();
    if (has_experts_[next_layer_++]) {
      layer.mixture = TakeMixture();
    } else {
      take(&layer.gate, &layer.up, &layer.down);
    }
    if (qkv_bias_) {
      for (AnyMatrix* matrix : {&layer.query, &layer.key, &layer.value}) matrix->bias = TakeVector();
    }
    if (output_bias_) layer.output.bias = TakeVector();
    layer.whole_norm = whole_norm_;
    if (qk_norm_ || whole_norm_) layer.query_norm = TakeVector(), layer.key_norm = TakeVector();
    return layer;
  }

  Floats Take() { return *args_.get<Floats>(next_++); }
  Integers TakeIntegers() { return *args_.get<Integers>(next_++); }

 private:
  Mixture TakeMixture() {
    const Matrix router = TakeMatrix<Matrix>();
    const Floats gate = Take(), up = Take(), down = Take();
    const auto size = gate.dimensions();
    return {router,  gate.typed_data(), up.typed_data(), down.typed_data(),
            size[0], choices_,          size[2],         normalised_};
  }

  ffi::RemainingArgs args_;
  size_t next_ = 0, next_layer_ = 0;
  float eps_;
  int64_t head_dim_, choices_;
  bool qkv_bias_, output_bias_, qk_norm_, whole_norm_, normalised_;
  ffi::Span<const int64_t> has_experts_;
};

}  // namespace areal_jax

#endif  // AREAL_JAX_NATIVE_WEIGHTS_H_
