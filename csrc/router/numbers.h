// Tensors whose type the router's kernels know at run time.

#pragma once

#include "rows.cuh"

namespace gbmoe {
namespace {

inline AnyNumbers any_numbers(const char* name, const Tensor& tensor) {
  const ScalarType dtype = tensor.scalar_type();
  STD_TORCH_CHECK(
      dtype == ScalarType::BFloat16 || dtype == ScalarType::Half || dtype == ScalarType::Float, name,
      ": expected bfloat16, float16 or float32");
  return {tensor.data_ptr(), dtype};
}
inline AnyNumbers any_numbers(const char* name, const std::optional<Tensor>& tensor) {
  return tensor ? any_numbers(name, *tensor) : AnyNumbers{nullptr, ScalarType::Float};
}

}  // namespace
}  // namespace gbmoe
