// The launches of few_rows_gemm.cuh.

#include "few_rows_gemm.cuh"

#include "../operators.h"
#include "../places_of.h"
#include "device.cuh"
#include "tensor_map.cuh"

namespace gbmoe {
namespace {

using namespace hopper;
namespace few = hopper::few_rows;

few::Arguments arguments(const char* name, const Tensor& x, const std::optional<Tensor>& sizes, const Tensor& out) {
  STD_TORCH_CHECK(out.scalar_type() == x.scalar_type(), name, ": out has another dtype than the result");
  STD_TORCH_CHECK(out.size(0) <= INT32_MAX / 2, name, ": expected at most 2^30 - 1 rows, got ", out.size(0));
  few::Arguments args{};
  args.sizes = sizes ? sizes->data_ptr() : nullptr;
  args.sizes_are_int64 = sizes && sizes->scalar_type() == ScalarType::Long;
  args.groups = sizes ? static_cast<int>(sizes->numel()) : 1;
  args.rows = static_cast<int>(out.size(0));
  args.size_n = static_cast<int>(out.size(1)), args.size_k = static_cast<int>(x.size(1));
  args.out[0] = out.data_ptr();
  args.step = 1;
  return args;
}

// Memory is read a line at a time: with two at a time GEMMs were up to 8 % slower on an H200.
CUtensorMap map_of_weights(const Tensor& weights, int lines, const Places& places, bool transposed = false) {
  return tensor_map(weights, lines, kLineBytes, kOneLine, transposed, &places);
}

// Shared memory of a multiprocessor, on which each CTA takes 1 KiB more than it asks for; and what a CTA may have.
constexpr uint32_t kSharedBytes = 228 << 10, kOwnBytes = 1 << 10, kMostOfCta = 227 << 10;

// How many CTAs run on a multiprocessor: all, if they are few. Three with three stages each have more on its way from memory than four with
// two, but where three leave more multiprocessors without work in the end, four are faster: on an H200 mixtral with eight tokens in all
// experts 640 and 678 us. Where CTAs follow each other once or twice only, three are faster all the same: mixtral with one token 183 and
// 187. The number is a bound: it counts a tile more for every kRows rows, which few groups need, so that mixtral with 32 tokens has three,
// where four were 3 % faster.
int ctas_at_once(int64_t ctas, int64_t multiprocessors) {
  constexpr int kMost = few::kMostCtas, kFewer = kMost - 1;
  if (ctas <= kMost * multiprocessors) return static_cast<int>(ceil_div(ctas, multiprocessors));
  const auto places = [&](int at_once) { return ceil_div(ctas, at_once * multiprocessors) * at_once * multiprocessors; };
  return ctas > 2 * kMost * multiprocessors && places(kFewer) > 1.05 * places(kMost) ? kMost : kFewer;
}

// Stages of a CTA that leave room for the others.
int stages(few::Arguments args, int64_t ctas, int device) {
  const int at_once = ctas_at_once(ctas, multiprocessors(device));
  for (args.stages = 1; args.stages * few::kStageK < args.size_k; ++args.stages) {
    few::Arguments more = args;
    ++more.stages;
    if (more.shared_bytes() > std::min(kMostOfCta, kSharedBytes / at_once - kOwnBytes)) break;
  }
  return args.stages;
}

// `together`: CTAs of a cluster, which have as many tiles of `columns` columns together.
template <typename T, bool kTransposed, EpilogueKind kEpilogue> void launch(
    const few::Maps& maps, few::Arguments args, int columns, const Tensor& on, int together = 1) {
  // Each group with rows may have a tile that is not full.
  const int64_t tiles_of_rows = int64_t{std::min(args.groups, args.rows)} + args.rows / few::kRows;
  args.tiles_n = ceil_div(args.size_n, columns * together) * together;
  const int64_t ctas = args.tiles_n * tiles_of_rows;
  STD_TORCH_CHECK(ctas <= INT32_MAX, "hopper_few_rows: expected at most 2^31 - 1 tiles, got ", ctas);
  args.stages = stages(args, ctas, on.get_device_index());
  constexpr auto kernel = few::few_rows_kernel<T, kTransposed, kEpilogue>;
  allow_dynamic_shared_memory<kernel>(on.get_device_index());
  const Grid grid{static_cast<unsigned>(ctas), static_cast<unsigned>(together)};
  launch_early(true, kernel, grid, few::kThreads, args.shared_bytes(), on, maps, args);
}

}  // namespace

// few_rows_gemm and few_rows_up, where a sum has the bits that hopper_rows gives it if it splits none
void hopper_few_rows_gemm(
    Tensor a, Tensor b, std::vector<int64_t> places, std::optional<Tensor> sizes, bool trans_b, bool reads_early,
    std::optional<Tensor> bias, Tensor out) {
  if (out.numel() == 0) return;
  const OnDevice current(a);
  few::Arguments args = arguments("hopper_few_rows_gemm", a, sizes, out);
  args.reads_early = reads_early;
  args.bias[0] = bias_of(bias);
  args.places = places_of("hopper_few_rows_gemm", places, args.groups);
  few::Maps maps{};
  maps.rows = line_map(a, kOneLine);
  maps.weights[0] = map_of_weights(b, trans_b ? few::kColumns : kBlockK, args.places);
  GBMOE_DISPATCH_16_BIT(a.scalar_type(), "hopper_few_rows_gemm", {
    if (trans_b) launch<T, false, EpilogueKind::kStore>(maps, args, few::kColumns, a);
    else launch<T, true, EpilogueKind::kStore>(maps, args, few::kColumns, a);
  });
}

// w1 and v1 are [E,F,H], contiguous along H or along F; or w1 is [E,2F,H], gate and up in turns, contiguous along 2F.
void hopper_few_rows_up(
    Tensor x, std::optional<Tensor> slot_of_row, int64_t top_k, Tensor w1, std::optional<Tensor> v1, std::vector<int64_t> places,
    std::optional<Tensor> w1_bias, std::optional<Tensor> v1_bias, Tensor sizes, std::vector<double> activation, Tensor a,
    std::optional<Tensor> h, std::optional<Tensor> g) {
  if (a.numel() == 0) return;
  const OnDevice current(x);
  few::Arguments args = arguments("hopper_few_rows_up", x, sizes, a);
  args.slot_of_row = data<const int>(slot_of_row);
  STD_TORCH_CHECK(x.size(0) > 0, "hopper_few_rows_up: expected at least one token, got none for ", args.rows, " rows");
  args.tokens = static_cast<int>(x.size(0)), args.top_k = static_cast<int>(top_k);
  args.padded = slot_of_row && args.rows > x.size(0) * top_k;
  args.activation = activation_of(activation);
  args.out[1] = h ? h->data_ptr() : nullptr, args.out[2] = g ? g->data_ptr() : nullptr;
  args.step = h ? static_cast<int>(h->stride(1)) : 1;
  args.bias[0] = bias_of(w1_bias), args.bias[1] = bias_of(v1_bias);
  args.next_begins_early = true;
  args.paired = !v1 && w1.size(1) == 2 * a.size(1);
  const bool glu = v1 || args.paired, transposed = contiguous_along_n(w1);
  STD_TORCH_CHECK(transposed || !args.paired, "hopper_few_rows_up: expected gate and up in turns to be contiguous along F");
  const int columns = glu ? few::kColumns / 2 : few::kColumns;
  // Boxes of weights that lie transposed are a k-block of lines.
  const int lines = transposed ? kBlockK : columns;
  args.places = places_of("hopper_few_rows_up", places, args.groups);
  few::Maps maps{};
  maps.rows = line_map(x, kOneLine);
  maps.weights[0] = map_of_weights(w1, lines, args.places, transposed);
  if (v1) maps.weights[1] = map_of_weights(*v1, lines, args.places, transposed);
  GBMOE_DISPATCH_16_BIT(x.scalar_type(), "hopper_few_rows_up", {
    if (transposed && glu) launch<T, true, EpilogueKind::kGlu>(maps, args, columns, x, args.paired ? 1 : 2);
    else if (transposed) launch<T, true, EpilogueKind::kActivation>(maps, args, columns, x);
    else if (glu) launch<T, false, EpilogueKind::kGlu>(maps, args, columns, x);
    else launch<T, false, EpilogueKind::kActivation>(maps, args, columns, x);
  });
}

GBMOE_OPERATOR(
    hopper_few_rows_gemm,
    "(Tensor a, Tensor b, int[] places, Tensor? sizes, bool trans_b, bool reads_early, Tensor? bias, Tensor(a!) out) -> ()");
GBMOE_OPERATOR(
    hopper_few_rows_up,
    "(Tensor x, Tensor? slot_of_row, int top_k, Tensor w1, Tensor? v1, int[] places, Tensor? w1_bias, Tensor? v1_bias, "
    "Tensor sizes, float[] activation, Tensor(a!) a, Tensor(b!)? h, Tensor(c!)? g) -> ()");

}  // namespace gbmoe
