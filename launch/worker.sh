#!/usr/bin/env bash
# Runs on a rented host, called by tpu_vm.sh over ssh: installs the tree that it lies in, and runs one command at a time
# there, detached from whoever started it. The command's process, log and exit code are in .run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'worker.sh: %s\n' "$*" >&2; }

is_running() {
  local pid
  pid=$(cat .run/pid 2>/dev/null) && kill -0 "$pid" 2>/dev/null && grep -aqs worker.sh "/proc/$pid/cmdline"
}

idle() {
  if is_running; then
    say "a command runs on $(hostname) already; see logs, or end it with stop"
    return 1
  fi
  echo idle
}

# The images of v4 to v6e have Python 3.10, which is too old; uv brings a newer one.
setup() {
  local name
  PATH=$HOME/.local/bin:$PATH
  for name in python3.14 python3.13 python3.12 python3.11; do
    if "$name" -c 'import ensurepip, venv' 2>/dev/null; then TPU_TRAIN_PYTHON=$(command -v "$name") && break; fi
  done
  if [[ -z ${TPU_TRAIN_PYTHON:-} ]]; then
    command -v uv >/dev/null || python3 -m pip install --quiet --user uv
    uv python install --quiet 3.12
    TPU_TRAIN_PYTHON=$(uv python find 3.12)
  fi
  export TPU_TRAIN_PYTHON
  TPU_TRAIN_EXTRAS=tpu ./launch/local.sh train --help >/dev/null
  if [[ -f prepare.sh ]]; then bash prepare.sh; fi
}

start() { # number of processes in the run, command...
  idle >/dev/null
  mkdir -p .run
  rm -f .run/status
  setsid bash launch/worker.sh supervise "$@" </dev/null >.run/log 2>&1 &
  echo $! >.run/pid
}

supervise() {
  local child='' asked='' status=0
  export TPU_TRAIN_PROCESSES=$1 PYTHONUNBUFFERED=1 PATH="$PWD/.venv/bin:$PATH"
  shift
  trap 'asked=yes; [[ -z $child ]] || kill -TERM "$child" 2>/dev/null || true' TERM INT HUP
  "$@" &
  child=$!
  if [[ -n $asked ]]; then kill -TERM "$child" || true; fi
  while kill -0 "$child" 2>/dev/null; do wait "$child" || true; done # a signal ends a wait early
  wait "$child" || status=$?
  echo "$status" >.run/status.new
  mv .run/status.new .run/status
}

# Shows the log from its last lines on until the command ends; its exit code.
follow() { # lines, as for tail -n; label
  local status
  if [[ ! -f .run/pid ]]; then
    say "no command was started here"
    return 1
  fi
  tail -s 0.2 -n "$1" --pid="$(<.run/pid)" -f .run/log | while IFS= read -r line || [[ -n $line ]]; do
    printf '%s%s\n' "${2:+[$2 w${HOSTNAME##*-w-}] }" "$line"
  done
  if ! status=$(cat .run/status 2>/dev/null); then
    say "the command on $(hostname) ended without an exit code: it was killed, or the host restarted"
    return 137
  fi
  return "$status"
}

stop() {
  local seconds=0
  if ! is_running; then
    say "nothing runs on $(hostname)"
    return
  fi
  kill -TERM "$(<.run/pid)"
  while is_running; do
    if ((seconds >= 300)); then
      say "it still runs on $(hostname), 5 minutes after SIGTERM"
      return 1
    fi
    sleep 1
    seconds=$((seconds + 1))
  done
}

result() {
  if is_running; then
    echo "result=running"
  else
    echo "result=$(cat .run/status 2>/dev/null || echo 137)"
  fi
}

case ${1:-} in
idle | setup | start | supervise | follow | stop | result) "$@" ;;
*)
  say "no command '${1:-}'; tpu_vm.sh calls this"
  exit 2
  ;;
esac
