"""A command as a real process: its output in files, a deadline, a mark by which all of its descendants are found."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

ROOT = pathlib.Path(__file__).parents[1]
HANG_S = 120.0  # a command that takes longer hangs; the slowest run here takes some 20 s on an idle machine
ORPHAN_S = 10.0  # descendants of a dead run are gone after so long
MARK = 'AREAL_JAX_CHAOS'  # environment variable; descendants inherit it
# after the first run every program comes from the cache, and no run is long enough for LLVM's passes
_QUICK = {'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0', 'XLA_FLAGS': '--xla_backend_optimization_level=0'}
_POLL_S = 0.005
_OUTPUT_BYTES = 2**22  # read of the end of an output; a hostile scorer may print gigabytes
_ABORTS = {-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGFPE, -signal.SIGILL, 134, 135, 136, 139}
_TRACEBACK = 'Traceback (most recent call last)'


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a command ended."""

    exit_code: int | None  # negative: by that signal; None: it was still running at the deadline
    seconds: float
    stdout: str
    stderr: str

    @property
    def trouble(self) -> Literal['', 'abort', 'hang', 'traceback']:
        if self.exit_code is None:
            return 'hang'
        if self.exit_code in _ABORTS:
            return 'abort'
        return 'traceback' if _TRACEBACK in self.stderr + self.stdout else ''

    def violations(self, allowed: Sequence[int]) -> list[str]:
        """What is wrong with the exit code and with the sentence of an exit code 2."""
        if self.exit_code is None:
            return [f'no end after {self.seconds:.0f} s: {self._last_lines(30)}']
        wrong = []
        if self.exit_code not in allowed or self.trouble:
            wrong.append(f'exit code {self.exit_code}, expected {_listed(allowed)}: {self._last_lines(4)}')
        if self.exit_code == 2:
            errors = [line for line in self.stderr.splitlines() if line.startswith('error: ')]
            if len(errors) != 1:
                wrong.append(f'exit code 2 with {len(errors)} lines "error: ..." on stderr: {self._last_lines(4)}')
        return wrong

    @property
    def error(self) -> str:
        """The sentence of an exit code 2."""
        return next((line for line in self.stderr.splitlines() if line.startswith('error: ')), '')

    def _last_lines(self, n: int) -> str:
        lines = (self.stderr.strip() or self.stdout.strip()).splitlines()
        return ' / '.join(lines[-n:])[-1500:]


class RunningCommand:
    """A started process, alone in a session; use it as a context manager, at whose end nothing of it is left."""

    def __init__(self, command: Sequence[str], directory: pathlib.Path, environment: Mapping[str, str] | None = None):
        """Starts it; stdout and stderr go to files in the directory."""
        self.mark = f'{os.getpid()}.{time.monotonic_ns()}'
        self._out, self._err = directory / f'{self.mark}.stdout', directory / f'{self.mark}.stderr'
        self.began_ns = time.time_ns()
        self._began = time.monotonic()
        with self._out.open('wb') as out, self._err.open('wb') as err:
            self._process = subprocess.Popen(
                ['nice', '-n', '5', *command],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, 'PYTHONFAULTHANDLER': '1', **_QUICK, **(environment or {}), MARK: self.mark},
                start_new_session=True,
            )

    def __enter__(self) -> RunningCommand:
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_alive():
            self._process.kill()
            self._process.wait()
        for pid in marked(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def stdout(self) -> str:
        """What it has printed so far."""
        return _read_end(self._out)

    def wait_for(self, happened: Callable[[], bool], timeout_s: float = HANG_S) -> bool:
        """True once it has happened; False when the process ends before or the time is up."""
        end = time.monotonic() + timeout_s
        while not happened():
            if not self.is_alive() or time.monotonic() > end:
                return False
            time.sleep(_POLL_S)
        return True

    def sleep(self, seconds: float) -> bool:
        """True after so many seconds; False when the process ends before."""
        end = time.monotonic() + seconds
        return self.wait_for(lambda: time.monotonic() >= end, seconds + 1.0)

    def send(self, number: signal.Signals, *, to_group: bool = False) -> None:
        """As `kill` does, or as a terminal does, which signals all processes of the group."""
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if to_group else os.kill)(self.pid, number)

    def wait(self, timeout_s: float = HANG_S) -> Ending:
        """How it ended; a process that does not end prints the stacks of its threads and is killed."""
        try:
            code: int | None = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
            self.send(signal.SIGABRT)  # the fault handler writes all stacks to stderr
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10.0)
            self._process.kill()
            self._process.wait()
        seconds = time.monotonic() - self._began
        return Ending(code, seconds, self.stdout(), _read_end(self._err))

    def finish(self, allowed: Sequence[int], timeout_s: float = HANG_S) -> tuple[Ending, list[str]]:
        """How it ended, and the violations in its exit code and in the processes that it left."""
        ending = self.wait(timeout_s)
        return ending, ending.violations(allowed) + self.orphans()

    def orphans(self, within_s: float = ORPHAN_S) -> list[str]:
        """Violations: descendants that are still alive so long after the end of the process."""
        end = time.monotonic() + within_s
        while (left := marked(self.mark)) and time.monotonic() < end:
            time.sleep(0.05)
        return [f'orphan {pid}: {_command_line(pid)}' for pid in left]


def marked(mark: str) -> list[int]:
    """The processes that carry the mark in their environment; zombies have none."""
    entries = pathlib.Path('/proc').iterdir()
    return [int(entry.name) for entry in entries if entry.name.isdecimal() and carries(int(entry.name), mark)]


def carries(pid: int, mark: str) -> bool:
    """Whether the process is there and carries the mark."""
    try:
        return f'{MARK}={mark}'.encode() in pathlib.Path(f'/proc/{pid}/environ').read_bytes().split(b'\0')
    except OSError:
        return False


def is_alive(pid: int) -> bool:
    """Whether it runs; a zombie, which nobody has waited for, does not."""
    try:
        return pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] not in ('Z', 'X')
    except OSError:
        return False


def find_marked(mark: str, words: Collection[bytes], without: Collection[bytes] = ()) -> list[int]:
    """The processes that carry the mark and have these words, and not the others, in their command line."""
    found = []
    for pid in marked(mark):
        with contextlib.suppress(OSError):
            own = set(pathlib.Path(f'/proc/{pid}/cmdline').read_bytes().split(b'\0'))
            if own.issuperset(words) and own.isdisjoint(without):
                found.append(pid)
    return found


def python(*arguments: str) -> list[str]:
    """A command that this interpreter runs."""
    return [sys.executable, *arguments]


def _read_end(path: pathlib.Path) -> str:
    with path.open('rb') as file:
        file.seek(max(0, path.stat().st_size - _OUTPUT_BYTES))
        return file.read().decode(errors='replace')


def _command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return pathlib.Path(f'/proc/{pid}/cmdline').read_bytes().replace(b'\0', b' ').decode(errors='replace').strip()
    return '?'


def _listed(codes: Sequence[int]) -> str:
    return ' or '.join(map(str, codes))
