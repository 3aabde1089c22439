// Where the matrices of a stack [E,R,C] begin that do not follow each other at one distance, because they are tensors of their own.
//
// They are read and written as a stack is, by one address and a distance between matrices: the address is that of the lowest matrix, and the
// distance divides the offset of every other one. A table says how many distances each is away, and kernels take this where they take a
// group's number of a stack.
// The table travels with the launch, so that a CUDA graph has a copy and nothing has to be kept alive.

#pragma once

#include <algorithm>

namespace gbmoe {

constexpr int kMostPlaces = 256, kStack = -1;

struct Places {
  int count;  // 0: the matrices follow each other
  // Where the numbers of a second tensor's matrices begin: 0 where they are those of the first, kStack where it is a stack as any other.
  int second;
  int number[kMostPlaces];

  int last() const { return *std::max_element(number, number + count); }
  // The number of a group's matrix, of the first tensor or of the second.
  __device__ __forceinline__ int of(int group, int tensor = 0) const {
    return count == 0 || (tensor && second == kStack) ? group : number[tensor * second + group];
  }
};

}  // namespace gbmoe
