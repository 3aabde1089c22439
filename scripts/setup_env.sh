# shellcheck shell=bash
# Sourced by the other scripts: makes .venv once, with torch, and installs gbmoe into it. If an active environment (venv or conda) has
# torch, that environment is used instead, and gbmoe with its extras is installed into it. Afterwards $python is the interpreter.
#
#   GBMOE_PYTHON   interpreter to make .venv with (default: python3, 3.10 or newer)
#   GBMOE_BUILD    1: compile the CUDA extension or fail, 0: leave it out (default: compile it where there is an nvcc that fits torch)
#   GBMOE_TORCH    torch to install, e.g. "torch==2.11.0" (default: torch==2.13.0, whose build for this platform may support CUDA)
#   GBMOE_INSTALLED   a file of extras, one a line, that are installed and are not installed again; .ci/run sets it
#
# A script that sources this may set $extras to further optional dependencies of pyproject.toml, separated by commas.

root=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)  # with CDPATH set, cd may go to another folder and print it

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

extras=cli,plot,test${extras:+,$extras}
if [[ -z ${GBMOE_INSTALLED:-} ]] || tr , '\n' <<<"$extras" | grep -vxFf <(cat "$GBMOE_INSTALLED" 2>/dev/null) >/dev/null; then
  # torch is installed now, so the extension is compiled ahead of time if it is built for CUDA and there is an nvcc that fits. Without one
  # pip would refuse; gbmoe is then installed without kernels. With -e changes to the checkout take effect.
  "$python" -m pip install -q 'setuptools>=77' wheel
  if plan=$(cd "$root" && "$python" -m gbmoe.extension.install); then
    say "installing gbmoe ($("$python" -c 'import torch; print("torch", torch.__version__)')): $plan"
  elif [[ ${GBMOE_BUILD:-} || ${GBMOE_REQUIRE_EXTENSION:-} == 1 ]]; then
    say "gbmoe cannot be installed as asked for: $plan"
    exit 1
  else
    say "NO CUDA KERNELS will be installed: $plan; afterwards run this again, or: python -m gbmoe build"
    export GBMOE_BUILD=0
  fi
  "$python" -m pip install -q --no-build-isolation -e "${root}[$extras]"
  [[ -z ${GBMOE_INSTALLED:-} ]] || tr , '\n' <<<"$extras" >>"$GBMOE_INSTALLED"
fi
unset GBMOE_INSTALLED  # tests that run these scripts install what they install
