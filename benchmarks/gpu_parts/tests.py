"""The tests marked `gpu`: which passed, failed and were skipped.

python -m benchmarks.gpu_parts.tests OUT
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys
from typing import Any

import pytest

from areal_jax import files

_ERROR_CHARACTERS = 2000
_MOST_PROCESSES = 8


def main(out: pathlib.Path) -> int:
    """pytest's exit code; 1 also where every test was skipped, because nothing was seen then.

    Most of the time is compilation on one core, so that several processes run the tests where pytest-xdist is there.
    """
    beside, processes = [], min(_MOST_PROCESSES, (os.cpu_count() or 1) // 2)
    if importlib.util.find_spec('xdist') and processes > 1:
        share = float(os.environ.get('XLA_PYTHON_CLIENT_MEM_FRACTION', 0.92))
        os.environ['XLA_PYTHON_CLIENT_MEM_FRACTION'] = str(round(0.9 * share / processes, 3))
        beside = ['-n', str(processes), '--dist', 'worksteal']  # the long ones wait behind no other
    found = Found(out)
    code = pytest.main(
        ['-m', 'gpu', 'tests/gpu', '-p', 'no:cacheprovider', '-p', 'no:benchmark', *beside], plugins=[found]
    )
    return int(code) or int(not found.numbers()['passed'])


class Found:
    """A plugin of pytest that writes what is known after each test, so that a call which is cut off leaves it."""

    def __init__(self, out: pathlib.Path):
        self._out = out
        self._seconds: dict[str, float] = {}
        self._failed: list[dict[str, str]] = []
        self._skipped: list[dict[str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.removeprefix('tests/gpu/')
        self._seconds[name] = self._seconds.get(name, 0.0) + report.duration
        if not report.passed:
            tests = self._failed if report.failed else self._skipped
            tests.append({'name': name, 'message': report.longreprtext.strip()[-_ERROR_CHARACTERS:] or report.when})
        if report.when == 'teardown':
            files.write_json(self._out, self.numbers())

    def numbers(self) -> dict[str, Any]:
        """{'passed': number, 'failed': tests, 'skipped': tests, 'slowest_s': seconds by test}."""
        not_passed = {test['name'] for test in (*self._failed, *self._skipped)}
        slowest = sorted(self._seconds, key=self._seconds.__getitem__, reverse=True)[:10]
        return {
            'passed': len(self._seconds.keys() - not_passed),
            'failed': self._failed,
            'skipped': self._skipped,
            'slowest_s': {name: round(self._seconds[name], 2) for name in slowest},
        }


if __name__ == '__main__':
    sys.exit(main(pathlib.Path(sys.argv[-1])))
