// The device that a launch goes to.

#pragma once

#include "../common.cuh"

namespace gbmoe::hopper {

// Makes a device and its context current. Tensor maps are made by the driver, which, unlike the runtime, does not make a context
// current by itself, and the thread that runs backward may not have used the device before.
struct OnDevice {
  torch::stable::accelerator::DeviceGuard guard;
  explicit OnDevice(const Tensor& tensor) : guard(tensor.get_device_index()) {
    STD_CUDA_CHECK(cudaSetDevice(tensor.get_device_index()));
  }
};

}  // namespace gbmoe::hopper
