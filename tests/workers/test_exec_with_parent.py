"""A program that ends with the process that started it, also where that one is killed."""

from __future__ import annotations

import subprocess
import sys

from areal_jax.workers import exec_with_parent
from tests.tasks.process_table import all_end, is_alive

# starts the file named by its first argument, says its number when its program runs, and waits
CALLER = """
import os, subprocess, sys
command = [sys.executable, '-I', '-S', sys.argv[1], str(os.getpid()), 'sh', '-c', 'echo $$; exec sleep 1000']
subprocess.Popen(command, start_new_session=True).wait()
"""


def test_the_program_is_killed_with_its_caller():
    command = [sys.executable, '-I', '-S', '-c', CALLER, exec_with_parent.__file__]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as caller:
        pid = int(caller.stdout.readline())
        assert is_alive(pid)
        caller.kill()
        assert all_end([pid])


def test_a_program_whose_caller_has_ended_is_not_started():
    done = subprocess.run([sys.executable, '-I', '-S', exec_with_parent.__file__, '1', 'true'])
    assert done.returncode == 1
