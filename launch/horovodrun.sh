#!/usr/bin/env bash
# Training by horovodrun, over Gloo. Started on one host; it reaches the other HOSTS by ssh, and chooses free ports.
#
#   bash launch/horovodrun.sh [flags of dualtrain.main]
#
# NPROC  ranks on each host (default: 2)
# HOSTS  host,host:slots,… where slots are a host's own number of ranks (default: this host alone)
# IFACE  network interface that the ranks talk through (default: their libraries choose)
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
count_ranks

exec horovodrun --gloo -np "$ranks" --hosts "$hosts" ${IFACE:+--network-interfaces "$IFACE"} \
  python -m dualtrain.main "$@"
