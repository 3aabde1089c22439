// m-grouped GEMMs, whose groups are rows of the result: forward, and the gradient of the rows.

#include "launch.cuh"

namespace gbmoe {
namespace {

template <typename T, typename Out, bool kKMajorB>
void launch_rows(const tensor_core::Arguments& args, const tensor_core::Tiling& tiling, const Tensor& on) {
  using namespace tensor_core;
  with_tile<WideTile, SquareTile, LowTile>("tensor_core_rows", tiling, [&](auto tile) {
    launch<T, Out, decltype(tile), true, kKMajorB, false, EpilogueKind::kStore>(args, on);
  });
}

}  // namespace

std::optional<tensor_core::Memory> tensor_core::memory_of(int device) {
  enum Answer { kUnknown, kNone, kOfSmall, kOfLarge };  // kUnknown is asked for again
  const int answer = once_per_device(device, [](int of) -> int {
    const torch::stable::accelerator::DeviceGuard guard(of);
    const auto kernel = grouped_gemm_kernel<GemmTraits<__half, __half, LowTile, Memory::kSmall, true, true, false, EpilogueKind::kStore>>;
    cudaFuncAttributes attributes{};
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) {
      (void)cudaGetLastError();  // that there is no code for this device is the answer, not an error to be found later
      return error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction ? kNone : kUnknown;
    }
    const int arch = attributes.ptxVersion;
    const bool large = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, of) >= shared_memory_bytes(Memory::kLarge);
    if (large && has_instances(arch, Memory::kLarge)) return kOfLarge;
    return has_instances(arch, Memory::kSmall) ? kOfSmall : kNone;
  });
  if (answer == kNone || answer == kUnknown) return std::nullopt;
  return answer == kOfLarge ? Memory::kLarge : Memory::kSmall;
}

// Whether the extension has code of tensor_core/ for this device (its index)
bool tensor_core_built(int64_t device) { return tensor_core::memory_of(static_cast<int>(device)).has_value(); }

// out[rows of e] = a[rows of e] @ b[e] (+ a2[rows of e] @ b2[e]); b [E,K,N], or [E,N,K] with trans_b; bf16, fp16, or fp32, whose
// operands are rounded to TF32; without sizes one group has all rows. out is of their dtype, or with trans_b and without a2 fp32
void tensor_core_rows(
    Tensor a, Tensor b, std::optional<Tensor> a2, std::optional<Tensor> b2, std::vector<int64_t> places,
    std::optional<Tensor> sizes, bool trans_b, std::vector<int64_t> tiling, Tensor out) {
  using namespace tensor_core;
  const torch::stable::accelerator::DeviceGuard guard(a.get_device_index());
  const Tiling tiles = tiling_of(tiling);
  // A router's logits, which are not rounded.
  const bool to_float = trans_b && !a2 && out.scalar_type() == ScalarType::Float;
  check_output("tensor_core_rows", out, to_float ? ScalarType::Float : a.scalar_type());
  Arguments args = arguments(sizes, out.size(0), out.size(1), tiles);
  args.size_k = static_cast<int>(a.size(1));
  args.operand_pairs = a2 ? 2 : 1;
  args.a[0] = a.data_ptr(), args.a[1] = pointer(a2);
  set_b(args, "tensor_core_rows", b, b2, places);
  args.out[0] = out.data_ptr();
  GBMOE_DISPATCH_TENSOR_CORE(a.scalar_type(), "tensor_core_rows", {
    if (to_float) launch_rows<T, float, true>(args, tiles, a);
    else if (trans_b) launch_rows<T, T, true>(args, tiles, a);
    else launch_rows<T, T, false>(args, tiles, a);
  });
}

GBMOE_OPERATOR_WITHOUT_TENSORS(tensor_core_built, "(int device) -> bool");
GBMOE_OPERATOR(
    tensor_core_rows,
    "(Tensor a, Tensor b, Tensor? a2, Tensor? b2, int[] places, Tensor? sizes, bool trans_b, int[] tiling, Tensor(a!) "
    "out) -> ()");

}  // namespace gbmoe
