// What every operator of the extension has in common, and how it is registered: below its definition, with its schema.
//
// Operators compute and neither allocate nor check. Callers in gbmoe/ hand them contiguous tensors of matching dtypes on one device, CPU
// int64 `sizes`, and the tensors to write to, allocated by torch in Python (where running out of memory is torch's own exception).
// Whatever maps, ids and sizes hold, no operator reads or writes outside its tensors: an entry outside its range counts as none. The public
// operators, their autograd, fakes and autocast rules live in gbmoe/ops/ under the namespace "gbmoe".

#pragma once

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "stable_abi.h"

namespace gbmoe {

using torch::stable::Tensor;

// An operator as torch's stable ABI calls it: with a stack of arguments, which it takes over, and on which it leaves its results.
using BoxedOperator = void (*)(StableIValue* stack, uint64_t num_arguments, uint64_t num_results);

// Lets programs (program.cpp) call an operator without the dispatcher. Always true, so that a static variable can be initialised by it.
bool let_programs_call(const std::string& name, BoxedOperator boxed);

}  // namespace gbmoe

// Registers the function of this name as gbmoe_cuda::name, whose schema is the name and `arguments`, "(Tensor x, ...) -> ()".
#define GBMOE_OPERATOR(name, arguments) GBMOE_REGISTER(name, arguments, CUDA)

// The same for one without tensors among its arguments, which has no device to be chosen by.
#define GBMOE_OPERATOR_WITHOUT_TENSORS(name, arguments) GBMOE_REGISTER(name, arguments, CompositeExplicitAutograd)

#define GBMOE_REGISTER(name, arguments, key)                                                               \
  [[maybe_unused]] static const bool programs_call_##name = let_programs_call(#name, TORCH_BOX(&name)); \
  GBMOE_REGISTER_BOXED(name, arguments, key, TORCH_BOX(&name))

// The same for a function of a stack, which gets and returns lists of tensors without a copy of each.
#define GBMOE_OPERATOR_BOXED(name, arguments) GBMOE_REGISTER_BOXED(name, arguments, CompositeExplicitAutograd, &name)

#define GBMOE_REGISTER_BOXED(name, arguments, key, boxed)                      \
  STABLE_TORCH_LIBRARY_FRAGMENT(gbmoe_cuda, m) { m.def(#name arguments); }     \
  STABLE_TORCH_LIBRARY_IMPL(gbmoe_cuda, key, m) { m.impl(#name, boxed); }      \
  static_assert(true, "so that a semicolon may follow")
