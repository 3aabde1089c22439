// The headers of torch's stable ABI that all files of csrc/ share, and what they cost each of them.

#pragma once

// For nvcc torch's complex numbers take Thrust's, a third of the time of a file with few kernels, of which none uses them. The files that
// complex.h includes come first, so that they are as usual: each is included once.
#include <complex>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>
#pragma push_macro("__CUDACC__")
#undef __CUDACC__
#include <torch/headeronly/util/complex.h>
#pragma pop_macro("__CUDACC__")

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>
