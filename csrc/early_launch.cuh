// Kernels that begin while the kernel before them ends: programmatic dependent launches (CUDA C++ Programming Guide), from compute
// capability 9.0 on. Between the kernels of a layer of a few tokens that saves a microsecond each; large layers get slower by it
// (docs/notes/hopper-programmatic-launch.md).
//
// A kernel that is launched early calls wait_for_kernel_before() in all threads ahead of their first access to global memory, reads through
// the read-only cache and writes among them, except for reads of what was complete before the kernel before it began; and only then lets the
// next one begin. So a kernel begins when all but the one before it have ended, and ends when that has.

#pragma once

#include "common.cuh"

namespace gbmoe {

// Until the kernels before this one have ended and what they wrote can be read. Returns at once where the launch was no early one.
__device__ __forceinline__ void wait_for_kernel_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the kernel after this one begin as soon as all CTAs have called this or ended, if it is launched early.
__device__ __forceinline__ void let_next_kernel_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The router and the scatter are launched early for at most so many tokens; the plan where one CTA makes it, GEMMs of groups of few rows
// always.
constexpr int64_t kFewTokens = 64;

// Whether the code of a kernel that this device runs waits: it does if it was compiled for 9.0 or later. What was compiled for an earlier
// one, and is translated by the driver for this device, does not.
template <typename Kernel> bool waits_for_kernel_before(Kernel kernel) {
  cudaFuncAttributes attributes{};
  STD_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
  return attributes.ptxVersion >= 90;
}

struct Grid {
  unsigned ctas, cluster = 1;  // CTAs in all, and of a cluster
  Grid(unsigned ctas, unsigned cluster = 1) : ctas(ctas), cluster(cluster) {}
};

// Launches a kernel that calls wait_for_kernel_before() on the device of `on`; `early` where it may begin before the kernel before it has
// ended.
template <typename... Parameters, typename... Arguments>
void launch_early(
    bool early, void (*kernel)(Parameters...), Grid grid, int threads, size_t shared_bytes, const Tensor& on,
    const Arguments&... arguments) {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  config.attrs = attributes;
  if (grid.cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {grid.cluster, 1, 1};
  }
  config.gridDim = dim3(grid.ctas);
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = current_stream(on);
  // Asked for once for all kernels with these parameters, because the files of the extension are compiled for the same devices.
  const bool waits =
      early && once_per_device(on.get_device_index(), [=](int) { return waits_for_kernel_before(kernel) ? 2 : 1; }) == 2;
  if (waits) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  STD_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
}

}  // namespace gbmoe
