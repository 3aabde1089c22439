#!/usr/bin/env bash
# Runs the tests that need a GPU, for those who change a kernel.
#
#   scripts/test_gpu.sh [PART...]     all parts in this order, or those that are named:
#     tests      tests marked `gpu`, in as many processes as test_processes.py says
#     two-gpus   tests in which each rank has a GPU; left out, with a message, where there is one GPU, unless GBMOE_TEST_SHARE_GPU=1
#     large      tests that need most of an H200's memory, one by one
#     memcheck   tests marked `memcheck`, under compute-sanitizer
#
# It installs nothing: the active python, or the one that PYTHON names, must have torch with CUDA, pytest, pytest-xdist and hypothesis.
# The extension is compiled first, if it is missing. Every part runs even if one before it failed; the status is 1 if any failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} GBMOE_TEST_REQUIRE_CUDA=1 GBMOE_REQUIRE_EXTENSION=1

processes=$("$python" scripts/test_processes.py)
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
# Tests that start a process for each GPU, or use several; nothing else may run at the same time.
on_two_gpus=(tests/test_fsdp.py tests/parallel)

run_tests() { "$python" -m pytest --quiet --tb=short "$@"; }

tests() {
  local ignored=("${on_two_gpus[@]/#/--ignore=}")
  OMP_NUM_THREADS=1 run_tests -m "gpu and not large" -n "$processes" --dist loadgroup "${ignored[@]}"
}

two-gpus() {
  if ((gpus < 2)) && [[ ${GBMOE_TEST_SHARE_GPU-} != 1 ]]; then
    echo "== two-gpus: left out, this machine has $gpus"
    return 0
  fi
  run_tests -m "gpu and not large" -n 0 "${on_two_gpus[@]}"
}

large() { PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True run_tests -m large -n 0; }

memcheck() {
  # Without torch's caching allocator, which would hide accesses just after the end of a tensor. Processes that a test starts are not checked.
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \
    "$python" -m pytest --quiet --tb=short -m "gpu and memcheck" -n 0
}

"$python" -c 'from gbmoe import extension; print(extension.load())'
failed=()
(($#)) || set -- tests two-gpus large memcheck
for part in "$@"; do
  if [[ ! $part =~ ^(tests|two-gpus|large|memcheck)$ ]]; then
    echo "test_gpu.sh: expected tests, two-gpus, large or memcheck, got '$part'" >&2
    exit 2
  fi
  echo "== $part"
  "$part" || failed+=("$part")
done
((${#failed[@]} == 0)) || { echo "== failed: ${failed[*]}"; exit 1; }
