#!/usr/bin/env bash
# Training by torchrun. With several HOSTS, start it on each of them, with the same variables: they meet at the first one.
#
#   bash launch/torchrun.sh [flags of dualtrain.main]
#
# NPROC  ranks on each host (default: 2)
# HOSTS  host,host:slots,… where slots are a host's own number of ranks (default: this host alone)
# PORT   a port that is free on the first host (with several hosts only; on one, a free one is chosen)
# IFACE  network interface that the ranks talk through (default: their libraries choose)
set -euo pipefail

case ${1:-} in -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; exit 0 ;; esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
activate=${DUALTRAIN_VENV:-$root/.venv}/bin/activate
if [ -f "$activate" ]; then source "$activate"; fi

nproc=${NPROC:-2}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # torchrun would set it; so it is the same in all launchers
if [ -n "${IFACE:-}" ]; then export GLOO_SOCKET_IFNAME=$IFACE NCCL_SOCKET_IFNAME=$IFACE HOROVOD_GLOO_IFACE=$IFACE; fi

meeting=(--standalone)
IFS=, read -ra names <<<"${HOSTS:-localhost}"
for host in "${names[@]}"; do
  if [[ $host == *:* && " localhost $(hostname) $(hostname -s) " == *" ${host%%:*} "* ]]; then nproc=${host##*:}; fi
done
if [ "${#names[@]}" -gt 1 ]; then
  if [ -z "${PORT:-}" ]; then
    echo "torchrun.sh: error: PORT is not set, and ${#names[@]} hosts must meet at one: set it to a free port of ${names[0]%%:*}" >&2
    exit 2
  fi
  meeting=(--nnodes="${#names[@]}" --rdzv-backend=c10d --rdzv-endpoint="${names[0]%%:*}:$PORT" --rdzv-id="dualtrain-$PORT")
fi
exec torchrun "${meeting[@]}" --nproc-per-node="$nproc" -m dualtrain.main "$@"
