"""Signals: heard at once, passed on once where a run can finish its update, ended with exit code 75 elsewhere."""

import signal
import subprocess
import sys
import time

import pytest

from areal_jax.app.process.interrupt import SIGNALS, Interrupts

# `busy` is one call into C without the GIL, as a compilation is: Python's own handlers do not run before it returns
RESET = """
import signal
from areal_jax.app.process.interrupt import SIGNALS
for number in SIGNALS:  # a shell has what it starts in the background ignore some
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
"""
PROGRAM = """
import hashlib, signal, sys, threading, time
from areal_jax.app.process.interrupt import Interrupts

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
