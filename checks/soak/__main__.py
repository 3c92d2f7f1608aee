"""Soak: python -m checks.soak --minutes=10 --seed=0 --json=FILE [--clients=64] [--channel=shm_delta].

Two servers, as processes, and a pool with 64 clients that uses them through proxies. At random moments, which the seed
decides, weights change, the pool pauses, calls are aborted, bodies are malformed, oversized, slow or unauthenticated,
readers hang up, connections are cut or slow, and a server is stopped (SIGSTOP) or killed (kill -9) and started again.
Servers are killed in the first part of the time alone, so that the memory of one process is seen over the second half.
One entry of the registry is that of a server that is dead from the beginning. Weights come from a process of their own,
over --channel; it is killed while it sends a version, and its successor sends that one again, whole.

Exit code 0 only if every answer ended once and was whole, every log-prob is that of its recorded version, every
abusive request got the right status, no server was taken for a wrong one, nothing took longer than two minutes, and
the memory of the servers themselves grows by less than a megabyte a minute: Theil and Sen's slope over medians of 30 s,
in the second half. What they share with a sender stays below two of its segments. A check of which nothing was seen has
failed: every kind of fault and abuse must have happened.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import pathlib
import random
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from areal_jax import files
from areal_jax.publication.carriers.shm_segment import DIRECTORY
from areal_jax.registry import Registration
from areal_jax.rollout.servers.server_entries import describe_server
from checks.command import describe_command, leave_directory, make_directory, make_parser
from checks.soak import abuse
from checks.soak.checks import (
    WINDOW_S,
    AnswerCheck,
    MemoryTrack,
    check_events,
    check_memory,
    check_seconds,
    check_seen,
    check_shared,
    count_events,
    find_quarantines,
)
from checks.soak.load import END_S, SoakLoad
from checks.soak.sender import SenderProcess
from checks.soak.servers import CHANNELS, START_S, ServerProcess

MOST_SECONDS = 120.0  # of an answer, an update and a pause
SAMPLE_S = 1.0  # between two looks at the memory
SLOW_BYTES_S = 2000.0
KILLS = 0.25  # of the time: after that no server is killed; both are warm in the second half
FAULTS = ('kill', 'stop', 'slow', 'cut', 'kill the sender')
WANTED = ('started', 'ended', 'updates', 'pauses', *FAULTS, *(f'abuse: {refusal.name}' for refusal in abuse.REFUSALS))


class Havoc:
    """Faults and abuse on threads of their own, until `stop`."""

    def __init__(
        self,
        servers: Sequence[ServerProcess],
        proxies: Sequence[abuse.Proxy],
        sender: SenderProcess,
        seed: int,
        seconds: float,
    ):
        self._servers, self._proxies, self._sender = servers, proxies, sender
        self._seed, self._seconds = seed, seconds
        self._began_s = time.monotonic()
        self._stop = threading.Event()
        self.memory = MemoryTrack()
        self.largest_segment = self.most_shared = 0  # bytes
        self.counts: collections.Counter[str] = collections.Counter()
        self.faults: list[str] = []
        self._threads = [
            threading.Thread(target=self._guard, args=(work,), daemon=True)
            for work in (self._break, self._send_abuse, self._sample)
        ]

    def __enter__(self) -> Havoc:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Returns when every server runs again and no connection is slow."""
        self._stop.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def _guard(self, work: Any) -> None:
        try:
            work()
        except Exception as error:
            self.faults.append(f'the soak itself: {type(error).__name__}: {error}')

    def _break(self) -> None:
        chosen = random.Random(f'{self._seed} faults')
        pause_s = min(8.0, self._seconds / 20)
        each_once = iter(FAULTS)
        while not self._stop.wait(chosen.uniform(pause_s / 2, 1.5 * pause_s)):
            kinds = FAULTS if self._elapsed_s < KILLS * self._seconds else FAULTS[1:]
            kind, number = next(each_once, None) or chosen.choice(kinds), chosen.randrange(len(self._servers))
            if kind == 'kill the sender':
                self._sender.kill_next(chosen.uniform(0.0, 1.0))
                continue
            self.counts[kind] += 1
            self._do(kind, self._servers[number], self._proxies[number], chosen.uniform(1.0, 9.0))

    def _do(self, kind: str, server: ServerProcess, proxy: abuse.Proxy, seconds: float) -> None:
        if kind == 'kill':
            server.send(signal.SIGKILL)
            server.restart()
        elif kind == 'stop':
            server.send(signal.SIGSTOP)
            self._stop.wait(seconds)
            server.send(signal.SIGCONT)
        elif kind == 'slow':
            proxy.bytes_s = SLOW_BYTES_S
            self._stop.wait(seconds)
            proxy.bytes_s = 0.0
        else:
            proxy.cut()

    def _send_abuse(self) -> None:
        chosen = random.Random(f'{self._seed} abuse')
        while not self._stop.is_set():
            for refusal in chosen.sample(abuse.REFUSALS, len(abuse.REFUSALS)):
                self._stop.wait(chosen.uniform(0.0, 0.5))
                self._send(refusal, chosen)

    def _send(self, refusal: abuse.Refusal, chosen: random.Random) -> None:
        status = abuse.send(refusal, chosen.choice(self._servers).port, chosen)
        if status is None:
            self.counts['abuse without an answer'] += 1
            return
        self.counts[f'abuse: {refusal.name}'] += 1
        if status not in refusal.expected:
            self.faults.append(f'{refusal.name}: status {status} instead of {refusal.expected}')

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            for server in self._servers:
                if (size := server.resident_bytes()) is not None:
                    self.memory.add(f'server {server.number}, start {server.starts}', self._elapsed_s, size.own)
                    self.largest_segment = max(self.largest_segment, *segment_sizes())
                    self.most_shared = max(self.most_shared, size.shared)


def segment_sizes() -> list[int]:
    """Bytes of the segments of shared memory of this machine; 0 is one of them."""
    return [0, *(path.stat().st_size for path in DIRECTORY.glob('areal_jax-*.weights') if path.exists())]


def soak(flags: argparse.Namespace, workdir: pathlib.Path) -> dict[str, Any]:
    """Everything that was found; `faults` is empty where all held."""
    seconds = 60 * flags.minutes
    Registration(workdir, describe_server('dead', 'http://127.0.0.1:9', 'own'))  # nobody listens, no heartbeat follows
    servers = [ServerProcess(number, workdir, flags.channel) for number in range(2)]
    with contextlib.ExitStack() as parts:
        for server in servers:
            parts.callback(server.end)
            server.start()
        for server in servers:
            server.wait_healthy()
        proxies = [parts.enter_context(abuse.Proxy(server.port)) for server in servers]
        urls = {server.url: proxy.url for server, proxy in zip(servers, proxies, strict=True)}
        load = SoakLoad(workdir, urls, flags.seed, seconds, flags.clients, flags.channel)
        havoc = Havoc(servers, proxies, load.sender, flags.seed, seconds)
        calm = threading.Timer(seconds, havoc.stop)  # the last answers end without further faults
        calm.daemon = True
        with AnswerCheck(load.answered, load.dtype) as check:
            calm.start()
            with havoc:
                load.run()
    events, counts = workdir / 'events.jsonl', load.counts | dict(sorted(havoc.counts.items()))
    counts |= {'kill the sender': load.sender.kills, 'deltas': load.sender.deltas}
    slopes = havoc.memory.megabytes_a_minute(seconds / 2, min(WINDOW_S, seconds / 20))
    faults = [*load.faults, *load.lost, *check.faults, *havoc.faults, *check_events(events, load.counts['started'])]
    scored = {'scored_answers': check.scored, 'scored_of_several_versions': check.of_versions}
    quarantines = find_quarantines(events)
    faults += [f'a server that was right was taken for a wrong one: {text}' for text in quarantines]
    shared = {'most_shared_bytes': havoc.most_shared, 'largest_segment_bytes': havoc.largest_segment}
    faults += check_memory(slopes, len(servers)) + check_shared(havoc.most_shared, havoc.largest_segment)
    faults += check_seconds(load.slowest_s, MOST_SECONDS)
    faults += check_seen(counts | scored, (*WANTED, *scored, *(['deltas'] if 'delta' in flags.channel else [])))
    return {
        'faults': faults, 'megabytes_a_minute': slopes, **shared, 'counts': counts, **scored,
        'slowest_s': load.slowest_s, 'quarantines': quarantines, 'events': count_events(events),
    }  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    parser = make_parser('soak', __doc__, seed_of='of all that is random but the moments at which work ends')
    parser.add_argument('--minutes', type=float, default=10.0)
    parser.add_argument('--clients', type=int, default=64)
    parser.add_argument('--channel', choices=CHANNELS, default='files', help='that carries the weights')
    flags = parser.parse_args(arguments)
    workdir = make_directory('soak')
    began = time.monotonic()
    faulthandler.dump_traceback_later(60 * flags.minutes + END_S + START_S + 120.0, exit=True)  # exit code 1
    found = soak(flags, workdir)
    faulthandler.cancel_dump_traceback_later()
    whole = {
        **describe_command(parser, arguments), 'seed': flags.seed, 'minutes_asked': flags.minutes,
        'minutes_taken': round((time.monotonic() - began) / 60, 2), **found,
    }  # fmt: skip
    if flags.json:
        files.write_json(flags.json, whole)
    for name, value in found.items():
        if name != 'faults':
            print(f'{name}: {value}')
    for fault in found['faults'][:50]:
        print(f'FAULT  {fault}')
    print(f'{len(found["faults"])} faults')
    leave_directory(workdir, failed=bool(found['faults']))
    return 1 if found['faults'] else 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
