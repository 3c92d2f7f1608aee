"""A run in a thread of its own, and KeyboardInterrupt in its caller as a request to stop it.

The thread of the run has no running event loop, so the run may be called from a notebook. And KeyboardInterrupt never
comes in the middle of a save or of a clean-up: Python raises it in the main thread, which only waits.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import TypeVar

from areal_jax.app.process.interrupt import Request
from areal_jax.errors import UserError

_Result = TypeVar('_Result')

_LOOK_S = 0.2  # a signal that comes just before the caller begins to wait is handled only when the wait ends


class CallerInterrupts:
    """StopRequests for a process that goes on after the run. `note` is called where KeyboardInterrupt was raised."""

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
    """Calls `function` in a new thread, waits until it has ended, and returns or raises what it does.

    A KeyboardInterrupt meanwhile is noted in the argument of `function`, and raised here when `function` returns or
    raises KeyboardInterrupt. An exception comes without the frames of the run: a program that keeps it (a notebook
    does) would keep the weights. The text of its traceback is added as a note, except to a UserError.
    """
    interrupts = CallerInterrupts()
    outcome: concurrent.futures.Future[_Result] = concurrent.futures.Future()
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
    """Also of the exceptions that led to it."""
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


def _say(sentence: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(sentence, flush=True)
