// Stands in for csrc/router/approximations.cuh.

#pragma once

#include <cmath>

namespace gbmoe {

inline float router_exp2(float x) { return std::exp2(x); }
inline float router_reciprocal(float x) { return 1.0f / x; }
inline float router_square_root(float x) { return std::sqrt(x); }

}  // namespace gbmoe
