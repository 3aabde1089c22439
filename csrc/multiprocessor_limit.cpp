// The most multiprocessors that a persistent GEMM takes, one number for the process.

#include <atomic>
#include <climits>

#include "operators.h"

namespace gbmoe {

std::atomic<int> multiprocessor_limit{INT_MAX};

// At least 2, for clusters of two CTAs. Launches that are in a stream or a CUDA graph already keep their grids.
void limit_multiprocessors(int64_t most) { multiprocessor_limit = static_cast<int>(most); }

GBMOE_OPERATOR_WITHOUT_TENSORS(limit_multiprocessors, "(int most) -> ()");

}  // namespace gbmoe
