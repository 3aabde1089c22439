#!/usr/bin/env bash
# Runs the tests of the adapters to torchtitan 0.3.0, NeMo Automodel 0.7.0, OLMo-core 3.0.0 and Megatron-Core 0.19.2 in these
# packages, on a CPU, in environments of their own, and those of the package for the hub with kernels 0.17.2. CI runs the tests of adapters in
# tests/compat/interfaces/.
#
#   scripts/test_frameworks.sh [FOLDER]      the environments' folder (default: .venv-frameworks), kept for the next time
#
# TransformerEngine is not installed, because it has to be compiled against the torch there, with a CUDA toolkit; so
# tests/compat/megatron/test_transformer_engine.py is skipped.
# Megatron-Core needs Python 3.12 or newer (GBMOE_PYTHON_MEGATRON names one; default: python3.12), and is left out where there is none.
# The packages are installed without what they require, which excludes what the others require, and with what their experts import.
set -euo pipefail
root=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=${1:-$root/.venv-frameworks}
python=$folder/bin/python
torch=("${GBMOE_TORCH:-torch==2.13.0}" numpy 'pytest>=8,<9.2' pytest-xdist hypothesis)
if ! "$python" -c 'import torch, torchtitan, nemo_automodel, olmo_core' 2>/dev/null; then
  "${GBMOE_PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    { echo "expected python3 3.11 or newer, as torchtitan does (set GBMOE_PYTHON)" >&2; exit 1; }
  "${GBMOE_PYTHON:-python3}" -m venv "$folder"
  "$python" -m pip install -q "${torch[@]}" triton spmd_types==0.2.3 tyro einops safetensors tokenizers torchdata pyyaml \
    omegaconf cached_path rich importlib_resources dataclass-extensions bettermap pandas
  "$python" -m pip install -q --no-deps torchtitan==0.3.0 nemo-automodel==0.7.0 ai2-olmo-core==3.0.0
fi
megatron=$folder/megatron/bin/python
newer=${GBMOE_PYTHON_MEGATRON:-python3.12}
if ! "$megatron" -c 'import torch, megatron.core' 2>/dev/null && "$newer" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
  "$newer" -m venv "$folder/megatron"
  "$megatron" -m pip install -q "${torch[@]}" triton packaging psutil
  "$megatron" -m pip install -q --no-deps megatron-core==0.19.2
fi
hub=$folder/hub/bin/python
if ! "$hub" -c 'import torch, transformers, kernels' 2>/dev/null; then
  "${GBMOE_PYTHON:-python3}" -m venv "$folder/hub"
  "$hub" -m pip install -q "${torch[@]}" transformers==5.24.0 kernels==0.17.2
fi

run() {  # with a Python and its tests
  "$1" -m pip list 2>/dev/null | grep -iE '^(torch|triton|torchtitan|nemo|spmd|ai2|megatron|transformers|kernels)'
  "$1" -m pytest -n 0 -p no:cacheprovider "${@:2}"
}
cd "$root"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONPATH=$root
run "$python" tests/compat/test_torchtitan.py tests/compat/test_torchtitan_moe.py tests/compat/test_automodel.py \
  tests/compat/test_olmo_core.py
run "$hub" tests/test_kernels_hub.py
if [ -x "$megatron" ]; then
  run "$megatron" tests/compat/megatron
else
  echo "Megatron-Core is left out: there is no $newer (set GBMOE_PYTHON_MEGATRON)" >&2
fi
