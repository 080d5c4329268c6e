# CUDA toolkit for Horovod with NCCL: a toolkit on this machine that has torch's CUDA version, or else one assembled from NVIDIA's
# wheels. launch/setup.sh sources this file. Before it calls plan_cuda, it calls read_torch of launch/build_horovod.sh, which sets
# packages, torch_build, torch_cuda and torch_architectures.
#
# HOROVOD_NCCL_HOME           a folder with NCCL's include and lib (default: the NCCL wheel that torch depends on)
# HOROVOD_BUILD_CUDA_CC_LIST  compute capabilities to compile for, such as 80,90 (default: those of this machine's GPUs,
#                             else those that torch was compiled for)
# CUDA_HOME                   a toolkit to try first

toolkit=''             # a CUDA toolkit on this machine that fits torch
unfit=''               # toolkits that do not fit torch, and the reasons
nccl=''                # the folder of NCCL's include and lib
architectures=''       # compute capabilities: "80,90"
cuda_options=()        # environment variables of Horovod's build

instead="or set DUALTRAIN_GPU=cpu: Horovod then moves tensors through the CPU"

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }

# gpu_architectures: prints "80,90" for GPUs of compute capability 8.0 and 9.0; nothing without a driver.
gpu_architectures() {
  command -v nvidia-smi >/dev/null || return 0
  { nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null || true; } |
    sed -n 's/^ *\([0-9]\{1,\}\)\.\([0-9]\) *$/\1\2/p' | sort -nu | paste -sd, -
}

# sm_names 80,90: prints "sm_80, sm_90".
sm_names() { echo "sm_${1//,/, sm_}"; }

nvcc_version() { "$1" --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\),.*/\1/p'; }

# toolkit_folders: prints folders that may hold a toolkit, one per line. The folder of the nvcc in PATH is printed only if it also has
# nvvm, since this nvcc may be a script that calls the nvcc of a toolkit elsewhere.
toolkit_folders() {
  local folder
  printf '%s\n' "${CUDA_HOME:-}" "${CUDA_PATH:-}"
  folder=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc || true)")")")
  if [ -d "$folder/nvvm" ]; then echo "$folder"; fi
  printf '%s\n' "/usr/local/cuda-$torch_cuda" /usr/local/cuda
}

# find_toolkit: sets toolkit and unfit. torch's headers need those of cuBLAS and cuSPARSE: a toolkit without them cannot be used.
find_toolkit() {
  local folder found file seen=:
  while read -r folder; do
    folder=$(readlink -f "$folder" || true)
    if [ ! -x "$folder/bin/nvcc" ] || [[ $seen == *":$folder:"* ]]; then continue; fi
    seen+=$folder:
    found=$(nvcc_version "$folder/bin/nvcc") || true
    if [ "$found" != "$torch_cuda" ]; then
      unfit+="${unfit:+, }CUDA ${found:-of an unknown version} in $folder"
      continue
    fi
    for file in include/cuda_runtime.h include/cublas_v2.h include/cusparse.h lib64/libcudart.so; do
      if [ ! -e "$folder/$file" ]; then
        unfit+="${unfit:+, }CUDA $found without $file in $folder"
        continue 2
      fi
    done
    toolkit=$folder
    return
  done < <(toolkit_folders)
}

# plan_cuda: chooses the toolkit, NCCL and GPU architectures of the build; ends with an error if no such build is possible. Builds nothing.
plan_cuda() {
  local major=${torch_cuda%%.*}
  if [ "$torch_cuda" = none ]; then
    refuse "Horovod with NCCL needs a CUDA build of torch, and torch $torch_build is a CPU build; set DUALTRAIN_TORCH to a version for which your package index has a CUDA build, $instead"
  fi
  nccl=${HOROVOD_NCCL_HOME:-$packages/nvidia/nccl}
  if [ ! -e "$nccl/include/nccl.h" ] || ! compgen -G "$nccl/lib*/libnccl.so*" >/dev/null; then
    refuse "no NCCL in $nccl (include/nccl.h and lib/libnccl.so); set HOROVOD_NCCL_HOME to a folder that has it, $instead"
  fi
  find_toolkit
  if [ -z "$toolkit" ] && [ "$major" -lt 13 ]; then
    refuse "torch $torch_build needs the compiler of CUDA $torch_cuda, but only the wheels of CUDA 13 and newer contain a compiler, and this machine has no toolkit of CUDA $torch_cuda${unfit:+ (but $unfit)}; install CUDA toolkit $torch_cuda and set CUDA_HOME to it, set DUALTRAIN_TORCH to a version for CUDA 13, $instead"
  fi
  if [ -z "$toolkit" ] && [ -n "$unfit" ]; then
    say "not used, since torch $torch_build is for CUDA $torch_cuda: $unfit"
  fi
  architectures=${HOROVOD_BUILD_CUDA_CC_LIST:-$(gpu_architectures)}
  architectures=${architectures:-$torch_architectures}
  if ! [[ $architectures =~ ^[0-9]+(,[0-9]+)*$ ]]; then
    refuse "HOROVOD_BUILD_CUDA_CC_LIST=$architectures is not a list of compute capabilities; set it to a list such as 80,90, or unset it"
  fi
}

# install_nvcc HOME: installs nvcc, NVVM and the headers of torch's CUDA version into the build's temporary folder, which is removed
# after the build. All wheels must be of the same CUDA version: nvcc fails with a newer NVVM.
install_nvcc() {
  local each wheels=()
  for each in nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-cccl; do wheels+=("$each==$torch_cuda.*"); done
  "$venv/bin/python" -m pip install --disable-pip-version-check --no-deps --target "$tools/wheels" "${wheels[@]}"
  link_cuda "$1"
}

# link_cuda HOME: links torch's own CUDA headers and libraries beside nvcc, under the names that they have in a toolkit.
link_cuda() {
  local own=$packages/nvidia/cu${torch_cuda%%.*} file name
  for file in "$own"/include/*; do
    [ -e "$1/include/${file##*/}" ] || ln -s "$file" "$1/include/"
  done
  mkdir -p "$1/lib"
  ln -sfn lib "$1/lib64"
  for file in "$own"/lib/*; do
    name=${file##*/}
    ln -sf "$file" "$1/lib/$name"
    if [[ $name == *.so.* ]]; then ln -sf "$file" "$1/lib/${name%%.so.*}.so"; fi
  done
}

# prepare_cuda: sets cuda_options, and checks that nvcc works. The temporary folders named here can be removed after the build:
# Horovod's library uses the libcudart and libnccl that torch has loaded before.
prepare_cuda() {
  local home=$toolkit
  if [ -z "$home" ]; then
    home=$tools/wheels/nvidia/cu${torch_cuda%%.*}
    step "nvcc of CUDA $torch_cuda (wheels, 300 MB)" "$network" install_nvcc "$home"
  fi
  cuda_options=(
    CUDA_HOME="$home" CUDAToolkit_ROOT="$home" HOROVOD_CUDA_HOME="$home" PATH="$home/bin:$venv/bin:$PATH"
    # SHARED, because a static NCCL of the system might have a different version than the headers.
    HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_LINK=SHARED HOROVOD_NCCL_INCLUDE="$nccl/include" HOROVOD_NCCL_LIB="$tools/nccl"
    HOROVOD_BUILD_CUDA_CC_LIST="$architectures"
    # Horovod requests C++11, but torch's headers need C++20, which the host compiler uses too.
    NVCC_APPEND_FLAGS="${NVCC_APPEND_FLAGS:+$NVCC_APPEND_FLAGS }-std=c++20")
  step "check: nvcc $torch_cuda for $(sm_names "$architectures")" \
    "if nvcc refuses the C++ compiler, set CXX to an older one; if it refuses an architecture, set HOROVOD_BUILD_CUDA_CC_LIST to those of 'nvcc --list-gpu-code'; $instead" \
    check_nvcc "$home/bin/nvcc"
}

# check_nvcc NVCC: compiles a few lines, to detect within seconds an error that would end Horovod's build after minutes.
check_nvcc() {
  local each found said targets=()
  said=$(env "$1" --version 2>&1) || { echo "$said"; echo "reason: nvcc cannot run: $(tail -n 1 <<<"$said")"; return 1; }
  found=$(nvcc_version "$1")
  if [ "$found" != "$torch_cuda" ]; then echo "reason: nvcc is of CUDA ${found:-(no version)}, but torch is of CUDA $torch_cuda"; return 1; fi
  mkdir -p "$tools/nccl"
  for each in "$nccl"/lib*/libnccl.so*; do ln -sf "$each" "$tools/nccl/libnccl.so"; done
  write_compiler
  for each in ${architectures//,/ }; do targets+=(-gencode "arch=compute_$each,code=sm_$each"); done
  echo '__global__ void add(float *sum, const float *other) { sum[threadIdx.x] += other[threadIdx.x]; }' >"$tools/add.cu"
  said=$(cd "$tools" && env "${cuda_options[@]}" "$1" -ccbin "$tools/c++" "${targets[@]}" --shared -Xcompiler -fPIC -o add.so add.cu 2>&1) || {
    echo "$said"
    echo "reason: nvcc says: $(grep -m 1 -iE 'error|fatal|unsupported' <<<"$said" || tail -n 1 <<<"$said")"
    return 1
  }
}
