#!/usr/bin/env bash
# One host of a cluster of containers (compose.yaml's profile "cluster"). Each host runs sshd. The first host in HOSTS starts
# training on all hosts, with both backends one after the other, and prints a table.
#
#   bash docker/node.sh [flags of dualtrain train, for both runs]
#
# HOSTS  name:ranks,name:ranks,…, the same in all containers; each name is the host name of a container
# PORT   a port that is free on the first host (default: 29400)
set -euo pipefail

refuse() { echo "node.sh: error: $*" >&2; exit 2; }

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PORT=${PORT:-29400} HOSTS=${HOSTS:-}
IFS=, read -ra names <<<"$HOSTS"
names=("${names[@]%%:*}")
[ "${#names[@]}" -gt 1 ] || refuse "HOSTS='$HOSTS' names fewer than two hosts: set it to, say, node1:2,node2:2"
[[ " ${names[*]} " == *" $(hostname) "* ]] || refuse "this host's name, $(hostname), is not in HOSTS=$HOSTS: set its hostname"
[ -w /keys ] || refuse "/keys cannot be written: mount a volume there that all hosts share"

# The container that starts first makes the keys, in a volume that all containers share, because an image must not contain keys.
umask 077
(
  flock 9
  if [ ! -f /keys/ready ]; then
    rm -f /keys/host* /keys/user*
    ssh-keygen -q -t ed25519 -N '' -C hosts -f /keys/host
    ssh-keygen -q -t ed25519 -N '' -C ranks -f /keys/user
    for name in "${names[@]}"; do echo "[$name]:2222 $(cut -d' ' -f1,2 /keys/host.pub)"; done >/keys/known_hosts
    touch /keys/ready
  fi
) 9>/keys/lock
mkdir -p ~/.ssh
printf '%s\n' "Host ${names[*]}" 'Port 2222' 'IdentityFile /keys/user' 'UserKnownHostsFile /keys/known_hosts' \
  'StrictHostKeyChecking yes' 'LogLevel ERROR' >~/.ssh/config

# sshd does not run as root, so it accepts logins of this user only. The ranks run as this user.
serve=(/usr/sbin/sshd -D -e -f /dev/null -p 2222 -h /keys/host)
for option in AuthorizedKeysFile=/keys/user.pub PasswordAuthentication=no KbdInteractiveAuthentication=no PidFile=none \
  LogLevel=ERROR "SetEnv=PATH=$PATH"; do serve+=(-o "$option"); done
if [ "$(hostname)" != "${names[0]}" ]; then exec "${serve[@]}"; fi
"${serve[@]}" &

for name in "${names[@]}"; do
  until ssh -o ConnectTimeout=2 "$name" true 2>/dev/null; do
    [ "$SECONDS" -lt 60 ] || { echo "node.sh: error: 60 s after the start, $name does not answer by ssh: is its container up?" >&2; exit 1; }
    sleep 1
  done
done
trap 'exit 143' TERM # bash exits after the launcher, and not before the ranks have saved
umask 022
runs=$PWD/runs/cluster-$(date +%Y%m%d-%H%M%S)-$$

echo "== Horovod, by ssh from ${names[0]} =="
bash launch/horovodrun.sh --run-dir "$runs/horovod" "$@"

echo; echo "== torchrun on each host, meeting at ${names[0]}:$PORT =="
printf -v line '%q ' bash launch/torchrun.sh --run-dir "$runs/torch" "$@"
others=()
for name in "${names[@]:1}"; do
  ssh "$name" "cd ${PWD@Q} && HOSTS=${HOSTS@Q} PORT=${PORT@Q} $line" &
  others+=($!)
done
bash launch/torchrun.sh --run-dir "$runs/torch" "$@"
for other in "${others[@]}"; do wait "$other"; done # `wait` with several processes returns only the last one's status

echo
python -m dualtrain.compare "$runs/horovod" "$runs/torch"
