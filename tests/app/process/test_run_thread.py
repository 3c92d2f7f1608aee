"""A call in a thread: its result, its exception, and KeyboardInterrupt in the caller as requests to stop."""

import gc
import signal
import threading
import weakref

import pytest

from areal_jax.app.process.run_thread import call_in_thread
from areal_jax.errors import UserError


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
