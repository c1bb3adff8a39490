#!/usr/bin/env bash
# Runs on each worker of a TPU slice, called by setup.sh and train.sh:
#
#   worker.sh install          installs the uploaded repository
#   worker.sh start FLAG…      starts training, detached from this session
#   worker.sh status           says whether training runs, or how it ended
#   worker.sh follow           prints the log until the run ends
#   worker.sh stop             ends the run, which saves a checkpoint first
#
# A run holds a lock on diffjax/run/lock as long as any of its processes lives.
# Its other files there: log; command, as shell words; pid; outcome, once it
# has ended; stop_requested.
# Tested without a TPU only.
set -euo pipefail

cd "$HOME"
mkdir -p diffjax/run
RUN=$HOME/diffjax/run
SOURCE=$HOME/diffjax/source
VENV=$HOME/diffjax/venv
# Seconds that a run has to save its checkpoint.
STOP_TIMEOUT=600

say() {
  echo "$(hostname): $*"
}

fail() {
  say "$@" >&2
  exit 1
}

is_running() {
  ! flock --shared --nonblock "$RUN/lock" true
}

install() {
  if is_running; then
    fail "a run uses the installed code; stop it first: train.sh --stop"
  fi
  rm -rf "$SOURCE"
  mkdir -p "$SOURCE"
  tar -xzf diffjax_upload/source.tar.gz -C "$SOURCE"

  export PATH="$HOME/.local/bin:$PATH"
  if ! command -v uv > /dev/null; then
    curl -LsSf https://astral.sh/uv/install.sh | sh
  fi
  # Images of TPU VMs have Python 3.10, for which there is no current JAX.
  uv venv --quiet --allow-existing --python=3.12 "$VENV"
  uv pip install --quiet "--python=$VENV/bin/python" \
    --editable "${SOURCE}[tpu,gcs]"
  say "$("$VENV/bin/python" -c \
    'import jax, sys; print("Python", sys.version.split()[0], "JAX", jax.__version__)')"
}

# Starts a run that outlives this session and inherits its lock.
start() {
  if [[ ! -x $VENV/bin/python ]]; then
    fail "diffjax is not installed; run tools/tpu/setup.sh first"
  fi
  exec 9>> "$RUN/lock"
  if ! flock --nonblock 9; then
    fail "a run is in progress already: $(cat "$RUN/command")"
  fi
  rm -f "$RUN/outcome" "$RUN/pid" "$RUN/stop_requested"
  printf '%q ' diffjax.train "$@" > "$RUN/command"
  setsid bash "$SOURCE/tools/tpu/worker.sh" run "$@" \
    < /dev/null >> "$RUN/log" 2>&1 &
  # The end of this session must not come before the run has left it.
  wait_for_pid
  say "started"
}

# Trains and records how the run ended. A shutdown of the machine signals this
# script and Python. Python then saves and exits with 0, so that the status
# does not tell a run that is complete from one that was interrupted.
run() {
  local pid status=0 is_interrupted=false
  trap 'is_interrupted=true' TERM
  cd "$SOURCE"
  echo "== $(date -u +%Y-%m-%dT%H:%M:%SZ) starts $(cat "$RUN/command")"
  "$VENV/bin/python" -m diffjax.train "$@" &
  pid=$!
  echo "$pid" > "$RUN/pid"
  # A signal can end wait before Python ends. Wait at least once, because bash
  # keeps the status of a process that has already ended.
  while true; do
    status=0
    wait "$pid" || status=$?
    if ! kill -0 "$pid" 2> /dev/null; then
      break
    fi
  done
  local outcome="ended with status $status"
  if [[ -e $RUN/stop_requested ]]; then
    outcome=stopped
  elif [[ $is_interrupted == true ]]; then
    outcome=interrupted
  fi
  echo "== $(date -u +%Y-%m-%dT%H:%M:%SZ) $outcome"
  echo "$outcome" > "$RUN/outcome"
}

# Prints one line that train.sh reads.
status() {
  if [[ ! -e $RUN/command ]]; then
    say "idle"
  elif is_running; then
    say "running: $(cat "$RUN/command")"
  elif [[ -e $RUN/outcome ]]; then
    say "$(cat "$RUN/outcome"): $(cat "$RUN/command")"
  else
    # The machine was restarted, or the run was killed.
    say "lost: $(cat "$RUN/command")"
  fi
}

follow() {
  if [[ ! -e $RUN/log ]]; then
    fail "no run was started here"
  fi
  if is_running; then
    wait_for_pid
    exec tail -n 100 -f --pid="$(cat "$RUN/pid")" "$RUN/log"
  fi
  tail -n 100 "$RUN/log"
}

wait_for_pid() {
  until [[ -s $RUN/pid ]]; do
    sleep 0.02
  done
}

stop() {
  if ! is_running; then
    status
    return
  fi
  wait_for_pid
  touch "$RUN/stop_requested"
  kill -TERM "$(cat "$RUN/pid")" 2> /dev/null || true
  if ! flock --shared "--timeout=$STOP_TIMEOUT" "$RUN/lock" true; then
    fail "the run has not ended after $STOP_TIMEOUT s; process $(cat "$RUN/pid")"
  fi
  status
}

"$@"
