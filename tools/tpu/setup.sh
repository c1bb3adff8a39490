#!/usr/bin/env bash
# Installs this copy of the repository on all workers of a TPU slice.
# Tested against a fake gcloud only, never on a real TPU.
set -euo pipefail
# shellcheck source=tools/tpu/common.sh
source "$(dirname "$0")/common.sh"

usage() {
  cat << 'END'
Usage: tools/tpu/setup.sh

Copies this repository to all workers, with your changes and new files but
without what .gitignore names, and installs diffjax[tpu,gcs] there in a virtual
environment with Python 3.12. Run it again after a change of the code.
END
  slice_variables
}

# Prints the files of the repository, each followed by a NUL byte.
repository_files() {
  git ls-files -z --cached --others --exclude-standard |
    while IFS= read -r -d '' file; do
      # Git lists deleted files until the deletion is staged.
      if [[ -e $file || -L $file ]]; then
        printf '%s\0' "$file"
      fi
    done
}

# Writes diffjax_upload/ into a directory: the repository and the script that
# installs it.
pack() {
  local upload=$1/diffjax_upload
  mkdir "$upload"
  repository_files > "$1/files"
  tar --null -T "$1/files" -czf "$upload/source.tar.gz"
  cp "$TPU_TOOLS/worker.sh" "$upload/worker.sh"
}

if [[ ${1:-} == --help ]]; then
  usage
  exit
fi
refuse "$@"
require TPU_NAME TPU_ZONE
cd "$TPU_TOOLS/../.."
if ! git rev-parse --git-dir > /dev/null; then
  fail "$PWD is not a git clone: git decides which files are copied"
fi

temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT
pack "$temporary"
say "copies the repository to all workers"
tpus tpu-vm scp "$temporary/diffjax_upload" "$TPU_NAME:" \
  --recurse --worker=all ||
  fail "the copy failed on at least one worker (see above); several workers" \
    "need the key in an agent: ssh-add ~/.ssh/google_compute_engine"
say "installs diffjax[tpu,gcs] on all workers; this takes some minutes"
on_workers all "bash diffjax_upload/worker.sh install" ||
  fail "the installation failed on at least one worker (see above)"
say "all workers are set up; next: tools/tpu/train.sh"
