#!/usr/bin/env bash
# Trains under mpirun (Open MPI). Start this script on one host: mpirun reaches the other HOSTS by ssh and chooses free ports.
#
#   bash launch/mpirun.sh [flags of dualtrain train]
#
# NPROC  ranks on each host for which HOSTS gives no slots (default: 2)
# HOSTS  host,host:slots,… where slots is the number of ranks on that host (default: this host only)
# IFACE  network interface of the ranks (default: the libraries choose)
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
count_ranks

options=(--oversubscribe --bind-to none) # ranks may outnumber cores
# Unlike horovodrun, mpirun passes variables to the other hosts only if they are named.
for name in PATH OMP_NUM_THREADS PYTHONPATH "${!DUALTRAIN_@}" ATEN_CPU_CAPABILITY ONEDNN_MAX_CPU_ISA MKL_CBWR THP_MEM_ALLOC_ENABLE; do
  if [ -n "${!name:-}" ]; then options+=(-x "$name"); fi
done
if [ "$(id -u)" = 0 ]; then options+=(--allow-run-as-root); fi
# With these keepalive times, mpirun ends the job on all hosts within 6 s of a broken link. With the defaults, the job had not ended after 60 s.
options+=(--mca oob_tcp_keepalive_time 3 --mca oob_tcp_keepalive_intvl 1 --mca oob_tcp_keepalive_probes 3)
if [ -n "${IFACE:-}" ]; then
  options+=(--mca btl_tcp_if_include "$IFACE" --mca oob_tcp_if_include "$IFACE")
  options+=(-x GLOO_SOCKET_IFNAME -x NCCL_SOCKET_IFNAME -x HOROVOD_GLOO_IFACE)
fi
need mpirun
# If mpirun is started by its full path, it uses the same path on the other hosts.
exec "$(command -v mpirun)" "${options[@]}" -np "$ranks" --host "$hosts" python -m dualtrain.main "$@"
