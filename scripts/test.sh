#!/usr/bin/env bash
# Runs the whole test suite in the same environment as quickstart.sh, which it makes if it is missing. Arguments go to pytest.
# Tests are distributed to one process more than there are cores, or to as many as a GPU has memory for (scripts/test_processes.py); -n 0
# runs them in one, which a debugger needs.
set -euo pipefail
SECONDS_OF_ALL=1400
extras=transformers  # gbmoe/compat/ is tested with the real packages
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

say "installing MegaBlocks"
"$python" -m gbmoe install-megablocks

processes=$("$python" "$root/scripts/test_processes.py")  # with one thread each
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
unset PYTHONDONTWRITEBYTECODE  # which images of containers set: hundreds of processes would compile the same files
if (($#)); then
  say "tests: pytest $*"
else
  # SECONDS_OF_ALL is the time in one process. The rest does not get shorter with more: imports, and the longest chain of Slurm jobs.
  cores=$(env -u OMP_NUM_THREADS nproc)
  busy=$((processes < cores ? processes : cores))
  say "tests: all of them, in about $(((SECONDS_OF_ALL / busy + 60) / 60 + 1)) minutes with $processes processes"
fi
cd "$root"
exec "$python" -m pytest -n "$processes" --dist loadgroup "$@"
