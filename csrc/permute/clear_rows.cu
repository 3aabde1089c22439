// clear_rows_without_slot: writes zeros to rows without a slot, which a grouped GEMM does not write and which may hold anything.
//
// It reads 4 P bytes and writes only those rows; a torch.where with the same result reads and writes the whole matrix.

#include "../common.cuh"
#include "../operators.h"

namespace gbmoe {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsOfCta = 32;  // one for each lane
constexpr int kRun = 8;         // rows whose slots share 32 bytes, which is the least that a memory access reads

// A CTA owns four runs of eight rows that lie far apart. Rows without a slot lie together after the last expert, so that a few
// CTAs would clear them all if runs were neighbours. Every warp reads its CTA's slots, and clears a share of each row.
template <typename V>
__global__ void __launch_bounds__(kThreads) clear_rows_kernel(const int* slot_of_row, V* rows_PF, int64_t rows, int64_t vectors) {
  const int lane = threadIdx.x % 32;
  const int64_t own = (static_cast<int64_t>(lane / kRun) * gridDim.x + blockIdx.x) * kRun + lane % kRun;
  const int slot = own < rows ? slot_of_row[own] : 0;
  for (unsigned left = __ballot_sync(kFullWarp, slot < 0); left; left &= left - 1) {
    V* row = rows_PF + __shfl_sync(kFullWarp, own, __ffs(left) - 1) * vectors;
    for (int64_t v = threadIdx.x; v < vectors; v += kThreads) row[v] = V{};
  }
}

}  // namespace

// rows [P,F] of any dtype, zeroed where slot_of_row is negative and not touched elsewhere
void clear_rows_without_slot(Tensor slot_of_row, Tensor rows) {
  const torch::stable::accelerator::DeviceGuard guard(rows.get_device_index());
  if (rows.numel() == 0) return;
  const int64_t count = rows.size(0), row_bytes = rows.size(1) * static_cast<int64_t>(rows.element_size());
  const auto launch = [&](auto vector) {
    using V = decltype(vector);
    clear_rows_kernel<V><<<static_cast<unsigned>(ceil_div(count, kRowsOfCta)), kThreads, 0, current_stream(rows)>>>(
        data<const int>(slot_of_row), data<V>(rows), count, row_bytes / static_cast<int64_t>(sizeof(V)));
  };
  switch (fits_16_bytes(row_bytes, {&rows}) ? 16 : rows.element_size()) {
    case 16: launch(uint4{}); break;
    case 8: launch(uint64_t{}); break;
    case 4: launch(uint32_t{}); break;
    case 2: launch(uint16_t{}); break;
    default: launch(uint8_t{});
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

GBMOE_OPERATOR(clear_rows_without_slot, "(Tensor slot_of_row, Tensor(a!) rows) -> ()");

}  // namespace gbmoe
