"""Program that forks a process for each line it reads, confines it, and prints what an attempt came to."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib.util
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

from areal_jax.workers.sandbox import confinement
from areal_jax.workers.sandbox.confinement import LANDLOCK, Confinement, confine, wrap_command
from areal_jax.workers.sandbox.packages import find_packages
from tests.workers.sandbox.attempts import ATTEMPTS, CONTROLS, LEFT_OPEN, MEASURED, name_outcome
from tests.workers.sandbox.place import Place, make_place

PASSED, DEADLINE = 'passed', 'deadline'
ROOT = pathlib.Path(__file__).parents[3]
NOBODY = 65_534
_ROOT_BECOMES = 60_001 + os.getpid() % 4_000  # runs beside each other count their own
_DEADLINE_S = 5
_DUMPABLE, _SUBREAPER = 4, 36  # prctl
_PACKAGES = find_packages(['numpy'] if importlib.util.find_spec('numpy') else [])


@dataclasses.dataclass(frozen=True)
class Request:
    """One process.

    Args:
      name: of ATTEMPTS, CONTROLS, MEASURED or LEFT_OPEN.
      is_user: an ordinary user is confined, and has a parent of the same user; False: root, which becomes a user.
      is_confined: False for what would pass without a sandbox, as the same user.
      limits: fields of Confinement; `readable` and `work` are names in Place.
      abi: of Landlock, which is used as in a kernel that has no later one; 0 = that of this kernel.
    """

    name: str
    is_user: bool = True
    is_confined: bool = True
    limits: dict[str, int | str] = dataclasses.field(default_factory=dict)
    abi: int = 0


class Tries:
    """The program, from the side of a test: it has no thread and little memory, whatever the test's process has."""

    def __init__(self, interpreter: str = sys.executable, level: str = LANDLOCK, user: int | None = None) -> None:
        """Starts it at the level, as that user where this one is root."""
        self._level, self._places = level, tempfile.TemporaryDirectory()
        os.chmod(self._places.name, 0o777)
        command = [interpreter, '-m', 'tests.workers.sandbox.try_attempts']
        environment = {**os.environ, 'TMPDIR': self._places.name}
        self._program = subprocess.Popen(
            wrap_command(level, command, writable=[self._places.name]), cwd=ROOT, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, bufsize=1, env=environment, user=user, group=user,
            extra_groups=None if user is None else [],
        )  # fmt: skip

    def run(self, request: Request) -> dict[str, str]:
        """The outcomes: `control` and `attempt`, each 'passed', 'deadline', or the name of an error or a signal."""
        assert self._program.stdin
        assert self._program.stdout
        values = dataclasses.asdict(request) | {'limits': {'level': self._level, **request.limits}}
        self._program.stdin.write(json.dumps(values) + '\n')
        outcomes: dict[str, str] = json.loads(self._program.stdout.readline())
        return outcomes

    def close(self) -> None:
        self._program.communicate(timeout=_DEADLINE_S)
        self._places.cleanup()


def find_open_interpreter() -> str:
    """This one, or that of the system: one that every user can read; '' where there is none."""
    return next(filter(_is_open, (sys.executable, '/usr/bin/python3.12', '/usr/bin/python3.11')), '')


def _is_open(interpreter: str) -> bool:
    file = pathlib.Path(interpreter).resolve()
    return file.exists() and all(one.stat().st_mode & 0o005 == 0o005 for one in (file, *file.parents))


def become(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _try(request: Request) -> dict[str, str]:
    """Forks the parent of the attempt, which forks the attempt."""
    uid = (NOBODY if request.is_user else _ROOT_BECOMES) if os.getuid() == 0 else os.getuid()
    reader, writer = os.pipe()
    with make_place(uid) as place:
        parent = os.fork()
        if parent == 0:
            try:
                os.close(reader)
                os.setsid()
                _be_parent(request, dataclasses.replace(place, parent=os.getpid()), uid, writer)
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader, 'rb', 0) as pipe:
            outcomes = _gather(pipe.fileno())
        for group in (parent, int(outcomes.pop('pid', parent))):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:  # those that lost their parent too: a process that has ended counts until somebody waits for it
                os.waitpid(-1, 0)
    return outcomes


def _gather(pipe: int) -> dict[str, str]:
    told, end_s = b'', time.monotonic() + _DEADLINE_S
    while True:
        ready, _, _ = select.select([pipe], [], [], max(0, end_s - time.monotonic()))
        read = os.read(pipe, 4096) if ready else b''
        told += read
        outcomes: dict[str, str] = {}
        for line in told.splitlines(keepends=True):
            if line.endswith(b'\n'):
                outcomes = json.loads(line) | outcomes
        if 'attempt' in outcomes:
            return outcomes
        if not read:
            return outcomes | {'attempt': 'no word' if ready else DEADLINE}


def _be_parent(request: Request, place: Place, uid: int, writer: int) -> None:
    if request.is_user and os.getuid() == 0:
        become(uid)
    ctypes.CDLL(None).prctl(_DUMPABLE, 1, 0, 0, 0)  # it may be traced, as one that was no other user before
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            _be_attempt(request, place, uid, writer)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        _tell(writer, attempt=signal.Signals(os.WTERMSIG(status)).name)


def _be_attempt(request: Request, place: Place, uid: int, writer: int) -> None:
    _tell(writer, pid=str(os.getpid()))
    try:
        _confine(request, place, uid)
    except Exception as error:
        _tell(writer, attempt=f'{type(error).__name__}: {error}')
        return
    alone = CONTROLS | MEASURED | LEFT_OPEN
    if request.name in alone:
        _tell(writer, attempt=_name(alone[request.name], place))
        return
    attempt = ATTEMPTS[request.name]
    with _other_work(place) as other:
        _tell(writer, control=_name(attempt.control, other))
    _tell(writer, attempt=_name(attempt.attempt, place))


@contextlib.contextmanager
def _other_work(place: Place) -> Iterator[Place]:
    """The control has a folder to itself, where it can make one."""
    folder = place.work / 'control'
    with contextlib.suppress(OSError):
        folder.mkdir()
    yield dataclasses.replace(place, work=folder)


def _confine(request: Request, place: Place, uid: int) -> None:
    os.chdir(place.work)
    if request.abi:
        confinement.find_abi = lambda: request.abi
    if request.is_confined:
        limits = {'work': 'work'} | request.limits
        work = str(getattr(place, limits.pop('work'))) if limits['work'] else limits.pop('work')
        readable = [str(getattr(place, limits.pop('readable')))] if 'readable' in limits else []
        uid_here = None if request.is_user else uid
        confine(Confinement(work=work, uid=uid_here, readable=(*readable, *_PACKAGES), **limits))
    elif not request.is_user and os.getuid() == 0:
        become(uid)


def _name(attempt: Callable[[Place], object], place: Place) -> str:
    try:
        attempt(place)
    except BaseException as error:
        return name_outcome(error)
    return PASSED


def _tell(writer: int, **outcomes: str) -> None:
    os.write(writer, json.dumps(outcomes).encode() + b'\n')


if __name__ == '__main__':
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    for line in sys.stdin:
        print(json.dumps(_try(Request(**json.loads(line)))), flush=True)
