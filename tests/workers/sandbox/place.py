"""What an attempt may reach for: files, sockets and a parent outside of the sandbox, and a raw system call."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import pathlib
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long


@dataclasses.dataclass(frozen=True)
class Place:
    """The folder of an attempt.

    Args:
      work: a folder that the sandbox can write.
      outside: a folder that everybody can write, and the user of the attempt owns, as its `victim`.
      secret: a file that everybody can read.
      stream, datagram: unix sockets that everybody can connect to; port: a TCP socket of this machine.
      inherited: unconnected sockets by family, opened before the sandbox.
      parent: the process that forked the one in the sandbox.
    """

    work: pathlib.Path
    outside: pathlib.Path
    victim: pathlib.Path
    secret: pathlib.Path
    stream: str
    datagram: str
    port: int
    inherited: dict[str, socket.socket]
    parent: int


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One way out of the sandbox.

    Args:
      attempt: returns where it got through.
      control: an allowed twin; raises where the sandbox refuses too much.
      refused: the outcomes that count as refused: an errno, an exception, or a signal.
    """

    attempt: Callable[[Place], object]
    control: Callable[[Place], object]
    refused: tuple[str, ...] = ('EPERM', 'EACCES')


def call(number: int, *arguments: object) -> int:
    """The system call; integers are as wide as a register."""
    wide = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    result: int = _LIBC.syscall(ctypes.c_long(number), *wide)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def raw(number: int, *arguments: object) -> Callable[[Place], object]:
    return lambda place: call(number, *arguments)


def in_child(action: Callable[[], object]) -> None:
    """Runs it in a fork, so that the process that tells the outcome stays as it is; raises its OSError."""
    pid = os.fork()
    if pid == 0:
        code = 0
        try:
            action()
        except OSError as error:
            code = error.errno
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        raise RuntimeError(f'the child was killed by signal {os.WTERMSIG(status)}')
    if code := os.waitstatus_to_exitcode(status):
        raise OSError(code, os.strerror(code))


@contextlib.contextmanager
def make_place(uid: int) -> Iterator[Place]:
    """For a sandbox that runs as this user; the parent is the calling process."""
    base = pathlib.Path(tempfile.mkdtemp(prefix='sandbox-'))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, base, ignore_errors=True)
        base.chmod(0o755)
        work, outside, secret = base / 'work', base / 'outside', base / 'secret'
        for folder, mode in ((work, 0o700), (outside, 0o777)):
            folder.mkdir()
            folder.chmod(mode)
        victim = outside / 'victim'
        for file, mode in ((secret, 0o644), (victim, 0o666)):
            file.write_text('the answer is 42')
            file.chmod(mode)
        if os.getuid() == 0:
            for path in (work, outside, victim):
                os.chown(path, uid, uid)

        def listen(family: int, kind: int, address: object) -> socket.socket:
            one = stack.enter_context(socket.socket(family, kind))
            one.bind(address)
            if kind == socket.SOCK_STREAM:
                one.listen()
            if isinstance(address, str):
                os.chmod(address, 0o777)
            return one

        tcp = listen(socket.AF_INET, socket.SOCK_STREAM, ('127.0.0.1', 0))
        listen(socket.AF_UNIX, socket.SOCK_STREAM, str(base / 'stream'))
        listen(socket.AF_UNIX, socket.SOCK_DGRAM, str(base / 'datagram'))
        inherited = {
            'tcp': stack.enter_context(socket.socket()),
            'unix': stack.enter_context(socket.socket(socket.AF_UNIX)),
        }
        yield Place(
            work, outside, victim, secret, str(base / 'stream'), str(base / 'datagram'), tcp.getsockname()[1],
            inherited, os.getpid(),
        )  # fmt: skip
