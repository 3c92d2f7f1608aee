"""A whole record over a TCP socket of this host, as from a process of a learner to an engine: CPU seconds of each step.

The reader is this thread, the sender the other threads of this process: CPU time tells them apart.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from areal_jax.distributed.peers import prove_as_client, prove_as_server
from areal_jax.publication.carriers.stream_receiver import StreamReceiver
from areal_jax.publication.carriers.stream_sender import StreamSender
from areal_jax.publication.manifest import LeafDigest, digest_leaf
from areal_jax.publication.record import Record, RecordHeader
from benchmarks.sides import Call, Start, serve

_KEY = b'of the benchmark'


def measure_stream(part_bytes: int, parts: int, versions: int) -> dict[str, float]:
    """Medians over so many versions after a first, whose memory is new."""
    content = np.random.default_rng(0).integers(0, 256, (parts, part_bytes), np.uint8)
    leaf, buffer = content.reshape(-1).view(jnp.bfloat16), np.zeros_like(content)
    leaves = {f'{part:08}': LeafDigest((part_bytes // 2,), 'bfloat16', (0, 0)) for part in range(parts)}
    steps: list[Sequence[float]] = []
    with contextlib.ExitStack() as opened:
        sender = StreamSender(functools.partial(prove_as_server, key=_KEY), '127.0.0.1')
        opened.enter_context(contextlib.closing(sender))
        address = next(each for each in sender.address.split(',') if each.startswith('tcp:'))
        reader = StreamReceiver(address, 'engine', functools.partial(prove_as_client, key=_KEY))
        opened.enter_context(contextlib.closing(reader))
        for version in range(versions + 1):
            record = Record(RecordHeader(version, leaves, [part_bytes] * parts), [memoryview(row) for row in content])
            began_s = time.process_time()
            sender.send(record)
            stored_s, own_s = time.process_time(), time.thread_time()
            reader.fetch(version, None, lambda record: None)
            fetched_s, received_s = time.process_time(), time.thread_time() - own_s
            np.copyto(buffer, content)
            copied_s = time.process_time()
            digest_leaf(leaf)
            digested_s = time.process_time() - copied_s
            sent_s = fetched_s - stored_s - received_s
            steps.append((stored_s - began_s, sent_s, received_s, copied_s - fetched_s, digested_s))
            sender.release(version)
    medians = map(statistics.median, zip(*steps[1:], strict=True))
    names = ('store_cpu_s', 'send_cpu_s', 'receive_cpu_s', 'copy_cpu_s', 'digest_cpu_s')
    return {'bytes': content.size, 'frames': parts, **dict(zip(names, medians, strict=True))}


def prepare(arguments: dict[str, Any]) -> Start:
    def start() -> tuple[Call, Callable[[], dict[str, Any]]]:
        return lambda: measure_stream(**arguments), dict

    return start


if __name__ == '__main__':
    serve(prepare)
