# Sourced by the scripts in this folder: the variables that describe a slice,
# and calls of gcloud. Tested against a fake gcloud only, never on a real TPU.
# shellcheck shell=bash disable=SC2034

TPU_POLL_SECONDS=${TPU_POLL_SECONDS:-20}
TPU_TOOLS=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# Where setup.sh puts the worker's script, relative to the home directory.
WORKER="bash diffjax/source/tools/tpu/worker.sh"

slice_variables() {
  cat << 'END'

Environment:
  TPU_NAME             name of the slice: of its queued resource and its node
  TPU_ZONE             zone, such as us-east5-b
  TPU_TYPE             accelerator type, such as v5litepod-16 (to create)
  TPU_SPOT             1 for a spot slice: cheaper, and may be preempted
  TPU_RUNTIME_VERSION  image of the workers; chosen by TPU_TYPE if unset
  TPU_PROJECT          project; gcloud's own if unset
  TPU_POLL_SECONDS     seconds between two looks at the slice (20)
END
}

say() {
  echo "$(date +%H:%M:%S) $*"
}

fail() {
  echo "$(basename "$0"): $*" >&2
  exit 1
}

# require NAME…: ends the script if a variable is not set.
require() {
  local name
  for name in "$@"; do
    if [[ -z ${!name:-} ]]; then
      fail "$name is not set; run 'export $name=…' first (see --help)"
    fi
  done
}

# refuse ARGUMENT…: ends the script if it was given arguments.
refuse() {
  if (($# > 0)); then
    fail "does not take '$1' (see --help)"
  fi
}

# tpus GROUP COMMAND [ARGUMENT…]: runs gcloud in the project and zone.
tpus() {
  local group=$1 command=$2
  shift 2
  gcloud compute tpus "$group" "$command" "$@" \
    "--zone=$TPU_ZONE" ${TPU_PROJECT:+"--project=$TPU_PROJECT"}
}

# on_workers WORKERS COMMAND: runs a shell command on some workers, or on all.
# gcloud fails if the command fails on any of them.
on_workers() {
  tpus tpu-vm ssh "$TPU_NAME" "--worker=$1" "--command=$2"
}

# Prints the queued resource's state, or nothing if it does not exist. A list
# tells a resource that does not exist from a call that failed.
request_state() {
  tpus queued-resources list \
    "--filter=name ~ \"/queuedResources/$TPU_NAME\$\"" \
    "--format=value(state.state)"
}

# Prints the node's state, or nothing if it does not exist.
node_state() {
  tpus tpu-vm list \
    "--filter=name ~ \"/nodes/$TPU_NAME\$\"" "--format=value(state)"
}

# Prints one state for both: READY if the workers can be used, MISSING if there
# is no request, NO_NODE if the node of a request is gone, and otherwise the
# state of what is not ready.
slice_state() {
  local request node
  request=$(request_state) || return
  if [[ $request != ACTIVE ]]; then
    echo "${request:-MISSING}"
    return
  fi
  node=$(node_state) || return
  echo "${node:-NO_NODE}"
}

# is_gone STATE: whether a slice in this state has no workers any more.
is_gone() {
  case $1 in
    MISSING | FAILED | SUSPENDED | PREEMPTED | TERMINATED | NO_NODE) return 0 ;;
    *) return 1 ;;
  esac
}

# Deletes the queued resource and its node, and waits until both are gone.
delete_slice() {
  tpus queued-resources delete "$TPU_NAME" --force --quiet
}
