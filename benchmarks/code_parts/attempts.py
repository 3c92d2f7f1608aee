"""Every attempt to leave the sandbox, as root and as an ordinary user, at both levels, each with its control."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from areal_jax.errors import UserError
from benchmarks.sides import ROOT

KINDS, LEAST_ATTEMPTS = 4, 43


def measure_attempts(options: Any) -> dict[str, Any]:
    """What launch/test_sandbox.sh counts, with the interpreter that runs this."""
    with tempfile.TemporaryDirectory() as folder:
        counts = pathlib.Path(folder, 'counts.json')
        command = [sys.executable, '-m', 'tests.workers.sandbox.run_attempts', '--json', str(counts)]
        subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False)
        if not counts.exists():
            raise UserError('the attempts were not counted; what went wrong stands above')
        found = json.loads(counts.read_text())
    return judge_counts(found)


def judge_counts(found: dict[str, Any]) -> dict[str, Any]:
    """The row from the counts of tests/workers/sandbox/run_attempts.py; raises UserError where no kind could run."""
    runs = found['runs']
    if not runs:
        raise UserError(f'no kind of sandbox can run here: {", ".join(found["missing"])}')
    holds = [run['attempts'] >= LEAST_ATTEMPTS and run['passed'] == run['failed'] == 0 for run in runs]
    value = {
        f'{run["level"]} as {run["user"]}': {key: run[key] for key in ('attempts', 'passed', 'controls', 'failed')}
        for run in runs
    }
    return {'value': value, 'met': all(holds) and len(runs) == KINDS, 'missing': found['missing']}
