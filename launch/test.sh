#!/usr/bin/env bash
# Sets the environment up, then checks format, lint and types, and runs the tests.
#
#   bash launch/test.sh                       all tests but launches, and one smoke launch per launcher and backend
#   bash launch/test.sh --all                 every test, with coverage (at least 90 %); before a release after
#                                             bash tests/extras.sh, which installs what hosts, Slurm and Docker need
#   bash launch/test.sh PYTEST-ARGUMENTS…     the tests that these select, such as tests/gradients -k sparse
#   bash launch/test.sh --help                this text
#
# What cannot run on this machine is listed at the end as skipped, with the reason. A failure ends with the command
# that repeats the test alone. tests/README.md says what each folder of tests is for.
set -euo pipefail

case ${1:-} in -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; exit 0 ;; esac
if [ "${1:-}" = --all ] && [ $# -gt 1 ]; then
  echo "test.sh: error: --all runs every test and takes no further arguments; leave it out to select tests" >&2
  exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh
source "${DUALTRAIN_VENV:-.venv}/bin/activate"

checks() {
  ruff format --check .
  ruff check .
  mypy
}

# Two processes share the tests: worlds of ranks run in one of them, tests of one process beside them.
tests=(pytest -n 2 --dist loadgroup)

case ${1:-} in
  '')
    checks
    mapfile -t rings < <(find tests -mindepth 1 -maxdepth 1 \( -name 'test_*.py' -o -type d ! -name launch ! -name __pycache__ \) | sort)
    python -m "${tests[@]}" "${rings[@]}" tests/launch/test_smoke.py
    ;;
  --all)
    checks
    coverage erase
    coverage run -m "${tests[@]}"
    coverage combine --quiet
    coverage report --fail-under=90
    ;;
  *) python -m "${tests[@]}" "$@" ;;
esac
