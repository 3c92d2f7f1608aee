"""What a confined child keeps of the server that forks it."""

from __future__ import annotations

import os

import pytest

from areal_jax.workers.sandbox import child_server


@pytest.mark.parametrize('has_call', [True, False])
def test_a_child_closes_all_descriptors_but_its_own(monkeypatch, has_call):
    if not has_call:  # an early kernel, or a filter

        def refuse(first, last):
            raise OSError

        monkeypatch.setattr(child_server, 'close_range', refuse)
    reader, writer = os.pipe()
    more = [os.dup(writer) for _ in range(5)]
    far = os.dup2(writer, 200)
    pid = os.fork()
    if pid == 0:
        try:
            child_server.close_others([writer, more[2], far])
            os.write(writer, ' '.join(sorted(os.listdir('/proc/self/fd'), key=int)).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    found = list(map(int, os.read(reader, 1000).split()))
    for descriptor in (reader, writer, far, *more):
        os.close(descriptor)
    listing = set(found) - {0, 1, 2, writer, more[2], far}
    assert len(listing) == 1  # that of the listing itself
    assert {0, 1, 2, writer, more[2], far} < set(found)
