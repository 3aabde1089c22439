#!/usr/bin/env bash
# Goes from a fresh checkout to a trained model: makes an environment, installs gbmoe, runs `gbmoe verify`, and trains a language model
# on real text. Arguments go to scripts/train_lm.py. setup_env.sh lists the variables that can be set.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

say "what runs here"
"$python" -m gbmoe info
say "every operator and engine against the reference"
"$python" -m gbmoe verify
say "training a small language model"
# exec, so that signals reach the training. A waiting shell would be ended by them and leave the training running.
exec "$python" "$root/scripts/train_lm.py" --out "$root/runs/quickstart" "$@"
