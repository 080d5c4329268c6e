#!/usr/bin/env bash
# Trains the default job on both backends with two ranks each, and prints a table of the results.
#
#   bash launch/demo.sh [flags of dualtrain train, for both runs]
#
# RUNS  folder of the two runs (default: a new folder below runs/)
# The script calls launch/setup.sh, whose --help lists more variables. Here, the default of DUALTRAIN_WITH is tree, not dev, so
# that the tools for tests are not installed.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:-} in -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; exit 0 ;; esac
# With this trap, bash exits after the launcher. Otherwise bash would exit first, and a container would end before the ranks have saved.
trap 'exit 143' TERM
DUALTRAIN_WITH=${DUALTRAIN_WITH:-tree} bash "$root/launch/setup.sh"
source "${DUALTRAIN_VENV:-$root/.venv}/bin/activate"

runs=${RUNS:-$root/runs/demo-$(date +%Y%m%d-%H%M%S)-$$}
if ! reason=$(mkdir -p "$runs" 2>&1); then
  echo "demo.sh: error: $runs cannot be made (${reason##*: }): set RUNS to a folder that you may write" >&2
  exit 2
fi

echo; echo "== horovodrun, Horovod =="
horovodrun --gloo -np 2 python -m dualtrain.main --backend horovod --run-dir "$runs/horovod" "$@"

echo; echo "== torchrun, torch.distributed =="
# Without OMP_NUM_THREADS, torchrun sets it and prints five lines about it. dualtrain sets the number of threads itself.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
torchrun --standalone --local-addr=localhost --nproc_per_node=2 -m dualtrain.main --backend torch --run-dir "$runs/torch" "$@"

echo
python -m dualtrain.compare "$runs/horovod" "$runs/torch"
