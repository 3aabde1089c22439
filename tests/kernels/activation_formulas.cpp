// The formulas of csrc/activation_formulas.cuh on a CPU; test_activation_formulas.py compiles this and calls it.

#include "activation_formulas.cuh"

namespace gbmoe {
namespace {

constexpr int kTogether = 8;

template <int kKind, bool kFast, typename A> void one_by_one(const A* x, int count, A* value, A* slope) {
  for (int i = 0; i < count; ++i) {
    const ValueAndSlope<A> result = activation_at<kKind, kFast>(x[i]);
    value[i] = result.value, slope[i] = result.slope;
  }
}

template <int kKind> void several(const float* x, int count, float* value, float* slope) {
  for (int first = 0; first < count; first += kTogether) {
    float of[kTogether] = {};
    for (int i = 0; i < kTogether && first + i < count; ++i) of[i] = x[first + i];
    ValueAndSlope<float> results[kTogether];
    activations_at<kKind>(of, results);
    for (int i = 0; i < kTogether && first + i < count; ++i) {
      value[first + i] = results[i].value, slope[first + i] = results[i].slope;
    }
  }
}

template <typename Family> void of_family(int kind, const float* x, int count, float* value) {
  for (int i = 0; i < count; ++i) value[i] = Family(kind).value(x[i]);
}

}  // namespace

extern "C" {

void in_double(int kind, const double* x, int count, double* value, double* slope) {
  with_activation(kind, [&](auto k) { one_by_one<decltype(k)::value, false>(x, count, value, slope); });
}
void in_float(int kind, const float* x, int count, float* value, float* slope) {
  with_activation(kind, [&](auto k) { one_by_one<decltype(k)::value, false>(x, count, value, slope); });
}
void in_float_fast(int kind, const float* x, int count, float* value, float* slope) {
  with_activation(kind, [&](auto k) { one_by_one<decltype(k)::value, true>(x, count, value, slope); });
}
void in_float_together(int kind, const float* x, int count, float* value, float* slope) {
  with_activation(kind, [&](auto k) { several<decltype(k)::value>(x, count, value, slope); });
}
// The epilogues' families, which have no slope.
void in_epilogue(int kind, const float* x, int count, float* value, float*) {
  if (kind == kSilu || kind == kGeluTanh) of_family<SigmoidActivation>(kind, x, count, value);
  else if (kind == kGelu) of_family<ErfActivation>(kind, x, count, value);
  else of_family<PiecewiseActivation>(kind, x, count, value);
}

}  // extern "C"

}  // namespace gbmoe
