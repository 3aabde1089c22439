// Grouped GEMMs by cuBLAS: one cublasGemmEx per expert, or one cublasGemmGroupedBatchedEx for all of them.
//
// Group e owns sizes[e] consecutive rows of a, after the rows of the groups before it. All operands are row-major, and
// cuBLAS is column-major, so each GEMM is computed as its transpose: the row-major matrix C [m,n] is the column-major
// C^T [n,m] = B^T A^T, which means that the operands change places and a row-major operand that is not transposed passes
// CUBLAS_OP_N with its row length as leading dimension.
//
//   m-grouped:  out[rows of e] = a[rows of e] @ b[e]      b [E,K,N], or [E,N,K] with trans_b
//   k-grouped:  out[e] = a[rows of e].T @ b[rows of e]    a [M,K], b [M,N], out [E,K,N]      (trans_a)
//
// A size that goes beyond the rows counts as the rows that are left, and a negative one as 0: no GEMM reads or writes outside.

#include <cublas_v2.h>

#include <algorithm>
#include <vector>

#include "common.cuh"
#include "operators.h"

namespace gbmoe {
namespace {

#define GBMOE_CUBLAS_CHECK(call)                                                                   \
  do {                                                                                             \
    const cublasStatus_t status = (call);                                                          \
    STD_TORCH_CHECK(status == CUBLAS_STATUS_SUCCESS, #call, " returned ", cublasGetStatusString(status)); \
  } while (0)

// torch's handle of this thread and device, on the current stream and with torch's workspace (so that it may be captured
// in a CUDA graph), with reductions in less than fp32 switched off while it is held.
class Handle {
 public:
  Handle() {
    void* handle = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_get_current_cuda_blas_handle(&handle));
    handle_ = static_cast<cublasHandle_t>(handle);
    GBMOE_CUBLAS_CHECK(cublasGetMathMode(handle_, &mode_));
    const int strict = static_cast<int>(mode_) | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
    GBMOE_CUBLAS_CHECK(cublasSetMathMode(handle_, static_cast<cublasMath_t>(strict)));
  }
  ~Handle() { cublasSetMathMode(handle_, mode_); }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  cublasHandle_t get() const { return handle_; }
  // torch sets this bit from torch.backends.cuda.matmul.allow_tf32 whenever it hands the handle out.
  bool allows_tf32() const { return (static_cast<int>(mode_) & CUBLAS_TF32_TENSOR_OP_MATH) != 0; }

 private:
  cublasHandle_t handle_ = nullptr;
  cublasMath_t mode_ = CUBLAS_DEFAULT_MATH;
};

struct Types {
  cudaDataType_t storage;
  cublasComputeType_t compute;
};

Types types_of(ScalarType dtype, bool allow_tf32) {
  switch (dtype) {
    case ScalarType::BFloat16: return {CUDA_R_16BF, CUBLAS_COMPUTE_32F};
    case ScalarType::Half: return {CUDA_R_16F, CUBLAS_COMPUTE_32F};
    case ScalarType::Float: return {CUDA_R_32F, allow_tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F};
    case ScalarType::Double: return {CUDA_R_64F, CUBLAS_COMPUTE_64F};
    default: STD_TORCH_CHECK(false, "gmm: expected bfloat16, float16, float32 or float64");
  }
  return {};
}

// One group's GEMM in cuBLAS' column-major terms, with the byte offsets of its operands.
struct Gemm {
  int64_t m, n, k;
  int64_t left, right, out;
};

struct GroupedGemm {
  cublasOperation_t op_left, op_right;
  int64_t ld_left, ld_right, ld_out;
  std::vector<Gemm> gemms;
  int64_t group_bytes = 0;             // of one out[e], k-grouped only
  std::vector<int64_t> empty_groups;   // whose out[e] must become zero, k-grouped only
};

// m or n of zero leaves nothing to do; k of zero leaves an output of zeros to write. Both stay out of cuBLAS, which need
// not accept them.
GroupedGemm make_grouped_gemm(
    const Tensor& a, const Tensor& b, const Tensor& sizes, bool trans_a, bool trans_b, const Tensor& out) {
  const int64_t* given = static_cast<const int64_t*>(sizes.data_ptr());
  const int64_t groups = sizes.numel();
  std::vector<int64_t> size(groups);
  for (int64_t e = 0, left = a.size(0); e < groups; left -= size[e++]) size[e] = std::clamp<int64_t>(given[e], 0, left);
  const int64_t bytes = static_cast<int64_t>(a.element_size());
  const int64_t columns = out.size(out.dim() - 1);
  GroupedGemm grouped;
  grouped.ld_out = std::max<int64_t>(columns, 1);
  int64_t row = 0;
  if (trans_a) {
    const int64_t inner = a.size(1);
    grouped.op_left = CUBLAS_OP_N;
    grouped.op_right = CUBLAS_OP_T;
    grouped.ld_left = std::max<int64_t>(columns, 1);
    grouped.ld_right = std::max<int64_t>(inner, 1);
    grouped.group_bytes = inner * columns * bytes;
    for (int64_t e = 0; e < groups; row += size[e++]) {
      if (grouped.group_bytes == 0) continue;
      if (size[e] == 0) {
        grouped.empty_groups.push_back(e);
      } else {
        grouped.gemms.push_back({columns, inner, size[e], row * columns * bytes, row * inner * bytes, e * grouped.group_bytes});
      }
    }
  } else {
    const int64_t inner = a.size(1);
    grouped.op_left = trans_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    grouped.op_right = CUBLAS_OP_N;
    grouped.ld_left = std::max<int64_t>(trans_b ? inner : columns, 1);
    grouped.ld_right = std::max<int64_t>(inner, 1);
    for (int64_t e = 0; e < groups; row += size[e++]) {
      if (size[e] == 0 || columns == 0 || inner == 0) continue;
      grouped.gemms.push_back({columns, size[e], inner, e * inner * columns * bytes, row * inner * bytes, row * columns * bytes});
    }
  }
  return grouped;
}

void write_zeros_where_k_is_zero(
    const GroupedGemm& grouped, const Tensor& a, const Tensor& out, bool accumulate, cudaStream_t stream) {
  if (accumulate) return;
  char* base = static_cast<char*>(out.data_ptr());
  for (const int64_t e : grouped.empty_groups) {
    STD_CUDA_CHECK(cudaMemsetAsync(base + e * grouped.group_bytes, 0, grouped.group_bytes, stream));
  }
  if (a.size(1) == 0 && out.numel() > 0) {
    STD_CUDA_CHECK(cudaMemsetAsync(base, 0, out.numel() * out.element_size(), stream));
  }
}

// alpha or beta in the type that the compute type asks for.
union Factor {
  float single;
  double full;
};
Factor factor(double value, cublasComputeType_t compute) {
  Factor result;
  if (compute == CUBLAS_COMPUTE_64F) result.full = value; else result.single = static_cast<float>(value);
  return result;
}

constexpr int kPointersPerLaunch = 128;

struct LaunchOffsets { int64_t left[kPointersPerLaunch], right[kPointersPerLaunch], out[kPointersPerLaunch]; };

// Kernel parameters carry the offsets, so no host buffer has to outlive the call and a captured graph holds its own copy.
__global__ void write_pointers(
    const __grid_constant__ LaunchOffsets offsets, int count, const char* left, const char* right, char* out,
    const void** left_pointers, const void** right_pointers, void** out_pointers) {
  const int i = threadIdx.x;
  if (i >= count) return;
  left_pointers[i] = left + offsets.left[i];
  right_pointers[i] = right + offsets.right[i];
  out_pointers[i] = out + offsets.out[i];
}

// The three base addresses of a call.
struct Operands {
  const char* left;
  const char* right;
  char* out;
};

Operands operands_of(const Tensor& a, const Tensor& b, const Tensor& out) {
  return {static_cast<const char*>(b.data_ptr()), static_cast<const char*>(a.data_ptr()), static_cast<char*>(out.data_ptr())};
}

void multiply_one(
    const Handle& handle, const GroupedGemm& grouped, const Types& types, const Gemm& gemm, const Operands& at, bool accumulate) {
  const Factor one = factor(1.0, types.compute), beta = factor(accumulate ? 1.0 : 0.0, types.compute);
  GBMOE_CUBLAS_CHECK(cublasGemmEx_64(
      handle.get(),
      grouped.op_left,
      grouped.op_right,
      gemm.m, gemm.n, gemm.k,
      &one,
      at.left + gemm.left, types.storage, grouped.ld_left,
      at.right + gemm.right, types.storage, grouped.ld_right,
      &beta,
      at.out + gemm.out, types.storage, grouped.ld_out,
      types.compute,
      CUBLAS_GEMM_DEFAULT));
}

// The grouped kernel adds the k terms of an fp32 sum one after the other, where cublasGemmEx may split them: beyond this
// many terms its error is more than twice the other's (measured for weight gradients, whose k is the rows of a group).
constexpr int64_t kLongestSingleChain = 2048;

}  // namespace

void cublas_loop(Tensor a, Tensor b, Tensor sizes, bool trans_a, bool trans_b, bool accumulate, Tensor out) {
  const torch::stable::accelerator::DeviceGuard guard(a.get_device_index());
  const GroupedGemm grouped = make_grouped_gemm(a, b, sizes, trans_a, trans_b, out);
  write_zeros_where_k_is_zero(grouped, a, out, accumulate, current_stream(a));
  if (grouped.gemms.empty()) return;
  const Handle handle;
  const Types types = types_of(a.scalar_type(), handle.allows_tf32());
  for (const Gemm& gemm : grouped.gemms) multiply_one(handle, grouped, types, gemm, operands_of(a, b, out), accumulate);
}

// pointers: int64 on the device, room for three per group
void cublas_grouped(
    Tensor a, Tensor b, Tensor sizes, bool trans_a, bool trans_b, bool accumulate, Tensor pointers, Tensor out) {
  const torch::stable::accelerator::DeviceGuard guard(a.get_device_index());
  const cudaStream_t stream = current_stream(a);
  const GroupedGemm grouped = make_grouped_gemm(a, b, sizes, trans_a, trans_b, out);
  write_zeros_where_k_is_zero(grouped, a, out, accumulate, stream);
  if (grouped.gemms.empty()) return;

  const Handle handle;
  const Types types = types_of(a.scalar_type(), handle.allows_tf32());
  const Operands at = operands_of(a, b, out);
  std::vector<Gemm> gemms;
  for (const Gemm& gemm : grouped.gemms) {
    if (trans_a && a.scalar_type() == ScalarType::Float && gemm.k > kLongestSingleChain) {
      multiply_one(handle, grouped, types, gemm, at, accumulate);
    } else {
      gemms.push_back(gemm);
    }
  }
  const int64_t count = static_cast<int64_t>(gemms.size());
  if (count == 0) return;

  // The three device arrays of pointers, in memory of torch's caching allocator, written on the current stream.
  const void** left_pointers = static_cast<const void**>(pointers.data_ptr());
  const void** right_pointers = left_pointers + count;
  void** out_pointers = const_cast<void**>(right_pointers + count);
  for (int64_t first = 0; first < count; first += kPointersPerLaunch) {
    const int in_launch = static_cast<int>(std::min<int64_t>(kPointersPerLaunch, count - first));
    LaunchOffsets offsets;
    for (int i = 0; i < in_launch; ++i) {
      const Gemm& gemm = gemms[first + i];
      offsets.left[i] = gemm.left;
      offsets.right[i] = gemm.right;
      offsets.out[i] = gemm.out;
    }
    write_pointers<<<1, kPointersPerLaunch, 0, stream>>>(
        offsets, in_launch, at.left, at.right, at.out, left_pointers + first, right_pointers + first, out_pointers + first);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }

  // Every group of cuBLAS' holds one GEMM: there a group is a run of GEMMs of the same shape.
  std::vector<cublasOperation_t> op_left(count, grouped.op_left), op_right(count, grouped.op_right);
  std::vector<int64_t> m(count), n(count), k(count), group_size(count, 1);
  std::vector<int64_t> ld_left(count, grouped.ld_left), ld_right(count, grouped.ld_right), ld_out(count, grouped.ld_out);
  std::vector<float> ones(count, 1.0f), betas(count, accumulate ? 1.0f : 0.0f);
  std::vector<double> ones_64(count, 1.0), betas_64(count, accumulate ? 1.0 : 0.0);
  for (int64_t i = 0; i < count; ++i) {
    m[i] = gemms[i].m;
    n[i] = gemms[i].n;
    k[i] = gemms[i].k;
  }
  const bool full = types.compute == CUBLAS_COMPUTE_64F;
  GBMOE_CUBLAS_CHECK(cublasGemmGroupedBatchedEx_64(
      handle.get(),
      op_left.data(),
      op_right.data(),
      m.data(), n.data(), k.data(),                     // host
      full ? static_cast<const void*>(ones_64.data()) : ones.data(),
      left_pointers, types.storage, ld_left.data(),     // device pointers, host leading dimensions
      right_pointers, types.storage, ld_right.data(),
      full ? static_cast<const void*>(betas_64.data()) : betas.data(),
      out_pointers, types.storage, ld_out.data(),
      count,
      group_size.data(),
      types.compute));
}

GBMOE_OPERATOR(cublas_loop,
               "(Tensor a, Tensor b, Tensor sizes, bool trans_a, bool trans_b, bool accumulate, Tensor(a!) out) -> ()");
GBMOE_OPERATOR(cublas_grouped,
               "(Tensor a, Tensor b, Tensor sizes, bool trans_a, bool trans_b, bool accumulate, Tensor(a!) pointers, "
               "Tensor(b!) out) -> ()");

}  // namespace gbmoe
