#!/usr/bin/env bash
# Deletes a TPU slice.
# Tested against a fake gcloud only, never on a real TPU.
set -euo pipefail
# shellcheck source=tools/tpu/common.sh
source "$(dirname "$0")/common.sh"

usage() {
  cat << 'END'
Usage: tools/tpu/delete.sh [--quiet]

Deletes the queued resource TPU_NAME and its node, whether they run or wait.
Asks first unless --quiet is given.
END
  slice_variables
}

is_quiet=false
for argument in "$@"; do
  case $argument in
    --help)
      usage
      exit
      ;;
    --quiet) is_quiet=true ;;
    *) refuse "$argument" ;;
  esac
done
require TPU_NAME TPU_ZONE

state=$(request_state)
if [[ -z $state ]]; then
  say "there is no queued resource $TPU_NAME in $TPU_ZONE"
  exit
fi
cat << END
Deletes in $TPU_ZONE:
  the queued resource $TPU_NAME, which is $state
  its node $TPU_NAME, with a run on it and all files on its workers' disks
Files in gs:// buckets stay.
END
if [[ $is_quiet == false ]]; then
  read -r -p "Delete? [y/N] " answer || answer=
  if [[ $answer != [yY] ]]; then
    fail "nothing was deleted; answer y, or pass --quiet"
  fi
fi
delete_slice
say "deleted $TPU_NAME"
