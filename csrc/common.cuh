// What every kernel file shares: the element types, 16-byte vectors, and the few facts asked of a stable tensor.
//
// Legend of shape letters used in csrc/: T tokens, K slots per token (top-k), E experts, H hidden, F ffn hidden,
// P padded rows (each expert's rows rounded up to the plan's alignment).
//
// A slot is a token's choice: token t's j-th choice is slot t * K + j, and -1 stands for "none". CTA is what CUDA also calls a
// thread block. The word block occurs only in k-block, a slice of the terms of a GEMM's sums (hopper/, tensor_core/).

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <type_traits>

#include "pitch.cuh"
#include "stable_abi.h"

namespace gbmoe {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline cudaStream_t current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

inline int device_attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}
// f(device), which is asked for once per device, or by several threads at the same time; 0 is not kept.
template <typename F> int once_per_device(int device, const F& f) {
  constexpr int kDevices = 64;  // those beyond are asked every time
  static std::atomic<int> known[kDevices];
  if (device >= kDevices) return f(device);
  int number = known[device].load(std::memory_order_acquire);
  if (number == 0) {
    number = f(device);
    known[device].store(number, std::memory_order_release);
  }
  return number;
}
inline int multiprocessors(int device) {
  return once_per_device(device, [](int of) { return device_attribute(cudaDevAttrMultiProcessorCount, of); });
}
// Of these a persistent GEMM takes at most multiprocessor_limit (multiprocessor_limit.cpp), which each launch reads. It is the size of the
// grid alone: schedules are made for all multiprocessors, so that no sum depends on it.
extern std::atomic<int> multiprocessor_limit;
inline int multiprocessors_to_take(int device) {
  return std::min(multiprocessors(device), multiprocessor_limit.load(std::memory_order_relaxed));
}

// Lets launches of kKernel on `device`, the current one, ask for as much dynamic shared memory as a CTA may have besides the kernel's static.
// That limit is a state of the kernel, in which all threads find it: if a launch set it to what it needs itself, another thread's launch
// in between would fail.
template <auto kKernel> void allow_dynamic_shared_memory(int device) {
  once_per_device(device, [](int of) {
    cudaFuncAttributes attributes{};
    STD_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kKernel));
    const int most = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, of) - static_cast<int>(attributes.sharedSizeBytes);
    STD_CUDA_CHECK(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most));
    return 1;
  });
}

// In the type that a and b have in common, so that 32 bits stay 32 bits on the device.
template <typename A, typename B> __host__ __device__ constexpr std::common_type_t<A, B> ceil_div(A a, B b) {
  return (a + b - 1) / b;
}

// The values of slot_of_row for rows without a slot: an expert's padding, and rows after the last expert (as in plain_plan.py).
constexpr int kPadding = -1, kBehindTheLast = -2;

// How many slots there are, T * top_k; a kernel compares one as an unsigned number with it, so that a negative one names none. There may be
// more than 2^31, but no int32 names them.
inline uint32_t count_of_slots(int64_t slots) { return static_cast<uint32_t>(std::min(slots, int64_t{1} << 31)); }
// The same for the router's weights of all slots; without weights, every slot that is not negative counts.
inline uint32_t count_of_slots(const std::optional<Tensor>& weights) {
  return count_of_slots(weights ? weights->numel() : INT64_MAX);
}

constexpr unsigned kFullWarp = 0xffffffffu;  // the mask of all lanes of a warp, for shuffles and votes

// The type sums are kept in: fp32, but fp64 for fp64.
template <typename T> struct Accumulate { using type = float; };
template <> struct Accumulate<double> { using type = double; };
template <typename T> using accumulate_t = typename Accumulate<T>::type;

template <typename T> __device__ __forceinline__ accumulate_t<T> widen(T value) { return value; }
template <> __device__ __forceinline__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
template <> __device__ __forceinline__ float widen(__half value) { return __half2float(value); }

template <typename T> __device__ __forceinline__ T narrow(accumulate_t<T> value) { return value; }
template <> __device__ __forceinline__ __nv_bfloat16 narrow(float value) { return __float2bfloat16_rn(value); }
template <> __device__ __forceinline__ __half narrow(float value) { return __float2half_rn(value); }

// N elements; one vectorised load or store moves them where N * sizeof(T) is 16.
template <typename T, int N> struct alignas(sizeof(T) * N) Vector { T element[N]; };

template <typename T> constexpr int kVectorLength = 16 / static_cast<int>(sizeof(T));

inline bool aligned_16(const Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0;
}
// Whether rows of row_bytes may be moved in vectors of 16 bytes in all of the tensors; nullptr stands for a tensor not given.
inline bool fits_16_bytes(int64_t row_bytes, std::initializer_list<const Tensor*> tensors) {
  bool fits = row_bytes % 16 == 0;
  for (const Tensor* tensor : tensors) fits = fits && (!tensor || aligned_16(*tensor));
  return fits;
}

template <typename V> V* data(const Tensor& tensor) { return static_cast<V*>(tensor.data_ptr()); }
template <typename V> V* data(const std::optional<Tensor>& tensor) { return tensor ? data<V>(*tensor) : nullptr; }

// Of a stack [E,R,C]. Of a single row or matrix the stride says nothing, and may be anything.
inline Pitch pitch_of(const char* name, const Tensor& stack) {
  const int64_t row = stack.size(1) > 1 ? stack.stride(1) : stack.size(2);
  STD_TORCH_CHECK(row <= INT32_MAX, name, ": expected rows that lie less than 2^31 elements apart, got ", row);
  return {static_cast<int>(row), stack.size(0) > 1 ? stack.stride(0) : row * stack.size(1)};
}
// Of two stacks of one shape, which must be the same; the second may be absent.
inline Pitch common_pitch(const char* name, const Tensor& stack, const std::optional<Tensor>& second) {
  const Pitch pitch = pitch_of(name, stack), other = second ? pitch_of(name, *second) : pitch;
  STD_TORCH_CHECK(pitch.row == other.row && pitch.group == other.group, name, ": expected two weights with the same strides");
  return pitch;
}

// Element i of an array whose dtype is known only at run time. These are out of line, because kernels that unroll over slots
// would hold a copy of the switch for each; and they take their arguments by value, because a pointer to a kernel's parameters
// would put those on the stack.
static __device__ __noinline__ double read_scalar(const void* data, ScalarType dtype, int64_t i) {
  switch (dtype) {
    case ScalarType::Float: return static_cast<const float*>(data)[i];
    case ScalarType::BFloat16: return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
    case ScalarType::Half: return __half2float(static_cast<const __half*>(data)[i]);
    default: return static_cast<const double*>(data)[i];
  }
}
static __device__ __noinline__ void write_scalar(void* data, ScalarType dtype, int64_t i, double value) {
  switch (dtype) {
    case ScalarType::Float: static_cast<float*>(data)[i] = static_cast<float>(value); break;
    case ScalarType::BFloat16: static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16_rn(static_cast<float>(value)); break;
    case ScalarType::Half: static_cast<__half*>(data)[i] = __float2half_rn(static_cast<float>(value)); break;
    default: static_cast<double*>(data)[i] = value;
  }
}

// A small tensor of any floating dtype (router weights: fp32 with bf16 rows, or the rows' own dtype). To choose the dtype at
// run time costs nothing next to the row that the number scales, and saves a template parameter everywhere.
struct Scalars {
  void* data;
  ScalarType dtype;

  __device__ __forceinline__ double read(int64_t i) const { return read_scalar(data, dtype, i); }
  __device__ __forceinline__ void write(int64_t i, double value) const { write_scalar(data, dtype, i, value); }
};

inline Scalars scalars(const std::optional<Tensor>& tensor) {
  if (!tensor.has_value()) return {nullptr, ScalarType::Float};
  return {tensor->data_ptr(), tensor->scalar_type()};
}

// Runs body with T bound to the C++ type of `dtype`; bf16, fp16, fp32 and fp64 are the types every operator takes.
#define GBMOE_DISPATCH_FLOATING(dtype, name, ...)                                      \
  do {                                                                                 \
    switch (dtype) {                                                                   \
      case ::gbmoe::ScalarType::BFloat16: { using T = __nv_bfloat16; __VA_ARGS__; break; } \
      case ::gbmoe::ScalarType::Half: { using T = __half; __VA_ARGS__; break; }          \
      case ::gbmoe::ScalarType::Float: { using T = float; __VA_ARGS__; break; }          \
      case ::gbmoe::ScalarType::Double: { using T = double; __VA_ARGS__; break; }        \
      default: STD_TORCH_CHECK(false, name, ": expected bfloat16, float16, float32 or float64"); \
    }                                                                                  \
  } while (0)

// The same for the two types of 16 bits, which are what the tensor cores are for.
#define GBMOE_DISPATCH_16_BIT(dtype, name, ...)                                        \
  do {                                                                                 \
    if (dtype == ScalarType::BFloat16) { using T = __nv_bfloat16; __VA_ARGS__; }       \
    else if (dtype == ScalarType::Half) { using T = __half; __VA_ARGS__; }             \
    else STD_TORCH_CHECK(false, name, ": expected bfloat16 or float16");               \
  } while (0)

}  // namespace gbmoe
