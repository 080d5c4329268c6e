#!/usr/bin/env bash
# Trains under torchrun. With several HOSTS, start it on each of them with the same variables; the first runs the rendezvous.
#
#   bash launch/torchrun.sh [flags of dualtrain train]
#
# NPROC  ranks on each host (default: 2)
# HOSTS  host,host:slots,… where slots is the number of ranks on that host (default: this host only)
# PORT   port that is free on the first host (needed with several hosts only)
# IFACE  network interface of the ranks (default: the libraries choose)
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

meeting=(--standalone)
for host in "${names[@]}"; do
  if [[ $host == *:* && " localhost $(hostname) $(hostname -s) " == *" ${host%%:*} "* ]]; then nproc=${host##*:}; fi
done
if [ "${#names[@]}" -gt 1 ]; then
  if [ -z "${PORT:-}" ]; then
    echo "torchrun.sh: error: PORT is not set, but ${#names[@]} hosts need one to meet: set it to a free port of ${names[0]%%:*}" >&2
    exit 2
  fi
  meeting=(--nnodes="${#names[@]}" --rdzv-backend=c10d --rdzv-endpoint="${names[0]%%:*}:$PORT" --rdzv-id="dualtrain-$PORT")
fi
exec torchrun "${meeting[@]}" --nproc-per-node="$nproc" -m dualtrain.main "$@"
