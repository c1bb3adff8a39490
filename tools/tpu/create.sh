#!/usr/bin/env bash
# Creates a TPU slice through a queued resource and waits until it is ready.
# Tested against a fake gcloud only, never on a real TPU.
set -euo pipefail
# shellcheck source=tools/tpu/common.sh
source "$(dirname "$0")/common.sh"

# Calls of gcloud that may fail in a row while the script waits.
MAX_FAILED_CALLS=5

usage() {
  cat << 'END'
Usage: tools/tpu/create.sh

Requests the slice TPU_NAME, a queued resource with one node of the same name,
and waits until its workers are ready. If the request exists already, waits for
it. Replaces a slice that was preempted or a request that failed.

Ctrl-C ends the waiting. The request stays in the queue.
END
  slice_variables
}

# Prints the image that Google recommends for JAX on this generation:
# https://cloud.google.com/tpu/docs/runtimes
runtime_version() {
  if [[ -n ${TPU_RUNTIME_VERSION:-} ]]; then
    echo "$TPU_RUNTIME_VERSION"
    return
  fi
  case $TPU_TYPE in
    v6e-*) echo v2-alpha-tpuv6e ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v[234]-*) echo tpu-ubuntu2204-base ;;
    *)
      fail "TPU_TYPE=$TPU_TYPE is not of a known generation (v2-, v3-, v4-," \
        "v5litepod-, v5p-, v6e-); set TPU_RUNTIME_VERSION as well"
      ;;
  esac
}

request_slice() {
  local image spot=
  image=$(runtime_version)
  if [[ ${TPU_SPOT:-0} == 1 ]]; then
    spot=--spot
  fi
  say "requests $TPU_NAME: $TPU_TYPE in $TPU_ZONE with $image $spot"
  tpus queued-resources create "$TPU_NAME" "--node-id=$TPU_NAME" \
    "--accelerator-type=$TPU_TYPE" "--runtime-version=$image" $spot
}

# Shows a state: on a terminal in one line with the time spent waiting, and
# elsewhere once for every change.
show_state() {
  local state=$1 previous=$2
  if [[ -t 1 ]]; then
    printf '\r%s %s after %d min\033[K' "$(date +%H:%M:%S)" "$state" \
      $((SECONDS / 60))
  elif [[ $state != "$previous" ]]; then
    say "$TPU_NAME is $state"
  fi
}

explain_waiting() {
  cat << END

No capacity for $TPU_TYPE in $TPU_ZONE at the moment. The request stays in the
queue and this script keeps waiting. To try another zone instead:
  Ctrl-C, then
  tools/tpu/delete.sh
  TPU_ZONE=ANOTHER-ZONE tools/tpu/create.sh
Zones: gcloud compute tpus locations list
Types in a zone: gcloud compute tpus accelerator-types list --zone=ZONE
END
}

# Shows what the service says about a request that ended, and ends the script.
report_end() {
  echo
  tpus queued-resources describe "$TPU_NAME" "--format=yaml(state)" || true
  fail "$TPU_NAME is $1 in $TPU_ZONE (see above); run create.sh again to" \
    "request it again, or with another TPU_ZONE or TPU_TYPE"
}

# Deletes what is left of a slice and requests it again.
replace_slice() {
  if [[ $1 != MISSING ]]; then
    say "$TPU_NAME is $1: deletes what is left of it, and requests it again"
    delete_slice
  fi
  request_slice
}

wait_until_ready() {
  local state previous="" is_requested=false is_explained=false failed_calls=0
  while true; do
    if state=$(slice_state); then
      failed_calls=0
      show_state "$state" "$previous"
    else
      failed_calls=$((failed_calls + 1))
      if ((failed_calls == MAX_FAILED_CALLS)); then
        fail "gcloud failed $failed_calls times in a row (see above)"
      fi
      sleep "$TPU_POLL_SECONDS"
      continue
    fi

    if [[ $state == READY ]]; then
      return
    elif [[ $state == WAITING_FOR_RESOURCES && $is_explained == false ]]; then
      explain_waiting
      is_explained=true
    elif is_gone "$state" && [[ $is_requested == false ]]; then
      replace_slice "$state"
      is_requested=true
    elif is_gone "$state" && [[ $state != NO_NODE ]]; then
      report_end "$state"
    fi
    previous=$state
    sleep "$TPU_POLL_SECONDS"
  done
}

if [[ ${1:-} == --help ]]; then
  usage
  exit
fi
refuse "$@"
require TPU_NAME TPU_ZONE TPU_TYPE
wait_until_ready
if [[ -t 1 ]]; then
  echo
fi
say "$TPU_NAME is ready; next: tools/tpu/setup.sh"
