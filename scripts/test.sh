#!/usr/bin/env bash
# Runs the tests in the same environment as quickstart.sh, which it makes if it is missing.
#
#   scripts/test.sh            all but those marked `slow`: long trainings, Slurm's jobs, many groups of ranks, kernels that are emulated
#   scripts/test.sh --slow     those that are marked `slow`
#   scripts/test.sh --all      both
#   scripts/test.sh ARG...     arguments go to pytest, which then leaves nothing out: scripts/test.sh tests/test_slurm.py
#
# Tests are distributed to one process more than there are cores, or to as many as a GPU has memory for (scripts/test_processes.py); -n 0
# runs them in one, which a debugger needs.
set -euo pipefail
SECONDS_OF_ALL=780
extras=transformers,training  # gbmoe/compat/ is tested with the real packages
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

say "installing MegaBlocks"
"$python" -m gbmoe install-megablocks

processes=$("$python" "$root/scripts/test_processes.py")  # with one thread each
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
unset PYTHONDONTWRITEBYTECODE  # which images of containers set: hundreds of processes would compile the same files
if [[ $# == 1 && $1 == --slow ]]; then
  say "tests: those marked slow"
  set -- -m slow
elif [[ $# == 1 && $1 == --all ]]; then
  say "tests: all"
  shift
elif (($#)); then
  say "tests: pytest $*"
else
  set -- -m "not slow"
  # SECONDS_OF_ALL is the time in one process. The rest, imports, does not get shorter with more.
  cores=$(env -u OMP_NUM_THREADS nproc)
  busy=$((processes < cores ? processes : cores))
  say "tests: all but the slow ones, in about $(((SECONDS_OF_ALL / busy + 60) / 60 + 1)) minutes with $processes processes"
fi
cd "$root"
exec "$python" -m pytest -n "$processes" --dist loadgroup "$@"
