// Which of its kernels the router launches, as tables: of the rows that take a call, the first one serves it.
//
// A call is E experts, K slots per token and the type of the logits. Rows say how a token is laid out over lanes
// (router_rows.cuh): with fewer lanes each sorts more numbers, with more lanes they exchange more. More lanes than a row has are
// 4 to 20 % slower (docs/notes/router-longer-lists.md). A number of experts that vectors do not divide has rows of its own, with
// shorter vectors or none. The last row of a table takes whatever the rows before it leave.

#pragma once

#include <cstddef>
#include <iterator>
#include <type_traits>
#include <utility>

namespace gbmoe {
namespace {

// What the router's kernels serve: brief keys hold experts below 1024, and a warp has a lane for each slot.
constexpr int kMaxRouterExperts = 1024, kMaxRouterSlots = 32;

// What depends on the number of slots: a row's kernel has one variant for each value that its slots call for.
enum Variants {
  kLists,        // forward, for lane groups: sorted lists of 4, 8, 16 or 32 places (router_sorted_lists.cuh)
  kCandidates,   // forward, for whole warps: ranked candidates (router_candidates.cuh), one variant, 0
  kSlotsPerLane  // backward: the number of slots per lane, 1 or 2
};

struct KernelRow {
  // The calls that the row takes: at most max_experts experts, a multiple of `multiple`, and min_slots to max_slots slots per
  // token.
  int max_experts, multiple, min_slots, max_slots;
  // The kernel: lanes per token, numbers per lane, the longest vector (16 is no limit), and what its variants are.
  int lanes, per_lane, max_vector;
  Variants variants;

  constexpr bool takes(int experts, int slots) const {
    return experts <= max_experts && experts % multiple == 0 && slots >= min_slots && slots <= max_slots;
  }
  constexpr int variant(int slots) const {
    if (variants == kCandidates) return 0;
    if (variants == kSlotsPerLane) return (slots + lanes - 1) / lanes;
    return slots <= 4 ? 4 : slots <= 8 ? 8 : slots <= 16 ? 16 : 32;
  }
  // Whether any call that the row takes is served by this variant: only those are compiled.
  constexpr bool needs(int candidate) const { return candidate >= variant(min_slots) && candidate <= variant(max_slots); }
};

// Forward. Sorted lists are used up to the number of experts where a warp that ranks candidates becomes faster, measured. With
// float logits, whose brief keys must be checked, that is sooner, unless slots are many. (Where there are no more than 8 or 16
// experts, there are no more slots either.)
template <typename T> struct ForwardTable {  // 16-bit logits
  static constexpr KernelRow kRows[] = {
      // E up to, multiple of, K from, to, lanes, numbers per lane, longest vector, variants
      {   8, 4,  1,  8,  2,  4, 16, kLists},
      {  16, 4,  1, 16,  4,  4, 16, kLists},
      {  16, 1,  1, 16,  8,  2,  1, kLists},
      {  32, 8, 17, 32,  8,  4, 16, kLists},  // lists of 32 places are spread over more lanes
      {  64, 8, 17, 32,  8,  8, 16, kLists},
      {  64, 4, 17, 32,  8,  8,  4, kLists},
      {  32, 8,  1, 16,  4,  8, 16, kLists},
      {  64, 8,  1, 16,  4, 16, 16, kLists},
      {  64, 4,  1, 16,  4, 16,  4, kLists},
      {  64, 1,  1, 32,  8,  8,  1, kLists},
      { 128, 8,  1, 32,  4, 32, 16, kLists},
      { 160, 8,  1, 32,  4, 40, 16, kLists},
      { 192, 8,  1, 32,  4, 48, 16, kLists},
      { 256, 8,  1, 32,  8, 32, 16, kLists},
      { 384, 8,  1, 32,  8, 48, 16, kLists},
      { 512, 8,  1, 32, 16, 32, 16, kLists},
      { 128, 4,  1, 32, 32,  4, 16, kCandidates},
      { 256, 1,  1, 32, 32,  8,  1, kCandidates},
      {1024, 8,  1, 32, 32, 32, 16, kCandidates},
      {1024, 1,  1, 32, 32, 32,  1, kCandidates},
  };
};
template <> struct ForwardTable<float> {
  static constexpr KernelRow kRows[] = {
      // E up to, multiple of, K from, to, lanes, numbers per lane, longest vector, variants
      {   8, 4,  1,  8,  2,  4, 16, kLists},
      {  16, 4,  1, 16,  4,  4, 16, kLists},
      {  16, 1,  1, 16,  8,  2,  1, kLists},
      {  32, 8,  1, 32,  4,  8, 16, kLists},
      {  64, 8,  1, 32,  4, 16, 16, kLists},
      {  64, 4,  1, 32,  4, 16,  4, kLists},
      {  64, 1,  1, 32,  8,  8,  1, kLists},
      { 128, 4,  1, 16,  4, 32, 16, kLists},
      { 128, 4, 17, 32,  8, 16, 16, kLists},
      { 160, 4,  1, 32,  8, 20, 16, kLists},
      { 192, 4,  1, 32,  8, 24, 16, kLists},
      { 256, 4, 17, 32, 16, 16, 16, kLists},
      { 256, 4,  1, 16,  8, 32, 16, kLists},
      { 384, 4,  1,  8, 16, 24, 16, kLists},
      { 384, 4, 17, 32, 16, 24, 16, kLists},
      { 384, 4,  9, 16, 32, 12, 16, kCandidates},
      { 512, 4, 17, 32, 16, 32, 16, kLists},
      { 256, 1,  1, 32, 32,  8,  1, kCandidates},
      { 512, 8,  1, 32, 32, 16, 16, kCandidates},
      {1024, 8,  1, 32, 32, 32, 16, kCandidates},
      {1024, 1,  1, 32, 32, 32,  1, kCandidates},
  };
};

// Backward, by the type of the logits' gradient. Eight lanes own a token up to the number of experts where a warp becomes faster,
// measured.
template <typename T> struct BackwardTable {  // 16-bit logits
  static constexpr KernelRow kRows[] = {
      // E up to, multiple of, K from, to, lanes, numbers per lane, longest vector, variants
      {  16, 1,  1, 16,  8,  2,  1, kSlotsPerLane},
      {  32, 4,  1, 16,  8,  4, 16, kSlotsPerLane},
      {  64, 8,  1, 16,  8,  8, 16, kSlotsPerLane},
      {  64, 1,  1, 16,  8,  8,  1, kSlotsPerLane},
      { 128, 8,  1, 16,  8, 16, 16, kSlotsPerLane},
      { 256, 8,  1, 16,  8, 32, 16, kSlotsPerLane},
      {  64, 1,  1, 32, 32,  2,  1, kSlotsPerLane},
      { 128, 4,  1, 32, 32,  4, 16, kSlotsPerLane},
      { 256, 8,  1, 32, 32,  8, 16, kSlotsPerLane},
      { 256, 1,  1, 32, 32,  8,  1, kSlotsPerLane},
      { 512, 8,  1, 32, 32, 16, 16, kSlotsPerLane},
      {1024, 8,  1, 32, 32, 32, 16, kSlotsPerLane},
      {1024, 1,  1, 32, 32, 32,  1, kSlotsPerLane},
  };
};
template <> struct BackwardTable<float> {
  static constexpr KernelRow kRows[] = {
      // E up to, multiple of, K from, to, lanes, numbers per lane, longest vector, variants
      {  16, 1,  1, 16,  8,  2,  1, kSlotsPerLane},
      {  32, 4,  1, 16,  8,  4, 16, kSlotsPerLane},
      {  64, 8,  1, 16,  8,  8, 16, kSlotsPerLane},
      {  64, 1,  1, 16,  8,  8,  1, kSlotsPerLane},
      { 128, 8,  1,  6,  8, 16, 16, kSlotsPerLane},
      {  64, 1,  1, 32, 32,  2,  1, kSlotsPerLane},
      { 128, 4,  1, 32, 32,  4, 16, kSlotsPerLane},
      { 256, 8,  1, 32, 32,  8, 16, kSlotsPerLane},
      { 256, 1,  1, 32, 32,  8,  1, kSlotsPerLane},
      { 512, 8,  1, 32, 32, 16, 16, kSlotsPerLane},
      {1024, 8,  1, 32, 32, 32, 16, kSlotsPerLane},
      {1024, 1,  1, 32, 32, 32,  1, kSlotsPerLane},
  };
};

// Launches this variant of the row's kernel if it is the one that the slots call for.
template <typename Table, size_t kRow, int kVariant, typename Launch>
bool launch_variant(int slots, const Launch& launch) {
  constexpr KernelRow row = Table::kRows[kRow];
  if constexpr (row.needs(kVariant)) {
    if (row.variant(slots) != kVariant) return false;
    launch(std::integral_constant<size_t, kRow>(), std::integral_constant<int, kVariant>());
    return true;
  }
  return false;
}
template <typename Table, size_t kRow, typename Launch> bool launch_row(int experts, int slots, const Launch& launch) {
  return Table::kRows[kRow].takes(experts, slots) &&
         (launch_variant<Table, kRow, 0>(slots, launch) || launch_variant<Table, kRow, 1>(slots, launch) ||
          launch_variant<Table, kRow, 2>(slots, launch) || launch_variant<Table, kRow, 4>(slots, launch) ||
          launch_variant<Table, kRow, 8>(slots, launch) || launch_variant<Table, kRow, 16>(slots, launch) ||
          launch_variant<Table, kRow, 32>(slots, launch));
}
template <typename Table, typename Launch, size_t... kRow>
bool launch_first_row(int experts, int slots, const Launch& launch, std::index_sequence<kRow...>) {
  return (launch_row<Table, kRow>(experts, slots, launch) || ...);
}

// Calls launch(row, variant), both as constants, with the first row of the table that takes the call; false where none does.
// Every row is compiled with every variant that it needs, and with no other.
template <typename Table, typename Launch> bool launch_from(int experts, int slots, const Launch& launch) {
  constexpr KernelRow last = Table::kRows[std::size(Table::kRows) - 1];
  static_assert(last.max_experts == kMaxRouterExperts && last.multiple == 1, "the last row takes every number of experts");
  static_assert(last.min_slots == 1 && last.max_slots == kMaxRouterSlots, "and every number of slots");
  return launch_first_row<Table>(experts, slots, launch, std::make_index_sequence<std::size(Table::kRows)>());
}

}  // namespace
}  // namespace gbmoe
