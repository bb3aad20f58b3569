#!/usr/bin/env bash
# Trains on Cloud TPU VMs, one slice or several: requests them as a queued resource, installs this tree on every host,
# runs a command on all of them, follows it, and starts it again after a preemption. `usage` below says how.
#
# The command runs detached on the hosts (worker.sh), so a lost connection ends the view of it and not the run.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

name='' zone='' reserved='' runtime='' prepare='' restarts=20 poll=30 lines=100

usage() {
  cat <<'END'
usage: ./launch/tpu_vm.sh COMMAND --name=NAME --zone=ZONE --topology=GENERATION:SHAPE [flags] [-- command]

  create   show the cost, ask, request the slices and wait until they are there
  setup    copy the code to every host and install it there
  run      start the command after -- on every host and follow it; after a preemption create, set up and start again
  logs     follow the command that runs, or show how the last one ended
  stop     ask the command to save and leave (SIGTERM)
  status   the state of the request and of each slice
  delete   ask, and delete the slices with all that is on them

  --topology=v6e:2x4   v4, v5e, v5p or v6e, and the chips of one slice
  --slices=1
  --project=ID         default: gcloud's own
  --spot, --reserved   whose capacity; default: on demand
  --price=USD          of a chip-hour; default: the list price where one is known
  --hours=H            show the cost of so many hours too; no limit, the slices stay until they are deleted
  --runtime=VERSION    of the image; default: what Google names for the generation
  --create_flag=FLAG   passed on to gcloud's create, such as --network=NAME; may be repeated
  --prepare=FILE       a script that setup runs on every host when all is installed, for example to mount a bucket
  --restarts=20        how many preemptions run gets over
  --lines=100          how much of the log's end logs begins with
  --poll=30            seconds between looks at the state
  --yes                don't ask
  --dry_run            print the commands in place of running them
  --flagfile=FILE      more flags, one a line

The command runs with what xla_flags.tsv recommends for the generation as LIBTPU_INIT_ARGS, or, where your environment
has that variable, with yours. A run continues after a preemption only if its workdir outlives the slice: a mounted
bucket, for example.
END
}

# gcloud compute tpus ..., in the zone and project. It is given nothing to read, since ssh would take what comes next.
tpus() {
  local line=(gcloud compute tpus "$@" "--zone=$zone" ${project:+"--project=$project"})
  if [[ -n $dry_run ]]; then
    printf '%s </dev/null\n' "$(quoted "${line[@]}")"
  else
    "${line[@]}" </dev/null
  fi
}

nodes() {
  local i
  if ((slices == 1)); then
    echo "$name"
  else
    for ((i = 0; i < slices; i++)); do echo "$name-$i"; done
  fi
}

# A command line on every host of every slice. --quiet: gcloud makes its ssh key without asking.
on_hosts() {
  local node
  for node in $(nodes); do
    tpus tpu-vm ssh "$node" --worker=all --quiet "--command=$1" || return
  done
}

worker_line() {
  local unless="{ echo 'nothing is installed on this host: run setup first' >&2; exit 1; }"
  echo "[ -e tpu-train/launch/worker.sh ] || $unless; bash tpu-train/launch/worker.sh $(quoted "$@")"
}

worker() { on_hosts "$(worker_line "$@")"; }

# `left` says what Ctrl-C leaves behind.
interrupted() { # exit code
  local child
  for child in $(jobs -p); do kill -TERM -- "-$child" 2>/dev/null || true; done
  say "stopped; $left"
  exit "$1"
}

request() {
  local status=0 flags=("--accelerator-type=$accelerator" "--runtime-version=${runtime:-$default_runtime}")
  if ((slices == 1)); then
    flags+=("--node-id=$name")
  else
    flags+=("--node-count=$slices" "--node-prefix=$name")
  fi
  if [[ -n $spot ]]; then flags+=(--spot); fi
  if [[ -n $reserved ]]; then flags+=(--reserved); fi
  flags+=(${create_flags[@]+"${create_flags[@]}"})
  tpus queued-resources create "$name" "${flags[@]}" --quiet || status=$?
  if ((status)); then say "gcloud did not take the request for $name (above)"; fi
  return "$status"
}

queue_state() { tpus queued-resources describe "$name" '--format=value(state.state)'; }

# Waits until the slices are there. A look that fails is tried again: the wait can take days.
wait_until_active() {
  local state='' last='' failures=0 status
  if [[ -n $dry_run ]]; then
    queue_state
    return
  fi
  left="the request for $name stays, and costs once it is granted; remove it with delete"
  while true; do
    status=0
    state=$(queue_state) || status=$?
    if ((status)); then
      failures=$((failures + 1))
      if ((failures == 5)); then return "$status"; fi
    else
      failures=0
      if [[ $state != "$last" ]]; then say "$name: $state"; fi
      last=$state
      case $state in
      ACTIVE) return ;;
      FAILED | SUSPENDING | SUSPENDED | DELETING)
        tpus queued-resources describe "$name" '--format=yaml(state)' >&2 || true
        say "the request for $name was not granted (above); remove it with delete"
        return 1
        ;;
      esac
    fi
    sleep "$poll"
  done
}

create() {
  show_cost
  confirm "Request $name in $zone?"
  request || exit
  wait_until_active
}

setup() {
  local node archive=$repo/build/$name/tpu-train.tgz content=(pyproject.toml README.md LICENSE)
  local parts="tpu_train pallas_kernels configs launch"
  call mkdir -p "${archive%/*}" || return
  # shellcheck disable=SC2206 # one folder a word
  content+=($parts)
  if [[ -n $prepare ]]; then
    [[ -f $prepare ]] || refuse "--prepare: no file '$prepare'"
    call cp "$prepare" "${archive%/*}/prepare.sh" || return
    content+=(-C "${archive%/*}" prepare.sh)
  fi
  COPYFILE_DISABLE=1 call tar -czf "$archive" --exclude=__pycache__ -C "$repo" "${content[@]}" || return
  left="the hosts of $name may be set up in part; setup begins anew"
  for node in $(nodes); do
    tpus tpu-vm scp "$archive" "$node:tpu-train.tgz" --worker=all --quiet || return
  done
  on_hosts "mkdir -p tpu-train && cd tpu-train && { [ ! -e launch/worker.sh ] || bash launch/worker.sh idle >/dev/null; } \
&& rm -rf $parts prepare.sh && tar -xzf ../tpu-train.tgz && bash launch/worker.sh setup"
}

# The hosts are counted, not taken from the table: v5litepod-8, for one, comes as one host and as two.
start() {
  local idle found
  if [[ -n $dry_run ]]; then worker idle; else
    idle=$(worker idle) || return
    found=$(grep -cx idle <<<"$idle" || true)
    if ((found != processes)); then
      say "$name has $found hosts, where $topology and $slices slices should have $processes"
      processes=$found
    fi
  fi
  left="the command may run on some of the hosts of $name; end it with stop"
  if worker start "$processes" ${xla_flags:+env "LIBTPU_INIT_ARGS=$xla_flags"} "${command[@]}"; then return; fi
  say "the command did not start on every host (above); stopping it on the others"
  worker stop || true
  return 1
}

follow() { # lines, as for tail -n
  local node label='' pid pids=() status=0
  left="the command goes on, on $name; see it again with logs, end it with stop; $name costs until delete"
  if ((slices == 1)); then
    if ((processes > 1)); then label=$name; fi
    worker follow "$1" "$label"
    return
  fi
  set -m # a process group each, so that Ctrl-C ends each gcloud with its ssh
  for node in $(nodes); do
    tpus tpu-vm ssh "$node" --worker=all --quiet "--command=$(worker_line follow "$1" "$node")" &
    pids+=($!)
  done
  set +m
  for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
  return "$status"
}

# Prints there, lost or deleted, for all slices together; fails if that can't be told now. What the user deletes from
# elsewhere must stay deleted.
whereabouts() {
  local node state
  state=$(tpus queued-resources describe "$name" '--format=value(state.state,state.stateInitiator)') || return
  case $state in
  ACTIVE*) ;;
  DELETING* | *USER) echo deleted && return ;;
  *) echo lost && return ;;
  esac
  for node in $(nodes); do
    state=$(tpus tpu-vm describe "$node" '--format=value(state)') || return
    case $state in PREEMPTED | TERMINATED) echo lost && return ;; esac
  done
  echo there
}

# Prints lost, deleted, running, the command's exit code (the first that is not 0), or nothing if the hosts can't be
# reached. On a spot slice a failure counts as the command's only at the third look: hosts go before the state says so.
outcome() {
  local where results look
  for ((look = 1; look <= 10; look++)); do
    where=$(whereabouts) || where=unknown
    case $where in lost | deleted) echo "$where" && return ;; esac
    if [[ $where == there ]] && results=$(worker result); then
      results=$(sed -n 's/^result=//p' <<<"$results" | LC_ALL=C sort -u)
      case $results in
      0) echo 0 && return ;;
      *running*) echo running && return ;;
      *) if [[ -z $spot ]] || ((look >= 3)); then grep -vx 0 <<<"$results" | head -n 1 && return; fi ;;
      esac
    fi
    sleep "$poll"
  done
}

run() {
  local ended lines=+1
  start || return
  while true; do
    if follow "$lines"; then return; fi
    ended=$(outcome)
    case $ended in
    lost) recreate || return ;;
    deleted) fail "$name was deleted" ;;
    running)
      say "lost sight of the command; following it again"
      sleep "$poll"
      ;;
    '') fail "can't reach the hosts of $name (above); try logs, or delete" ;;
    *) return "$ended" ;;
    esac
    lines=20
  done
}

# Until the command runs again, or a step fails for another reason than a further preemption.
recreate() {
  while true; do
    ((restarts > 0)) || fail "$name was preempted, and --restarts is used up"
    restarts=$((restarts - 1))
    say "$name was preempted; $restarts restarts are left"
    confirm "Delete what is left of $name and request it again?"
    tpus queued-resources delete "$name" --force --quiet || return
    request || return
    if wait_until_active && setup && start; then return; fi
    [[ $(whereabouts) == lost ]] || fail "$name could not be set up again (above), and costs until delete"
  done
}

status() {
  local node
  queue_state || return
  for node in $(nodes); do tpus tpu-vm describe "$node" '--format=value(name.basename(),state,health)' || return; done
}

delete() {
  confirm "Delete $name in $zone, with all that is on its disks?"
  tpus queued-resources delete "$name" --force --quiet
}

main() {
  local action=${1:-}
  case $action in
  -h | --help | help)
    usage
    exit
    ;;
  create | setup | run | logs | stop | status | delete) shift ;;
  *)
    usage >&2
    exit 2
    ;;
  esac
  parse_flags "name zone project topology slices price hours runtime create_flag prepare restarts lines poll" \
    "spot reserved yes dry_run" "$@"
  check_name
  [[ $zone =~ ^[a-z0-9-]+$ ]] || refuse "--zone=$zone is no zone, such as us-east5-b"
  check_number slices "$slices" 1
  check_number restarts "$restarts" 0
  check_number lines "$lines" 0
  check_number poll "$poll" 0
  check_amount price "$price"
  check_amount hours "$hours"
  read_topology
  read_xla_flags
  [[ -n $default_runtime ]] || refuse "tpu7x is rented through GKE, not as a Cloud TPU VM: see launch/gke.sh"
  if [[ -n $spot && -n $reserved ]]; then refuse "--spot and --reserved exclude each other"; fi
  processes=$((hosts * slices))
  if [[ $action == run ]]; then
    ((${#command[@]})) || refuse "run needs a command after --, such as: -- tpu-train train --config=configs/tiny.py"
  else
    ((${#command[@]} == 0)) || refuse "$action takes no command after --; run does"
  fi
  needs gcloud "install the Google Cloud CLI: cloud.google.com/sdk/docs/install"
  left="nothing was begun"
  trap 'interrupted 130' INT
  trap 'interrupted 143' TERM
  case $action in
  logs) follow "$lines" ;;
  stop) worker stop ;;
  *) "$action" ;;
  esac
}

main "$@"
