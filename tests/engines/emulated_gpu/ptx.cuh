// Stands in for csrc/tensor_core/ptx.cuh: the same functions, as the PTX manual defines their instructions. Reads of shared memory
// fail where lanes that read at the same time would meet in a bank.

#pragma once

#include "../common.cuh"

namespace gbmoe::tensor_core {

inline uint32_t shared_address(const void*) { return 0; }

inline void cp_async_16(uint32_t to, const void* from, bool exists) {
  const emulated_gpu::Copy copy{to, from, exists};
  emulated_gpu::cta.fibers[emulated_gpu::thread].open_group.push_back(copy);
  if (!emulated_gpu::run.late_copies) emulated_gpu::write(copy);
}
inline void cp_async_commit() {
  auto& fiber = emulated_gpu::cta.fibers[emulated_gpu::thread];
  fiber.groups.push_back(std::move(fiber.open_group));
  fiber.open_group.clear();
}
template <int kPending> void cp_async_wait() {
  auto& fiber = emulated_gpu::cta.fibers[emulated_gpu::thread];
  for (; static_cast<int>(fiber.groups.size()) > kPending; fiber.groups.pop_front()) {
    if (emulated_gpu::run.late_copies) for (const auto& copy : fiber.groups.front()) emulated_gpu::write(copy);
  }
}

template <int> void await_turn(int warp) { emulated_gpu::await_turn(warp); }
template <int> void pass_turn(int to_warp) { emulated_gpu::pass_turn(to_warp); }

inline int load_in_place(const int* from) { return *from; }
inline uint4 load_once_16(const void* from) {
  emulated_gpu::check_read(from);
  return *static_cast<const uint4*>(from);
}

template <typename T> T at(uint64_t address) {
  T value;
  if (address + sizeof(T) > emulated_gpu::shared_limit) emulated_gpu::fail("a read beyond the shared memory");
  std::memcpy(&value, emulated_gpu::shared_memory + address, sizeof(T));
  return value;
}

// `bytes` from each of these addresses are read at the same time.
template <typename F> void check_banks(int addresses, int bytes, const F& address) {
  uint32_t taken = 0;
  for (int i = 0; i < addresses; ++i) {
    if (address(i) % bytes) emulated_gpu::fail("a read from an address that is not aligned");
    for (int word = 0; word < bytes / 4; ++word) taken |= 1u << (address(i) / 4 + word) % 32;
  }
  if (taken != ~0u) emulated_gpu::fail("a bank conflict");
}

inline void load_matrices(uint32_t (&fragment)[4], uint32_t row, bool transposed) {
  const auto rows = emulated_gpu::exchange(&row, 1);
  const int lane = emulated_gpu::thread % 32;
  for (int matrix = 0; matrix < 4; ++matrix) {
    if (lane == 0) check_banks(8, 16, [&](int i) { return rows[8 * matrix + i][0]; });
    uint16_t pair[2];
    for (int i = 0; i < 2; ++i) {
      const int major = lane / 4, minor = 2 * (lane % 4) + i;
      pair[i] = at<uint16_t>(rows[8 * matrix + (transposed ? minor : major)][0] + 2 * (transposed ? major : minor));
    }
    fragment[matrix] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
  }
}
inline void ldmatrix_x4(uint32_t (&fragment)[4], uint32_t row) { load_matrices(fragment, row, false); }
inline void ldmatrix_x4_transposed(uint32_t (&fragment)[4], uint32_t row) { load_matrices(fragment, row, true); }
inline uint32_t load_shared_4(uint32_t from) {
  const auto addresses = emulated_gpu::exchange(&from, 1);
  if (emulated_gpu::thread % 32 == 0) check_banks(32, 4, [&](int i) { return addresses[i][0]; });
  return at<uint32_t>(from);
}

// The elements of a register: two of 16 bits, or one in TF32.
template <typename T> void unpack(uint32_t word, float* elements) {
  if (sizeof(T) == 4 && word & 0x1fff) emulated_gpu::fail("an operand of mma that was not rounded to TF32");
  T values[4 / sizeof(T)];
  std::memcpy(values, &word, 4);
  for (T value : values) *elements++ = static_cast<float>(value);
}

template <typename T> void mma(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  constexpr int kOfWord = 4 / sizeof(T), kHalf = 4 * kOfWord;  // elements of a register; terms of half a step
  float own[6 * kOfWord];
  for (int i = 0; i < 6; ++i) unpack<T>(i < 4 ? a[i] : i == 4 ? b0 : b1, own + i * kOfWord);
  const auto of_lane = emulated_gpu::exchange(own, 6 * kOfWord);
  const int lane = emulated_gpu::thread % 32;
  double exact[4] = {sums[0], sums[1], sums[2], sums[3]};  // of rows lane / 4 and 8 more, and of two columns
  for (int k = 0; k < 2 * kHalf; ++k) {
    const int of_four = k % kHalf / kOfWord, half = k / kHalf, place = k % kOfWord;
    for (int i = 0; i < 4; ++i) {
      exact[i] += static_cast<double>(of_lane[lane / 4 * 4 + of_four][(i / 2 + half * 2) * kOfWord + place]) *
                  of_lane[(2 * (lane % 4) + i % 2) * 4 + of_four][(4 + half) * kOfWord + place];
    }
  }
  for (int i = 0; i < 4; ++i) sums[i] = static_cast<float>(exact[i]);
}

inline uint32_t round_to_tf32(uint32_t bits) {
  const bool finite = (bits & 0x7f800000) != 0x7f800000;
  return (finite ? bits + 0x1000 : bits) & ~0x1fffu;
}

}  // namespace gbmoe::tensor_core
