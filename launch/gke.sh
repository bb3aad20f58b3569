#!/usr/bin/env bash
# Trains on TPU slices of a GKE cluster: writes a JobSet, one job a slice and one pod a host, and hands it to kubectl,
# or the same run to xpk. `usage` below says how. The cluster, with JobSet and TPU node pools, is there already.
#
# Users' values stand in the manifest as JSON strings, which YAML reads as they are.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

name='' image='' bucket='' queue='' service_account='' namespace='' context='' cluster='' zone='' restarts=20

usage() {
  cat <<'END'
usage: ./launch/gke.sh COMMAND --name=NAME --topology=GENERATION:SHAPE --image=IMAGE [flags] [-- command]

  manifest  print the JobSet
  create    show the cost, ask, and create the JobSet
  xpk       the same run through xpk, which brings its own JobSet
  logs      follow the pods' output
  status    the JobSet and its pods
  delete    ask, and delete the JobSet; node pools stay, and cost, until you remove them

  --topology=v6e:2x4      v4, v5e, v5p, v6e or 7x, and the chips of one slice
  --slices=1
  --image=IMAGE           see launch/Dockerfile
  --bucket=NAME           a Cloud Storage bucket, mounted at /bucket
  --queue=NAME            of Kueue
  --service_account=NAME  of Kubernetes, to reach the bucket with
  --namespace=NAME, --context=NAME   kubectl's; default: its own
  --restarts=20           preemptions and failures that the JobSet gets over
  --spot                  spot nodes
  --price=USD, --hours=H  of a chip-hour; to show the cost of
  --cluster=NAME, --zone=ZONE, --project=ID   for xpk
  --yes                   don't ask
  --dry_run               print the commands in place of running them
  --flagfile=FILE         more flags, one a line

The command runs with what xla_flags.tsv recommends for the generation as LIBTPU_INIT_ARGS, or, where your environment
has that variable, with yours. A slice of 2x4 is one host of 8 chips. A run continues after a restart only if its
workdir is in the bucket; choose a bucket with a hierarchical namespace, since a checkpoint is completed by renaming
its folder.
END
}

# A JSON string, for all but NUL, which no argument holds.
json() {
  local i c code out='"'
  for ((i = 0; i < ${#1}; i++)); do
    c=${1:i:1}
    case $c in
    '"' | "\\") out+="\\$c" ;;
    [[:cntrl:]])
      printf -v code '\\u%04x' "'$c"
      out+=$code
      ;;
    *) out+=$c ;;
    esac
  done
  printf '%s"' "$out"
}

# Characters that YAML won't take as they are, beyond ASCII: C1 controls, its further line breaks, byte order marks.
check_text() {
  local LC_ALL=C
  case $1 in
  *$'\xc2'[$'\x80'-$'\x9f']* | *$'\xe2\x80'[$'\xa8\xa9']* | *$'\xef\xbb\xbf'* | *$'\xef\xbf'[$'\xbe\xbf']*)
    refuse "a manifest can't carry the control characters in $(quoted "$1")"
    ;;
  esac
}

# A JSON string inside a container's command, where Kubernetes reads $(NAME) as a variable and $$ as $.
json_argument() {
  local rest=$1 doubled=''
  while [[ $rest == *\$* ]]; do
    doubled+="${rest%%\$*}\$\$" rest=${rest#*\$}
  done
  json "$doubled$rest"
}

# Passes its input on if its argument is not empty.
only_if() {
  if [[ -n $1 ]]; then cat; else cat >/dev/null; fi
}

# Several hosts: a node pool for each slice alone, as a pool is one slice. Exit code 2 is bad input, which another try
# would not mend; anything else is tried again.
manifest() {
  local several=''
  if ((processes > 1)); then several=yes; fi
  cat <<END
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: $name
END
  only_if "$namespace" <<<"  namespace: $(json "$namespace")"
  only_if "$queue" <<<"  labels:
    kueue.x-k8s.io/queue-name: $(json "$queue")"
  only_if "$several" <<<'  annotations:
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool'
  cat <<END
spec:
  failurePolicy:
    maxRestarts: $restarts
    rules:
    - name: badInput
      action: FailJobSet
      onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
  - name: slice
    replicas: $slices
    template:
      spec:
        parallelism: $hosts
        completions: $hosts
        completionMode: Indexed
        backoffLimit: 0
        podFailurePolicy:
          rules:
          - action: FailJob
            onPodConditions: [] # older JobSets want it
            onExitCodes:
              containerName: train
              operator: In
              values: [2]
        template:
END
  only_if "$bucket" <<<'          metadata:
            annotations:
              gke-gcsfuse/volumes: "true"'
  pod
}

pod() {
  local word multislice=''
  if ((slices > 1)); then multislice=yes; fi
  cat <<END
          spec:
            restartPolicy: Never
            terminationGracePeriodSeconds: 150
            nodeSelector:
              cloud.google.com/gke-tpu-accelerator: $gke_accelerator
              cloud.google.com/gke-tpu-topology: $gke_topology
END
  only_if "$spot" <<<'              cloud.google.com/gke-spot: "true"'
  cat <<END
            tolerations:
            - key: google.com/tpu
              operator: Exists
END
  only_if "$spot" <<<'            - key: cloud.google.com/gke-spot
              operator: Exists'
  only_if "$service_account" <<<"            serviceAccountName: $(json "$service_account")"
  # Traffic between slices goes past the pods' own network.
  only_if "$multislice" <<<'            hostNetwork: true
            dnsPolicy: ClusterFirstWithHostNet'
  cat <<END
            containers:
            - name: train
              image: $(json "$image")
              command:
END
  for word in "${command[@]}"; do printf '              - %s\n' "$(json_argument "$word")"; done
  cat <<END
              env:
              - name: TPU_TRAIN_PROCESSES
                value: "$processes"
              - name: PYTHONUNBUFFERED
                value: "1"
END
  only_if "$xla_flags" <<<"              - name: LIBTPU_INIT_ARGS
                value: $(json_argument "$xla_flags")"
  cat <<END
              resources:
                limits:
                  google.com/tpu: $chips_per_host
END
  only_if "$bucket" <<<"              volumeMounts:
              - name: bucket
                mountPath: /bucket
            volumes:
            - name: bucket
              csi:
                driver: gcsfuse.csi.storage.gke.io
                volumeAttributes:
                  bucketName: $(json "$bucket")"
}

kube() { call kubectl ${kube_flags[@]+"${kube_flags[@]}"} "$@"; }

create() {
  show_cost
  confirm "Create the JobSet $name?"
  if [[ -n $dry_run ]]; then
    show_fed "$(manifest)" kubectl ${kube_flags[@]+"${kube_flags[@]}"} create --filename=-
  else
    manifest | kube create --filename=-
  fi
}

# xpk writes the command into a script within YAML as it is, where a line break would end it and Kubernetes reads $.
xpk_create() {
  local word line
  line=$(quoted env "TPU_TRAIN_PROCESSES=$processes" ${xla_flags:+"LIBTPU_INIT_ARGS=$xla_flags"} "${command[@]}")
  [[ $line != *[$'\n$']* ]] || refuse "xpk can't take a command with a line break or \$ in it; create can"
  for word in cluster zone project; do [[ -n ${!word} ]] || refuse "xpk needs --$word"; done
  for word in bucket queue service_account namespace context; do
    [[ -z ${!word} ]] || refuse "xpk has no --$word; its storage and queues are set up with xpk itself"
  done
  show_cost
  confirm "Create the workload $name with xpk?"
  call xpk workload create "--workload=$name" "--cluster=$cluster" "--zone=$zone" "--project=$project" \
    "--tpu-type=$accelerator" "--num-slices=$slices" --no-use-parallel-containers "--docker-image=$image" \
    "--max-restarts=$restarts" ${spot:+--spot} "--command=$line"
}

# What the actions that start a run need.
check_run() { # action
  read_topology
  read_xla_flags
  check_text "$xla_flags"
  check_number slices "$slices" 1
  check_number restarts "$restarts" 0
  check_amount price "$price"
  check_amount hours "$hours"
  [[ -n $image ]] || refuse "--image is missing; launch/Dockerfile builds one"
  ((${#command[@]})) || refuse "$1 needs a command after --, such as: -- tpu-train train --config=configs/tiny.py"
  # xpk has hosts of 4 chips at most.
  if [[ $1 == xpk ]] && ((chips_per_host == 8)); then hosts=2; fi
  if ((hosts == 1 && slices > 1)); then refuse "GKE joins only slices of several hosts, and $topology is one host"; fi
  processes=$((hosts * slices))
}

main() {
  local text action=${1:-} known="name topology slices image bucket queue service_account namespace context restarts"
  case $action in
  -h | --help | help)
    usage
    exit
    ;;
  manifest | create | xpk | logs | status | delete) shift ;;
  *)
    usage >&2
    exit 2
    ;;
  esac
  parse_flags "$known price hours cluster zone project" "spot yes dry_run" "$@"
  check_name
  for text in "$image" "$bucket" "$queue" "$service_account" "$namespace" ${command[@]+"${command[@]}"}; do
    check_text "$text"
  done
  case $action in
  manifest | create | xpk) check_run "$action" ;;
  *) ((${#command[@]} == 0)) || refuse "$action takes no command after --" ;;
  esac
  case $action in
  manifest) ;;
  xpk) needs xpk "install it with pip: github.com/AI-Hypercomputer/xpk" ;;
  *) needs kubectl "install it: kubernetes.io/docs/tasks/tools" ;;
  esac
  kube_flags=(${context:+"--context=$context"} ${namespace:+"--namespace=$namespace"})
  local mine="--selector=jobset.sigs.k8s.io/jobset-name=$name"
  case $action in
  manifest | create) "$action" ;;
  xpk) xpk_create ;;
  logs) kube logs "$mine" --container=train --follow --prefix --tail=100 --max-log-requests=1000 ;;
  status)
    kube get jobset "$name"
    kube get pods "$mine" --output=wide
    ;;
  delete)
    confirm "Delete the JobSet $name with its pods?"
    kube delete jobset "$name"
    ;;
  esac
}

main "$@"
