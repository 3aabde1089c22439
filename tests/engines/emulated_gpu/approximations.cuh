// Stands in for csrc/approximations.cuh.

#pragma once

#include <cmath>

#include "emulated_gpu.h"

namespace gbmoe {

inline float fast_exp2(float x) { return std::exp2(x); }
inline float fast_reciprocal(float x) { return 1.0f / x; }

}  // namespace gbmoe
