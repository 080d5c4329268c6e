#!/usr/bin/env bash
# Trains under torchrun. With several HOSTS, start this script on each host with the same variables; the first host runs the rendezvous.
#
#   bash launch/torchrun.sh [flags of dualtrain train]
#
# NPROC  ranks on each host for which HOSTS gives no slots (default: 2)
# HOSTS  host,host:slots,… where slots is the number of ranks on that host (default: this host only)
# PORT   port that is free on the first host (needed with several hosts only)
# IFACE  network interface of the ranks (default: the libraries choose)
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# Find the number of ranks on this host. It is in this host's entry of HOSTS; if there is no such entry, all entries must have
# the same number.
count_ranks
here=" localhost $(hostname) $(hostname -s) $(hostname -I 2>/dev/null || true) "
mine='' counts=() listed=' '
IFS=, read -ra entries <<<"$hosts"
for host in "${entries[@]}"; do
  # Each entry is one torchrun: with a host listed twice, torchrun would wait for a second start on it.
  if [[ $listed == *" ${host%%:*} "* ]]; then
    refuse "HOSTS=$HOSTS has the host ${host%%:*} twice: name each host once, with all of its ranks, such as ${host%%:*}:4"
  fi
  listed+="${host%%:*} "
  if [[ $here == *" ${host%%:*} "* ]]; then
    mine=${host##*:}
  elif [[ -z $mine && ${host%%[.:]*} == "$(hostname -s)" ]]; then
    mine=${host##*:}  # a later entry with the full name replaces this number
  fi
  if [[ " ${counts[*]-} " != *" ${host##*:} "* ]]; then counts+=("${host##*:}"); fi
done
if [ -z "$mine" ] && [ "${#counts[@]}" -gt 1 ]; then
  refuse "HOSTS=$HOSTS has different numbers of ranks, and none of its names is this host's: use the name $(hostname) for this host"
fi
nproc=${mine:-${counts[0]}}

# Without --local-addr, torchrun looks up this host's name. If the name has no address, as with docker run --network none, it waits for
# minutes.
rendezvous=(--standalone --local-addr=localhost)
if [ "${#names[@]}" -gt 1 ]; then
  # If localhost comes first, each host meets itself and waits for the others. If not, each host takes localhost's number of ranks.
  if [[ $listed =~ \ (localhost|127\.[0-9.]+)\  ]]; then
    refuse "HOSTS=$HOSTS has several hosts, and ${BASH_REMATCH[1]} is another host on each of them: use the name $(hostname) for this host"
  fi
  if [ -z "${PORT:-}" ]; then
    refuse "PORT is not set, but the rendezvous of ${#names[@]} hosts needs a port: set it to a free port of ${names[0]%%:*}"
  fi
  if ! [[ $PORT =~ ^[1-9][0-9]{0,4}$ ]] || [ "$PORT" -gt 65535 ]; then
    refuse "PORT=$PORT is not a port: set it to a free port of ${names[0]%%:*}, from 1 to 65535"
  fi
  # If another job's torchrun listens at the port, nodes of the two jobs would join each other.
  if [[ $here == *" ${names[0]%%:*} "* ]] && (exec 3<>"/dev/tcp/${names[0]%%:*}/$PORT") 2>/dev/null; then
    refuse "PORT=$PORT is in use on this host: set it to a free port, the same on all hosts"
  fi
  rendezvous=(--nnodes="${#names[@]}" --rdzv-backend=c10d --rdzv-endpoint="${names[0]%%:*}:$PORT" --rdzv-id="dualtrain-$PORT")
fi
need torchrun
exec torchrun "${rendezvous[@]}" --nproc-per-node="$nproc" -m dualtrain.main "$@"
