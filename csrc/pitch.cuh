// How far apart the rows of a stack of matrices [E,R,C] lie, which are contiguous themselves.

#pragma once

#include <cstdint>

namespace gbmoe {

struct Pitch {
  int row;        // elements from one row to the next
  int64_t group;  // and from one matrix to the next
};

}  // namespace gbmoe
