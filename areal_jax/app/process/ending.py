"""The end of a process and of a call: exit codes, one sentence for each error, and requests to stop.

Imports nothing slow: every command imports it first.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, TypeVar

from areal_jax.errors import ExitCode, LostPeerError, UserError, describe_disk_trouble, describe_memory_trouble

STOPPED_CODE = 'AREAL_JAX_STOPPED_CODE'  # environment variable
RESUME = 'the same command with --resume goes on'
_EXIT_DEADLINE_S = 120.0  # for exit handlers, among them the barrier of jax.distributed


class ProcessEnd:
    """Ends the process after its exit handlers and before the interpreter is torn down; make it before importing jax.

    Threads of XLA, tensorstore and orbax outlive the interpreter's own threads. Destructors that meet them abort the
    process ("terminate called", exit code 134).
    """

    def __init__(self) -> None:
        self._code: int | None = None
        atexit.register(self._leave)  # handlers run last in, first out: this one runs after the handlers of jax

    def note(self, code: int) -> int:
        """Sets the exit code. If an exit handler hangs, the process ends with this code after two minutes."""
        self._code = code
        guard = threading.Timer(_EXIT_DEADLINE_S, os._exit, [code])
        guard.daemon = True
        guard.start()
        return code

    def _leave(self) -> None:
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed when the process was started
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        if self._code is not None:
            os._exit(self._code)


def end_command(command: Callable[[], int], doing: str, again: str = '') -> int:
    """Runs `command`; returns its exit code, or the code of the exception that it raises; see errors.ExitCode.

    Args:
      doing: the command's action on a disk, for errors that carry no file name: 'writing to runs/tiny'.
      again: how the user continues a command that Ctrl-C has ended: RESUME; '' = by starting it again.
    """
    try:
        return command()
    except UserError as error:
        _print_error(str(error))
        return ExitCode.STOPPED if isinstance(error, LostPeerError) else ExitCode.USER_ERROR
    except KeyboardInterrupt:
        _print_error(f'stopped; {again}' if again else 'stopped')
        return ExitCode.STOPPED
    except BrokenPipeError:  # the reader of our output has closed the pipe
        return ExitCode.STOPPED
    except Exception as error:
        if sentence := describe_disk_trouble(error, doing) or describe_memory_trouble(error):
            _print_error(sentence)
            return ExitCode.USER_ERROR
        traceback.print_exc()
        return ExitCode.BUG


def code_of_stopped_server() -> int:
    """Returns the exit code of an engine or exporter that a signal has ended: 0, or the value of STOPPED_CODE.

    An executor sets it if a signal means that the process moves to another machine, not that the run is over.
    """
    return int(os.environ.get(STOPPED_CODE) or ExitCode.FINISHED)


def judge_training(report: Mapping[str, Any]) -> ExitCode:
    """Returns the exit code for the report of a finished run; prints an error if it has no optimizer step."""
    steps = report['optimizer_steps']
    if steps['applied']:
        return ExitCode.FINISHED
    _print_error(_describe_untrained(report['steps'], steps['skipped']))
    return ExitCode.NOTHING_TRAINED


def _describe_untrained(updates: int, skipped: int) -> str:
    """Describes a run without an optimizer step; `skipped` updates had a gradient that was not finite."""
    why = (
        f'all {skipped} were skipped because their gradient was not finite'
        if skipped
        else 'no update held a token to train: all rewards of every group were equal, or all tokens too old'
    )
    return f'{updates} updates made no optimizer step: {why}. The weights are those of the start'


def _print_error(sentence: str) -> None:
    with contextlib.suppress(OSError):
        print(f'error: {sentence}', file=sys.stderr, flush=True)


# Requests to stop a run: the interface that a run expects, and signals as such requests, for long-running commands.


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Request = Callable[[signal.Signals], None]


@contextlib.contextmanager
def written_signals(descriptor: int, numbers: Sequence[signal.Signals]) -> Iterator[frozenset[signal.Signals]]:
    """Inside, each of these signals only writes its number, a byte, to the descriptor, which must not block.

    Yields the signals that do so: an ignored signal stays ignored (nohup). For the main thread.
    """
    heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    # a handler must be set, or Python does not write to the descriptor
    before = {number: signal.signal(number, _ignore) for number in heeded}
    descriptor_before = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    try:
        yield frozenset(before)
    finally:
        signal.set_wakeup_fd(descriptor_before)
        for number, handler in before.items():
            signal.signal(number, handler)


class StopRequests(Protocol):
    """The interface through which a run learns that it must stop."""

    ends_process: bool  # the process ends with the run: threads that still work are not waited for

    def check(self) -> None:
        """Raises KeyboardInterrupt if a stop was requested; called between the parts of a start."""
        ...

    def deferred(
        self, request: Request, then: str, abandon: Callable[[], None] | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Inside, the first request calls `request`, and a further one ends the run at once; both on another thread.

        Args:
          then: the message to the user about the next steps: 'finishing the update under way, then saving'.
          abandon: ends the code inside with KeyboardInterrupt; used if the process continues after the run.
        """
        ...


class Interrupts:
    """SIGINT, SIGTERM and SIGHUP while a command runs; a context manager, for the main thread.

    A signal ends the process at once with ExitCode.STOPPED, except inside `deferred`: there the first signal is passed
    on and the second one ends the process. A thread receives them, because Python runs its own handlers on the main
    thread only, which may be inside XLA's compiler for minutes. A signal that is ignored when the command starts
    stays ignored (nohup). Implements StopRequests.

    Args:
      again: the advice on how to continue, printed after a signal that ends the process at once.
    """

    ends_process = True

    def __init__(self, again: str = RESUME) -> None:
        self.again = again
        self._request: Request | None = None
        self._then = ''
        self._lock = threading.Lock()

    def __enter__(self) -> Interrupts:
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._signals = contextlib.ExitStack()
        self._heeded = self._signals.enter_context(written_signals(self._sender.fileno(), SIGNALS))
        self._thread = threading.Thread(target=self._receive, name='signals', daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signals.close()
        self._sender.close()
        self._thread.join()
        self._receiver.close()

    def check(self) -> None:
        """Does nothing: a signal outside `deferred` has already ended the process."""

    @contextlib.contextmanager
    def deferred(self, request: Request, then: str, abandon: Callable[[], None] | None = None) -> Iterator[None]:
        """See StopRequests. The second signal ends the process, so `abandon` is not called."""
        with self._lock:
            self._request, self._then = request, then
        try:
            yield
        finally:
            with self._lock:
                self._request = None

    def _receive(self) -> None:
        while numbers := self._receiver.recv(64):
            for number in numbers:
                if number in self._heeded:
                    self._handle(signal.Signals(number))

    def _handle(self, number: signal.Signals) -> None:
        if number == signal.SIGHUP:
            _leave_terminal()
        with self._lock:
            request, self._request = self._request, None
            if request is not None:
                _say(f'{number.name}: {self._then}; once more to quit at once')
                request(number)
                return
        _say(f'{number.name}: stopped at once; {self.again}')
        os._exit(ExitCode.STOPPED)


class Wakeups:
    """Lets the main thread wait for SIGNALS and for the ends of child processes; a context manager.

    A signal that is ignored when the program starts stays ignored (nohup).
    """

    def __enter__(self) -> Wakeups:
        self._receiver, self._sender = os.pipe()
        os.set_blocking(self._receiver, False)
        os.set_blocking(self._sender, False)
        self._signals = contextlib.ExitStack()
        self._signals.enter_context(written_signals(self._sender, (*SIGNALS, signal.SIGCHLD)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signals.close()
        os.close(self._receiver)
        os.close(self._sender)

    def wait(self, timeout_s: float | None, file: int | None = None) -> tuple[list[signal.Signals], bool]:
        """Returns (the SIGNALS that arrived, whether `file` can be read); ([], False) also if a child has ended."""
        watched = [self._receiver] if file is None else [self._receiver, file]
        ready, _, _ = select.select(watched, [], [], timeout_s)
        numbers = os.read(self._receiver, 64) if self._receiver in ready else b''
        return [signal.Signals(number) for number in numbers if number in SIGNALS], file in ready


def ignore_signals() -> None:
    """Ignores SIGNALS in follower processes: process 0 tells them when to end."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _ignore(number: int, frame: object) -> None:
    """Does nothing: the reader of the descriptor handles the signal."""


def _leave_terminal() -> None:
    """Redirects output from the closed terminal to /dev/null, because writing to the terminal would raise OSError."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed when the process was started
        with contextlib.suppress(OSError, ValueError):
            if stream.isatty():
                os.dup2(null, stream.fileno())
    os.close(null)


def _say(sentence: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(sentence, flush=True)


# Runs in a separate thread, where KeyboardInterrupt in the caller is a request to stop the run.
#
# The thread of the run has no running event loop, so the run may be called from a notebook. KeyboardInterrupt never
# comes in the middle of a save or a clean-up: Python raises it in the main thread, which only waits.


_Result = TypeVar('_Result')

_LOOK_S = 0.2  # a signal that comes just before the caller begins to wait is handled only when the wait ends


class CallerInterrupts:
    """StopRequests for a process that continues after the run. `note` is called after a KeyboardInterrupt."""

    ends_process = False

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()
        self._request: Request | None = None
        self._abandon: Callable[[], None] | None = None
        self._then = ''
        self._is_deferred = False

    def note(self) -> None:
        """Passes one KeyboardInterrupt on to the run."""
        with self._lock:
            self.count += 1
            request, self._request = self._request, None
            if request is not None:
                further = '; once more to stop without saving' if self._abandon else ''
                _say(f'interrupted: {self._then}{further}')
                request(signal.SIGINT)
            elif self._abandon is not None:
                abandon, self._abandon = self._abandon, None
                _say('interrupted again: stopping without saving, as soon as the work under way ends')
                abandon()
            else:
                _say('interrupted: stopping as soon as the work under way ends')

    # In the thread of the run; see StopRequests.

    def check(self) -> None:
        if self.count and not self._is_deferred:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def deferred(self, request: Request, then: str, abandon: Callable[[], None] | None = None) -> Iterator[None]:
        with self._lock:
            self.check()
            self._request, self._then, self._abandon = request, then, abandon
            self._is_deferred = True
        try:
            yield
        finally:
            with self._lock:
                self._request = self._abandon = None
                self._is_deferred = False


def call_in_thread(function: Callable[[CallerInterrupts], _Result], name: str) -> _Result:
    """Calls `function` in a new thread, waits until it has ended, and returns its result or raises its exception.

    A KeyboardInterrupt meanwhile is noted in the argument of `function`, and raised here when `function` returns or
    raises KeyboardInterrupt. The exception carries no frames of the run: a program that keeps it (a notebook does)
    would keep the weights in memory. Its traceback is added as a text note, except to a UserError.
    """
    from concurrent.futures import Future  # here: it loads logging, which --help does not need

    interrupts = CallerInterrupts()
    outcome: Future[_Result] = Future()
    ended = threading.Event()

    def run() -> None:
        try:
            outcome.set_result(function(interrupts))
        except BaseException as error:
            _drop_frames(error)
            outcome.set_exception(error)
        finally:
            ended.set()

    thread = threading.Thread(target=run, name=name)
    asked = 0
    while not ended.is_set():
        try:
            if thread.ident is None:
                thread.start()
            while interrupts.count < asked:
                interrupts.note()
            ended.wait(_LOOK_S)
        except KeyboardInterrupt:
            asked += 1
    thread.join()
    if interrupts.count and (outcome.exception() is None or isinstance(outcome.exception(), KeyboardInterrupt)):
        raise KeyboardInterrupt('stopped; the same call with resume=True goes on')
    return outcome.result()


def _drop_frames(error: BaseException) -> None:
    """Drops the frames of an exception and of the exceptions that led to it; adds its traceback as a note."""
    if not isinstance(error, UserError | KeyboardInterrupt):
        error.add_note(f'\nIn the thread of the run:\n\n{"".join(traceback.format_exception(error))}')
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            left += [one.__cause__, one.__context__]
