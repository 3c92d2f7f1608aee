"""What a confined child keeps of the server that forks it, and what it says before it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from areal_jax.workers.sandbox.confined_children import Child, ConfinedChildren

_PROGRAM = """
import json, os, sys
from areal_jax.workers.sandbox import child_server

def refuse(first, last):
    raise OSError

if sys.argv[1] == 'refused':
    child_server.close_range = refuse
reader, writer = os.pipe()
more = [os.dup(writer) for _ in range(5)]
kept = [writer, more[2], os.dup2(writer, 200)]
child_server.close_others(kept)
is_open = [descriptor for descriptor in range(1000) if os.path.exists(f'/proc/self/fd/{descriptor}')]
print(json.dumps([sorted(kept), is_open]))
"""


@pytest.mark.parametrize('call', ['allowed', 'refused'])  # an early kernel has none, or a filter refuses it
def test_a_child_closes_all_descriptors_but_its_own(call):
    reader, writer = os.pipe()  # one more that it inherits
    try:
        found = subprocess.run(
            [sys.executable, '-c', _PROGRAM, call], pass_fds=[reader], capture_output=True, check=True
        )
    finally:
        os.close(reader)
        os.close(writer)
    kept, is_open = json.loads(found.stdout)
    assert is_open == [0, 1, 2, *kept]


def test_children_that_are_ended_at_once_have_been_confined():
    children = ConfinedChildren('none', ['signal'])
    waits = Child('signal:pause', (), {'memory_bytes': 2**30})
    try:
        for _ in range(20):
            children.start([waits, waits])
            assert [child.status for child in children.end()] == [signal.SIGKILL] * 2
    finally:
        children.close()
