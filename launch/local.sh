#!/usr/bin/env bash
# Runs tpu-train, or its tests, in a virtual environment that the first run sets up. `usage` below says how.
#
# The stamp file is written last and names everything it stands for, so a run with a matching stamp starts at once and
# an interrupted set-up is never taken for a complete one. Works with bash 3.2, the one macOS has.
set -euo pipefail

usage() {
  cat <<'END'
usage: ./launch/local.sh COMMAND [arguments]

  train --config=configs/tiny.py   any tpu-train command; runs where you stand, and paths are relative to it
  test [pytest arguments]          the tests, in the repository root

The first run sets up .venv in the repository root, later ones only when pyproject.toml changed. Environment:
  TPU_TRAIN_PYTHON   the Python to set it up with; default: the newest >= 3.11 on PATH
  TPU_TRAIN_EXTRAS   more extras of pyproject.toml to install, such as cuda or tpu,hf; remembered
  TPU_TRAIN_VENV     another folder than .venv
END
}

say() { printf 'local.sh: %s\n' "$*" >&2; }
fail() {
  say "$*"
  exit 1
}

# The union of comma-separated lists, sorted.
union() { tr -s ', ' '\n' <<<"$*" | sed '/^$/d' | LC_ALL=C sort -u | paste -sd, -; }

# "3.12 /the/interpreter": the path it gives itself, because the one on PATH may be a version manager's shim.
probe() {
  "$1" -E -s -c 'import sys; print("%d.%d %s" % (sys.version_info[:2] + (sys.executable,)))' </dev/null 2>/dev/null
}

version_of() {
  local answer
  answer=$(probe "$1") && printf '%s\n' "${answer%% *}"
}

# Whether the environment's Python runs, is recent enough, and is the one that was asked for, if one was.
venv_python_suits() {
  local version
  version=$(version_of "$venv/bin/python") && is_recent "$version" || return 1
  [[ -z ${TPU_TRAIN_PYTHON:-} || $(version_of "$TPU_TRAIN_PYTHON") == "$version" ]]
}

is_recent() { [[ $1 =~ ^3\.([0-9]+)$ ]] && ((BASH_REMATCH[1] >= 11)); }

# Environments hold absolute paths, so one that was moved does not match either.
stamp_for() { # python version, extras
  printf 'pyproject %s\nat %s %s\npython %s\nextras %s\n' "$(cksum <"$repo/pyproject.toml")" "$repo" "$venv" "$1" "$2"
}

stamped_extras() { [[ ! -f $venv/.stamp ]] || sed -n 's/^extras //p' "$venv/.stamp"; }

is_complete() {
  local installed
  [[ -f $venv/.stamp && -x $venv/bin/tpu-train ]] && venv_python_suits || return 1
  installed=$(stamped_extras)
  [[ $(union "$installed,$extras") == "$installed" ]] || return 1
  [[ $(stamp_for "$(version_of "$venv/bin/python")" "$installed") == "$(<"$venv/.stamp")" ]]
}

# Sets `uv` to one that runs, or to nothing.
find_uv() {
  local path
  uv=
  while IFS= read -r path; do
    if "$path" --version </dev/null >/dev/null 2>&1; then
      uv=$path
      return 0
    fi
  done < <(type -ap uv)
}

# Sets `python` and `version` if `$1` can make an environment; otherwise notes why not.
consider() {
  local answer pattern='^([0-9]+\.[0-9]+) (/.+)$'
  if ! answer=$(probe "$1"); then
    tried+="  $1: does not run"$'\n'
  elif ! [[ $answer =~ $pattern ]]; then
    tried+="  $1: does not say its version"$'\n'
  else
    version=${BASH_REMATCH[1]} python=${BASH_REMATCH[2]}
    if ! is_recent "$version"; then
      tried+="  $1: is Python $version"$'\n'
    elif [[ -z $uv ]] && ! "$python" -E -s -c 'import ensurepip, venv' </dev/null >/dev/null 2>&1; then
      tried+="  $1: is Python $version without ensurepip (Debian: apt-get install python$version-venv)"$'\n'
    else
      return 0
    fi
  fi
  return 1
}

find_python() {
  local name path
  tried=
  if [[ -n ${TPU_TRAIN_PYTHON:-} ]]; then
    if consider "$TPU_TRAIN_PYTHON"; then return; fi
  else
    for name in python3.14 python3.13 python3.12 python3.11 python3 python; do
      while IFS= read -r path; do
        if consider "$path"; then return; fi
      done < <(type -ap "$name")
    done
  fi
  if [[ -z $tried ]]; then tried=$'  nothing: no python is on PATH\n'; fi
  say "no Python here can set up the environment; tried:"
  printf '%s' "$tried" >&2
  fail "install Python 3.11 or newer, or name one: TPU_TRAIN_PYTHON=/path/to/python ./launch/local.sh ..."
}

# One set-up at a time in a repository, also of different environments: both write the package's egg-info there.
# The installer inherits the lock, so it holds until the last of them has ended.
lock() {
  local status=0
  command -v flock >/dev/null || return 0
  exec 9<"$repo/pyproject.toml"
  flock -n 9 || status=$?
  if ((status == 1)); then
    say "waiting for another set-up to finish..."
    flock 9
  fi
}

# uv first, being the faster; pip where uv fails, because an index set up for pip alone is out of uv's reach.
make_venv() {
  if [[ -n $uv ]] && "$uv" venv --quiet --allow-existing --python "$python" "$venv"; then return; fi
  "$python" -m venv "$venv"
}

# Everything is compiled to bytecode now, as pip does by itself, or the first run would parse a million lines. Our own
# files too, which nobody installs; where that can't be, the first run only starts later.
install() {
  install_packages || return
  "$venv/bin/python" -m compileall -q tpu_train pallas_kernels || true
}

install_packages() {
  local target=.${extras:+[$extras]}
  cd "$repo" || return
  if [[ -n $uv ]]; then
    if "$uv" pip install --quiet --compile-bytecode --python "$venv/bin/python" -e "$target"; then return; fi
    echo "uv failed (above); tried pip:"
  fi
  "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip || return
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input -e "$target"
}

# Prepares $venv for the installer and says so: kept where only packages are missing, emptied where it can't be trusted.
prepare() {
  rmdir "$venv" 2>/dev/null || true
  if [[ -e $venv && ! -e $venv/.stamp && ! -e $venv/.incomplete ]]; then
    venv_python_suits || fail "$venv is not an environment that suits, nor made here: remove it, or set TPU_TRAIN_VENV"
    say "installing into the $shown that was there already..."
    return
  fi
  if [[ ! -e $venv/.incomplete ]] && grep -qxF "at $repo $venv" "$venv/.stamp" 2>/dev/null && venv_python_suits; then
    say "updating $shown (pyproject.toml or the extras changed)..."
    touch "$venv/.incomplete"
    rm -f "$venv/.stamp"
    return
  fi
  find_python
  say "setting up $shown with Python $version (once)..."
  mkdir -p "$venv"
  touch "$venv/.incomplete"
  find "$venv" -mindepth 1 -maxdepth 1 ! -name .incomplete -exec rm -rf {} +
  make_new=1
}

set_up() {
  local shown=${venv#"$repo/"} log make_new=
  lock
  if is_complete; then return; fi # another run did it while this one waited
  extras=$(union "$extras,$(stamped_extras)")
  find_uv
  prepare
  log=$(mktemp)
  # shellcheck disable=SC2064 # the name is expanded now on purpose: `log` is local
  trap "rm -f '$log'" EXIT
  if ! { { [[ -z $make_new ]] || make_venv; } && install; } </dev/null >"$log" 2>&1; then
    cat "$log" >&2
    fail "setting up $shown failed (above): mend that and run the same again, or name another Python in TPU_TRAIN_PYTHON"
  fi
  stamp_for "$(version_of "$venv/bin/python")" "$extras" >"$venv/.stamp.new"
  mv "$venv/.stamp.new" "$venv/.stamp"
  rm -f "$venv/.incomplete"
}

main() {
  if (($# == 0)); then
    usage >&2
    exit 2
  fi
  case $1 in -h | --help | help)
    usage
    exit
    ;;
  esac
  repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
  venv=${TPU_TRAIN_VENV:-$repo/.venv}
  [[ $venv == /* ]] || venv=$PWD/$venv
  extras=$(union "${TPU_TRAIN_EXTRAS:-}")
  if [[ $1 == test ]]; then extras=$(union "$extras,test"); fi
  export UV_PYTHON_DOWNLOADS=never # an interpreter is chosen here; uv must not fetch another
  if ! is_complete; then (set_up); fi # a subshell, so that the lock ends with it
  if [[ $1 == test ]]; then
    shift
    cd "$repo"
    exec "$venv/bin/python" -m pytest "$@"
  fi
  exec "$venv/bin/tpu-train" "$@"
}

main "$@"
