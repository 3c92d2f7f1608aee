"""Whole runs that generate with a real SGLang server; skipped unless AREAL_JAX_SGLANG_PYTHON names an interpreter.

launch/test_external.sh sets it. The task is that of configs/tiny_cpu.py, the model has two layers.
"""

import json
import os

import pytest

from areal_jax.app.roles.server_program import find_directory
from areal_jax.registry import read_entries
from areal_jax.report.aggregates import conservation
from checks.logs import check_with_commands
from checks.processes import is_alive
from tests.launch.test_role_runs import Launched

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.environ.get('AREAL_JAX_SGLANG_PYTHON'), reason='AREAL_JAX_SGLANG_PYTHON names no interpreter with SGLang'
    ),
]
STEPS = 6
FIELDS = {
    'rollout__server': 'sglang', 'cluster__engines': '1 x shared', 'cluster__learner': 'data=1', 'run__steps': STEPS,
    'evaluation__problems': 0, 'run__stall_timeout_s': 300.0, 'rollout__prefill_buckets': None,
}  # fmt: skip
DELTA = {'publication__delta': True, 'publication__dtype': 'bfloat16', 'publication__base_every': 4}


def require_whole(run, output, starts):
    """The run has ended, trained every version, lost no draw, and left no process. Returns its report."""
    events, report = run.events(), json.loads((run.workdir / 'report.json').read_text())
    assert report['finished']
    assert [event['version'] for event in events if event['kind'] == 'publish'] == list(range(1, STEPS + 1))
    assert conservation(events) == []  # each draw was trained, dropped for a reason or is open; none twice
    assert len([e for e in events if e['kind'] == 'engine_state' and e['state'] == 'serving']) == starts
    assert {e['outcome'] for e in events if e['kind'] == 'probe'} == {'passed'}
    assert output.count('was ended by SIGKILL') == starts - 1
    assert check_with_commands(run.workdir) == []
    assert not any(is_alive(entry.process) for entry in read_entries(run.workdir))
    return report


def test_a_run_trains_with_sglang_and_a_server_that_is_killed_loses_nothing(tmp_path):
    """Every token has the log-prob that the learner gives it under the version which the server named."""
    with Launched(tmp_path / 'run', **FIELDS) as run:
        run.await_publications(2)
        (entry,) = read_entries(run.workdir)
        run.kill(entry.name)
        code, output = run.finish()
    assert code == 0, output
    report = require_whole(run, output, starts=2)
    assert report['mismatch']['n'] > 200  # tokens
    assert report['mismatch']['max'] < 1e-5


def test_sglang_takes_deltas_through_its_receiver(tmp_path):
    """Weights travel by what changed, in 16 bits, whose rounding is all that log-probs differ by."""
    with Launched(tmp_path / 'run', **FIELDS, **DELTA) as run:
        run.await_publications(2)
        (entry,) = read_entries(run.workdir)
        made = find_directory(run.workdir, entry.name)
        assert entry.details['receiver'].startswith('http://')
        assert any(made.glob('v*/manifest.json'))
        code, output = run.finish()
    assert code == 0, output
    report = require_whole(run, output, starts=1)
    records = [event['record'] for event in run.events('publish')]
    assert records == ['delta', 'delta', 'delta', 'whole', 'delta', 'delta']
    assert report['mismatch']['mean'] < 5e-2
    assert not made.exists()
