#!/usr/bin/env bash
# Builds the images of docker/Dockerfile, runs all services of compose.yaml that need no GPU, and checks the results. This
# takes 15 minutes, and 15 minutes more if the images were never built on this machine. The script does not remove the
# images that it builds: dualtrain and dualtrain:test, or with GPU=1 only dualtrain:gpu.
#
#   bash tests/docker.sh [base image]
#
# GPU                1: build the GPU image instead, and run it without a GPU (20 GB of disk space)
# TORCH              torch's version in the images (default: that of launch/versions.txt)
# ARCHITECTURES      compute capabilities of the GPU image, such as 80,90 (default: all that torch was compiled for); with
#                    fewer of them, the build is faster
# DOCKER_BUILD_ARGS  more arguments of docker build, such as --network host
# COMPOSE            the command of Compose (default: docker compose, else docker-compose)
# TESTS              arguments of launch/test.sh in the tests' image (default: three quick test files; empty: no arguments)
# WEIGHTS            expected hash of the weights after a run with two ranks, first 16 digits. The hash depends on the CPU
#                    (default: none; the hashes of the two backends are compared in any case)
set -euo pipefail

refuse() { echo "docker.sh: error: $*" >&2; exit 2; }
# reason FILE: prints the last line of a command's output, ignoring docker's advice to run docker … --help.
reason() { grep -v -e '^$' -e "^Run 'docker" "$1" | tail -n 1 | cut -c 1-300; }
fail() { echo "docker.sh: FAILED: $* (outputs: $logs)" >&2; exit 1; }

case ${1:-} in -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; exit 0 ;; esac
[ $# -le 1 ] || refuse "one argument at most, the base image; $# were given"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
docker info >/dev/null 2>&1 || refuse "Docker's daemon does not answer: start it, or use a user who may connect to it"
if [ -z "${COMPOSE:-}" ]; then
  if docker compose version >/dev/null 2>&1; then COMPOSE='docker compose'; else COMPOSE=docker-compose; fi
fi
$COMPOSE version >/dev/null 2>&1 || refuse "no Compose found: install Docker's plugin or docker-compose 1.29, or set COMPOSE"

case ${GPU:-} in '' | 0) GPU='' ;; 1) ;; *) refuse "GPU=$GPU is not known; set it to 1 for the GPU image, or unset it" ;; esac
export BASE_IMAGE=${1:-debian:bookworm-slim} TORCH=${TORCH:-} ARCHITECTURES=${ARCHITECTURES:-} IMAGE=dualtrain NPROC=2
unset RUNS DUALTRAIN_USER
project=dualtrain-check-$$
logs=$(mktemp -d)
read -ra build_args <<<"${DOCKER_BUILD_ARGS:-}"

compose() { $COMPOSE -p "$project" -f docker/compose.yaml "$@"; }

leftovers() {
  local filter=label=com.docker.compose.project=$project
  docker ps -aq --filter "$filter"; docker network ls -q --filter "$filter"; docker volume ls -q --filter "$filter"
}

clean_up() {
  docker ps -aq --filter "label=com.docker.compose.project=$project" | xargs -r docker rm -f >/dev/null
  compose --profile cluster down --volumes --remove-orphans >"$logs/down" 2>&1 || true
}
trap clean_up EXIT

# check TITLE COMMAND…: prints TITLE, and runs COMMAND with its output in the file $out. Ends the script if COMMAND fails.
check() {
  local what=$1 began=$SECONDS status=0
  shift
  out=$logs/${what//[^a-z0-9]/-}
  printf '%s … ' "$what"
  "$@" >"$out" 2>&1 </dev/null || status=$?
  [ "$status" = 0 ] || { echo; fail "$what: exit status $status, $(reason "$out")"; }
  echo "done ($((SECONDS - began)) s)"
}

inside() { docker run --rm "$@"; }
in_container() { docker exec "$container" "$@"; }
service() { compose run --rm -T "$@"; }

# trained RANKS: checks that $out has one run of each backend, and that these two runs have RANKS ranks, an accuracy of 0.97
# or more and equal weights (with 2 ranks, those of WEIGHTS, if it is set). Prints one row per run.
trained() {
  local table
  table=$(tr -d '\r' <"$out" | grep -oE '(horovod|torch) \([a-z]+\) .* [0-9a-f]{16} *$' | awk '{print $1, $(NF-5), $(NF-4), $NF}')
  [ "$(cut -d' ' -f1 <<<"$table" | sort | xargs)" = 'horovod torch' ] ||
    fail "${out##*/} does not have exactly one row per backend"
  awk -v ranks="$1" '$2 != ranks || $3 < 0.97 {exit 1}' <<<"$table" ||
    fail "$1 ranks and an accuracy of 0.97 expected: $(paste -sd, <<<"$table")"
  [ "$(cut -d' ' -f4 <<<"$table" | sort -u | wc -l)" = 1 ] || fail "the backends have different weights: $(paste -sd, <<<"$table")"
  if [ "$1" = 2 ] && [ -n "${WEIGHTS:-}" ]; then
    [ "$(cut -d' ' -f4 <<<"$table" | sort -u)" = "$WEIGHTS" ] || fail "the weights are not $WEIGHTS: $(paste -sd, <<<"$table")"
  fi
  sed 's/^/  /' <<<"$table"
}

# learned: checks that the run in $out has an accuracy of 0.97 or more. Sets $weights to the hash of the run's weights.
learned() {
  local line
  line=$(tr -d '\r' <"$out" | grep -oE 'done: val accuracy [0-9.]+.*weights [0-9a-f]{16}' | tail -n 1)
  awk '{exit !($4 + 0 >= 0.97)}' <<<"$line" || fail "the accuracy in ${out##*/} is missing or below 0.97: $line"
  weights=${line##* }
  echo "  ${line#done: }"
}

# In an image made by docker import, / has the mode of the imported folder, which may exclude all users but root.
base_is_usable() {
  docker run --rm --user 1000:1000 "$BASE_IMAGE" sh -c : ||
    { echo "only root can run programs in $BASE_IMAGE: set the mode of its root folder to 755, or name another base image"; return 1; }
}
check "base image" base_is_usable
for profile in cpu test cluster gpu; do check "compose file, $profile" compose --profile "$profile" config; done

# build TARGET TAG ARGUMENTS…
build() {
  docker build "${build_args[@]}" --build-arg "BASE_IMAGE=$BASE_IMAGE" --build-arg "TORCH=$TORCH" \
    --target "$1" -t "$2" "${@:3}" -f docker/Dockerfile .
}

numeric_user() {
  [[ $(docker image inspect -f '{{.Config.User}}' "$1") == [1-9]* ]] ||
    fail "$1: its user is not a number, so Kubernetes refuses it under runAsNonRoot"
}

healthy() {
  local state=starting
  for _ in $(seq 120); do
    state=$(docker inspect -f '{{.State.Health.Status}}' "$container")
    [ "$state" = starting ] || break
    sleep 1
  done
  docker inspect -f '{{json .State.Health}}' "$container"
  [ "$state" = healthy ]
}

# check_contents IMAGE: checks the image's user, files, programs, versions and health check.
check_contents() {
  local label
  echo "  $1: $(($(docker image inspect -f '{{.Size}}' "$1") / 1000000)) MB"
  numeric_user "$1"
  container=$(docker run -d --health-interval 2s --label "com.docker.compose.project=$project" "$1" sleep infinity)
  check "orphans reaped" in_container bash -c '(sleep 0.1 &); sleep 1; ! grep "^State:.*Z" /proc/[0-9]*/status'
  check "no root" in_container bash -c '[ "$(id -u)" != 0 ] && ! [ -w .venv ]'
  check "no compiler" in_container bash -c '! command -v gcc g++ cc c++ cpp clang gcc-12 g++-12 as ld make cmake ninja nvcc'
  check "no key" docker exec --user root "$container" bash -c '
    find / -xdev \( -name "ssh_host_*" -o -name "id_*" -path "*ssh*" \) >/tmp/found
    ! grep . /tmp/found && [ -z "$(ls -A /keys)" ]'
  check "pinned versions" in_container bash -c '
    for name in torch torchvision horovod mpi4py numpy safetensors; do
      pin=$(sed -n "s/^$name==//p" .venv/setup.constraints)
      [ -z "$pin" ] || python -c "import importlib.metadata as m, sys; sys.exit(m.version(sys.argv[1]).split(\"+\")[0] != sys.argv[2])" "$name" "$pin" || { echo "$name is not $pin"; exit 1; }
    done'
  check "version" in_container python -c 'import dualtrain; print(dualtrain.__version__)'
  label=$(docker image inspect -f '{{index .Config.Labels "org.opencontainers.image.version"}}' "$1")
  [ "$label" = "$(cat "$out")" ] || fail "the label of $1 says version $label, but its dualtrain says $(cat "$out")"
  check "health" healthy
  docker rm -f "$container" >/dev/null
}

finish() {
  clean_up
  trap - EXIT
  [ -z "$(leftovers)" ] || fail "left behind: $(leftovers | xargs)"
  rm -rf "$logs"
  echo "docker.sh: all checks passed; images that were not removed: $*"
  exit 0
}

if [ -n "$GPU" ]; then
  check "GPU image" build runtime "$IMAGE:gpu" --build-arg GPU=nccl --build-arg "ARCHITECTURES=$ARCHITECTURES"
  check_contents "$IMAGE:gpu"
  check "Horovod with NCCL" inside "$IMAGE:gpu" horovodrun --check-build
  for part in PyTorch NCCL MPI Gloo; do grep -qF "[X] $part" "$out" || fail "Horovod in $IMAGE:gpu lacks $part"; done
  check "compare, on the CPU" inside --shm-size 1g "$IMAGE:gpu" bash launch/demo.sh
  trained 2
  finish "$IMAGE:gpu"
fi

check "image" build runtime "$IMAGE"
check_contents "$IMAGE"
check "image for tests" build test "$IMAGE:test"
numeric_user "$IMAGE:test"
[ "$(docker image inspect -f '{{join .Config.Entrypoint " "}}' "$IMAGE:test")" = 'tini -s -- bash launch/test.sh' ] ||
  fail "the entrypoint of $IMAGE:test is not bash launch/test.sh under tini"

check "horovod" service horovod
learned
horovod=$weights
check "torch" service torch
learned
[ "$weights" = "$horovod" ] || fail "torch's weights are $weights, Horovod's $horovod"
check "mpirun" inside --shm-size 1g "$IMAGE" bash launch/mpirun.sh
learned
# Run under the restrictions of a Kubernetes pod: no capabilities, and only /tmp and the folder of the runs are writable.
check "one process, restricted" inside --cap-drop ALL --security-opt no-new-privileges --read-only --tmpfs /tmp \
  --mount type=volume,destination=/opt/dualtrain/runs "$IMAGE"
learned
check "torchrun, no network" inside --network none "$IMAGE" bash launch/torchrun.sh
learned
# Keep the runs in a folder of this machine, and train as a user who is not in the image's /etc/passwd.
owner=$(id -u)
if [ "$owner" = 0 ]; then owner=12345; fi
mkdir "$logs/runs"
chown "$owner" "$logs/runs"
check "compare, own folder and user" env RUNS="$logs/runs" DUALTRAIN_USER="$owner:$owner" \
  $COMPOSE -p "$project" -f docker/compose.yaml run --rm -T compare
trained 2
[ "$(find "$logs/runs" -name summary.json -user "$owner" | wc -l)" = 2 ] || fail "$logs/runs does not have two runs of user $owner"

# SIGTERM, as a cluster's scheduler sends it: the ranks save and exit before SIGKILL.
# stop_in_epoch_3 CONTAINER: stops the container once it has reached epoch 3, or after a minute, and checks that its ranks
# have saved.
stop_in_epoch_3() {
  local log=$logs/stopped-run status
  for _ in $(seq 60); do
    docker logs "$1" >"$log" 2>&1
    if grep -q 'epoch 3' "$log"; then break; fi
    sleep 1
  done
  docker stop -t 60 "$1" >/dev/null
  docker logs "$1" >"$log" 2>&1
  status=$(docker inspect -f '{{.State.ExitCode}}' "$1")
  tail -n 5 "$log"
  [ "$status" != 137 ] && grep -q saved "$log"
}
stopped() { stop_in_epoch_3 "$(compose run -d "$1" --epochs 100000 | tail -n 1)"; }
stopped_cluster() {
  compose --profile cluster up -d && stop_in_epoch_3 "$(compose --profile cluster ps -q node1)" && compose --profile cluster down
}
for name in torch horovod compare; do check "stop, $name" stopped "$name"; done
check "stop, cluster" stopped_cluster

check "cluster" compose --profile cluster up --no-color --exit-code-from node1
trained 4

read -ra tests <<<"${TESTS-tests/backends/test_launchers.py tests/backends/test_store.py tests/backends/test_collectives.py}"
check "tests" service test "${tests[@]}"
echo "  $(grep -E ' passed' "$out" | tail -n 1)"

finish "$IMAGE" "$IMAGE:test"
