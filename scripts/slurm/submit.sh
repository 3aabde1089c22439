#!/usr/bin/env bash
# Submits the jobs build -> bench (an array) -> merge, and build -> train, and prints their numbers. README.md has the details.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: scripts/slurm/submit.sh SITE_FILE [options] [-- arguments of scripts/train_lm.py]

  --suite NAME   suite of `python -m gbmoe bench` (default: smoke)
  --bench WORDS  further options of `gbmoe bench` in one word, e.g. --bench '--dtype fp16 --memory-limit 16'
  --tasks N      array tasks that share the suite's configurations (default: 8)
  --nodes N      number of nodes of the training (default: 1)
  --expert-parallel  spread every layer's experts over the GPUs of all nodes of the training
  --time LIMIT   time limit of one training job, which is requeued until the training has ended (default: 01:00:00)
  --run FOLDER   where results and logs go (default: runs/slurm/NAME)
  --only JOBS    submit only some of build,bench,merge,train, with commas between them (default: all)
  --dry-run      print the commands and submit nothing
TEXT
}

fail() {
  echo "submit.sh: $*" >&2
  exit 2
}

number() { [[ $2 =~ ^[1-9][0-9]*$ ]] || fail "$1: expected a number greater than 0, got '$2'"; }

root=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)  # with CDPATH set, cd may go to another folder and print it
site='' suite=smoke bench='' tasks=8 nodes=1 time=01:00:00 run='' only=build,bench,merge,train dry_run=''
expert_parallel=()
while (($#)); do
  case $1 in
    --suite | --bench | --tasks | --nodes | --time | --run | --only)
      (($# > 1)) || fail "$1: expected a value, got none"
      printf -v "${1#--}" %s "$2"
      shift 2
      ;;
    --expert-parallel) expert_parallel=(--expert-parallel); shift ;;
    --dry-run) dry_run=yes; shift ;;
    -h | --help) usage; exit ;;
    --) shift; break ;;
    -*) usage >&2; fail "unknown option $1" ;;
    *)
      [[ ! $site ]] || fail "expected one site file, got '$site' and '$1'"
      site=$1
      shift
      ;;
  esac
done
train_arguments=("${expert_parallel[@]}" "$@")

[[ $site ]] || { usage >&2; fail "expected a site file; examples are in scripts/slurm/sites"; }
[[ -r $site ]] || fail "expected a site file that can be read, got '$site'"
[[ $suite =~ ^(smoke|nyu|layers|float8|transformers|gemm|permute|scaling|inference|host|parallel)$ ]] ||
  fail "--suite: expected smoke, nyu, layers, float8, transformers, gemm, permute, scaling, inference, host or parallel, got '$suite'"
number --tasks "$tasks"
number --nodes "$nodes"
for job in ${only//,/ }; do
  [[ $job =~ ^(build|bench|merge|train)$ ]] || fail "--only: expected build, bench, merge or train, got '$job'"
done
site=$(realpath "$site")
run=$(realpath --canonicalize-missing "${run:-$root/runs/slurm/$suite}")

# shellcheck source=scripts/slurm/sites/constraint.sh
source "$site"
for name in every_job gpu_jobs cpu_jobs gpus_per_node cpus_per_gpu python; do
  declare -p "$name" &>/dev/null || fail "expected $site to set $name"
done
declare -F activate >/dev/null || fail "expected $site to define the function activate"
[[ $suite != parallel || $gpus_per_node != 1 ]] || fail "--suite parallel: expected a site with several GPUs on a node, or none, got 1"
[[ $dry_run ]] || command -v sbatch >/dev/null || fail "expected Slurm's sbatch, found none on PATH; --dry-run prints the commands"

# gpus N: sets `options` to those for N GPUs of a node and the cores that belong to them.
gpus() {
  options=("${gpu_jobs[@]}" --cpus-per-task="$(($1 * cpus_per_gpu))")
  if ((gpus_per_node)); then options+=(--gres="gpu:${gpu_type:+$gpu_type:}$1"); fi
}

declare -A ids=()

# give_up JOB: a job was refused. Those before it are cancelled, and the folders that were made for it removed.
give_up() {
  if ((${#ids[@]})); then scancel "${ids[@]}" || true; fi
  if [[ $made ]]; then (cd "$existing" && rmdir --parents "$made") || true; fi
  fail "expected sbatch to take the job $1, see above: no job was left in the queue"
}

# submit JOB LOG DEPENDENCY [options of sbatch]
submit() {
  local job=$1 log=$2 dependency=$3
  [[ ,$only, == *,$job,* ]] || return 0
  local command=(
    sbatch --parsable --job-name="gbmoe-$job-$(basename "$run")" --chdir="$root" --output="$run/logs/$log"
    ${dependency:+--dependency="$dependency" --kill-on-invalid-dep=yes} "${every_job[@]}" "${@:4}"
    "$root/scripts/slurm/$job.sbatch" "$root" "$site" "$run" "$suite" "$bench"
  )
  if [[ $job == train ]]; then command+=("${train_arguments[@]}"); fi
  if [[ $dry_run ]]; then
    ids[$job]=${job^^}_ID
    printf '%-5s ' "$job"
    printf ' %q' "${command[@]}"
    printf '\n'
  else
    local id
    id=$("${command[@]}") || give_up "$job"
    ids[$job]=${id%%;*}  # a federation adds the cluster's name
    printf '%-5s  %s\n' "$job" "${ids[$job]}"
  fi
}

# after CONDITION JOB: prints the dependency on a job, if this command submits it.
after() { if [[ ${ids[$2]:-} ]]; then echo "$1:${ids[$2]}"; fi; }

existing=$run/logs  # or the nearest folder above it that is there
while [[ ! -e $existing ]]; do existing=$(dirname "$existing"); done
made=${run#"$existing/"}/logs
if [[ $existing == "$run/logs" ]]; then made=''; elif [[ $existing == "$run" ]]; then made=logs; fi
if [[ ! $dry_run ]]; then mkdir -p "$run/logs"; fi
gpus 1
submit build build-%j.log '' "${options[@]}"
built=$(after afterok build)
if [[ $suite == parallel && $gpus_per_node -gt 0 ]]; then gpus "$gpus_per_node"; fi
submit bench bench-%A_%a.log "$built" "${options[@]}" --array="0-$((tasks - 1))"
submit merge merge-%j.log "$(after afterany bench)" "${cpu_jobs[@]}"
gpus "$((gpus_per_node ? gpus_per_node : 1))"
# singleton: jobs of the same name run one at a time, because they share a checkpoint.
submit train train-%j.log "${built:+$built,}singleton" "${options[@]}" --nodes="$nodes" --time="$time"
if [[ ! $dry_run ]]; then echo "results and logs: $run"; fi
