#!/usr/bin/env bash
# Trains under horovodrun over Gloo. Start this script on one host: horovodrun reaches the other HOSTS by ssh and chooses free ports.
#
#   bash launch/horovodrun.sh [flags of dualtrain train]
#
# NPROC  ranks on each host for which HOSTS gives no slots (default: 2)
# HOSTS  host,host:slots,… where slots is the number of ranks on that host (default: this host only)
# IFACE  network interface of the ranks (default: the libraries choose)
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
count_ranks

need horovodrun
exec horovodrun --gloo -np "$ranks" --hosts "$hosts" ${IFACE:+--network-interfaces "$IFACE"} \
  python -m dualtrain.main "$@"
