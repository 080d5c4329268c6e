#!/usr/bin/env bash
# Installs programs that launch/setup.sh does not install. Some tests need them, and are skipped without them.
# Needs root and apt-get (Debian, Ubuntu), unless all packages are installed. The part k8s needs the environment of
# launch/setup.sh. The script can be run again: installed packages are not changed.
# The script starts no daemon. The tests start the daemons that they need, except Docker's (systemctl start docker).
#
#   bash tests/extras.sh [PART…]     (default: all parts)
#
# hosts   tests/launch/test_hosts.py, tests/commands/test_bench.py: iproute2, openssh-client, openssh-server
# slurm   tests/launch/test_slurm.py and test_smoke.py: munge, slurm-wlm
# k8s     tests/commands/test_k8s.py: kubeflow-training, into the environment of launch/setup.sh
# browser tests/commands/test_report_browser.py: chromium
# java    tests/integrations/test_spark.py: a Java runtime
# docker  tests/docker.sh: docker.io, docker-compose
#
# DUALTRAIN_VENV  environment made by launch/setup.sh (default: .venv beside setup.cfg)
set -euo pipefail

refuse() { printf 'extras.sh: error: %s\n' "$*" >&2; exit 2; }

case ${1:-} in -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; exit 0 ;; esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${DUALTRAIN_VENV:-$root/.venv}
parts=("$@")
if [ $# = 0 ]; then parts=(hosts slurm k8s browser java docker); fi

packages=() modules=()
for part in "${parts[@]}"; do
  case $part in
    hosts) packages+=(iproute2 openssh-client openssh-server) ;;
    slurm) packages+=(munge slurm-wlm) ;;
    k8s) modules+=(kubeflow-training==1.9.4) ;;
    browser) packages+=(chromium) ;;
    java) packages+=(default-jre-headless) ;;
    docker) packages+=(docker.io docker-compose) ;;
    *) refuse "there is no part '$part'; name hosts, slurm, k8s, browser, java or docker" ;;
  esac
done

# installed PACKAGE: true if the package is installed and configured.
installed() { [ "$(dpkg-query -W -f '${Status}' "$1" 2>/dev/null)" = 'install ok installed' ]; }

missing=()
for package in ${packages[@]+"${packages[@]}"}; do
  if ! command -v dpkg-query >/dev/null || ! installed "$package"; then missing+=("$package"); fi
done
if [ "${#missing[@]}" -gt 0 ]; then
  command -v apt-get >/dev/null || refuse "no apt-get found; install the programs of these Debian packages: ${missing[*]}"
  [ "$(id -u)" = 0 ] || refuse "user $(id -un) cannot install ${missing[*]}; run this as root"
  # Prevent packages such as openssh-server from starting their daemons.
  policy=/usr/sbin/policy-rc.d
  if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
  fi
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
fi

if [ "${#modules[@]}" -gt 0 ]; then
  [ -x "$venv/bin/python" ] || refuse "no environment in $venv; run bash launch/setup.sh first, or set DUALTRAIN_VENV"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$root/launch/versions.txt" "${modules[@]}"
fi
echo "extras.sh: ready: ${parts[*]}"
