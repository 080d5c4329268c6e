#!/usr/bin/env bash
# Runs a command with a private Slurm of two nodes on this machine. This Slurm uses its own ports, keeps its keys, state and
# logs in a temporary folder, does not connect to another cluster, and leaves nothing behind.
#
#   bash tests/launch/slurm.sh COMMAND…
#
# SLURM_CONF is set for the command. The exit status is that of the command, or 2 if the command or a requirement is missing, 1
# if Slurm does not start, or 129, 130 or 143 after SIGHUP, SIGINT or SIGTERM. Needs root, and Debian's packages slurm-wlm and
# munge. The nodes' names are in an /etc/hosts that is mounted only for Slurm and the command.
set -euo pipefail

refuse() { printf 'slurm.sh: error: %s\n' "$*" >&2; exit 2; }

[ $# -gt 0 ] || refuse "no command: bash tests/launch/slurm.sh COMMAND…"
PATH=$PATH:/usr/sbin:/sbin
for program in munged slurmctld slurmd srun; do
  command -v "$program" >/dev/null || refuse "$program is not installed: apt install slurm-wlm munge"
done
[ "$(id -u)" = 0 ] || refuse "user $(id -un) cannot start Slurm's daemons: run this script as root"
if [ "$1" != --inside ]; then
  unshare --mount true 2>/dev/null || refuse "root cannot make a mount namespace here: run this script where CAP_SYS_ADMIN is granted"
  exec unshare --mount bash "$0" --inside "$@"
fi
shift

work=$(mktemp -d)
mkdir "$work/munge"
# Set this before the traps: without it, scancel in `finish` would cancel the jobs of this machine's own cluster.
export SLURM_CONF=$work/slurm.conf
daemons=()
nodes=(dualtrain-node1 dualtrain-node2)

# ours: prints the ids of all processes that were started with this SLURM_CONF: of Slurm's daemons, of jobs and of the
# command. It also finds processes whose parent has exited.
ours() { grep -lsz "^SLURM_CONF=$SLURM_CONF$" /proc/[0-9]*/environ | cut -d/ -f3; }

# end SIGNAL: sends the signal to the daemons and to the processes that `ours` prints; then waits until `ours` prints
# nothing, 5 s at most.
end() {
  kill "-$1" ${daemons[@]+"${daemons[@]}"} $(ours) || true
  for ((i = 0; i < 50; i++)); do [ -n "$(ours)" ] || break; sleep 0.1; done
}

finish() {
  trap '' INT TERM HUP
  exec 2>/dev/null # no messages about processes that have exited
  scancel --quiet --full --user=root || true
  # Let Slurm end its jobs first, so that the daemons see the jobs' last processes end.
  for ((i = 0; i < 50; i++)); do [ -n "$(squeue --noheader)" ] || break; sleep 0.1; done
  export -n SLURM_CONF # so that `ours` does not find this script's own commands
  end TERM
  end KILL
  wait
  umount /etc/hosts || true # not mounted if munge did not start
  rm -rf "$work"
}
trap finish EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

# free_port: sets port to a free port, a different port at each call.
port=$((20000 + RANDOM % 10000))
free_port() {
  port=$((port + 1))
  while (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do port=$((port + 1)); done
}

# daemon COMMAND…: starts a daemon without detaching it, so that this script knows its process id.
daemon() { "$@" >>"$work/daemons.log" 2>&1 & daemons+=($!); }

# until_true WHAT COMMAND…: waits until the command succeeds; after about half a minute, ends this script with status 1.
until_true() {
  local what=$1
  shift
  for ((i = 0; i < 300; i++)); do if "$@" >/dev/null 2>&1; then return; fi; sleep 0.1; done
  tail -n 20 "$work"/*.log >&2
  printf 'slurm.sh: error: %s was not ready within 30 s; the last lines of the logs are above\n' "$what" >&2
  exit 1
}

start_munge() {
  head -c 128 /dev/urandom >"$work/munge/key"
  chmod 400 "$work/munge/key"
  chown -R munge: "$work/munge"
  chmod 755 "$work" "$work/munge" # all users must reach munge's socket
  daemon setpriv --reuid=munge --regid=munge --clear-groups munged --foreground --socket="$work/munge/socket" \
    --key-file="$work/munge/key" --pid-file="$work/munge/pid" --log-file="$work/munge/log" --seed-file="$work/munge/seed"
  until_true munged munge --socket="$work/munge/socket" --no-input
}

# Both nodes are this machine: their names resolve to its first network address, or to 127.0.0.1 if it has none.
name_nodes() {
  address=$(hostname -I | cut -d' ' -f1)
  address=${address:-127.0.0.1}
  printf '127.0.0.1 localhost\n%s %s %s\n' "$address" "$(hostname)" "${nodes[*]}" >"$work/hosts"
  mount --bind "$work/hosts" /etc/hosts
}

write_config() {
  local controller node
  free_port; controller=$port
  cat >"$SLURM_CONF" <<CONF
ClusterName=dualtrain-test
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=$controller
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$work/munge/socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2
SwitchType=switch/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
# Allow more processors than the machine has: the tests need jobs to run, not to be fast.
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=20
StateSaveLocation=$work/state
SlurmctldPidFile=$work/slurmctld.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdSpoolDir=$work/spool-%n
SlurmdPidFile=$work/slurmd-%n.pid
SlurmdLogFile=$work/slurmd-%n.log
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
  mkdir "$work/state"
  for node in "${nodes[@]}"; do
    free_port
    mkdir "$work/spool-$node"
    echo "NodeName=$node NodeHostname=$(hostname -s) NodeAddr=$address Port=$port CPUs=4 State=UNKNOWN" >>"$SLURM_CONF"
  done
}

nodes_are_idle() { [ "$(sinfo --noheader --Node --format=%T | sort -u)" = idle ]; }

start_munge
name_nodes
write_config
daemon slurmctld -D -i
for node in "${nodes[@]}"; do daemon slurmd -D -N "$node"; done
until_true Slurm nodes_are_idle
"$@" <&0 & # in the background, so that signals are handled at once
wait $!
