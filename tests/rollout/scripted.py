"""Tests that are the script of a rig: a coroutine beside the engines, under the clock of the rig."""

import functools
import inspect


def scripted(make, *arguments, **settings):
    """Makes a test of a coroutine function `test(rig, ...)`, which `make(*arguments, **settings).run` drives."""

    def decorate(test):
        @functools.wraps(test)
        def run(**given):
            make(*arguments, **settings).run(lambda rig: test(rig, **given))

        _, *others = inspect.signature(test).parameters.values()
        run.__signature__ = inspect.Signature(others)  # without the rig, which pytest would take for a fixture
        return run

    return decorate
