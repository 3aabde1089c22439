// Every operator of the extension, with the argument checks left to Python: callers in gbmoe/ guarantee contiguous
// tensors of matching dtypes on one device, and CPU int64 `sizes`.

#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <tuple>

namespace gbmoe {

using torch::stable::Tensor;

// gmm_cublas.cu
void cublas_loop(Tensor a, Tensor b, Tensor sizes, bool trans_a, bool trans_b, bool accumulate, Tensor out);
void cublas_grouped(Tensor a, Tensor b, Tensor sizes, bool trans_a, bool trans_b, bool accumulate, Tensor out);

// permute.cu
Tensor padded_gather(Tensor x, Tensor row_of_slot, Tensor slot_of_row);
Tensor padded_scatter(Tensor y, Tensor row_of_slot, std::optional<Tensor> weights);
std::tuple<Tensor, Tensor> padded_scatter_backward(
    Tensor grad, std::optional<Tensor> y, Tensor row_of_slot, Tensor slot_of_row, std::optional<Tensor> weights);

// activation.cu
Tensor activate(Tensor h, std::optional<Tensor> g, int64_t activation);
std::tuple<Tensor, Tensor, Tensor> activate_backward(
    Tensor h, std::optional<Tensor> g, Tensor d, Tensor slot_of_row, std::optional<Tensor> weights, int64_t activation);

}  // namespace gbmoe
