#!/usr/bin/env bash
# Compiles csrc/ for every generation of GPUs and checks the result (check_csrc.py, which gets the arguments), in the same environment as
# quickstart.sh, which it makes if it is missing. It needs nvcc and no GPU.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

# If the toolkit lacks cuBLAS' headers, they are installed from their wheel.
"$python" - <<'PY' || "$python" -m pip install -q nvidia-cublas
import sys
from gbmoe.extension import build
try:
    nvcc = build.Nvcc.find()
    build.include_flags(nvcc, build.Torch.imported())
except (build.CompileError, AttributeError):
    sys.exit(1)
PY
say "csrc"
"$python" "$root/scripts/check_csrc.py" "$@"
