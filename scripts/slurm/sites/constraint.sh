# shellcheck shell=bash disable=SC1091,SC2034  # submit.sh and the jobs read what is set here
# An example of a cluster that schedules by constraint: the features of the nodes that a job asks for determine its partition. The
# software is a virtual environment on a file system that all nodes share. Copy this file, change it, and give the copy to submit.sh.

# Options of sbatch for every job, for jobs that need GPUs, and for jobs that do not.
every_job=(--account=my_project)
gpu_jobs=(--constraint=a100 --qos=gpu --hint=nomultithread)
cpu_jobs=(--constraint=cpu --mem=8G)

gpus_per_node=4  # GPUs of a node that gpu_jobs select; with 0 everything runs on CPUs, in one process on each node
gpu_type=        # the TYPE, if sbatch needs --gres=gpu:TYPE:N
cpus_per_gpu=8   # cores of each process; there is one process for each GPU

# Called first in every job: modules, variables, the environment.
activate() {
  module load cuda/12.9
  source "$HOME/venvs/gbmoe/bin/activate"
}

# The command that runs python there. torch must be installed. gbmoe need not be: without one that was installed with its kernels
# compiled, PYTHONPATH has this checkout.
python=(python)
