#!/usr/bin/env bash
# The package as a stranger gets it: sdist and wheel are built, and installed into a fresh environment without a checkout,
# with every extra. There gbmoe is imported, `gbmoe info` and `gbmoe verify` run and `pip check` is clean. Needs no GPU.
#
#   GBMOE_PYTHON, GBMOE_TORCH   as in setup_env.sh
set -euo pipefail
root=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
say() { printf '\n== %s\n' "$*"; }

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${GBMOE_PYTHON:-python3}" -m venv "$folder/environment"
python=$folder/environment/bin/python
"$python" -m pip install -q --upgrade pip build

say "building the sdist, and the wheel from it"
# A copy of what git knows, so that nothing else of the checkout gets in, and no build folder stays behind.
mkdir "$folder/tree"
git -C "$root" ls-files -z --cached --others --exclude-standard |
  tar -C "$root" --null --ignore-failed-read -T - -c | tar -C "$folder/tree" -x
"$python" -m build --outdir "$folder/dist" "$folder/tree" >"$folder/log" 2>&1 || { cat "$folder/log" >&2; exit 1; }
sdist=$(echo "$folder"/dist/*.tar.gz) wheel=$(echo "$folder"/dist/*.whl)
printf '%s\n' "${sdist##*/}" "${wheel##*/}"

say "installing the wheel with every extra"
"$python" -m pip install -q "${GBMOE_TORCH:-torch==2.13.0}"
"$python" -m pip install -q "${wheel}[cli,plot,docs,test,lint,transformers]"
"$python" -m pip check
cd "$folder"  # from here on no checkout is in reach
files() {
  "$python" - <<'PY'
import importlib.metadata
installed = importlib.metadata.files("gbmoe")
print(*sorted(str(file) for file in installed if file.parts[0] == "gbmoe" and file.suffix != ".pyc"), sep="\n")
PY
}
files >wheel.files
for needed in gbmoe/py.typed gbmoe/csrc/register.cpp gbmoe/csrc/hopper/grouped_gemm.cuh; do
  grep -qx "$needed" wheel.files || { echo "package.sh: expected $needed in the wheel" >&2; exit 1; }
done
check() {
  "$python" - <<'PY'
import pathlib, sys
import gbmoe
assert pathlib.Path(gbmoe.__file__).is_relative_to(sys.prefix), gbmoe.__file__
PY
  "$python" -m gbmoe info
  "$python" -m gbmoe verify
}
check

say "installing the sdist in its place"
"$python" -m pip install -q --force-reinstall --no-deps "$sdist"
"$python" -m pip check
files | diff wheel.files -
"$python" -m gbmoe info >/dev/null
echo "the sdist installs the same $(wc -l <wheel.files) files as the wheel"
