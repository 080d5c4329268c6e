"""Ranks that ``spawn`` starts, each in a new interpreter; tests/commands/test_spawn.py tests forked ranks."""

from __future__ import annotations

import multiprocessing
import sys

from tests.launch.jobs import run

PROGRAM = """
import multiprocessing
import os
import sys

from dualtrain.launchers import detect_world
from dualtrain.spawn import spawn

def body(arguments):
    world = detect_world()
    method = multiprocessing.get_start_method()
    sys.stdout.write(f"{os.environ['RANK']} {world.launcher} {world.size} {method} {arguments}\\n")
    return 0

if __name__ == "__main__":
    sys.exit(spawn(body, sys.argv[1:], 2))
"""


def test_each_rank_gets_arguments_environment_variables_and_the_default_start_method(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    end = run([sys.executable, str(program), "--lr", "a b"])
    assert end.returncode == 0, end.stderr
    method = multiprocessing.get_start_method()
    assert sorted(end.stdout.splitlines()) == [f"{rank} spawn 2 {method} ['--lr', 'a b']" for rank in range(2)]
