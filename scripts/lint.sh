#!/usr/bin/env bash
# Runs ruff on everything and mypy on the public interface, in the same environment as quickstart.sh, which it makes if it is missing.
# With a commit as argument (usually main) it also runs clang-format on the lines of csrc/ that differ from that commit.
set -euo pipefail
extras=lint
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
cd "$root"

say "ruff"
"$python" -m ruff check .
say "mypy"
"$python" -m mypy
if (($#)); then
  say "clang-format of what differs from $1"
  bin=$(dirname "$python")
  "$bin/git-clang-format" --binary "$bin/clang-format" --diff --extensions cu,cuh,cpp,h "$1" -- csrc
fi
