#!/usr/bin/env bash
# The main job on both backends, two processes each, and a table of what came out.
#
#   bash launch/demo.sh [flags of dualtrain.main, for both runs]
#
# RUNS  where the two run folders go (default: a new folder below runs/)
# launch/setup.sh, which it calls, has more variables; DUALTRAIN_WITH is tree here: no tools for tests.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
DUALTRAIN_WITH=${DUALTRAIN_WITH:-tree} bash "$root/launch/setup.sh"
source "${DUALTRAIN_VENV:-$root/.venv}/bin/activate"

runs=${RUNS:-$root/runs/demo-$(date +%Y%m%d-%H%M%S)-$$}
mkdir -p "$runs"

echo; echo "== horovodrun, Horovod =="
horovodrun --gloo -np 2 python -m dualtrain.main --backend horovod --run-dir "$runs/horovod" "$@"

echo; echo "== torchrun, torch.distributed =="
# torchrun would set this anyway, and say so in five lines; dualtrain shares the cores out itself.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
torchrun --standalone --nproc_per_node=2 -m dualtrain.main --backend torch --run-dir "$runs/torch" "$@"

echo
python -m dualtrain.compare "$runs/horovod" "$runs/torch"
