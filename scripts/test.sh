#!/usr/bin/env bash
# The whole test suite, in the same environment as quickstart.sh, which it makes if it is missing. Arguments go to pytest.
set -euo pipefail
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

say "tests"
cd "$root"
exec "$python" -m pytest "$@"
