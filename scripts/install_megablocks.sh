#!/usr/bin/env bash
# Installs MegaBlocks 0.10.0 and stanford-stk 0.7.1, unmodified, and keeps the torch that is installed. It needs neither a GPU nor nvcc,
# and does nothing where both are installed already.
#
#   scripts/install_megablocks.sh [python]     interpreter of the environment (default: python3)
#
# MegaBlocks pins torch 2.7.0, and its CUDA extension does not compile with CUDA 13. So pip installs only those of its requirements
# that are imported, and its setup.py sees a stand-in torch without CUDA, for which it builds a pure-Python wheel. pip may warn later
# that megablocks requires torch<2.7.1; it works with newer ones.
#
# Then, in Python, before the first import of megablocks:
#
#   import gbmoe.compat.megablocks
#   gbmoe.compat.megablocks.register()
set -euo pipefail

python=${1:-python3}
fail() { echo "install_megablocks.sh: $*" >&2; exit 1; }
command -v "$python" >/dev/null || fail "expected a Python interpreter, found no command $python"
has() { "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)"; }
has pip || fail "expected pip in the environment of $python, found none"
has torch || fail "expected torch in the environment of $python, found none: install one that suits this machine first"

torch=$(mktemp -d)
trap 'rm -rf "$torch"' EXIT
mkdir -p "$torch/torch/utils"
echo "__version__ = '0'" >"$torch/torch/__init__.py"
echo "CUDA_HOME = BuildExtension = CUDAExtension = None" >"$torch/torch/utils/cpp_extension.py"

"$python" -m pip install -q 'setuptools>=70.1' numpy packaging
# Without pip's cache, which may hold a wheel with the extension, and must not get one without it.
PYTHONPATH=$torch${PYTHONPATH:+:$PYTHONPATH} "$python" -m pip install -q --no-cache-dir --no-deps --no-build-isolation \
  megablocks==0.10.0 stanford-stk==0.7.1
has gbmoe || echo "install_megablocks.sh: gbmoe itself is not in the environment of $python: pip install ." >&2
