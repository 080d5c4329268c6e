#!/usr/bin/env bash
# Compares the ways of data parallelism on this machine: trains the same job in one process; with nn.DataParallel, also with
# --parallel-loss; on ranks that torchrun, --nproc and horovodrun start; and under torchrun with mixed precision. Prints a
# table of the results, and writes the page report.html into the folder of the runs.
#
#   bash launch/ways.sh [flags of dualtrain train, for all runs]
#
# NPROC  number of ranks under torchrun, --nproc and horovodrun (default: 2)
# RUNS   folder of the runs (default: a new folder below runs/)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:-} in -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; exit 0 ;; esac
nproc=${NPROC:-2}
if ! [[ $nproc =~ ^[1-9][0-9]{0,4}$ ]]; then
  echo "ways.sh: error: NPROC=$nproc is not a number of ranks: set it to a number from 1 to 99999, such as NPROC=2" >&2
  exit 2
fi
DUALTRAIN_WITH=${DUALTRAIN_WITH:-tree} bash "$root/launch/setup.sh"
source "${DUALTRAIN_VENV:-$root/.venv}/bin/activate"

runs=${RUNS:-$root/runs/ways-$(date +%Y%m%d-%H%M%S)-$$}
if ! reason=$(mkdir -p "$runs" 2>&1); then
  echo "ways.sh: error: $runs cannot be made (${reason##*: }): set RUNS to a folder that you may write" >&2
  exit 2
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # torchrun would set it and print five lines about it
done_runs=()

# way NAME COMMAND…: runs the command, and adds its run to done_runs if it succeeded. Ends the script after Ctrl-C, or if the first
# way refuses the flags, because all other ways would refuse them too.
way() {
  local name=$1 status=0
  shift
  printf '\n== %s ==\n' "$name"
  "$@" --run-dir "$runs/$name" || status=$?
  case $status-$name in
    0-*) done_runs+=("$runs/$name") ;;
    130-* | 2-one-process) exit "$status" ;;
    *) echo "($name: failed, see above)" ;;
  esac
}

# All runs take the same number of optimizer steps, because the default recipe sets the global batch size.
main=(python -m dualtrain.main)
way one-process "${main[@]}" --backend local "$@"
way data-parallel "${main[@]}" --backend local --data-parallel "$@"
way data-parallel-loss "${main[@]}" --backend local --data-parallel --parallel-loss "$@"
way torchrun torchrun --standalone --local-addr=localhost --nproc_per_node="$nproc" -m dualtrain.main --backend torch "$@"
way spawn "${main[@]}" --nproc "$nproc" --backend torch "$@"
way horovodrun horovodrun --gloo -np "$nproc" python -m dualtrain.main --backend horovod "$@"
way torchrun-bf16 torchrun --standalone --local-addr=localhost --nproc_per_node="$nproc" -m dualtrain.main --backend torch --amp bf16 "$@"

echo
python -m dualtrain.compare "${done_runs[@]}"
python -m dualtrain.report "${done_runs[@]}" --out "$runs/report.html"
