# shellcheck shell=bash disable=SC2034  # submit.sh and the jobs read what is set here
# An example of a cluster that schedules by partition, with typed GPUs. The software is a container. Copy this file, change it, and
# give the copy to submit.sh; constraint.sh explains each line.

every_job=(--account=my_project)
gpu_jobs=(--partition=gpu --mem-per-cpu=8G)
cpu_jobs=(--partition=standard --mem=8G)

gpus_per_node=8
gpu_type=h200
cpus_per_gpu=12

activate() {
  module load apptainer
  # The home directory is mounted by default; the checkout may be elsewhere.
  export APPTAINER_BIND=$PWD
}

# The container needs torch and, to compile gbmoe's kernels, nvcc.
python=(apptainer exec --nv "$HOME/images/pytorch-cuda-devel.sif" python)
