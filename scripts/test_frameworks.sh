#!/usr/bin/env bash
# Runs the tests of the adapters to torchtitan 0.3.0 and NeMo Automodel 0.7.0 in these packages, on a CPU, in an environment of their own.
# CI runs the same tests in tests/compat/interfaces/.
#
#   scripts/test_frameworks.sh [FOLDER]      the environment's folder (default: .venv-frameworks), kept for the next time
#
# The packages are installed without what they require, which excludes what the other requires, and with what their experts import.
set -euo pipefail
root=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=${1:-$root/.venv-frameworks}
python=$folder/bin/python
if ! "$python" -c 'import torch, torchtitan, nemo_automodel' 2>/dev/null; then
  "${GBMOE_PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    { echo "expected python3 3.11 or newer, as torchtitan does (set GBMOE_PYTHON)" >&2; exit 1; }
  "${GBMOE_PYTHON:-python3}" -m venv "$folder"
  "$python" -m pip install -q "${GBMOE_TORCH:-torch==2.13.0}" triton numpy 'pytest>=8,<9.2' pytest-xdist hypothesis \
    spmd_types==0.2.3 tyro einops safetensors tokenizers torchdata pyyaml
  "$python" -m pip install -q --no-deps torchtitan==0.3.0 nemo-automodel==0.7.0
fi
cd "$root"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONPATH=$root
"$python" -m pip list 2>/dev/null | grep -iE '^(torch|triton|torchtitan|nemo|spmd)'
exec "$python" -m pytest -n 0 -p no:cacheprovider tests/compat/test_torchtitan.py tests/compat/test_automodel.py
