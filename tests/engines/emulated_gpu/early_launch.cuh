// Stands in for csrc/early_launch.cuh. A kernel that is launched early begins before what the kernel before it writes is there.

#pragma once

#include "emulated_gpu.h"

namespace gbmoe {

inline void wait_for_kernel_before() { emulated_gpu::wait_for_kernel_before(); }
inline void let_next_kernel_begin() { emulated_gpu::let_next_kernel_begin(); }

}  // namespace gbmoe
