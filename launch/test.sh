#!/usr/bin/env bash
# Sets everything up, then checks format, lint and types, and runs the tests.
#
#   bash launch/test.sh                     everything (minutes)
#   bash launch/test.sh -m "not launch"     without the tests that start whole jobs; other pytest options work too
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh
source "${DUALTRAIN_VENV:-.venv}/bin/activate"

ruff format --check .
ruff check .
mypy
coverage erase
# Two processes: one for the tests of worlds of processes and of whole jobs, one for all others beside it.
coverage run -m pytest -n 2 --dist loadgroup "$@"
coverage combine --quiet
# The bound holds for the whole suite: a selection covers less.
if [ $# = 0 ]; then coverage report --fail-under=90; else coverage report | tail -n 1; fi
