# shellcheck shell=bash
# What the launchers share: flags, quoting, dry runs, questions, TPU topologies, what they cost and the flags of their
# compiler. Sourced, not run.
#
# A user's value is data: it travels as one argument, and `quoted` writes it as one word where a shell at the far end
# reads it. Keeps to what bash 3.2 has, the one on macOS.
# shellcheck disable=SC2034 # the variables are for the scripts that source this

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
command=()
create_flags=()
dry_run='' yes='' project='' topology='' slices=1 price='' hours='' spot='' xla_flags=''

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }
fail() { # message, exit code
  say "$1"
  exit "${2:-1}"
}
refuse() { fail "$1" 2; }

# Its arguments, each as one word of a POSIX shell. No ${x//a/b}: bash versions differ in what quotes mean in it.
quoted() {
  local word rest line='' plain='^[A-Za-z0-9_./:=@%+,-]+$' LC_ALL=C
  for word; do
    line+=" "
    if [[ $word =~ $plain ]]; then
      line+=$word
      continue
    fi
    rest=$word line+="'"
    while [[ $rest == *\'* ]]; do
      line+="${rest%%\'*}'\\''" rest=${rest#*\'}
    done
    line+="$rest'"
  done
  printf '%s' "${line# }"
}

# Runs its arguments, or prints them as a line to paste into a shell.
call() {
  if [[ -n $dry_run ]]; then
    printf '%s\n' "$(quoted "$@")"
  else
    "$@"
  fi
}

# Prints the command after the first argument, fed with that argument, as lines to paste into a shell.
show_fed() {
  local input=$1 end=END
  shift
  while [[ $'\n'$input$'\n' == *$'\n'"$end"$'\n'* ]]; do end+=_; done
  printf "%s <<'%s'\n%s\n%s\n" "$(quoted "$@")" "$end" "$input" "$end"
}

needs() { # program, where it comes from
  [[ -n $dry_run ]] || command -v "$1" >/dev/null || fail "$1 is not on PATH; $2"
}

# Asks before what costs or destroys. Without a terminal the answer is no.
confirm() {
  local answer
  if [[ -n $yes || -n $dry_run ]]; then return; fi
  [[ -t 0 ]] || refuse "$1 There is no terminal to ask on: add --yes to go on without asking"
  printf '%s [y/N] ' "$1" >&2
  read -r answer || answer=''
  [[ $answer == [yY] || $answer == [yY][eE][sS] ]] || fail "nothing done"
}

# parse_flags "name zone" "spot" arguments...: sets the variable of each --name=value and --switch; what stands after
# -- becomes `command`.
parse_flags() {
  local known=$1 switches=$2
  shift 2
  while (($#)); do
    case $1 in
    --)
      shift
      command=("$@")
      return
      ;;
    -h | --help)
      usage
      exit
      ;;
    --flagfile=*) read_flagfile "${1#*=}" ;;
    *) set_flag "$1" ;;
    esac
    shift
  done
}

read_flagfile() {
  local line
  [[ -f $1 ]] || refuse "no flag file '$1'"
  while IFS= read -r line || [[ -n $line ]]; do
    case $line in
    '' | '#'*) ;;
    --flagfile=*) refuse "$1: a flag file can't name another" ;;
    *) set_flag "$line" ;;
    esac
  done <"$1"
}

set_flag() {
  local flag=${1#--} # not "name", which a flag sets
  flag=${flag%%=*}
  [[ $1 == --* ]] || refuse "flags look like --name=value, not '$1'; the command to run comes after --"
  if [[ ! $flag =~ ^[a-z_]+$ || " $known $switches " != *" $flag "* ]]; then
    refuse "no flag --$flag; there are: $known $switches flagfile"
  elif [[ " $switches " == *" $flag "* ]]; then
    [[ $1 == "--$flag" ]] || refuse "--$flag takes no value"
    printf -v "$flag" yes
  elif [[ $1 != *=?* ]]; then
    refuse "--$flag needs a value: --$flag=..."
  elif [[ $flag == create_flag ]]; then
    [[ $1 == --create_flag=--* ]] || refuse "--create_flag takes a flag of gcloud's, as in --create_flag=--network=N"
    create_flags+=("${1#*=}")
  else
    printf -v "$flag" %s "${1#*=}"
  fi
}

check_name() {
  local pattern='^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$'
  [[ -n ${name:-} ]] || refuse "--name is missing"
  [[ $name =~ $pattern ]] || refuse "--name=$name does not fit: at most 40 of a-z, 0-9 and -, a letter first"
}

check_number() { # flag, its value, least
  if [[ ! $2 =~ ^(0|[1-9][0-9]{0,8})$ ]] || (($2 < $3)); then refuse "--$1=$2 is not a whole number of $3 or more"; fi
}

check_amount() { # flag, its value
  [[ -z $2 || $2 =~ ^[0-9]+(\.[0-9]+)?$ ]] || refuse "--$1=$2 is not a number such as 2.70"
}

# Sets chips, hosts, chips_per_host, and the names that Cloud TPU and GKE have for the topology: v4, v5p and 7x have two
# cores a chip and are named by cores. Images: docs.cloud.google.com/tpu/docs/runtimes; shapes, labels and hosts of 4
# chips: AI-Hypercomputer/xpk, src/xpk/core/system_characteristics.py; flat slices of up to 8 chips on one host: the
# pages v5e and v6e of tpu/docs. Read 2026-11-30.
read_topology() {
  local shape a b c shapes='2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x12 8x8x16 8x16x16'
  [[ -n $topology ]] || refuse "--topology is missing, such as --topology=v6e:2x4"
  generation=${topology%%:*} shape=${topology#*:}
  case $generation in
  v5e | v6e) shapes='1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16' ;;
  v4 | v5p | 7x | tpu7x) ;;
  *) refuse "--topology=$topology: no TPU generation '$generation'; there are v4, v5e, v5p, v6e and 7x" ;;
  esac
  if [[ ! $shape =~ ^[0-9x]+$ || " $shapes " != *" $shape "* ]]; then
    refuse "--topology=$topology: $generation comes as $shapes"
  fi
  IFS=x read -r a b c <<<"$shape"
  chips=$((a * b * ${c:-1}))
  chips_per_host=4
  if [[ -z $c ]] && ((chips <= 8)); then chips_per_host=$chips; fi
  hosts=$((chips / chips_per_host))
  gke_topology=$shape
  case $generation in
  v4) accelerator=v4-$((2 * chips)) default_runtime=tpu-ubuntu2204-base gke_accelerator=tpu-v4-podslice ;;
  v5e) accelerator=v5litepod-$chips default_runtime=v2-alpha-tpuv5-lite gke_accelerator=tpu-v5-lite-podslice ;;
  v5p) accelerator=v5p-$((2 * chips)) default_runtime=v2-alpha-tpuv5 gke_accelerator=tpu-v5p-slice ;;
  v6e) accelerator=v6e-$chips default_runtime=v2-alpha-tpuv6e gke_accelerator=tpu-v6e-slice ;;
  *) accelerator=tpu7x-$((2 * chips)) default_runtime='' gke_accelerator=tpu7x ;;
  esac
}

# Sets xla_flags to the LIBTPU_INIT_ARGS of the run: your own where your environment has some, even none, else what
# xla_flags.tsv recommends for the generation.
read_xla_flags() {
  local of flag more
  if [[ -n ${LIBTPU_INIT_ARGS+set} ]]; then
    xla_flags=$LIBTPU_INIT_ARGS
    return
  fi
  xla_flags=''
  while IFS=$'\t' read -r of flag more; do
    if [[ $of == "${generation#tpu}" ]]; then xla_flags+="${xla_flags:+ }$flag"; fi
  done <"$repo/launch/xla_flags.tsv"
}

# Shows what the slices cost. List prices in USD for a chip-hour on demand in us-central1, from SkyPilot's catalog of
# Google's price list (skypilot-org/skypilot-catalog, catalogs/v7/gcp/vms.csv), read 2026-11-30. Where none is known the
# user has to say one.
show_cost() {
  local each=$price from="your --price" most=''
  if [[ -z $each ]]; then
    case $generation in
    v5e) each=1.20 ;;
    v5p) each=4.20 ;;
    v6e) each=2.70 ;;
    *) refuse "no price is known for $generation: give a chip-hour's as --price=USD, from cloud.google.com/tpu/pricing" ;;
    esac
    from="list price on demand, us-central1, read 2026-11-30; other regions differ, see --price"
    if [[ -n $spot ]]; then most="at most " from+="; spot costs less"; fi
  fi
  # awk, since a price has a fraction.
  say "$(LC_ALL=C awk -v chips="$chips" -v slices="$slices" -v each="$each" -v hours="$hours" -v most="$most" \
    -v topology="$topology" -v from="$from" 'BEGIN {
      hour = chips * slices * each
      printf "%s: %d chips x ", topology, chips
      if (slices > 1) printf "%d slices x ", slices
      printf "$%.2f a chip-hour (%s): %s$%.2f an hour, $%.2f a day", each, from, most, hour, 24 * hour
      if (hours != "") printf ", $%.2f in %s hours", hours * hour, hours
    }'), for as long as it exists"
}
