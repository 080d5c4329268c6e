#!/usr/bin/env bash
# Sets up the environment, then checks format, lint and types, and runs the tests.
#
#   bash launch/test.sh                       all tests except tests/launch/ and tests/integrations/, plus one smoke launch
#                                             per launcher and backend
#   bash launch/test.sh --all                 every test, with coverage (at least 90 %). Before a release, first run
#                                             bash tests/extras.sh, which installs programs that some tests need
#   bash launch/test.sh PYTEST-ARGUMENTS…     the tests that the arguments select, such as tests/gradients -k sparse
#   bash launch/test.sh --help                this text
#
# Tests that cannot run on this machine are listed at the end as skipped, with the reason. For each failed test, the output
# has the command that repeats this test. tests/README.md describes the folders of tests.
set -euo pipefail

case ${1:-} in -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; exit 0 ;; esac
if [ "${1:-}" = --all ] && [ $# -gt 1 ]; then
  echo "test.sh: error: --all runs every test and takes no further arguments; leave it out to select tests" >&2
  exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh
source "${DUALTRAIN_VENV:-.venv}/bin/activate"

# Tests start hundreds of processes. With PYTHONDONTWRITEBYTECODE, each of them would compile the package's modules, and each
# process of pytest would rewrite the assertions of all tests again.
unset PYTHONDONTWRITEBYTECODE
# Ignore errors: the tests' user may lack write permission for dualtrain/, as in the Docker image of the tests.
python -m compileall -qq dualtrain || true

# begin_checks: checks the format, lints, and starts mypy in the background. mypy takes 20 s without its cache, but it hardly
# delays the tests, because they leave the cores idle for longer than that. mypy's output is written to a file, so that it is not
# mixed with the tests' output.
begin_checks() {
  ruff format --check .
  ruff check .
  types=$(mktemp)
  trap 'kill $(jobs -p) 2>/dev/null || true; rm -f "$types"' EXIT
  trap 'exit 130' INT # runs after pytest has ended. The EXIT trap then ends mypy, because Ctrl-C does not reach a background job
  mypy >"$types" 2>&1 &
  mypy=$!
}

# end_checks: prints mypy's output, after that of the tests. If mypy alone has failed, its exit status becomes this script's.
end_checks() {
  local failed=0
  wait "$mypy" || failed=$?
  cat "$types"
  if [ "$failed" = 0 ]; then return; fi
  echo "test.sh: error: mypy failed with exit status $failed; its output is above" >&2
  if [ "$status" = 0 ]; then status=$failed; fi
}

# not_run: lists the tests that this script does not run, or that cannot run on this machine.
not_run() {
  local missing=''
  for program in ip sshd; do command -v "$program" >/dev/null || [ -x "/usr/sbin/$program" ] || missing+=" $program"; done
  [ -z "$missing" ] || echo "skipped: tests of hosts in network namespaces, which need$missing: bash tests/extras.sh hosts"
  command -v srun >/dev/null || echo "skipped: tests of Slurm, which need srun: bash tests/extras.sh slurm"
  if ! python -c 'import pyspark, ray.train' 2>/dev/null; then
    echo "skipped: tests of Spark or Ray, which need pyspark or Ray: DUALTRAIN_WITH=integrations bash launch/setup.sh"
  elif ! command -v java >/dev/null; then
    echo "skipped: tests of Spark, which need a Java runtime: bash tests/extras.sh java"
  fi
  if docker info >/dev/null 2>&1; then
    echo "not run: tests/docker.sh, which takes a quarter of an hour"
  else
    echo "skipped: tests/docker.sh, which needs a running Docker daemon"
  fi
}

# Use three pytest processes. All tests whose ranks are processes run in one of them. Meanwhile, the others run the other tests, file
# by file. With only two pytest processes, a machine with two cores would be idle for a quarter of the time, because many tests wait
# for timeouts or for launchers.
tests=(pytest -n 3 --dist loadgroup)

case ${1:-} in
  '')
    begin_checks
    mapfile -t targets < <(find tests -mindepth 1 -maxdepth 1 \( -name 'test_*.py' -o -type d ! -name launch ! -name integrations ! -name __pycache__ \) | sort)
    status=0
    python -m "${tests[@]}" "${targets[@]}" tests/launch/test_smoke.py || status=$?
    end_checks
    echo "not run: tests/launch/ except for the smoke launches, and tests/integrations/ (--all runs both)"
    not_run
    exit "$status"
    ;;
  --all)
    begin_checks
    coverage erase
    status=0
    coverage run -m "${tests[@]}" || status=$?
    { coverage combine --quiet && coverage report --fail-under=90; } || status=1
    end_checks
    not_run
    exit "$status"
    ;;
  *) python -m "${tests[@]}" "$@" ;;
esac
