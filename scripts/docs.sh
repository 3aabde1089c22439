#!/usr/bin/env bash
# Builds the documentation as a site in docs/_build/html, where a warning is an error, and looks at every page in headless Chromium
# (check_page_widths.py; without Chromium it says so, which only in CI is an error). It uses the same environment as quickstart.sh, and makes it
# if it is missing. Arguments go to sphinx-build. It needs no GPU.
set -euo pipefail
extras=docs,pages
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

say "documentation"
cd "$root"
rm -rf docs/_build/html  # pages that are no more
"$python" -m sphinx -W --keep-going -n -E -q -b html "$@" docs docs/_build/html
say "every page at three widths"
"$python" scripts/check_page_widths.py || { status=$?; [[ $status == 2 && ${CI:-} != true ]] || exit "$status"; }
echo "docs/_build/html/index.html"
