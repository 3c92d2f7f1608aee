"""One record of weights from this process to one reader process through each carrier: wall and CPU seconds of both.

A function a carrier; benchmarks/publication.py gives them the record. The reader process copies every part into memory
that it has used before, as an engine does; the checksum of the copy is compared outside the measured interval. Two
records are sent before the measurement: then pages, connections and maps are there.

    python -m benchmarks.side_carriers --minutes=0.1 --seed=0 --megabytes=32 --json=carriers.json
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import secrets
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from areal_jax.distributed.wire import prove_as_client, prove_as_server
from areal_jax.publication.carriers.receivers import Reader, open_receiver
from areal_jax.publication.carriers.shm_carrier import ShmSender
from areal_jax.publication.carriers.shm_segment import segment_path, sweep
from areal_jax.publication.carriers.stream_sender import StreamSender
from areal_jax.publication.manifest import LeafDigest
from areal_jax.publication.record import Held, Record, RecordHeader, RecordSender
from benchmarks.sides import ROOT

LEAF_BYTES = 4_000_000  # of the random record of the command


@dataclasses.dataclass(frozen=True)
class CarrierTimes:
    """Of one record, seconds. The reader's begin when it asks, so they do not contain the sender's."""

    n_bytes: int
    send_wall_s: float
    send_cpu_s: float
    read_wall_s: float
    read_cpu_s: float
    serve_cpu_s: float  # of the sender while the reader reads


def time_shm(record: Record, repeats: int = 3) -> list[CarrierTimes]:
    """Through shared memory."""
    sweep()
    with contextlib.closing(ShmSender(segment_path('benchmark', secrets.token_hex(4)))) as sender:
        return _time(sender, lambda address: address, record, repeats)


def time_unix(record: Record, repeats: int = 3) -> list[CarrierTimes]:
    """Through a Unix socket."""
    return _time_stream(0, record, repeats)


def time_tcp(record: Record, repeats: int = 3) -> list[CarrierTimes]:
    """Through TCP on 127.0.0.1."""
    return _time_stream(1, record, repeats)


CARRIERS: Mapping[str, Callable[[Record, int], list[CarrierTimes]]] = {
    'shared memory': time_shm,
    'Unix socket': time_unix,
    'TCP': time_tcp,
}


def _time_stream(index: int, record: Record, repeats: int) -> list[CarrierTimes]:
    key = secrets.token_bytes(32)
    with contextlib.closing(StreamSender(lambda own: prove_as_server(own, key), '127.0.0.1')) as sender:
        return _time(sender, lambda address: address.split(',')[index], record, repeats, key)


def _time(
    sender: RecordSender, choose: Callable[[str], str], record: Record, repeats: int, key: bytes = bytes(32)
) -> list[CarrierTimes]:
    times = list[CarrierTimes]()
    with _reader(key) as ask:
        for number in range(repeats + 2):  # the first two fill both places
            header = dataclasses.replace(record.header, version=number)
            began = _now()
            address = choose(sender.send(Record(header, record.parts)))
            sent = _now()
            read_wall_s, read_cpu_s, crc = ask(f'{address} {number}')
            served = _now()
            if crc != _checksum(record.parts):
                raise RuntimeError(f'version {number} did not arrive as it was sent')
            sender.release(number)
            if number > 1:
                send_wall_s, send_cpu_s = sent[0] - began[0], sent[1] - began[1]
                serve_cpu_s = served[1] - sent[1]
                parts = (send_wall_s, send_cpu_s, read_wall_s, read_cpu_s, serve_cpu_s)
                times.append(CarrierTimes(record.header.n_bytes, *parts))
    return times


@contextlib.contextmanager
def _reader(key: bytes) -> Iterator[Callable[[str], tuple[float, float, int]]]:
    command = [sys.executable, '-m', 'benchmarks.side_carriers', '--read']
    pipes = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE, 'text': True, 'cwd': ROOT}
    with subprocess.Popen(command, env=os.environ | {'KEY': key.hex()}, **pipes) as process:  # type: ignore[call-overload]

        def ask(request: str) -> tuple[float, float, int]:
            process.stdin.write(f'{request}\n')
            process.stdin.flush()
            wall_s, cpu_s, crc = process.stdout.readline().split()
            return float(wall_s), float(cpu_s), int(crc)

        yield ask
        process.stdin.close()


def _read() -> None:
    """The reader process: a line 'address version' in, a line 'wall CPU crc32' out."""
    key, receiver, copy = bytes.fromhex(os.environ['KEY']), None, np.zeros(0, np.uint8)

    def consume(record: Record) -> None:
        nonlocal copy
        if len(copy) < record.header.n_bytes:
            copy = np.zeros(record.header.n_bytes, np.uint8)
        at = 0
        for part in record.parts:
            np.copyto(copy[at : at + len(part)], np.frombuffer(part, np.uint8) if len(part) else copy[:0])
            at += len(part)

    held: Held | None = None
    for line in sys.stdin:
        address, version = line.rsplit(' ', 1)
        receiver = receiver or open_receiver(address, Reader('reader', lambda own: prove_as_client(own, key)))
        began = _now()
        receiver.fetch(int(version), held, consume)
        ended = _now()
        print(ended[0] - began[0], ended[1] - began[1], zlib.crc32(copy), flush=True)


def _now() -> tuple[float, float]:
    """(wall, CPU of this process), seconds."""
    return time.perf_counter(), time.process_time()


def _checksum(parts: Sequence[bytes | bytearray | memoryview]) -> int:
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return crc


def make_random_record(n_bytes: int, seed: int) -> Record:
    """A whole record of leaves of LEAF_BYTES; nobody looks at its digests."""
    rng = np.random.default_rng(seed)
    parts = [rng.bytes(min(LEAF_BYTES, n_bytes - at)) for at in range(0, n_bytes, LEAF_BYTES)]
    leaves = {f'leaf/{k:05d}': LeafDigest((len(part),), 'uint8', (k, 0)) for k, part in enumerate(parts)}
    return Record(RecordHeader(0, leaves, tuple(map(len, parts))), parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--read', action='store_true', help=argparse.SUPPRESS)
    parser.add_argument('--minutes', type=float, default=0.1, help='rounds over all carriers until then, at least one')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--megabytes', type=int, default=32, help='of the record')
    parser.add_argument('--json', help='file for the numbers')
    options = parser.parse_args()
    if options.read:
        return _read()
    record, end_s = (
        make_random_record(options.megabytes * 1_000_000, options.seed),
        time.monotonic() + 60 * options.minutes,
    )
    found: dict[str, list[CarrierTimes]] = {name: [] for name in CARRIERS}
    while not all(found.values()) or time.monotonic() < end_s:
        for name, measure in CARRIERS.items():
            found[name] += measure(record, 3)
    for name, times in found.items():
        best = min(times, key=lambda each: each.send_wall_s + each.read_wall_s)
        print(f'{name:14} {len(times):3} records, best: send {best.send_wall_s:.3f} s, read {best.read_wall_s:.3f} s')
    if options.json:
        rows = {name: [dataclasses.asdict(each) for each in times] for name, times in found.items()}
        with open(options.json, 'w', encoding='utf-8') as file:
            json.dump({'seed': options.seed, 'bytes': record.header.n_bytes, 'carriers': rows}, file)


if __name__ == '__main__':
    main()
