#!/usr/bin/env bash
# Trains on all workers of a TPU slice, detached from this machine.
# Tested against a fake gcloud only, never on a real TPU.
set -euo pipefail
# shellcheck source=tools/tpu/common.sh
source "$(dirname "$0")/common.sh"

# Failures in a row after which keep_alive gives up.
MAX_FAILURES=5
# Polls after which a run that is still running makes up for failures before.
HEALTHY_POLLS=30
# Attempts to create and set up a slice before keep_alive gives up.
MAX_ATTEMPTS=3

usage() {
  cat << 'END'
Usage: tools/tpu/train.sh --config=CONFIG --workdir=gs://BUCKET/DIR [FLAG…]
       tools/tpu/train.sh --keep_alive --config=… --workdir=… [FLAG…]
       tools/tpu/train.sh --follow[=WORKER] | --status | --stop

Starts `python -m diffjax.train` with these flags on all workers and returns.
The same command resumes a run that was interrupted: all that it needs is in
the workdir. A second run is refused while one is in progress.

  --keep_alive  stays, and starts the run again whenever it ends early. Creates
                and sets up the slice again if it was preempted. Ends when the
                run is complete, was stopped, or fails five times in a row.
  --follow      prints the log of worker 0, or of another, until the run ends
  --status      says for each worker whether the run is in progress
  --stop        ends the run, which saves a checkpoint first
END
  slice_variables
}

# require_flags FLAG…: ends the script if the config or the workdir is missing.
require_flags() {
  local argument has_config=false has_workdir=false
  for argument in "$@"; do
    case $argument in
      --config=?*) has_config=true ;;
      --workdir=gs://?*) has_workdir=true ;;
    esac
  done
  if [[ $has_config == false ]]; then
    fail "pass --config=CONFIG, such as --config=configs/diff_1b.py"
  fi
  if [[ $has_workdir == false ]]; then
    fail "pass --workdir=gs://BUCKET/DIR: all workers must see the workdir," \
      "and it must outlive them"
  fi
}

# quoted WORD…: prints the words as a shell reads them.
quoted() {
  printf '%q ' "$@"
}

statuses() {
  on_workers all "$WORKER status" ||
    fail "at least one worker did not answer (see above); is the slice ready" \
      "and set up? tools/tpu/create.sh && tools/tpu/setup.sh"
}

# start FLAG…: starts the run on all workers, or on none.
start() {
  say "starts $(quoted diffjax.train "$@")"
  if ! on_workers all "$WORKER start $(quoted "$@")"; then
    say "the start failed on at least one worker (see above): stops the others"
    on_workers all "$WORKER stop" || true
    return 1
  fi
}

start_unless_running() {
  local answers
  answers=$(statuses)
  if grep -q ': running: ' <<< "$answers"; then
    echo "$answers" >&2
    fail "a run is in progress already; end it with: tools/tpu/train.sh --stop"
  fi
  start "$@" || fail "nothing runs"
  say "the run goes on without this machine; its log:" \
    "tools/tpu/train.sh --follow"
}

# run_state FLAG…: prints one word for the states of all workers.
run_state() {
  local answers command
  command=$(quoted diffjax.train "$@")
  if ! answers=$(on_workers all "$WORKER status"); then
    echo unreachable
  elif sed -n 's/^[^:]*: running: //p' <<< "$answers" |
    grep -qvxF "$command"; then
    echo other
  elif grep -qE ': (lost|interrupted|ended with status [1-9][0-9]*): ' \
    <<< "$answers"; then
    echo failed
  elif grep -q ': running: ' <<< "$answers"; then
    echo running
  elif grep -q ': stopped: ' <<< "$answers"; then
    echo stopped
  elif grep -q ': idle$' <<< "$answers"; then
    echo idle
  else
    echo complete
  fi
}

# recreate: creates the slice and sets it up. A new spot slice may be preempted
# before it is set up.
recreate() {
  local attempt
  for ((attempt = 1; attempt <= MAX_ATTEMPTS; attempt++)); do
    if "$TPU_TOOLS/create.sh" && "$TPU_TOOLS/setup.sh"; then
      return
    fi
    say "attempt $attempt of $MAX_ATTEMPTS to create the slice failed"
    sleep "$TPU_POLL_SECONDS"
  done
  fail "could not create and set up $TPU_NAME; run the same command again later"
}

# launch STATE FLAG…: ends what is left of a run and starts it again.
launch() {
  local state=$1
  shift
  # Workers that do not answer may have been replaced by empty ones.
  if [[ $state == unreachable ]]; then
    "$TPU_TOOLS/setup.sh" || return
  fi
  on_workers all "$WORKER stop" > /dev/null && start "$@"
}

# keep_alive FLAG…: starts the run and watches it until it is complete.
#
# The first failures of a preempted slice come from its workers, before the
# slice itself is reported as preempted. Each of them is answered by a new
# start, which fails on a slice that is going away.
keep_alive() {
  local slice state failures=0 healthy_polls=0 is_started=false
  while true; do
    slice=$(slice_state) || slice=unknown
    if is_gone "$slice"; then
      say "the slice is $slice"
      recreate
      failures=0
      state=idle
    elif [[ $slice == READY ]]; then
      state=$(run_state "$@")
    else
      say "the slice is $slice: waits"
      sleep "$TPU_POLL_SECONDS"
      continue
    fi

    # An outcome from before this script's first start says nothing about it.
    if [[ $is_started == false && $state =~ ^(failed|stopped|complete)$ ]]; then
      state=idle
    fi
    case $state in
      stopped | complete)
        say "the run is $state"
        return
        ;;
      other)
        on_workers all "$WORKER status" >&2 || true
        fail "another run is in progress; end it with:" \
          "tools/tpu/train.sh --stop"
        ;;
      running)
        is_started=true
        healthy_polls=$((healthy_polls + 1))
        if ((healthy_polls == HEALTHY_POLLS)); then
          failures=0
        fi
        ;;
      failed | unreachable)
        failures=$((failures + 1))
        say "the run is $state, failure $failures of $MAX_FAILURES in a row"
        on_workers all "$WORKER status" || true
        ;;
    esac
    if ((failures >= MAX_FAILURES)); then
      fail "gives up; the log: tools/tpu/train.sh --follow"
    fi
    if [[ $state != running ]]; then
      healthy_polls=0
      is_started=false
      if launch "$state" "$@"; then
        is_started=true
      elif [[ $state == idle ]]; then
        failures=$((failures + 1))
      fi
    fi
    sleep "$TPU_POLL_SECONDS"
  done
}

is_kept_alive=false
flags=()
for argument in "$@"; do
  case $argument in
    --help)
      usage
      exit
      ;;
    --keep_alive) is_kept_alive=true ;;
    *) flags+=("$argument") ;;
  esac
done
require TPU_NAME TPU_ZONE

case ${1:-} in
  --status | --stop | --follow | --follow=*)
    refuse "${@:2}"
    ;;
esac
case ${1:-} in
  --status)
    statuses
    ;;
  --stop)
    on_workers all "$WORKER stop" ||
      fail "at least one worker did not stop (see above)"
    ;;
  --follow)
    on_workers 0 "$WORKER follow"
    ;;
  --follow=*)
    on_workers "${1#--follow=}" "$WORKER follow"
    ;;
  *)
    require_flags ${flags[@]+"${flags[@]}"}
    if [[ $is_kept_alive == true ]]; then
      require TPU_TYPE
      keep_alive "${flags[@]}"
    else
      start_unless_running "${flags[@]}"
    fi
    ;;
esac
