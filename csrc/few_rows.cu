// The launches of few_rows.cuh. ops.h has the operators' arguments.

#include <algorithm>

#include "early_launch.cuh"
#include "few_rows.cuh"
#include "ops.h"

namespace gbmoe {
namespace {

using namespace few_rows;

template <typename Columns> int64_t ctas_of(const Arguments& args, int size_n) {
  return ceil_div(int64_t{size_n}, Columns::kTileN) * std::min(args.groups, args.rows) * args.row_blocks;
}
// CTAs that can run at the same time.
template <typename Columns> int64_t most_at_once(const Tensor& on) {
  return int64_t{Columns::kCtasPerMultiprocessor} * multiprocessors(on.get_device_index());
}
template <typename Columns> bool at_once(const Arguments& args, int size_n, const Tensor& on) {
  return ctas_of<Columns>(args, size_n) <= most_at_once<Columns>(on);
}
// Where CTAs follow each other, and nothing asks for turns: on an H100, whose memory bus is 5,120 bits wide, turns are 1 to 2 % faster. On
// an H200, with 6,016 bits and 1.4 times the bandwidth, parts are: a layer in a graph, microseconds in turns and in parts, qwen3 with two
// tokens 60 and 58, with eight 144 and 133, with 32 281 and 262, olmoe with one 48 and 45, with 16 191 and 176, mixtral with eight 610 and
// 590, dsv3 with 16 1,166 and 1,129; but mixtral with one token, which has rows in two groups, 191 and 200. Nothing else was
// measured; that the width of the bus tells is an assumption.
bool pays_to_take_turns(const Arguments& args, const Tensor& on) {
  constexpr int kWideBus = 5632, kFewGroups = 2;
  const int bus =
      once_per_device(on.get_device_index(), [](int of) { return device_attribute(cudaDevAttrGlobalMemoryBusWidth, of); });
  return bus < kWideBus || std::min(args.groups, args.rows) <= kFewGroups;
}
template <typename Columns> bool takes_turns(const Arguments& args, bool in_turns, const Tensor& on) {
  return in_turns || (!at_once<Columns>(args, args.size_n, on) && pays_to_take_turns(args, on));
}
// Whether words are arranged before a turn, in the second GEMM of a layer: where sums are short and few CTAs follow each other. Both
// GEMMs on one H100, microseconds so and otherwise: qwen3 (768 terms) with one token 40.5 and 41.1, with two 67.3 and 69.3, with eight,
// where CTAs follow each other six times, 195.1 and 194.3; olmoe (1,024) with one 52.3 and 51.9; mixtral (14,336) with one 262 and 260.
// Shorter sums were not measured.
template <typename Columns> bool arranges_first(const Arguments& args, const Tensor& on) {
  return args.size_k <= kShortSum && ctas_of<Columns>(args, args.size_n) <= 2 * most_at_once<Columns>(on);
}

template <typename T, typename Columns, EpilogueKind kEpilogue, bool kInTurns> void launch(
    const Arguments& args, const Tensor& on) {
  const int64_t ctas = ctas_of<Columns>(args, args.size_n);
  STD_TORCH_CHECK(ctas <= INT32_MAX, "few_rows: expected at most 2^31 - 1 tiles, got ", ctas);
  if (ctas == 0) return;
  launch_early(
      true, few_rows_kernel<T, Columns, kEpilogue, kInTurns>, static_cast<unsigned>(ctas), 32 * Columns::kWarps,
      sizeof(Sums<Columns, kInTurns>), on, args);
}
template <typename T, typename Columns, EpilogueKind kEpilogue> void launch(
    const Arguments& args, bool in_turns, const Tensor& on) {
  if (takes_turns<Columns>(args, in_turns, on)) launch<T, Columns, kEpilogue, true>(args, on);
  else launch<T, Columns, kEpilogue, false>(args, on);
}

void* pointer(const std::optional<Tensor>& tensor) { return tensor ? tensor->data_ptr() : nullptr; }

Arguments arguments(const char* name, const Tensor& x, const std::optional<Tensor>& sizes, const Tensor& out) {
  STD_TORCH_CHECK(out.scalar_type() == x.scalar_type(), name, ": out has another dtype than the result");
  Arguments args{};
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
  return args;
}

}  // namespace

void few_rows_gemm(Tensor a, Tensor b, std::optional<Tensor> sizes, bool trans_b, bool in_turns, bool reads_early, Tensor out) {
  const torch::stable::accelerator::DeviceGuard guard(a.get_device_index());
  Arguments args = arguments("few_rows_gemm", a, sizes, out);
  args.b[0] = b.data_ptr();
  args.reads_early = reads_early;
  GBMOE_DISPATCH_16_BIT(a.scalar_type(), "few_rows_gemm", {
    using OfFewCtas = KMajorColumns<T, false, true>;
    if (trans_b && in_turns && args.groups == 1 && at_once<OfFewCtas>(args, args.size_n, a))
      launch<T, OfFewCtas, EpilogueKind::kStore, true>(args, a);
    else if (trans_b) launch<T, KMajorColumns<T, false>, EpilogueKind::kStore>(args, in_turns, a);
    else if (takes_turns<NMajorColumns<T>>(args, in_turns, a) && arranges_first<NMajorColumns<T>>(args, a))
      launch<T, NMajorColumns<T, true>, EpilogueKind::kStore, true>(args, a);
    else launch<T, NMajorColumns<T>, EpilogueKind::kStore>(args, in_turns, a);
  });
}

void few_rows_up(
    Tensor x, std::optional<Tensor> slot_of_row, int64_t top_k, Tensor w1, std::optional<Tensor> v1, Tensor sizes,
    int64_t activation, bool in_turns, Tensor a, std::optional<Tensor> h, std::optional<Tensor> g) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  Arguments args = arguments("few_rows_up", x, sizes, a);
  args.slot_of_row = data<const int>(slot_of_row);
  args.tokens = static_cast<int>(x.size(0)), args.top_k = static_cast<int>(top_k);
  args.b[0] = w1.data_ptr(), args.b[1] = pointer(v1);
  args.activation = static_cast<int>(activation);
  args.out[1] = pointer(h), args.out[2] = pointer(g);
  GBMOE_DISPATCH_16_BIT(x.scalar_type(), "few_rows_up", {
    // Of the second GEMM, whose result has as many columns as the rows here. If all of its CTAs run at once, they would fill the first
    // multiprocessors that have room for them, and leave others without any.
    args.next_begins_early = !at_once<NMajorColumns<T>>(args, args.size_k, x);
    if (v1) launch<T, KMajorColumns<T, true>, EpilogueKind::kGlu>(args, in_turns, x);
    else launch<T, KMajorColumns<T, false>, EpilogueKind::kActivation>(args, in_turns, x);
  });
}

}  // namespace gbmoe
