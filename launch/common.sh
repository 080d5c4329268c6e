# Common part of torchrun.sh, horovodrun.sh, mpirun.sh and slurm.sbatch, which source this file. $1 is their first argument.
# Activates the environment. Sets root, nproc, names (the entries of HOSTS), and the ranks' environment variables.

case ${1:-} in -h | --help) sed -n '2,/^set/{/^set\|^#SBATCH/d;s/^# \{0,1\}//p}' "$0"; exit 0 ;; esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
activate=${DUALTRAIN_VENV:-$root/.venv}/bin/activate
if [ -f "$activate" ]; then source "$activate"; fi

refuse() { printf '%s: error: %s\n' "${script:-${0##*/}}" "$*" >&2; exit 2; }

# need PROGRAM: ends with an error if the launcher PROGRAM is missing.
need() { command -v "$1" >/dev/null || refuse "no $1 found: run bash launch/setup.sh, or activate the environment that has it"; }

nproc=${NPROC:-2}
[[ $nproc =~ ^[1-9][0-9]{0,4}$ ]] || refuse "NPROC=$nproc is not a number of ranks: set it to a number from 1 to 99999, such as NPROC=2"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # torchrun's default, here for all launchers
if [ -n "${IFACE:-}" ]; then export GLOO_SOCKET_IFNAME=$IFACE NCCL_SOCKET_IFNAME=$IFACE HOROVOD_GLOO_IFACE=$IFACE; fi
HOSTS=$(printf %s "${HOSTS:-localhost}")
HOSTS=${HOSTS//$'\n'/ } # `read` would ignore all lines but the first; count_ranks refuses the spaces
IFS=, read -ra names <<<"$HOSTS"

# count_ranks: sets hosts (host:slots,… where slots is the number of ranks on the host) and ranks (the total number of ranks).
count_ranks() {
  local host
  hosts='' ranks=0
  for host in "${names[@]}"; do
    if [[ $host != *:* ]]; then host=$host:$nproc; fi
    # Without this check, some wrong lists would start a smaller job: with "a b", torchrun.sh would use this host alone.
    [[ $host =~ ^[[:alnum:]._-]+:[1-9][0-9]{0,4}$ ]] ||
      refuse "HOSTS=$HOSTS has the entry '$host': write each host as a name, or as name:ranks, with commas between"
    hosts+=${hosts:+,}$host ranks=$((ranks + ${host##*:}))
  done
}
