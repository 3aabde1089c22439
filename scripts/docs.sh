#!/usr/bin/env bash
# Builds the documentation as a site in docs/_build/html; a warning is an error. It uses the same environment as quickstart.sh, and
# makes it if it is missing. Arguments go to sphinx-build. It needs no GPU.
set -euo pipefail
extras=docs
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

say "documentation"
cd "$root"
"$python" -m sphinx -W --keep-going -n -E -q -b html "$@" docs docs/_build/html
echo "docs/_build/html/index.html"
