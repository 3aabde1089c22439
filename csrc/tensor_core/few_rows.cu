// The launches of few_rows.cuh.

#include <algorithm>

#include "../early_launch.cuh"
#include "../operators.h"
#include "../places_of.h"
#include "few_rows.cuh"

namespace gbmoe {
namespace {

using namespace few_rows;

template <typename Columns> int64_t ctas_of(const Arguments& args, int size_n) {
  return ceil_div(int64_t{size_n}, Columns::kTileN) * std::min(args.groups, args.rows) * args.row_blocks;
}
// Whether all CTAs run at the same time.
template <typename Columns> bool at_once(const Arguments& args, int size_n, const Tensor& on) {
  return ctas_of<Columns>(args, size_n) <= int64_t{Columns::kCtasPerMultiprocessor} * multiprocessors(on.get_device_index());
}

template <typename T, typename Columns, EpilogueKind kEpilogue, bool kInTurns = false> void launch(
    const Arguments& args, const Tensor& on) {
  const int64_t ctas = ctas_of<Columns>(args, args.size_n);
  STD_TORCH_CHECK(ctas <= INT32_MAX, "few_rows: expected at most 2^31 - 1 tiles, got ", ctas);
  if (ctas == 0) return;
  launch_early(
      true, few_rows_kernel<T, Columns, kEpilogue, kInTurns>, static_cast<unsigned>(ctas), 32 * Columns::kWarps,
      sizeof(Sums<Columns, kInTurns>), on, args);
}

void* pointer(const std::optional<Tensor>& tensor) { return tensor ? tensor->data_ptr() : nullptr; }

Arguments arguments(const char* name, const Tensor& x, const std::optional<Tensor>& sizes, const Tensor& out, bool may_be_float = false) {
  Arguments args{};
  args.out_is_float = may_be_float && out.scalar_type() == ScalarType::Float;
  STD_TORCH_CHECK(args.out_is_float || out.scalar_type() == x.scalar_type(), name, ": out has another dtype than the result");
  args.sizes = pointer(sizes);
  args.sizes_are_int64 = sizes && sizes->scalar_type() == ScalarType::Long;
  args.groups = sizes ? static_cast<int>(sizes->numel()) : 1;
  args.rows = static_cast<int>(out.size(0));
  // A CTA's next row is an int.
  STD_TORCH_CHECK(out.size(0) <= INT32_MAX / 2, name, ": expected at most 2^30 - 1 rows, got ", out.size(0));
  // A group alone may have many rows, and then too few CTAs would walk them.
  args.row_blocks = args.groups == 1 ? std::max(1, ceil_div(args.rows, kRows)) : 1;
  args.x = x.data_ptr();
  args.size_n = static_cast<int>(out.size(1)), args.size_k = static_cast<int>(x.size(1));
  args.out[0] = out.data_ptr();
  args.step = 1;
  return args;
}

// b, and a second one with the same strides.
void set_b(
    Arguments& args, const char* name, const Tensor& b, const std::optional<Tensor>& second, const std::vector<int64_t>& places) {
  args.b[0] = b.data_ptr(), args.b[1] = pointer(second);
  args.pitch_b = common_pitch(name, b, second);
  args.places = places_of(name, places, args.groups);
  if (args.places.count > 0) args.pitch_b.group = b.stride(0);
}

}  // namespace

// The same as tensor_core_rows without a second pair, and as tensor_core_up, for groups of few rows; bf16 and fp16. Sums are made of parts.
// With slot_of_row, x is [tokens,H], and row r that of token slot_of_row[r] / top_k, or zeros where that names none. With reads_early,
// which needs b and sizes to have been complete before the kernel before this one began, they are read before that has ended. Without
// sizes one group has all rows.
void few_rows_gemm(
    Tensor a, Tensor b, std::vector<int64_t> places, std::optional<Tensor> sizes, bool trans_b, bool reads_early,
    std::optional<Tensor> bias, Tensor out) {
  const torch::stable::accelerator::DeviceGuard guard(a.get_device_index());
  Arguments args = arguments("few_rows_gemm", a, sizes, out);
  set_b(args, "few_rows_gemm", b, std::nullopt, places);
  args.reads_early = reads_early;
  args.bias[0] = bias_of(bias);
  GBMOE_DISPATCH_16_BIT(a.scalar_type(), "few_rows_gemm", {
    if (trans_b) launch<T, KMajorColumns<T, false>, EpilogueKind::kStore>(args, a);
    else launch<T, NMajorColumns<T>, EpilogueKind::kStore>(args, a);
  });
}

// out = x @ weight.T, of as many rows as the only group has, in their dtype or fp32, where a sum has on Hopper the bits that
// tensor_core_rows gives it
void few_rows_linear(Tensor x, Tensor weight, std::optional<Tensor> sizes, Tensor out) {
  STD_TORCH_CHECK(!sizes || sizes->numel() == 1, "few_rows_linear: sizes: expected one group, got ", sizes->numel());
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  Arguments args = arguments("few_rows_linear", x, sizes, out, true);
  args.b[0] = weight.data_ptr();
  args.pitch_b.row = args.size_k;
  GBMOE_DISPATCH_16_BIT(x.scalar_type(), "few_rows_linear", {
    using OneRun = KMajorColumns<T, false, true, 1>;
    using TwoRuns = KMajorColumns<T, false, true, 2>;
    if (at_once<OneRun>(args, args.size_n, x)) launch<T, OneRun, EpilogueKind::kStore, true>(args, x);
    else if (at_once<TwoRuns>(args, args.size_n, x)) launch<T, TwoRuns, EpilogueKind::kStore, true>(args, x);
    else launch<T, KMajorColumns<T, false>, EpilogueKind::kStore, true>(args, x);
  });
}

// w1 and v1 are [E,F,H], contiguous along H or along F; or w1 is [E,2F,H], gate and up in turns, contiguous along 2F.
void few_rows_up(
    Tensor x, std::optional<Tensor> slot_of_row, int64_t top_k, Tensor w1, std::optional<Tensor> v1, std::vector<int64_t> places,
    std::optional<Tensor> w1_bias, std::optional<Tensor> v1_bias, Tensor sizes, std::vector<double> activation, Tensor a,
    std::optional<Tensor> h, std::optional<Tensor> g) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  Arguments args = arguments("few_rows_up", x, sizes, a);
  args.slot_of_row = data<const int>(slot_of_row);
  args.tokens = static_cast<int>(x.size(0)), args.top_k = static_cast<int>(top_k);
  set_b(args, "few_rows_up", w1, v1, places);
  const bool transposed = w1.stride(2) != 1;
  if (transposed) {
    STD_TORCH_CHECK(
        w1.stride(2) <= INT32_MAX && (!v1 || v1->stride(2) == w1.stride(2)),
        "few_rows_up: expected two weights with the same strides");
    args.pitch_b = {static_cast<int>(w1.stride(2)), args.pitch_b.group};
  }
  args.paired = !v1 && w1.size(1) == 2 * a.size(1);
  STD_TORCH_CHECK(transposed || !args.paired, "few_rows_up: expected gate and up in turns to be contiguous along F");
  args.bias[0] = bias_of(w1_bias), args.bias[1] = bias_of(v1_bias);
  args.activation = activation_of(activation);
  args.out[1] = pointer(h), args.out[2] = pointer(g);
  args.step = h ? static_cast<int>(h->stride(1)) : 1;
  GBMOE_DISPATCH_16_BIT(x.scalar_type(), "few_rows_up", {
    // Of the second GEMM, whose result has as many columns as the rows here. If all of its CTAs run at once, they would fill the first
    // multiprocessors that have room for them, and leave others without any.
    args.next_begins_early = !at_once<NMajorColumns<T>>(args, args.size_k, x);
    if (transposed && (v1 || args.paired)) launch<T, NMajorColumns<T, true, true>, EpilogueKind::kGlu>(args, x);
    else if (transposed) launch<T, NMajorColumns<T, true>, EpilogueKind::kActivation>(args, x);
    else if (v1) launch<T, KMajorColumns<T, true>, EpilogueKind::kGlu>(args, x);
    else launch<T, KMajorColumns<T, false>, EpilogueKind::kActivation>(args, x);
  });
}

GBMOE_OPERATOR(
    few_rows_gemm,
    "(Tensor a, Tensor b, int[] places, Tensor? sizes, bool trans_b, bool reads_early, Tensor? bias, "
    "Tensor(a!) out) -> ()");
GBMOE_OPERATOR(few_rows_linear, "(Tensor x, Tensor weight, Tensor? sizes, Tensor(a!) out) -> ()");
GBMOE_OPERATOR(
    few_rows_up,
    "(Tensor x, Tensor? slot_of_row, int top_k, Tensor w1, Tensor? v1, int[] places, Tensor? w1_bias, Tensor? v1_bias, "
    "Tensor sizes, float[] activation, Tensor(a!) a, Tensor(b!)? h, Tensor(c!)? g) -> ()");

}  // namespace gbmoe
