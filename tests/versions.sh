#!/usr/bin/env bash
# Runs the tests with the given versions of torch. Run this script by hand before a release, for the table in tests/README.md.
# For each version, the script makes an environment with that torch, the matching torchvision and no Horovod. In the environment,
# it runs all tests except tests/launch/, and then runs one job under torchrun. At the end, it prints a table. It needs the package
# index, and 6 GB of disk space per environment (less if there is a CPU build of torch). A second run uses finished environments again.
#
#   bash tests/versions.sh VERSION…            such as 2.5.1 2.6.0 2.15.0
#   bash tests/versions.sh --into FOLDER VERSION…
#   bash tests/versions.sh --help              this text
#
# --into FOLDER    folder of the environments and logs (default: versions/ in DUALTRAIN_CACHE; if that variable is not set, in
#                  ${XDG_CACHE_HOME:-~/.cache}/dualtrain). The script leaves no other files. The folder can be deleted
#                  between runs
# PYTHON           the interpreter, 3.11 or newer (default: python3)
#
# The tests run on a copy of this tree. Exit status: 0 if all versions passed; 1 if one failed; 2 for an error that the user can
# fix and that one line on stderr explains. A version that the index does not have is refused before any installation.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
into=${DUALTRAIN_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/dualtrain}/versions
install_minutes=60 tests_minutes=90 job_minutes=5   # time limits of the steps
python_version=''                                      # such as Python 3.11.9
work=''                                                # the temporary folder, with a copy of the tree and the results
running=''                                             # the process of the current step
export LC_ALL=C PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

say() { printf 'versions: %s\n' "$*"; }
refuse() { printf 'versions.sh: error: %s\n' "$*" >&2; exit 2; }

read_arguments() {
  versions=()
  while [ $# -gt 0 ]; do
    case $1 in
      -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; exit 0 ;;
      --into) [ -n "${2:-}" ] || refuse "--into takes a folder, and none was given"; into=$2; shift ;;
      -*) refuse "there is no option $1; see --help" ;;
      *) [[ " ${versions[*]} " == *" $1 "* ]] || versions+=("$1") ;;
    esac
    shift
  done
  [ "${#versions[@]}" -gt 0 ] || refuse "no version of torch was given; name one or more, such as 2.5.1 2.15.0"
}

# requirements NAME…: prints the requirements of these packages, from install_requires and the extra dev of setup.cfg. Without names,
# prints all requirements in these two lists except those of torch and torchvision.
requirements() {
  "$python" - "$root/setup.cfg" "$@" <<'PY'
import configparser, re, sys

config = configparser.ConfigParser()
config.read(sys.argv[1])
lines = config["options"]["install_requires"].split() + config["options.extras_require"]["dev"].split()
named = {re.split(r"[<>=!~]", line)[0]: line for line in lines}
chosen = sys.argv[2:] or [name for name in named if name not in ("torch", "torchvision")]
print(*(named[name] for name in chosen), sep="\n")
PY
}

check_versions() {
  local version oldest
  command -v "$python" >/dev/null || refuse "no interpreter '$python' found; install Python 3.11 or newer, or set PYTHON"
  python_version=$("$python" --version 2>/dev/null) || refuse "the interpreter '$python' does not run; install Python 3.11 or newer, or set PYTHON to it"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    refuse "$python_version is too old; install Python 3.11 or newer, or set PYTHON to it"
  oldest=$(requirements torch)
  oldest=${oldest#*>=}
  for version in "${versions[@]}"; do
    [[ $version =~ ^[0-9]+(\.[0-9]+)+$ ]] || refuse "'$version' is not a version of torch; write it with numbers and dots, such as 2.15.0"
    [ "$(printf '%s\n' "$oldest" "$version" | sort -V | head -n 1)" = "$oldest" ] ||
      refuse "torch $version is older than $oldest, the oldest that setup.cfg allows; name a newer one"
  done
}

# open_folders: makes the folder, locks it against other runs of this script, and makes the temporary folder. `bounded`
# closes the lock's descriptor in its command: if this script is killed, a command that still runs must not hold the lock.
open_folders() {
  local reason
  reason=$({ mkdir -p "$into" && : >>"$into/lock"; } 2>&1) ||
    refuse "cannot write $into (${reason##*: }); make room, or choose another folder by --into"
  into=$(cd "$into" && pwd)
  # A run removes its lock file at its end. If that happened between opening and locking the file, lock the new file.
  while exec {lock}>>"$into/lock"; do
    flock --nonblock "$lock" || refuse "another run of this script uses $into; wait for its end, or choose another folder by --into"
    if [ "$into/lock" -ef "/proc/self/fd/$lock" ]; then break; fi
    exec {lock}>&-
  done
  trap clean_up EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM HUP
  work=$(mktemp -d "${TMPDIR:-/tmp}/versions.XXXXXX") || refuse "cannot write ${TMPDIR:-/tmp}; make room, or set TMPDIR"
  # Tests and jobs use this folder too. Its path is short, because the length of socket paths is limited.
  export TMPDIR=$work
}

clean_up() {
  if [ -n "$running" ]; then
    kill "$running" 2>/dev/null || true   # the process is a timeout command, which forwards the signal to its process group
    wait "$running" 2>/dev/null || true
  fi
  rm -f "$into/lock"
  if [ -n "$work" ]; then rm -rf "$work"; fi
}

# bounded MINUTES LOG COMMAND…: runs the command, and appends its output to the log. Returns the command's exit status;
# after a timeout, 124, or 137 if the command ended only after SIGKILL.
bounded() {
  local status=0
  timeout --kill-after=20 "$1m" "${@:3}" >>"$2" 2>&1 </dev/null {lock}>&- &
  running=$!
  wait "$running" || status=$?
  running=''
  return "$status"
}

environment() { echo "$into/torch-$1-$tag"; }

# hash_inputs: prints a hash of the requirements and the pins, without the pins of torch and torchvision. A finished environment has
# this hash in its file versions.done. The versions of torch and Python are in the name of the environment's folder.
hash_inputs() {
  { requirements; requirements torch torchvision; grep '^[^#]' "$root/launch/versions.txt"; } |
    grep -vE '^(torch|torchvision)==' | sort -u | sha256sum
}

finished() { [ "$(cat "$(environment "$1")/versions.done" 2>/dev/null)" = "$wanted" ]; }

# check_index: refuses a version that the index lacks for this Python, or an index that does not answer. Ignores versions whose
# environments are finished.
check_index() {
  local version missing=() known='' broken='' folder=$work/index
  for version in "${versions[@]}"; do finished "$version" || missing+=("$version"); done
  [ "${#missing[@]}" -gt 0 ] || return 0
  "$python" -m venv "$folder" >"$work/index.log" 2>&1 ||
    refuse "this Python cannot make virtual environments here ($(tail -n 1 "$work/index.log")); Debian: apt install python3-venv"
  bounded 5 "$work/index.log" "$folder/bin/python" -m pip index versions torch || true
  known=$(sed -n 's/^Available versions: //p' "$work/index.log" | tr -d ' ')
  # pip lists the versions in local folders (find-links) even if the index does not answer, so look for a connection error too.
  broken=$(grep -E 'after connection broken' "$work/index.log" | tail -n 1 | cut -c 1-200) || true
  for version in "${missing[@]}"; do
    [[ ",$known," == *",$version,"* ]] && continue
    if [ -z "$known$broken" ]; then broken=$(grep -iE 'error|warning' "$work/index.log" | grep -v experimental | tail -n 1 | cut -c 1-200) || true; fi
    if [ -z "$known" ] || [ -n "$broken" ]; then
      refuse "the package index does not answer (${broken:-no reason given}); to use a proxy, set HTTPS_PROXY; to use another index, run pip config set global.index-url URL"
    fi
    refuse "the package index has no torch $version for $python_version; it has ${known//,/ }"
  done
}

# install VERSION FOLDER: installs torch's CPU build, from the index in pip's settings or else from PyTorch's index. If neither has
# it, installs the default build. pip chooses the matching torchvision, because each torchvision requires one version of torch.
# Then installs the other requirements.
install() {
  local pip=("$2/bin/python" -m pip install --no-cache-dir) needed
  grep -vE '^(torch|torchvision)==' "$root/launch/versions.txt" >"$2/constraints.txt"
  mapfile -t needed < <(requirements torch torchvision)
  "${pip[@]}" "torch==$1+cpu" "${needed[@]}" ||
    "${pip[@]}" --retries 0 --timeout 5 --index-url https://download.pytorch.org/whl/cpu "torch==$1+cpu" "${needed[@]}" ||
    "${pip[@]}" "torch==$1" "${needed[@]}" || return
  mapfile -t needed < <(requirements)
  "${pip[@]}" --constraint "$2/constraints.txt" "torch==$1" "${needed[@]}"
}

# failure STATUS LOG: prints in a few words why an installation failed; "space" if a disk is full, even if the log does not say so.
failure() {
  local free
  free=$(df --output=avail --block-size=1M "$into" "$TMPDIR" 2>/dev/null | sed 1d | sort -n | head -n 1) || free=''
  if [ "${free:-1000}" -lt 100 ] || grep -qE 'No space left on device|Errno 28|Disk quota exceeded' "$2"; then
    echo space
  elif [ "$1" = 124 ] || [ "$1" = 137 ]; then
    echo "it did not end in time"
  else
    { grep -E '^ERROR' "$2" || grep -vE '^ *$' "$2" || echo "exit status $1"; } | tail -n 1 | cut -c 1-200
  fi
}

# make_environment VERSION: makes the version's environment, unless it is finished. Removes an unfinished one first.
make_environment() {
  local folder log reason status=0 began=$SECONDS
  folder=$(environment "$1")
  log=$work/install.log
  if finished "$1"; then say "torch $1: $folder is ready (delete it to install anew)"; return; fi
  say "torch $1: installing into $folder (some minutes)"
  rm -rf "$folder"
  : >"$log"
  bounded 5 "$log" "$python" -m venv "$folder" || status=$?
  if [ "$status" = 0 ]; then
    bounded "$install_minutes" "$log" bash -c \
      "$(declare -f install requirements); python=${python@Q} root=${root@Q}; install ${1@Q} ${folder@Q}" || status=$?
  fi
  if [ "$status" != 0 ]; then
    reason=$(failure "$status" "$log")
    rm -rf "$folder"
    cp "$log" "$into/install-$1.log" 2>/dev/null || true
    if [ "$reason" = space ]; then
      refuse "no space left on device for torch $1 in $into or $TMPDIR; an environment takes 6 GB: make room, or choose another folder by --into"
    fi
    refuse "torch $1 could not be installed ($reason); see $into/install-$1.log"
  fi
  echo "$wanted" >"$folder/versions.done"
  say "torch $1: installed in $((SECONDS - began)) s, $(du -sh "$folder" | cut -f 1)"
}

copy_tree() {
  mkdir "$work/tree"
  local name
  for name in .ci .dockerignore .gitignore .pre-commit-config.yaml .ruff.toml CHANGELOG.md CONTRIBUTING.md LICENSE MANIFEST.in README.md \
    docker dualtrain launch pyproject.toml setup.cfg tests; do
    if [ -e "$root/$name" ]; then cp -R "$root/$name" "$work/tree/"; fi
  done
}

# in_environment FOLDER MINUTES LOG COMMAND…: runs the command in the copy of the tree, as after `source bin/activate`.
in_environment() {
  bounded "$2" "$3" env -u CI -u PYTHONHOME -C "$work/tree" VIRTUAL_ENV="$1" PATH="$1/bin:$PATH" PYTHONPATH="$work/tree" "${@:4}"
}

# try_version VERSION: runs the tests and the job. tests/versions.py reads their results in the temporary folder.
try_version() {
  local folder log targets status=0 began=$SECONDS
  folder=$(environment "$1")
  log=$folder/versions.log
  : >"$log"
  "$folder/bin/python" -c 'import platform
from importlib.metadata import version
print(f"Python={platform.python_version()}", *(f"{name}={version(name)}" for name in ("torch", "torchvision")), sep="\n")
' >"$work/facts-$1"
  mapfile -t targets < <(cd "$work/tree" && find tests -mindepth 1 -maxdepth 1 \
    \( -name 'test_*.py' -o -type d ! -name launch ! -name __pycache__ \) | sort)
  say "torch $1: tests and job (log: $log)"
  in_environment "$folder" "$tests_minutes" "$log" python -m pytest -v -n 2 --dist loadgroup -p no:cacheprovider \
    --basetemp "$work/pytest" --junitxml "$work/results-$1.xml" "${targets[@]}" || status=$?
  case $status in
    0 | 1) ;;  # the table shows which tests failed
    124 | 137) say "torch $1: the tests did not end within $tests_minutes minutes" ;;
    *) say "torch $1: the tests ended with exit status $status" ;;
  esac
  rm -rf "$work/pytest"
  in_environment "$folder" "$job_minutes" "$log" torchrun --standalone --nproc-per-node=2 -m dualtrain.main \
    --run-dir "$work/run-$1" || say "torch $1: the job failed with exit status $?"
  say "torch $1: done in $((SECONDS - began)) s"
}

# Bash reads a script while the script runs, and this file may change meanwhile. So all code is in functions, and main is called
# on the same line as exit.
main() {
  local tag version wanted
  read_arguments "$@"
  check_versions
  tag=$("$python" -c 'import sys; print(sys.implementation.cache_tag)')
  open_folders
  wanted=$(hash_inputs)
  check_index
  copy_tree
  for version in "${versions[@]}"; do make_environment "$version"; done
  for version in "${versions[@]}"; do try_version "$version"; done
  "$python" "$work/tree/tests/versions.py" "$work" "${versions[@]}"
}

main "$@"; exit
