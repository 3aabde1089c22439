#!/usr/bin/env bash
# From a fresh checkout to a trained model: environment, gbmoe, `gbmoe verify`, and a language model on real text.
# Arguments go to scripts/train_lm.py. See setup_env.sh for what can be set.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

say "what runs here"
"$python" -m gbmoe info
say "every operator and engine against the reference"
"$python" -m gbmoe verify
say "training a small language model"
# exec, so that a signal reaches the training: a shell that waits would die of it alone, and leave the training behind.
exec "$python" "$root/scripts/train_lm.py" --out "$root/runs/quickstart" "$@"
