// What a launch hands to the kernel.
//
// Legend: M, N, K as in out [M,N] = a [M,K] @ b [K,N]; E groups (experts); P rows of all groups.

#pragma once

#include "../activation_formulas.cuh"
#include "../group_sizes.cuh"
#include "../pitch.cuh"
#include "../places.cuh"

namespace gbmoe::tensor_core {

struct Arguments {
  const void* sizes;     // [E], rows of each group; null: one group has all rows
  bool sizes_are_int64;  // else int32
  int groups;
  int rows;              // P: no group reaches beyond it, whatever its size says
  int size_m;            // M, k-grouped
  int size_n;            // N of one output tensor
  int size_k;            // K of one pair of operands, m-grouped
  int operand_pairs;     // that are summed
  int panel_tiles;       // the most tiles along M that are walked before the next along N
  ActivationOf activation;
  // m-grouped: a [P,K], and b [E,K,N], or [E,N,K] where it is contiguous along K; two of each where two pairs are summed, and b's
  // second is v1 under EpilogueKind::kGlu. k-grouped: a [P,M], b [P,N].
  const void *a[2], *b[2];
  Pitch pitch_b;  // m-grouped; of both
  // [P,N], or [E,M,N] k-grouped; under EpilogueKind::kActivation and kGlu a, h and g, of which h and g may be null.
  void* out[3];
  Pitch pitch_out;  // k-grouped
  Places places;    // m-grouped of both b's, k-grouped of the output's matrices
};

}  // namespace gbmoe::tensor_core
