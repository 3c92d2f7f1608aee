"""The tests marked `gpu`: which passed, failed and were skipped.

python -m benchmarks.gpu_parts.tests OUT
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from areal_jax import files

_ERROR_CHARACTERS = 2000
_PROCESSES = 4


def main(out: pathlib.Path) -> int:
    """pytest's exit code; 1 also where every test was skipped, because nothing was seen then.

    Most of the time is compilation on one core, so that several processes run the tests where pytest-xdist is there.
    """
    beside = []
    if importlib.util.find_spec('xdist') and (os.cpu_count() or 1) >= 2 * _PROCESSES:
        share = float(os.environ.get('XLA_PYTHON_CLIENT_MEM_FRACTION', 0.92))
        os.environ['XLA_PYTHON_CLIENT_MEM_FRACTION'] = str(round(0.9 * share / _PROCESSES, 3))
        beside = ['-n', str(_PROCESSES)]
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, 'junit.xml')
        code = pytest.main(['-m', 'gpu', 'tests/gpu', '-p', 'no:cacheprovider', f'--junitxml={path}', *beside])
        found = read_junit(path)
    files.write_json(out, found)
    return int(code) or int(not found['passed'])


def read_junit(path: pathlib.Path) -> dict[str, Any]:
    """{'passed': number, 'failed': tests, 'skipped': tests, 'slowest_s': seconds by test} of a report of pytest."""
    failed, skipped, seconds = [], [], {}
    for case in ElementTree.parse(path).iter('testcase'):
        name = f'{case.get("classname", "").removeprefix("tests.gpu.")}::{case.get("name")}'
        seconds[name] = float(case.get('time', 0))
        for tag, tests in (('failure', failed), ('error', failed), ('skipped', skipped)):
            for child in case.iter(tag):
                text = f'{child.get("message", "")}\n{child.text or ""}'
                tests.append({'name': name, 'message': text.strip()[:_ERROR_CHARACTERS] or tag})
    not_passed = {test['name'] for test in (*failed, *skipped)}
    slowest = sorted(seconds, key=seconds.__getitem__, reverse=True)[:10]
    return {
        'passed': len(seconds.keys() - not_passed),
        'failed': failed,
        'skipped': skipped,
        'slowest_s': {name: seconds[name] for name in slowest},
    }


if __name__ == '__main__':
    sys.exit(main(pathlib.Path(sys.argv[-1])))
