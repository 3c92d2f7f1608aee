"""Watches one program: feeds its input, drains its output, and ends all processes that it started.

On Linux the supervisor adopts the orphans of its program, so it also finds a process that left its session (setsid) or
its parent (a daemon); and the kernel signals a supervisor whose parent ends. Elsewhere the process group of the program
is killed, and the supervisor checks for its parent once a second.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import select
import signal
import sys
import types
from collections.abc import Callable, Sequence

from areal_jax.workers.descendants import adopt_orphans, die_with_parent, end_descendants

TAIL_BYTES = 2048  # the end of the output that is kept
_CHUNK_BYTES = 2**16  # read or written at once
_LAST_READS = 64  # after the end of all; a process that could not be killed may still print
_LOOK_S = 1.0  # between two checks whether the parent lives
_DEATH_S = 0.1  # between SIGKILL and the end of a process, usually
_KILL_S = 3.0  # a process that is alive this long after SIGKILL is stuck in the kernel


class Supervisor:
    """One program, seen by the process that watches it; made by `start_program`."""

    def __init__(self, parent: int):
        self.exit_code: int | None = None  # of the program; negative: the signal that killed it
        self.is_asked_to_end = False  # by SIGTERM, or because the parent has ended
        self.tail = b''  # the last bytes that the program wrote
        self._parent = parent
        self._wakeups = watch_signals(self._ask_to_end)

    def watch(self, pid: int, stdin: int, unsent: bytes, output: int, hear: Callable[[bytes], None]) -> None:
        """Waits until the program ends or this process is asked to end; then kills all processes of the program.

        Args:
          pid: of the program, a child of this process that leads a session.
          stdin, output: this process's ends of the program's pipes.
          unsent: the whole input of the program, followed by the end of the file.
          hear: called with each piece of output.
        """
        self._pid, self._stdin, self._unsent, self._output, self._hear = pid, stdin, unsent, output, hear
        self._output_is_open = True
        for descriptor in (stdin, output):
            os.set_blocking(descriptor, False)
        self._write()
        while self.exit_code is None and not self.is_asked_to_end:
            self._wait(_LOOK_S)
        self._end_all()
        for _ in range(_LAST_READS):
            if not self._output_is_open or not self._read():
                break

    def _ask_to_end(self) -> None:
        self.is_asked_to_end = True

    def _wait(self, longest_s: float) -> None:
        poller = select.poll()
        poller.register(self._wakeups, select.POLLIN)
        if self._output_is_open:
            poller.register(self._output, select.POLLIN)
        if self._unsent:
            poller.register(self._stdin, select.POLLOUT)
        ready = dict(poller.poll(1000 * longest_s))
        if self._output in ready:
            self._read()
        if self._stdin in ready and self._unsent:
            self._write()
        if self._wakeups in ready:
            os.read(self._wakeups, _CHUNK_BYTES)
            self._reap()
        if os.getppid() != self._parent:
            self.is_asked_to_end = True

    def _read(self) -> bool:
        try:
            chunk = os.read(self._output, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        self._output_is_open = bool(chunk)
        self.tail = (self.tail + chunk)[-TAIL_BYTES:]
        self._hear(chunk)
        return True

    def _write(self) -> None:
        try:
            self._unsent = self._unsent[os.write(self._stdin, self._unsent[:_CHUNK_BYTES]) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # the program has closed its stdin
            self._unsent = b''
        if not self._unsent:
            os.close(self._stdin)

    def _reap(self) -> bool:
        """Reaps every child that has ended, also adopted orphans; False if no child is left."""
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._pid:
                    self.exit_code = os.waitstatus_to_exitcode(ended[1])
        except ChildProcessError:
            return False
        return True

    def _end_all(self) -> None:
        # After the program is reaped, another process may have its pid; on Linux, orphans are found as children.
        if self.exit_code is None or sys.platform != 'linux':
            with contextlib.suppress(OSError):
                os.killpg(self._pid, signal.SIGKILL)
        if self.exit_code is None:
            self._wait(_DEATH_S)
        if self._reap():
            end_descendants(self._reap, _KILL_S)


def start_program(
    parent: int, stdin: bytes, hear: Callable[[bytes], None] = lambda chunk: None, kept: Sequence[int] = ()
) -> Supervisor | None:
    """Forks: returns None in the child, which becomes the program, and the supervisor in the caller when that ended.

    The program leads a new session and has the signals of a new process. The caller should block SIGTERM, so that it
    does not come before the supervisor handles it.

    Args:
      parent: the process that forked this one; the program ends when `parent` does.
      stdin: the whole input of the program.
      hear: called in the supervisor with each piece of output.
      kept: descriptors that the program keeps in addition to 0 to 2, which are pipes.

    Raises OSError if the program cannot be forked.
    """
    adopt_orphans()
    supervisor = Supervisor(parent)
    for_program, to_program = os.pipe()
    from_program, of_program = os.pipe()
    own_pid = os.getpid()
    pid = os.fork()
    if pid:
        for descriptor in (for_program, of_program):
            os.close(descriptor)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        supervisor.watch(pid, to_program, stdin, from_program, hear)
        return supervisor
    die_with_parent()
    os.setsid()
    for source, target in ((for_program, 0), (of_program, 1), (of_program, 2)):
        os.dup2(source, target)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    close_descriptors(kept)
    if os.getppid() != own_pid:
        os._exit(1)
    return None


def watch_signals(on_term: Callable[[], None]) -> int:
    """Returns a descriptor that becomes readable when a child ends or SIGTERM comes; `on_term` is called before."""
    wakeups, wake = os.pipe()
    for descriptor in (wakeups, wake):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: on_term())
    return wakeups


def close_descriptors(kept: Sequence[int]) -> None:
    """Closes all descriptors except 0 to 2 and `kept`."""
    for name in os.listdir('/dev/fd'):
        if int(name) > 2 and int(name) not in kept:
            with contextlib.suppress(OSError):  # the one that listed them
                os.close(int(name))


# Runs `python FILE.py` or `python -m MODULE` in this process, as a new interpreter would run it.


_NAMES = ('python', 'python3')
_CANNOT_OPEN = 2  # the exit code of python without its file


def find_python_program(command: Sequence[str]) -> list[str]:
    """['FILE.py', ...] or ['-m', 'MODULE', ...] from a command of this form; else [].

    Other options of the interpreter, such as -u or -c, need a new interpreter.
    """
    words = list(command[1:])
    is_module, is_file = words[:1] == ['-m'] and len(words) > 1, bool(words) and words[0].endswith('.py')
    return words if is_python(command[0]) and (is_module or is_file) else []


def is_python(word: str) -> bool:
    """Whether a command with this first word runs in the interpreter of the run."""
    return word in (*_NAMES, sys.executable)


def import_as(words: Sequence[str]) -> None:
    """Makes imports resolve as in that program: puts its directory first in sys.path."""
    place = os.getcwd() if words[0] == '-m' else os.path.dirname(os.path.realpath(words[0]))
    sys.path.insert(0, place)


def run_python(words: Sequence[str]) -> int:
    """Runs the program in this process; returns the exit code of an interpreter, with a traceback on stderr."""
    sys.orig_argv = [sys.executable, *words]
    try:
        return _run_module(words[1], words[2:]) if words[0] == '-m' else _run_file(words)
    except SystemExit as end:
        return _read_exit_code(end.code)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error, trace)
        return 1


def _run_file(words: Sequence[str]) -> int:
    sys.argv, path = list(words), os.path.abspath(words[0])
    try:
        with open(path, 'rb') as file:
            source = file.read()
    except OSError as error:
        return _refuse(f"can't open file {path!r}: [Errno {error.errno}] {error.strerror}", _CANNOT_OPEN)
    loader = importlib.machinery.SourceFileLoader('__main__', path)
    _run_main(compile(source, path, 'exec', dont_inherit=True), __file__=path, __loader__=loader, __package__=None)
    return 0


def _run_module(name: str, arguments: Sequence[str]) -> int:
    """Runs a module like `runpy`, which however removes the module before its threads and exit functions have ended."""
    sys.argv = ['-m', *arguments]
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f'{name}.__main__'
        spec = importlib.util.find_spec(name)
    code = spec.loader.get_code(spec.name) if spec and isinstance(spec.loader, importlib.abc.InspectLoader) else None
    if spec is None or code is None:
        return _refuse(f'No module named {name}', 1)
    sys.argv[0] = spec.origin or name
    names = {'__file__': spec.origin, '__cached__': spec.cached, '__spec__': spec, '__package__': spec.parent}
    _run_main(code, __loader__=spec.loader, **names)
    return 0


def _run_main(code: types.CodeType, **names: object) -> None:
    module = types.ModuleType('__main__')
    vars(module).update({'__cached__': None, '__builtins__': builtins, '__annotations__': {}, **names})
    sys.modules['__main__'] = module
    exec(code, vars(module))


def _refuse(reason: str, exit_code: int) -> int:
    print(f'{sys.executable}: {reason}', file=sys.stderr)
    return exit_code


def _read_exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1
