#!/usr/bin/env bash
# The grid `session` of ablations, 98M parameters, on a GPU that is available for minutes and has no network:
#
#   experiments/gpu_session.sh pack runs/session    # with a network: tokenizer, rows and packages, under 64 MiB
#   experiments/gpu_session.sh run runs/session     # on the GPU, within $LIMIT = 540 seconds; again for more
#
# The GPU's machine needs Python 3.12, JAX for CUDA, SciPy, matplotlib and pip. Other packages that it lacks are installed from the pack into
# $SCRATCH = /tmp/gpu_session, where the runs are too. Runs are made one after the other, seed after seed, and none starts that would not end
# in time. The results are in DIR/out, and in $OUT if that is set: results.json, table.md, plot.png, and the logs of all runs, curves.jsonl.
# The same command continues with the missing runs, also on another machine with this DIR/out at the same path. Flags of experiments.run may
# follow, the same ones each time: --set=model.attention_implementation=chunked.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
LIMIT=${LIMIT:-540}
SCRATCH=${SCRATCH:-/tmp/gpu_session}
RESERVE=40      # seconds to save a run that is stopped, and to collect the results
RUN_SECONDS=150 # estimate for a run, until one has been timed; see experiments/ablations/config.py
MAX_MIB=60      # largest pack, so that the code fits beside it

# The packages that training needs beyond JAX, and their dependencies.
PACKAGES=(
  absl-py aiofiles array_record cloudpickle etils flax fsspec grain humanize jaxtyping markdown-it-py mdurl ml_collections msgpack optax
  orbax-checkpoint packaging portpicker prometheus_client protobuf psutil pygments pyyaml rich simplejson tensorboardX tensorstore
  tokenizers treescope typing_extensions uvloop wadler-lindig zipp
)

pack() {
  local vocabulary=16384 flag platforms=()
  local prepare=("$PYTHON" -m diffjax.prepare --config=experiments/ablations/config.py:diff,size=session)
  for flag in "$@"; do
    case $flag in --set=model.vocab_size=*) vocabulary=${flag##*=} ;; esac
    case $flag in --set=*) prepare+=("--config.${flag#--set=}") ;; esac
  done
  [ -e "$DIR/tokenizer/tokenizer.json" ] || "${prepare[@]}" --train_tokenizer="$DIR/tokenizer" --vocab_size="$vocabulary"
  "${prepare[@]}" --config.data.tokenizer="$DIR/tokenizer/tokenizer.json" --config.data.prepared_dir="$DIR/rows"
  if [ ! -e "$DIR/wheels" ]; then
    for flag in 17 24 26 27 28 31 34 35 39; do platforms+=(--platform "manylinux_2_${flag}_x86_64"); done
    "$PYTHON" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" \
      --platform manylinux2014_x86_64 -d "$DIR/wheels.tmp" "${PACKAGES[@]}"
    mv "$DIR/wheels.tmp" "$DIR/wheels"
  fi
  du -sh "$DIR"/*
  local size
  size=$(du -sm "$DIR" | cut -f1)
  [ "$size" -le "$MAX_MIB" ] || fail "$DIR takes $size MiB, more than $MAX_MIB"
}

run() {
  [ -e "$DIR/rows/meta.json" ] || fail "$DIR holds no rows; make them with experiments/gpu_session.sh pack $DIR"
  mkdir -p "$DIR/out" "$SCRATCH/runs/ablations/session"
  export XDG_CACHE_HOME=$SCRATCH/cache PYTHONUNBUFFERED=1 PYTHONPATH=$SCRATCH/site:$PWD${PYTHONPATH:+:$PYTHONPATH}
  install_packages
  "$PYTHON" -c 'import diffjax.training.loop, experiments.run, jax; print("devices:", *jax.devices(), flush=True)' # missing packages fail here
  [ -n "${ON_CPU:-}" ] || [ "$("$PYTHON" -c 'import jax; print(jax.default_backend())')" != cpu ] ||
    fail "JAX finds no GPU here; set ON_CPU=1 to go on without"
  local experiment=(
    "$PYTHON" -m experiments.run ablations --grid=session "--workdir=$SCRATCH/runs" "--out=$DIR/out" "--set=data.prepared_dir=$DIR/rows"
    "--set=data.tokenizer=$DIR/tokenizer/tokenizer.json" "$@"
  )
  local next only left status=0
  while [ "$status" = 0 ]; do
    left=$((LIMIT - SECONDS - RESERVE))
    next=$(runs_that_fit "$left")
    [ -n "$next" ] || break
    mapfile -t only <<< "$next"
    echo "$left s left: ${only[*]}"
    timeout --foreground --signal=TERM --kill-after="$RESERVE" "$left" "${experiment[@]}" "${only[@]/#/--only=}" || status=$?
    if [ "$status" != 0 ]; then # collect the runs that ended before the one that was stopped or failed
      next=$(find "$SCRATCH/runs/ablations/session" -name result.json -printf '%P\n' | sed 's|/result.json||')
      mapfile -t only <<< "$next"
      [ -z "$next" ] || "${experiment[@]}" "${only[@]/#/--only=}"
    fi
    collect
  done
  [ "$status" != 124 ] || status=0 # stopped, and saved
  [ "$status" = 0 ] || fail "a run failed, as said above"
  echo "$(grep -c '"name"' "$DIR/out/results.json" 2>/dev/null || true) runs in $DIR/out; $SECONDS s"
}

# Installs into $SCRATCH/site the packages that this machine lacks, or has in older versions than the pack.
install_packages() {
  local wheels
  wheels=$(
    "$PYTHON" - "$DIR/wheels" << 'END'
import importlib.metadata, pathlib, sys
from pip._vendor.packaging import utils, version

for wheel in sorted(pathlib.Path(sys.argv[1]).glob("*.whl")):
  name, packed, *_ = utils.parse_wheel_filename(wheel.name)
  try:
    there = version.Version(importlib.metadata.version(name)) >= packed
  except importlib.metadata.PackageNotFoundError:
    there = False
  if not there:
    print(wheel)
END
  )
  [ -z "$wheels" ] || xargs -d '\n' "$PYTHON" -m pip install -q --no-index --no-deps --upgrade --target "$SCRATCH/site" <<< "$wheels"
}

# Prints the next runs that end within $1 seconds, one a line. A run is expected to take a little longer than the longest so far.
runs_that_fit() {
  "$PYTHON" - "$1" "$RUN_SECONDS" "$DIR/out/results.json" << 'END'
import json, pathlib, sys
from experiments import grid

left, seconds, results = int(sys.argv[1]), float(sys.argv[2]), pathlib.Path(sys.argv[3])
done = json.loads(results.read_text())["runs"] if results.exists() else []
seconds = 1.15 * max((run["seconds"] for run in done), default=seconds / 1.15)
names = [run.name for run in grid.expand("ablations", grid.load("ablations").grids["session"], {})]
missing = [name for name in names if name not in {run["name"] for run in done}]
for name in missing[: max(0, int((left - 15) / seconds))]:  # 15 s: the command's own start
  print(name)
END
}

# Joins the logs of all runs into one file, with those of other machines.
collect() {
  "$PYTHON" - "$SCRATCH/runs/ablations/session" "$DIR/out/curves.jsonl" << 'END'
import json, pathlib, sys


def read(log):
  for line in log.read_text().splitlines():
    try:
      yield json.loads(line)
    except ValueError:  # a line that was being written when the run was killed
      continue


runs, curves = map(pathlib.Path, sys.argv[1:])
lines = [*read(curves)] if curves.exists() else []
there = {line["run"] for line in lines}
for result in sorted(runs.glob("*/*/result.json")):
  name = f"{result.parts[-3]}/{result.parts[-2]}"
  if name not in there:
    lines += [{"run": name, **line} for line in read(result.parent / "metrics.jsonl")]
temporary = curves.with_suffix(".tmp")
temporary.write_text("".join(json.dumps(line) + "\n" for line in lines))
temporary.replace(curves)
END
  [ -z "${OUT:-}" ] || cp "$DIR"/out/* "$OUT"
}

fail() {
  echo "error: $1" >&2
  exit 1
}

case ${1:-} in
  pack | run)
    [ -n "${2:-}" ] || fail "name a directory: experiments/gpu_session.sh $1 DIR"
    DIR=$2
    "$1" "${@:3}"
    ;;
  *) fail "experiments/gpu_session.sh pack DIR, or run DIR" ;;
esac
