#!/usr/bin/env bash
# One node's part of train.sbatch, started by srun: torchrun, which starts a process a GPU and meets the other nodes'
# at the first node.

# Slurm signals every process of a step, and this script, the site's activate and torchrun would die of USR1. Ignored here,
# first of all, it stays ignored in all that follows, but for train_lm.py, which handles it.
trap '' USR1
set -euo pipefail  # job.sh says so too, if it is found
source scripts/slurm/job.sh "$@"

# Below the ports that the kernel gives out itself; two jobs that share a node have different numbers.
port=$((10000 + SLURM_JOB_ID % 20000))

# srun's own address is one that every node of the job reaches, whatever their names. A restart is another rendezvous.
exec "${python[@]}" -m torch.distributed.run \
  --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$((gpus_per_node ? gpus_per_node : 1))" --max-restarts=0 \
  --rdzv-backend=c10d --rdzv-endpoint="$SLURM_LAUNCH_NODE_IPADDR:$port" --rdzv-conf="is_host=$((SLURM_NODEID == 0))" \
  --rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" \
  scripts/train_lm.py --device "$device" --out "$run/train" "${@:6}"
