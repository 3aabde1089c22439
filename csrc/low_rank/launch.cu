// The launches of low_rank_kernel.cuh. They need compute capability 8.0 or later, and sizes on the device.

#include "../operators.h"
#include "low_rank_kernel.cuh"

namespace gbmoe {
namespace {

using namespace low_rank;

constexpr int kMostRanks = 64;

int multiprocessor_bytes(int device) {
  return once_per_device(device, [](int of) { return device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, of); });
}

template <typename Traits> void launch_instance(Arguments& args, const Tensor& on) {
  const int device = on.get_device_index();
  const Launch of = launch_of<Traits>(args, multiprocessors(device), multiprocessor_bytes(device));
  STD_TORCH_CHECK(of.ctas <= INT32_MAX, "low_rank: expected at most 2^31 - 1 tiles, got ", of.ctas);
  if (of.ctas == 0) return;
  allow_dynamic_shared_memory<low_rank_kernel<Traits>>(device);
  low_rank_kernel<Traits><<<static_cast<unsigned>(of.ctas), kThreads, of.shared_bytes, current_stream(on)>>>(args);
  STD_CUDA_CHECK(cudaGetLastError());
}

// The instance with the least number of columns that all ranks fit into.
void launch(Arguments& args, const Tensor& on) {
  int ranks = args.product.ranks;
  for (const Gradient& gradient : args.gradients) ranks = std::max(ranks, gradient.ranks);
  if (ranks <= 16) launch_instance<Traits<16>>(args, on);
  else if (ranks <= 32) launch_instance<Traits<32>>(args, on);
  else launch_instance<Traits<kMostRanks>>(args, on);
}

int count_of_ranks(const char* name, int64_t ranks) {
  STD_TORCH_CHECK(ranks > 0 && ranks <= kMostRanks && ranks % 8 == 0, name, ": expected a multiple of 8 ranks up to 64, got ", ranks);
  return static_cast<int>(ranks);
}

// Without a product or gradients. `wide` is one of the operands that have P rows, or with slots those of tokens.
Arguments arguments(
    const char* name, const Tensor& sizes, int64_t rows, const std::optional<Tensor>& slot_of_row, int64_t top_k,
    const Tensor& wide) {
  const ScalarType dtype = wide.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::BFloat16 || dtype == ScalarType::Half, name, ": expected bfloat16 or float16");
  Arguments args{};
  args.rows.is_half = dtype == ScalarType::Half;
  args.rows.sizes = sizes.data_ptr();
  args.rows.sizes_are_int64 = sizes.scalar_type() == ScalarType::Long;
  args.rows.groups = static_cast<int>(sizes.numel());
  args.rows.rows = static_cast<int>(rows);
  args.rows.top_k = static_cast<int>(top_k);
  args.rows.slots = count_of_slots(wide.size(0) * top_k);
  args.rows.slot_of_row = data<const int>(slot_of_row);
  return args;
}

void set_product(
    Arguments& args, const char* name, const Tensor& a, const Tensor& b, const std::optional<Tensor>& a2,
    const std::optional<Tensor>& b2, bool along_r, const Tensor& out) {
  const bool to_float = out.scalar_type() == ScalarType::Float;
  STD_TORCH_CHECK(to_float || out.scalar_type() == a.scalar_type(), name, ": expected out in float32 or in the operands' dtype");
  STD_TORCH_CHECK(
      a2.has_value() == b2.has_value() && (!a2 || (a2->size(1) == a.size(1) && a2->size(0) == a.size(0))), name,
      ": expected a second pair with the rows and the inner dimension of the first");
  Product& product = args.product;
  product.inner = static_cast<int>(a.size(1)), product.ranks = count_of_ranks(name, out.size(1));
  product.pairs = a2 ? 2 : 1;
  product.to_float = to_float;
  product.along_r = along_r;
  product.a[0] = a.data_ptr(), product.a[1] = a2 ? a2->data_ptr() : nullptr;
  product.b[0] = b.data_ptr(), product.b[1] = b2 ? b2->data_ptr() : nullptr;
  product.pitch_b = common_pitch(name, b, b2);
  product.out = out.data_ptr();
}

void set_gradient(Gradient& gradient, const char* name, const Tensor& left, const Tensor& right, const Tensor& out) {
  STD_TORCH_CHECK(
      right.scalar_type() == left.scalar_type() && out.scalar_type() == left.scalar_type(), name,
      ": expected left, right and out of one dtype");
  STD_TORCH_CHECK(aligned_16(out), name, ": expected out at a multiple of 16 bytes");
  gradient.ranks = count_of_ranks(name, out.size(1)), gradient.columns = static_cast<int>(out.size(2));
  gradient.left = left.data_ptr(), gradient.right = right.data_ptr();
  gradient.out = out.data_ptr();
  gradient.pitch_out = pitch_of(name, out);
}

}  // namespace

// out[rows of e] = a[rows of e] @ b[e].T (+ a2[rows of e] @ b2[e].T), [P,R]; bf16 and fp16, R and K multiples of 8, R at most 64. b [E,R,K],
// or [E,K,R] with along_r, whose rows may lie further apart, and b2 as b. With slot_of_row, a and a2 are [tokens,K], and row r is that of
// token slot_of_row[r] / top_k, or zeros where that names none. out may be fp32.
void rank_product(
    Tensor a, std::optional<Tensor> slot_of_row, int64_t top_k, Tensor b, std::optional<Tensor> a2, std::optional<Tensor> b2,
    Tensor sizes, bool along_r, Tensor out) {
  const torch::stable::accelerator::DeviceGuard guard(a.get_device_index());
  Arguments args = arguments("rank_product", sizes, out.size(0), slot_of_row, top_k, a);
  set_product(args, "rank_product", a, b, a2, b2, along_r, out);
  launch(args, a);
}

// out[e] = left[rows of e].T @ right[rows of e], [E,R,N], whose rows may lie further apart; bf16 and fp16, R and N multiples of 8, R at most
// 64. With slot_of_row, right is [tokens,N], and its rows are as those of rank_product's a.
void rank_gradient(Tensor left, Tensor right, std::optional<Tensor> slot_of_row, int64_t top_k, Tensor sizes, Tensor out) {
  const torch::stable::accelerator::DeviceGuard guard(left.get_device_index());
  Arguments args = arguments("rank_gradient", sizes, left.size(0), slot_of_row, top_k, right);
  set_gradient(args.gradients[0], "rank_gradient", left, right, out);
  launch(args, left);
}

// rank_product, and rank_gradient of one to three pairs left and right, in one launch and with the same bits; with slot_of_row all of a, a2
// and right are of tokens.
void rank_product_and_gradients(
    Tensor a, std::optional<Tensor> slot_of_row, int64_t top_k, Tensor b, std::optional<Tensor> a2, std::optional<Tensor> b2,
    Tensor sizes, bool along_r, Tensor out, Tensor left, Tensor right, Tensor made, std::optional<Tensor> left2,
    std::optional<Tensor> right2, std::optional<Tensor> made2, std::optional<Tensor> left3, std::optional<Tensor> right3,
    std::optional<Tensor> made3) {
  constexpr const char* kName = "rank_product_and_gradients";
  const torch::stable::accelerator::DeviceGuard guard(a.get_device_index());
  Arguments args = arguments(kName, sizes, out.size(0), slot_of_row, top_k, a);
  set_product(args, kName, a, b, a2, b2, along_r, out);
  int count = 0;
  const auto add = [&](const std::optional<Tensor>& of_left, const std::optional<Tensor>& of_right,
                       const std::optional<Tensor>& to) {
    STD_TORCH_CHECK(
        of_left.has_value() == to.has_value() && of_right.has_value() == to.has_value(), kName,
        ": expected left, right and made, or none of them");
    if (!to) return;
    STD_TORCH_CHECK(
        of_left->size(0) == out.size(0) && of_right->size(0) == a.size(0), kName, ": expected left with ", out.size(0),
        " rows and right with ", a.size(0), ", got ", of_left->size(0), " and ", of_right->size(0));
    set_gradient(args.gradients[count++], kName, *of_left, *of_right, *to);
  };
  add(left, right, made), add(left2, right2, made2), add(left3, right3, made3);
  launch(args, a);
}

GBMOE_OPERATOR(
    rank_product,
    "(Tensor a, Tensor? slot_of_row, int top_k, Tensor b, Tensor? a2, Tensor? b2, Tensor sizes, bool along_r, Tensor(a!) out) -> "
    "()");
GBMOE_OPERATOR(
    rank_gradient, "(Tensor left, Tensor right, Tensor? slot_of_row, int top_k, Tensor sizes, Tensor(a!) out) -> ()");
GBMOE_OPERATOR(
    rank_product_and_gradients,
    "(Tensor a, Tensor? slot_of_row, int top_k, Tensor b, Tensor? a2, Tensor? b2, Tensor sizes, bool along_r, Tensor(a!) out, "
    "Tensor left, Tensor right, Tensor(b!) made, Tensor? left2, Tensor? right2, Tensor(c!)? made2, Tensor? left3, Tensor? "
    "right3, "
    "Tensor(d!)? made3) -> ()");

}  // namespace gbmoe
