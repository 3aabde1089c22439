// What every operator of the extension has in common, and how it is registered: below its definition, with its schema.
//
// Operators compute and neither allocate nor check. Callers in gbmoe/ hand them contiguous tensors of matching dtypes on one device, CPU
// int64 `sizes`, and the tensors to write to, allocated by torch in Python (where running out of memory is torch's own exception).
// Whatever maps, ids and sizes hold, no operator reads or writes outside its tensors: an entry outside its range counts as none. The public
// operators, their autograd, fakes and autocast rules live in gbmoe/ops/ under the namespace "gbmoe".

#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>
#include <vector>

namespace gbmoe {

using torch::stable::Tensor;

}  // namespace gbmoe

// Registers the function of this name as gbmoe_cuda::name, whose schema is the name and `arguments`, "(Tensor x, ...) -> ()".
#define GBMOE_OPERATOR(name, arguments) GBMOE_REGISTER(name, arguments, CUDA)

// The same for one without tensors among its arguments, which has no device to be chosen by.
#define GBMOE_OPERATOR_WITHOUT_TENSORS(name, arguments) GBMOE_REGISTER(name, arguments, CompositeExplicitAutograd)

#define GBMOE_REGISTER(name, arguments, key)                                     \
  STABLE_TORCH_LIBRARY_FRAGMENT(gbmoe_cuda, m) { m.def(#name arguments); }       \
  STABLE_TORCH_LIBRARY_IMPL(gbmoe_cuda, key, m) { m.impl(#name, TORCH_BOX(&name)); } \
  static_assert(true, "so that a semicolon may follow")
