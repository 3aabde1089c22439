# shellcheck shell=bash disable=SC2034  # the jobs read what is set here
# Every job sources this first, with the arguments that submit.sh gave the job: the checkout, the site file, the folder of the run, the
# suite, and options of `gbmoe bench` in one word. Afterwards the site's environment is active.
set -euo pipefail

root=$1 site=$2 run=$3 suite=$4
read -ra bench_options <<< "$5"
cd "$root"
# shellcheck source=scripts/slurm/sites/constraint.sh
source "$site"

printf '== %(%F %T)T  %s, job %s%s, restart %s, on %s\n' -1 "$SLURM_JOB_NAME" "$SLURM_JOB_ID" \
  "${SLURM_ARRAY_TASK_ID:+ (task $SLURM_ARRAY_TASK_ID)}" "${SLURM_RESTART_COUNT:-0}" "$(hostname)"

set +u  # modules and activate scripts read variables that are not set
activate
set -u
# A gbmoe that was installed with its kernels is taken as it is. Otherwise the checkout is, whose kernels are compiled into a cache.
installed=$("${python[@]}" scripts/slurm/installed_gbmoe.py) || installed=''
if [[ $installed == compiled:* ]]; then
  echo "== gbmoe is the installed one, compiled with its kernels, in ${installed#compiled:}"
  export GBMOE_CHECKOUT=$root  # a wheel has no benchmarks/
else
  export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$cpus_per_gpu}

# The device is named explicitly, so that a node whose GPU is broken fails instead of measuring its CPU.
device=cpu
if ((gpus_per_node)); then
  device=cuda
  export GBMOE_REQUIRE_EXTENSION=1
fi

configurations=$run/configurations.tsv  # of the suite: index, tab, name
# From the run's folder: with -m Python looks for modules in the current folder first, which would be the checkout.
gbmoe() { (cd "$run" && exec "${python[@]}" -m gbmoe "$@"); }
bench_words=(bench --suite "$suite" --device "$device" "${bench_options[@]}")
bench() { gbmoe "${bench_words[@]}" "$@"; }
# A suite that is measured in several processes together runs in one for each GPU of a node, or in two on CPUs.
if [[ $suite == parallel ]]; then
  bench() {
    (cd "$run" && exec "${python[@]}" -m torch.distributed.run --standalone --nproc-per-node="$((gpus_per_node ? gpus_per_node : 2))" \
      -m gbmoe "${bench_words[@]}" "$@")
  }
fi
