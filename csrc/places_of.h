// The table of places.cuh as an operator is given it.

#pragma once

#include <climits>
#include <cstdint>
#include <vector>

#include "common.cuh"
#include "places.cuh"

namespace gbmoe {

// `numbers`: none, where the matrices of a stack follow each other; or those of each group's matrix, then perhaps those of a second
// tensor's. The stack is the matrix with the lowest address then, [1,R,C], whose first stride is the distance.
inline Places places_of(const char* name, const std::vector<int64_t>& numbers, int64_t groups) {
  Places places{};
  if (numbers.empty()) return places;
  const auto count = static_cast<int64_t>(numbers.size());
  STD_TORCH_CHECK(
      count <= kMostPlaces && (count == groups || count == 2 * groups), name, ": places: expected ", groups, " or ", 2 * groups,
      " numbers, at most ", kMostPlaces, ", got ", count);
  places.count = static_cast<int>(count);
  places.second = count == groups ? 0 : static_cast<int>(groups);
  for (int64_t i = 0; i < count; ++i) {
    STD_TORCH_CHECK(
        numbers[i] >= 0 && numbers[i] < INT_MAX, name, ": places: expected numbers from 0 to 2^31 - 2, got ", numbers[i]);
    places.number[i] = static_cast<int>(numbers[i]);
  }
  return places;
}

}  // namespace gbmoe
