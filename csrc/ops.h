// Every operator of the extension. They compute and neither allocate nor check: callers in gbmoe/ hand them contiguous
// tensors of matching dtypes on one device, CPU int64 `sizes`, and the tensors to write to, allocated by torch in Python
// (where running out of memory is torch's own exception).

#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

namespace gbmoe {

using torch::stable::Tensor;

// gmm_cublas.cu; pointers: int64 on the device, room for three a group
void cublas_loop(Tensor a, Tensor b, Tensor sizes, bool trans_a, bool trans_b, bool accumulate, Tensor out);
void cublas_grouped(
    Tensor a, Tensor b, Tensor sizes, bool trans_a, bool trans_b, bool accumulate, Tensor pointers, Tensor out);

// groups.cu
void zero_empty_groups(Tensor sizes, Tensor out);

// permute.cu
void padded_gather(Tensor x, Tensor row_of_slot, Tensor slot_of_row, Tensor out);
void padded_scatter(Tensor y, Tensor row_of_slot, std::optional<Tensor> weights, Tensor out);
void padded_scatter_backward(
    Tensor grad, std::optional<Tensor> y, Tensor row_of_slot, Tensor slot_of_row, std::optional<Tensor> weights,
    Tensor grad_y, std::optional<Tensor> grad_weights);

// activation.cu; d becomes dh, grad_weights comes as zeros
void activate(Tensor h, std::optional<Tensor> g, int64_t activation, Tensor out);
void activate_backward(
    Tensor h, std::optional<Tensor> g, Tensor d, Tensor slot_of_row, std::optional<Tensor> weights, int64_t activation,
    Tensor a, std::optional<Tensor> dg, std::optional<Tensor> grad_weights);

}  // namespace gbmoe
