#!/usr/bin/env bash
# srun starts this on each node of train.sbatch. It runs torchrun, which starts a process for each GPU and connects to the torchruns of
# the other nodes at the first node.

# Slurm signals every process of a step, and USR1 would end this script, the site's activate and torchrun. It is ignored here before
# anything else, and so in all that follows, except in train_lm.py, which handles it.
trap '' USR1
set -euo pipefail  # as in job.sh, for the case that job.sh is not found
source scripts/slurm/job.sh "$@"

# Every node of the job can reach srun's own address, whatever the nodes' names are. A restart has a rendezvous id of its own.
exec "${python[@]}" -m torch.distributed.run \
  --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$((gpus_per_node ? gpus_per_node : 1))" --max-restarts=0 \
  --rdzv-backend=c10d --rdzv-endpoint="$SLURM_LAUNCH_NODE_IPADDR:$RENDEZVOUS_PORT" --rdzv-conf="is_host=$((SLURM_NODEID == 0))" \
  --rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" \
  scripts/train_lm.py --device "$device" --out "$run/train" "${@:6}"
