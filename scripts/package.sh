#!/usr/bin/env bash
# Tests the package as users get it: builds sdist and wheel, and installs each into a new environment without a checkout, with every
# extra. There it imports gbmoe and runs `gbmoe info`, `gbmoe verify`, `gbmoe bench` and `pip check`. Needs no GPU.
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
# From a copy of the files that git does not ignore, so that nothing else gets into the package and no build folder is left behind.
mkdir "$folder/tree"
git -C "$root" ls-files -z --cached --others --exclude-standard |
  tar -C "$root" --null --ignore-failed-read -T - -c | tar -C "$folder/tree" -x
"$python" -m build --outdir "$folder/dist" "$folder/tree" >"$folder/log" 2>&1 || { cat "$folder/log" >&2; exit 1; }
sdist=$(echo "$folder"/dist/*.tar.gz) wheel=$(echo "$folder"/dist/*.whl)
printf '%s\n' "${sdist##*/}" "${wheel##*/}"

say "installing the wheel with every extra"
"$python" -m pip install -q "${GBMOE_TORCH:-torch==2.13.0}"
"$python" -m pip install -q "${wheel}[bench,cli,plot,docs,test,lint,transformers]"
"$python" -m pip check
cd "$folder"  # from here on Python cannot find the checkout
files() {
  "$python" - <<'PY'
import importlib.metadata
installed = importlib.metadata.files("gbmoe")
print(*sorted(str(file) for file in installed if file.parts[0] == "gbmoe" and file.suffix != ".pyc"), sep="\n")
PY
}
files >wheel.files
for needed in gbmoe/py.typed gbmoe/csrc/operators.h gbmoe/csrc/hopper/grouped_gemm.cuh; do
  grep -qx "$needed" wheel.files || { echo "package.sh: expected $needed in the wheel" >&2; exit 1; }
done
tar -tf "$sdist" >sdist.files
grep -q '/benchmarks/__init__\.py$' sdist.files || { echo "package.sh: expected benchmarks/ in the sdist" >&2; exit 1; }
"$python" -m zipfile -l "$wheel" >everything.files
if grep '^benchmarks/' everything.files; then echo "package.sh: expected no benchmarks/ in the wheel" >&2; exit 1; fi
check() {
  "$python" - <<'PY'
import pathlib, sys
import gbmoe
assert pathlib.Path(gbmoe.__file__).is_relative_to(sys.prefix), gbmoe.__file__
PY
  "$python" -m gbmoe info
  "$python" -m gbmoe verify
  "$python" -m gbmoe bench --shape 64,32,48,4,2 --device cpu --quick --rivals bmm --json mine.json
  status=0
  "$python" -m gbmoe bench --suite layers || status=$?
  ((status == 2)) || { echo "package.sh: expected status 2 of a suite that a wheel has not, got $status" >&2; exit 1; }
}
check

say "installing the sdist in its place"
"$python" -m pip install -q --force-reinstall --no-deps "$sdist"
"$python" -m pip check
files | diff wheel.files -
"$python" -m gbmoe info >/dev/null
echo "the sdist installs the same $(wc -l <wheel.files) files as the wheel"
