"""Signals and calls in a thread: heard at once, passed on once where a run can finish its update."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest

from areal_jax.app.process.ending import SIGNALS, Interrupts, call_in_thread
from areal_jax.errors import UserError

# `busy` is one call into C without the GIL, as a compilation is: Python's own handlers do not run before it returns
RESET = """
import signal
from areal_jax.app.process.ending import SIGNALS
for number in SIGNALS:  # a shell has what it starts in the background ignore some
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
"""
PROGRAM = """
import hashlib, signal, sys, threading, time
from areal_jax.app.process.ending import Interrupts

def busy():
    print('busy', flush=True)
    hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)

with Interrupts() as interrupts:
    {body}
"""
AT_ONCE = 'busy()'
DEFERRED = """
    asked = threading.Event()
    with interrupts.deferred(lambda number: asked.set(), 'finishing the update under way'):
        print('busy', flush=True)
        asked.wait()
        print('asked', flush=True)
        busy()
"""


started: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def nothing_is_left():
    """A process that did not end as it should would compute for hours."""
    yield
    while started:
        started.pop().kill()


def start(body, before=''):
    program = RESET + before + PROGRAM.format(body=body)
    process = subprocess.Popen(
        [sys.executable, '-c', program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    started.append(process)
    return process


def wait_for(process, line):
    for shown in process.stdout:
        if shown.strip() == line:
            return
    raise AssertionError(process.stderr.read())


@pytest.mark.parametrize('number', SIGNALS)
def test_a_signal_ends_a_process_that_is_inside_a_long_call(number):
    process = start(AT_ONCE)
    wait_for(process, 'busy')
    process.send_signal(number)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 75
    assert output == f'{number.name}: stopped at once; the same command with --resume goes on\n'
    assert errors == ''


@pytest.mark.parametrize('number', SIGNALS)
def test_the_first_signal_is_passed_on_and_the_second_ends_the_process(number):
    process = start(DEFERRED)
    wait_for(process, 'busy')
    process.send_signal(number)
    wait_for(process, 'asked')
    wait_for(process, 'busy')
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 75
    assert 'stopped at once' in output


IGNORED = "signal.signal(signal.SIGHUP, signal.SIG_IGN)\nprint('ready', flush=True)"


def test_a_signal_ignored_at_the_start_stays_ignored():
    process = start("time.sleep(1); print('still here')", before=f'import signal\n{IGNORED}')
    wait_for(process, 'ready')
    time.sleep(0.5)
    process.send_signal(signal.SIGHUP)
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (0, 'still here\n')


def test_handlers_are_as_before_afterwards():
    before = [signal.getsignal(number) for number in SIGNALS]
    with Interrupts():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1


# A call in a thread: its result, its exception, and KeyboardInterrupt in the caller as requests to stop.


@pytest.fixture(autouse=True)
def interruptible():
    """A shell has what it starts in the background ignore SIGINT, and Python then leaves it so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press_ctrl_c():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def test_it_runs_elsewhere_and_returns_or_raises_what_the_function_does():
    assert call_in_thread(lambda _: threading.current_thread().name, 'of the run') == 'of the run'
    with pytest.raises(ZeroDivisionError):
        call_in_thread(lambda _: 1 / 0, 'of the run')
    assert 'of the run' not in [thread.name for thread in threading.enumerate()]


def test_interrupts_become_a_request_and_then_an_end():
    heard = []
    requested, abandoned = threading.Event(), threading.Event()

    def function(interrupts):
        def request(number):
            heard.append(number)
            requested.set()

        with interrupts.deferred(request, 'saving', abandoned.set):
            press_ctrl_c()
            assert requested.wait(10)
            assert not abandoned.is_set()
            press_ctrl_c()
            assert abandoned.wait(10)
            interrupts.check()  # it was passed on
        return 'a result'

    with pytest.raises(KeyboardInterrupt, match='resume=True'):
        call_in_thread(function, 'run')
    assert heard == [signal.SIGINT]


def test_an_interrupt_outside_of_deferred_is_raised_by_the_next_check():
    def noted(interrupts):
        press_ctrl_c()
        while not interrupts.count:
            pass

    def by_check(interrupts):
        noted(interrupts)
        interrupts.check()

    def by_deferred(interrupts):
        noted(interrupts)
        with interrupts.deferred(print, 'saving'):
            raise AssertionError('it went on')

    for function in (by_check, by_deferred):
        with pytest.raises(KeyboardInterrupt):
            call_in_thread(function, 'run')


def test_the_error_of_a_stopped_run_is_the_one_to_show():
    def function(interrupts):
        with interrupts.deferred(lambda _: None, 'saving'):
            press_ctrl_c()
            while not interrupts.count:
                pass
            raise OSError('the disk is full')

    with pytest.raises(OSError, match='the disk is full'):
        call_in_thread(function, 'run')


class Weights:
    pass


@pytest.mark.parametrize('kind', [RuntimeError, UserError])
def test_a_kept_exception_keeps_no_weights_but_says_where_it_was_raised(kind):
    kept = []

    def function(_):
        weights = Weights()
        kept.append(weakref.ref(weights))
        raise_twice(lambda: weights)

    def raise_twice(closure):
        try:
            raise ValueError('the first one')
        except ValueError as error:
            raise kind('the second one') from error

    with pytest.raises(kind, match='the second one') as caught:
        call_in_thread(function, 'run')
    gc.collect()
    assert kept[0]() is None
    notes = ''.join(getattr(caught.value, '__notes__', ()))
    assert ('in raise_twice' in notes and 'ValueError: the first one' in notes) == (kind is RuntimeError)
