# shellcheck shell=bash disable=SC1091,SC2034  # submit.sh and the jobs read what is set here
# A cluster that schedules by constraint: the partition follows from the features of the nodes that a job asks for.
# The software is a virtual environment on a file system that all nodes see. Copy this file, change it, and give the
# copy to submit.sh.

# Options of sbatch: for every job, for those that need GPUs, for those that need none.
every_job=(--account=my_project)
gpu_jobs=(--constraint=a100 --qos=gpu --hint=nomultithread)
cpu_jobs=(--constraint=cpu --mem=8G)

gpus_per_node=4  # of the nodes that gpu_jobs reach; 0: everything runs on CPUs, one process a node
gpu_type=        # where sbatch wants --gres=gpu:TYPE:N
cpus_per_gpu=8   # cores of each process; there is one a GPU

# Called first in every job: modules, variables, the environment.
activate() {
  module load cuda/12.9
  source "$HOME/venvs/gbmoe/bin/activate"
}

# What runs python there. PYTHONPATH holds this checkout: gbmoe itself need not be installed, torch does.
python=(python)
