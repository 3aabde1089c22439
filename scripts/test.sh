#!/usr/bin/env bash
# The whole test suite, in the same environment as quickstart.sh, which it makes if it is missing. Arguments go to pytest.
# Tests are shared among as many processes as there are cores; -n 0 runs them in one, as a debugger wants it.
set -euo pipefail
SECONDS_OF_ALL=780
extras=transformers  # gbmoe/compat/ is tested in the packages that it adapts to
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

# The tests compile csrc/ wherever nvcc is; a toolkit without cuBLAS' headers gets them from their wheel.
if command -v nvcc >/dev/null; then
  "$python" - <<'PY' || "$python" -m pip install -q nvidia-cublas
import sys
from gbmoe import _compile
try:
    nvcc = _compile.Nvcc.find()
    _compile.include_flags(nvcc, _compile.Torch.imported())
except (_compile.CompileError, AttributeError):
    sys.exit(1)
PY
fi
say "installing MegaBlocks"
"$root/scripts/install_megablocks.sh" "$python"

# A process a core, ten at most, which is what one GPU has room for; `-n 0` runs the tests in one. One thread a process.
processes=$(nproc)
((processes <= 10)) || processes=10
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if (($#)); then
  say "tests: pytest $*"
else
  # SECONDS_OF_ALL in one process, and what does not get shorter: imports, and the longest chain of Slurm jobs.
  say "tests: all of them, in about $(((SECONDS_OF_ALL / processes + 60) / 60 + 1)) minutes with $processes processes"
fi
cd "$root"
exec "$python" -m pytest -n "$processes" --dist loadgroup "$@"
