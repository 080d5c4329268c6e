#!/usr/bin/env bash
# Shows that --virtual-ranks gives one result: trains the same job in one process, then with several numbers of ranks, with
# different backends, transports and launchers (WAYS), and in a chain of runs. Each run of the chain has a different number
# of ranks, and resumes from a checkpoint of the previous run. Ends with a table and "N runs, 1 hash". Exit status 1 if
# weights or metrics differ or a run failed, 2 if the flags are wrong. Ways (see below) that cannot run here are listed at
# the end with the reason.
#
#   bash launch/one_result.sh [flags of dualtrain train, for all runs]     (default: --epochs 2)
#
# V      number of virtual ranks (default: 4)
# RANKS  numbers of ranks, such as "1 2 3 4", for every way except the chain (default: one or two numbers from 2
#        to 4, depending on the way)
# WAYS   ways to train: a launcher with a transport or backend, or the chain, whose runs have 4, 1, 3 and 2 ranks (default:
#        "nproc-shm nproc-native torchrun-shm torchrun-native horovodrun-gloo horovodrun-mpi mpirun-torch mpirun-horovod
#        chain"). The run in one process is always the first
# RUNS   folder of the runs (default: a new folder below runs/)
# The script calls launch/setup.sh, whose --help lists more variables. Here, the default of DUALTRAIN_WITH is tree, not dev, so
# that the tools for tests are not installed.
set -euo pipefail

refuse() { printf 'one_result.sh: error: %s\n' "$*" >&2; exit 2; }

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:-} in -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; exit 0 ;; esac

known=(nproc-shm nproc-native torchrun-shm torchrun-native horovodrun-gloo horovodrun-mpi mpirun-torch mpirun-horovod chain)
virtual=${V:-4}
[[ $virtual =~ ^[1-9][0-9]{0,3}$ ]] || refuse "V is '$virtual', but must be a number of virtual ranks, such as V=4"
# With -d '', read does not end at the first line, but its status is 1.
read -rd '' -a sizes <<<"${RANKS:-}" || true
for size in ${sizes[@]+"${sizes[@]}"}; do
  [[ $size =~ ^[1-9][0-9]{0,3}$ ]] || refuse "RANKS has '$size', but must be numbers of ranks, such as RANKS=\"1 2 3 4\""
done
read -rd '' -a ways <<<"${WAYS:-${known[*]}}" || true
for way in "${ways[@]}"; do
  [[ " ${known[*]} " == *" $way "* ]] || refuse "WAYS has '$way', but each entry must be one of ${known[*]}"
done
for flag in "$@"; do
  case ${flag%%=*} in
    --virtual-ranks) refuse "--virtual-ranks is set by the script: use V" ;;
    --run-dir) refuse "--run-dir is set by the script: use RUNS" ;;
    --nproc | --backend | --transport | --resume) refuse "${flag%%=*} is set by the script: use WAYS and RANKS" ;;
  esac
done
if [ $# = 0 ]; then set -- --epochs 2; fi

DUALTRAIN_WITH=${DUALTRAIN_WITH:-tree} bash "$root/launch/setup.sh"
source "${DUALTRAIN_VENV:-$root/.venv}/bin/activate"
runs=${RUNS:-$root/runs/one-result-$(date +%Y%m%d-%H%M%S)-$$}
reason=$(mkdir -p "$runs" 2>&1) || refuse "$runs cannot be made (${reason##*: }): set RUNS to a folder that you may write"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # torchrun would set it and print five lines about it
mpi=(mpirun --oversubscribe --bind-to none) # ranks may outnumber cores
if [ "$(id -u)" = 0 ]; then mpi+=(--allow-run-as-root); fi
main=(python -m dualtrain.main --virtual-ranks "$virtual" "$@")
folders=() left_out=()

# train NAME COMMAND…: runs the command, with its output in NAME.log; prints one line of results, or the end of NAME.log after a failure.
train() {
  local name=$1 status=0
  shift
  printf '%-26s ' "$name"
  folders+=("$runs/$name")
  "$@" --run-dir "$runs/$name" >"$runs/$name.log" 2>&1 </dev/null || status=$?
  if [ $status = 0 ]; then
    grep -o 'val accuracy [0-9.]*,.*weights [0-9a-f]*' "$runs/$name.log" | tail -n 1
  else
    printf 'failed with exit status %s; the end of %s:\n' "$status" "$runs/$name.log"
    tail -n 5 "$runs/$name.log"
    if [ "$status" = 130 ]; then exit 130; fi # interrupted
  fi
  return "$status"
}

# run_way WAY RANKS NAME [FLAG…]: trains the run NAME in this way, on this number of ranks.
run_way() {
  local way=$1 size=$2 name=$3
  shift 3
  case $way in
    alone) train "$name" "${main[@]}" --backend local "$@" ;;
    nproc-*) train "$name" "${main[@]}" --nproc "$size" --backend torch --transport "${way#*-}" "$@" ;;
    torchrun-*)
      set -- --backend torch --transport "${way#*-}" "$@"
      train "$name" torchrun --standalone --local-addr=localhost --nproc_per_node="$size" "${main[@]:1}" "$@"
      ;;
    horovodrun-*) train "$name" horovodrun "--${way#*-}" -np "$size" "${main[@]}" --backend horovod "$@" ;;
    mpirun-*) train "$name" "${mpi[@]}" -np "$size" "${main[@]}" --backend "${way#*-}" "$@" ;;
  esac
}

# missing MODULE: true if the environment has no such module; imports nothing.
missing() { python -c 'import sys, importlib.util as u; sys.exit(u.find_spec(sys.argv[1]) is not None)' "$1"; }

# why_not WAY: prints why a way cannot run here, or nothing.
why_not() {
  local program=${1%%-*} module=horovod
  case $1 in nproc-* | torchrun-* | chain) return ;; mpirun-torch) module=mpi4py ;; esac
  if ! command -v "$program" >/dev/null; then
    echo "there is no $program here; bash launch/setup.sh installs it"
  elif missing "$module"; then
    echo "$module is not installed; bash launch/setup.sh installs it"
  fi
}

# sizes_of WAY: prints the numbers of ranks of a way.
sizes_of() {
  if [ "${#sizes[@]}" -gt 0 ]; then echo "${sizes[*]}"; return; fi
  case $1 in
    nproc-shm | torchrun-native) echo 2 4 ;;
    horovodrun-gloo) echo 4 ;;
    horovodrun-mpi) echo 2 ;;
    *) echo 3 ;;
  esac
}

# chain: starts four complete runs, on 4, 1, 3 and 2 ranks. The second resumes from step 3 of the first, the third from step 6 of
# the second, the fourth from step 9 of the third. A failed run ends the chain.
chain() {
  local step=0 from=() link way size flags=(--checkpoint-every 3 --keep 100)
  local third=nproc-native last=torchrun-native
  if [ -z "$(why_not horovodrun-gloo)" ]; then third=horovodrun-gloo; fi
  if [ -z "$(why_not mpirun-torch)" ]; then last=mpirun-torch; fi
  for link in "torchrun-shm 4" "alone 1" "$third 3" "$last 2"; do
    read -r way size <<<"$link"
    if [ "$step" -gt 0 ]; then
      from=(--resume "${folders[-1]}/checkpoints/step-$(printf %08d "$step").safetensors")
      [ -f "${from[1]}" ] || { left_out+=("the rest of the chain: the job has fewer than $step steps"); return; }
    fi
    run_way "$way" "$size" "chain-$((step / 3 + 1))-$way-$size" "${flags[@]}" ${from[@]+"${from[@]}"} || return 0
    step=$((step + 3))
  done
}

status=0
run_way alone 1 one-process || status=$?
if [ $status = 2 ]; then exit 2; fi # the flags are wrong: every other run would fail in the same way
for way in "${ways[@]}"; do
  why=$(why_not "$way")
  if [ -n "$why" ]; then
    left_out+=("$way: $why")
  elif [ "$way" = chain ]; then
    chain
  else
    for size in $(sizes_of "$way"); do run_way "$way" "$size" "$way-$size" || true; done
  fi
done

echo
for why in ${left_out[@]+"${left_out[@]}"}; do echo "left out: $why"; done
python -m dualtrain.compare --one-result "${folders[@]}"
