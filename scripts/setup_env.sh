# shellcheck shell=bash
# Sourced by quickstart.sh and test.sh: makes .venv once, with a torch that suits the machine, and installs gbmoe into it.
#
#   GBMOE_PYTHON   interpreter to make .venv from (default: python3, 3.10 or newer)
#   GBMOE_TORCH    requirement to install, e.g. "torch==2.11.0" (default: torch==2.13.0; a GPU is served by the CUDA build
#                  that the registry offers under that name)
#
# $extras, where the sourcing script sets it, names more of pyproject.toml's optional dependencies, separated by commas.
# Afterwards: $python is the environment's interpreter. Where an active environment
# (venv or conda) has torch, that one is used, and gbmoe with its extras is installed into it.

root=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)  # with CDPATH cd may go elsewhere, and prints where

say() { printf '\n== %s\n' "$*"; }

active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
if [[ -n "$active" ]] && "$active/bin/python" -c 'import torch' 2>/dev/null; then
  python=$active/bin/python
else
  python=$root/.venv/bin/python
  if ! "$python" -c 'import torch' 2>/dev/null; then
    say "making $root/.venv"
    "${GBMOE_PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
      { echo "expected python3 3.10 or newer (set GBMOE_PYTHON)" >&2; exit 1; }
    "${GBMOE_PYTHON:-python3}" -m venv "$root/.venv"
    "$python" -m pip install -q --upgrade pip 'setuptools>=77' wheel
    "$python" -m pip install -q "${GBMOE_TORCH:-torch==2.13.0}"
  fi
fi

# Torch is there now, so the extension is compiled ahead of time where it can be; -e keeps the checkout the one source.
"$python" -m pip install -q 'setuptools>=77' wheel
say "installing gbmoe ($("$python" -c 'import torch; print("torch", torch.__version__)'))"
"$python" -m pip install -q --no-build-isolation -e "${root}[cli,plot,test${extras:+,$extras}]"
