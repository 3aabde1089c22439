// The formulas of csrc/activation_formulas.cuh on a CPU; test_activation_formulas.py compiles this and calls it.

#include "activation_formulas.cuh"

namespace gbmoe {
namespace {

constexpr int kTogether = 8;

template <int kKind, bool kFast, typename A> void one_by_one(const A* x, int count, const ActivationOf& of, A* value, A* slope) {
  for (int i = 0; i < count; ++i) {
    const ValueAndSlope<A> result = activation_at<kKind, kFast>(x[i], of);
    value[i] = result.value, slope[i] = result.slope;
  }
}

template <int kKind> void several(const float* x, int count, const ActivationOf& of, float* value, float* slope) {
  for (int first = 0; first < count; first += kTogether) {
    float some[kTogether] = {};
    for (int i = 0; i < kTogether && first + i < count; ++i) some[i] = x[first + i];
    ValueAndSlope<float> results[kTogether];
    activations_at<kKind>(some, results, of);
    for (int i = 0; i < kTogether && first + i < count; ++i) {
      value[first + i] = results[i].value, slope[first + i] = results[i].slope;
    }
  }
}

template <typename Family> void of_family(const Family& family, const float* x, int count, float* value) {
  for (int i = 0; i < count; ++i) value[i] = family.value(x[i]);
}

ActivationOf with(int kind, const double* constants, int count) {
  std::vector<double> values{static_cast<double>(kind)};
  values.insert(values.end(), constants, constants + count);
  return activation_of(values);
}

}  // namespace

extern "C" {

// Of an activation and its constants, or of its gate.
void in_double(int kind, const double* constants, int constant_count, const double* x, int count, double* value, double* slope) {
  with_activation(kind, [&](auto k) {
    one_by_one<decltype(k)::value, false>(x, count, with(kind, constants, constant_count), value, slope);
  });
}
void in_float(int kind, const double* constants, int constant_count, const float* x, int count, float* value, float* slope) {
  with_activation(kind, [&](auto k) {
    one_by_one<decltype(k)::value, false>(x, count, with(kind, constants, constant_count), value, slope);
  });
}
void in_float_fast(int kind, const double* constants, int constant_count, const float* x, int count, float* value, float* slope) {
  with_activation(kind, [&](auto k) {
    one_by_one<decltype(k)::value, true>(x, count, with(kind, constants, constant_count), value, slope);
  });
}
void in_float_together(int kind, const double* constants, int constant_count, const float* x, int count, float* value, float* slope) {
  with_activation(kind, [&](auto k) { several<decltype(k)::value>(x, count, with(kind, constants, constant_count), value, slope); });
}
// The epilogues' families, which have no slope.
void in_epilogue(int kind, const double* constants, int constant_count, const float* x, int count, float* value, float*) {
  const ActivationOf of = with(kind, constants, constant_count);
  if (kind == kSilu || kind == kGeluTanh) of_family(SigmoidActivation(of), x, count, value);
  else if (kind == kGelu) of_family(ErfActivation(of), x, count, value);
  else if (changes_gate(kind)) of_family(GatingActivation(of), x, count, value);
  else of_family(PiecewiseActivation(of), x, count, value);
}
void gate_in_double(int kind, const double* constants, int constant_count, const double* g, int count, double* value, double* slope) {
  const ActivationOf of = with(kind, constants, constant_count);
  with_activation(kind, [&](auto k) {
    for (int i = 0; i < count; ++i) {
      const ValueAndSlope<double> result = gate_at<decltype(k)::value>(g[i], of);
      value[i] = result.value, slope[i] = result.slope;
    }
  });
}

}  // extern "C"

}  // namespace gbmoe
