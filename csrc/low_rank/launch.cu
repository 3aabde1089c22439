// The launches of rank_product.cuh and rank_gradient.cuh. They need compute capability 8.0 or later, and sizes on the device.

#include "../operators.h"
#include "rank_gradient.cuh"
#include "rank_product.cuh"

namespace gbmoe {
namespace {

using namespace low_rank;

constexpr int kMostRanks = 64;

template <auto kKernel, typename Traits, typename Arguments> void launch_ctas(int64_t ctas, const Arguments& args, const Tensor& on) {
  STD_TORCH_CHECK(ctas <= INT32_MAX, "low_rank: expected at most 2^31 - 1 tiles, got ", ctas);
  if (ctas == 0) return;
  allow_dynamic_shared_memory<kKernel>(on.get_device_index());
  kKernel<<<static_cast<unsigned>(ctas), kThreads, Traits::kSharedBytes, current_stream(on)>>>(args);
  STD_CUDA_CHECK(cudaGetLastError());
}

// As many as there may be tiles, whatever the sizes are: each group's last one may have a single row.
template <typename Traits> void launch(const ProductArguments& args, const Tensor& on) {
  const int64_t ctas = int64_t{args.rows} / Traits::kTileRows + std::min(args.groups, args.rows);
  launch_ctas<rank_product_kernel<Traits>, Traits>(ctas, args, on);
}
template <typename Traits> void launch(const GradientArguments& args, const Tensor& on) {
  launch_ctas<rank_gradient_kernel<Traits>, Traits>(int64_t{args.groups} * ceil_div(args.columns, Traits::kColumns), args, on);
}

// Calls f with the least number of columns of an instance that `ranks` fit into.
template <typename F> void with_ranks(const char* name, int64_t ranks, const F& f) {
  STD_TORCH_CHECK(ranks > 0 && ranks <= kMostRanks && ranks % 8 == 0, name, ": expected a multiple of 8 ranks up to 64, got ", ranks);
  if (ranks <= 16) f(std::integral_constant<int, 16>());
  else if (ranks <= 32) f(std::integral_constant<int, 32>());
  else f(std::integral_constant<int, 64>());
}

template <typename Arguments> Arguments arguments(const char* name, const Tensor& sizes, const Tensor& rows, const Tensor& out) {
  STD_TORCH_CHECK(out.scalar_type() == rows.scalar_type(), name, ": out has another dtype than the operands");
  const ScalarType dtype = rows.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::BFloat16 || dtype == ScalarType::Half, name, ": expected bfloat16 or float16");
  Arguments args{};
  args.is_half = dtype == ScalarType::Half;
  args.sizes = sizes.data_ptr();
  args.sizes_are_int64 = sizes.scalar_type() == ScalarType::Long;
  args.groups = static_cast<int>(sizes.numel());
  return args;
}

}  // namespace

// out[rows of e] = a[rows of e] @ b[e].T (+ a2[rows of e] @ b2[e].T), [P,R]; bf16 and fp16, R and K multiples of 8, R at most 64. b [E,R,K],
// or [E,K,R] with along_r, whose rows may lie further apart, and b2 as b.
void rank_product(
    Tensor a, Tensor b, std::optional<Tensor> a2, std::optional<Tensor> b2, Tensor sizes, bool along_r, Tensor out) {
  const torch::stable::accelerator::DeviceGuard guard(a.get_device_index());
  auto args = arguments<ProductArguments>("rank_product", sizes, a, out);
  STD_TORCH_CHECK(
      a2.has_value() == b2.has_value() && (!a2 || a2->size(1) == a.size(1)),
      "rank_product: expected a second pair with the inner dimension of the first");
  args.rows = static_cast<int>(out.size(0));
  args.inner = static_cast<int>(a.size(1)), args.ranks = static_cast<int>(out.size(1));
  args.pairs = a2 ? 2 : 1;
  args.a[0] = a.data_ptr(), args.a[1] = a2 ? a2->data_ptr() : nullptr;
  args.b[0] = b.data_ptr(), args.b[1] = b2 ? b2->data_ptr() : nullptr;
  args.pitch_b = common_pitch("rank_product", b, b2);
  args.out = out.data_ptr();
  with_ranks("rank_product", out.size(1), [&](auto ranks) {
    if (along_r) launch<ProductTraits<ranks.value, false>>(args, a);
    else launch<ProductTraits<ranks.value, true>>(args, a);
  });
}

// out[e] = left[rows of e].T @ right[rows of e], [E,R,N], whose rows may lie further apart; bf16 and fp16, R and N multiples of 8, R at most
// 64. With slot_of_row, right is [tokens,N], and row r that of token slot_of_row[r] / top_k, or zeros where that names none.
void rank_gradient(Tensor left, Tensor right, std::optional<Tensor> slot_of_row, int64_t top_k, Tensor sizes, Tensor out) {
  const torch::stable::accelerator::DeviceGuard guard(left.get_device_index());
  auto args = arguments<GradientArguments>("rank_gradient", sizes, left, out);
  STD_TORCH_CHECK(right.scalar_type() == left.scalar_type(), "rank_gradient: right has another dtype than left");
  STD_TORCH_CHECK(aligned_16(out), "rank_gradient: expected out at a multiple of 16 bytes");
  args.rows = static_cast<int>(left.size(0));
  args.ranks = static_cast<int>(out.size(1)), args.columns = static_cast<int>(out.size(2));
  args.top_k = static_cast<int>(top_k);
  args.slots = count_of_slots(right.size(0) * top_k);
  args.left = left.data_ptr(), args.right = right.data_ptr();
  args.slot_of_row = data<const int>(slot_of_row);
  args.out = out.data_ptr();
  args.pitch_out = pitch_of("rank_gradient", out);
  with_ranks("rank_gradient", out.size(1), [&](auto ranks) { launch<GradientTraits<ranks.value>>(args, left); });
}

GBMOE_OPERATOR(
    rank_product, "(Tensor a, Tensor b, Tensor? a2, Tensor? b2, Tensor sizes, bool along_r, Tensor(a!) out) -> ()");
GBMOE_OPERATOR(
    rank_gradient, "(Tensor left, Tensor right, Tensor? slot_of_row, int top_k, Tensor sizes, Tensor(a!) out) -> ()");

}  // namespace gbmoe
