"""The servers of a soak as processes: started, killed, stopped for a while, started again; their memory."""

from __future__ import annotations

import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from typing import NamedTuple

from checks.processes import ROOT

API_KEY = 'soak'
CONTEXT, SLOTS = 256, 16
CONFIG = 'configs/tiny_cpu.py'
OVERRIDES = {
    'rollout.context_tokens': CONTEXT, 'rollout.block_tokens': 64, 'rollout.slots': SLOTS,
    'rollout.prefill_buckets': '(64,512)', 'rollout.max_new_tokens': 200,
    'rollout.server': 'own', 'server.max_body_bytes': 65536,
    'server.body_timeout_s': 2.0, 'server.max_streams': 80,
}  # fmt: skip
CHANNELS = {
    'files': {'publication.channel': 'files'},
    **{
        f'{name}_delta': {'publication.channel': name, 'publication.delta': True, 'publication.dtype': 'bfloat16'}
        for name in ('files', 'shm', 'stream')
    },
}  # by --channel: overrides of the config
START_S = 180.0
_RESTART_S = 1.0


def list_flags(channel: str) -> list[str]:
    return [f'--config.{name}={value}' for name, value in (OVERRIDES | CHANNELS[channel]).items()]


class Resident(NamedTuple):
    """Bytes of a process that are in memory."""

    own: int
    shared: int  # of a channel in shared memory: it has a place after the other, and begins anew with each sender


class ServerProcess:
    """One server on a port that it keeps when it is started again. Every method may be called from any thread."""

    def __init__(self, number: int, workdir: pathlib.Path, channel: str):
        with socket.socket() as taken:
            taken.bind(('127.0.0.1', 0))
            self.port = int(taken.getsockname()[1])
        self.number, self.url, self._channel = number, f'http://127.0.0.1:{self.port}', channel
        self._workdir, self._log = workdir, workdir / f'server_{number}.log'
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    @property
    def pid(self) -> int | None:
        """None while it is dead."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def start(self) -> None:
        overrides = list_flags(self._channel)
        command = [sys.executable, '-m', 'areal_jax.main_serve', f'--config={CONFIG}', f'--port={self.port}']
        command += [f'--workdir={self._workdir}', f'--name={self.number}', *overrides]
        environment = {key: value for key, value in os.environ.items() if key != 'XLA_FLAGS'}
        environment |= {'AREAL_JAX_API_KEY': API_KEY, 'JAX_PLATFORMS': 'cpu'}
        with self._lock, self._log.open('ab') as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment
            )
            self.starts += 1

    def wait_healthy(self) -> None:
        """Raises RuntimeError with its last words where it does not start."""
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s and self.pid is not None:
            try:
                with urllib.request.urlopen(f'{self.url}/health', timeout=5):
                    return
            except OSError:
                time.sleep(0.2)
        raise RuntimeError(f'server {self.number} did not start: {self.last_words()}')

    def send(self, number: signal.Signals) -> None:
        """Nothing where it is dead."""
        if self._process is not None and self.pid is not None:
            self._process.send_signal(number)

    def restart(self) -> None:
        """After it was killed, as a launcher does."""
        assert self._process is not None
        self._process.wait()
        time.sleep(_RESTART_S)
        self.start()

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()

    def resident_bytes(self) -> Resident | None:
        """None while it is dead."""
        try:
            status = pathlib.Path(f'/proc/{self.pid}/status').read_text()
        except OSError:
            return None
        lines = [line.split() for line in status.splitlines()]
        sizes = {fields[0]: int(fields[1]) * 1024 for fields in lines if fields and fields[0].startswith('Rss')}
        return Resident(sizes['RssAnon:'] + sizes['RssFile:'], sizes['RssShmem:']) if 'RssAnon:' in sizes else None

    def last_words(self) -> str:
        return self._log.read_text(errors='replace')[-2000:] if self._log.exists() else ''
