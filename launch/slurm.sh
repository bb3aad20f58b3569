#!/usr/bin/env bash
# Trains on the GPUs of a SLURM cluster: submits a batch job that continues in a new job when its time is up, until the
# command ends. `usage` below says how.
#
# One process has all of one node's GPUs. Over several nodes there is one a GPU, as JAX expects under SLURM.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

name='' nodes=1 gpus='' time='' cpus='' partition='' account='' image='' log='' lines=100

usage() {
  cat <<'END'
usage: ./launch/slurm.sh COMMAND --name=NAME [flags] [-- command]

  submit  submit the command after --; it starts again where its workdir stopped when SLURM's time for it is up or
          another job takes its nodes
  script  print the batch script
  logs    follow the job's output
  status  the job in the queue
  cancel  ask, and cancel the job; the command is told by SIGTERM first

  --nodes=1
  --gpus=N            on each node
  --cpus=N            on each node, for reading data; default: the cluster's own, often one a process
  --time=D-HH:MM:SS   for one job
  --partition=NAME, --account=NAME   default: the cluster's own
  --image=IMAGE       a container image, for clusters with pyxis; default: .venv here, which must be on a shared disk
  --log=FILE          default: NAME.log here
  --lines=100         how much of the log's end logs begins with
  --yes               don't ask
  --dry_run           print the commands in place of running them
  --flagfile=FILE     more flags, one a line

Set .venv up first, on a login node: TPU_TRAIN_EXTRAS=cuda ./launch/local.sh train --help
END
}

# SLURM sends USR1 to the script two minutes before the time is up; the command gets SIGTERM, saves and leaves, and the
# job goes back into the queue. A job that was cancelled gets no USR1, so it stays cancelled.
script() {
  local step=(srun --kill-on-bad-exit=1 ${cpus:+"--cpus-per-task=$((cpus * nodes / processes))"})
  if [[ -n $image ]]; then
    step+=("--container-image=$image" "--container-mounts=$PWD" "--container-workdir=$PWD")
  fi
  cat <<END
#!/usr/bin/env bash
set -uo pipefail
export TPU_TRAIN_PROCESSES=$processes PYTHONUNBUFFERED=1
END
  if [[ -z $image ]]; then printf "export PATH=%s:\$PATH\n" "$(quoted "$repo/.venv/bin")"; fi
  cat <<END
time_is_up=
trap 'time_is_up=yes; kill -TERM "\$step"' USR1
$(quoted "${step[@]}" "${command[@]}") &
step=\$!
while kill -0 "\$step" 2>/dev/null; do wait "\$step"; done
wait "\$step"
status=\$?
if [[ -n \$time_is_up && \$status != 0 ]]; then exec scontrol requeue "\$SLURM_JOB_ID"; fi
exit "\$status"
END
}

submit() {
  local options=("--job-name=$name" "--nodes=$nodes" "--ntasks-per-node=$((processes / nodes))" "--gpus-per-node=$gpus"
    "--time=$time" "--output=$log" --open-mode=append --requeue --signal=B:USR1@120)
  if [[ -n $cpus ]]; then options+=("--cpus-per-task=$((cpus * nodes / processes))"); fi
  if [[ -n $partition ]]; then options+=("--partition=$partition"); fi
  if [[ -n $account ]]; then options+=("--account=$account"); fi
  if [[ -n $dry_run ]]; then
    show_fed "$(script)" sbatch "${options[@]}"
  else
    [[ -n $image || -x $repo/.venv/bin/tpu-train ]] ||
      refuse "$repo/.venv is not set up: TPU_TRAIN_EXTRAS=cuda ./launch/local.sh train --help does it; or give --image"
    script | sbatch "${options[@]}"
  fi
}

main() {
  local action=${1:-} pattern='^([0-9]+-)?[0-9]+(:[0-9]+){0,2}$'
  case $action in
  -h | --help | help)
    usage
    exit
    ;;
  submit | script | logs | status | cancel) shift ;;
  *)
    usage >&2
    exit 2
    ;;
  esac
  parse_flags "name nodes gpus cpus time partition account image log lines" "yes dry_run" "$@"
  check_name
  check_number lines "$lines" 0
  log=${log:-$PWD/$name.log}
  # sbatch reads % and \ in the name of the log as patterns.
  [[ $log != *[%\\]* ]] || refuse "--log=$log: SLURM reads % and \\ in it as patterns; choose another"
  case $action in
  submit | script)
    check_number nodes "$nodes" 1
    check_number gpus "$gpus" 1
    if [[ -n $cpus ]]; then check_number cpus "$cpus" "$gpus"; fi
    [[ $time =~ $pattern ]] || refuse "--time=$time is no time for SLURM, such as --time=1-00:00:00"
    ((${#command[@]})) || refuse "$action needs a command after --, as in: -- tpu-train train --config=configs/tiny.py"
    processes=1
    if ((nodes > 1)); then processes=$((nodes * gpus)); fi
    ;;
  *) ((${#command[@]} == 0)) || refuse "$action takes no command after --" ;;
  esac
  if [[ $action != script && $action != logs ]]; then needs sbatch "run this on a login node of the cluster"; fi
  case $action in
  submit | script) "$action" ;;
  logs) call tail -n "$lines" -F "$log" ;;
  status) call squeue --me "--name=$name" ;;
  cancel)
    confirm "Cancel the jobs named $name?"
    call scancel --me "--name=$name"
    ;;
  esac
}

main "$@"
