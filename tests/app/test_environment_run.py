"""Runs whose episodes are those of a server with the wire of verifiers: its reward, our ids; kill, resume, replay."""

from __future__ import annotations

import itertools
import json
import pathlib
import sys

import pytest

from areal_jax import main_check_log, main_replay
from areal_jax.types import NOT_GENERATED
from tests.app.small import start_killed_and_resumed
from tests.app.test_agent_run import episodes
from tests.app.test_program_run import FIELDS
from tests.app.test_session import logprob_gaps

pytestmark = pytest.mark.whole
TOY = pathlib.Path(__file__).parents[1] / 'agents' / 'toy'


@pytest.fixture(scope='module')
def killed(tmp_path_factory):
    """A run that was killed after its second update, and resumed; three of its 16 tasks kill the server."""
    directory = tmp_path_factory.mktemp('environments')
    tasks = [''.join(symbols) for symbols in itertools.product('ab', repeat=4)]
    does = dict.fromkeys(tasks[::6], 'do = "die"\n')
    lines = [f'[[env.taskset.tasks]]\nprompt = "{text}"\nthen = ["="]\n{does.get(text, "")}' for text in tasks]
    (directory / 'env.toml').write_text(''.join(lines))
    fields = {
        **FIELDS, 'task__name': 'verifiers:toy', 'task__path': str(directory / 'env.toml'), 'agent__max_turns': 2,
        'task__held_out_fraction': 0.0, 'run__steps': 6,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('PYTHONPATH', str(TOY))
        patch.setenv('AREAL_JAX_VERIFIERS_PYTHON', sys.executable)
        resumed = start_killed_and_resumed(directory / 'run', 2, **fields)
        assert resumed.version_at_start >= 1
        yield resumed.train()


def test_rows_have_the_reward_of_the_environment_and_the_logprobs_that_were_recorded(killed):
    gaps, _ = logprob_gaps(killed)
    rows = [row for rows in episodes(killed) for row in rows]
    assert len(gaps) == sum(row.loss_mask.sum() for row in rows)
    assert gaps.max() < 1e-5
    assert {row.reward for row in rows} == {1.0}
    assert all(row.segments[-1].policy_version != NOT_GENERATED for row in rows)


def test_a_server_that_was_killed_ended_episodes_and_not_the_run(killed):
    assert {event['reason'] for event in killed.events if event['kind'] == 'finish'} == {'stop', 'env_error'}


def test_the_log_keeps_the_rules_and_a_replay_needs_no_server(killed, tmp_path, capsys):
    assert main_check_log.main([str(killed.workdir)]) == 0
    assert main_replay.main([f'--workdir={killed.workdir}', f'--out={tmp_path / "out"}']) == 0
    assert f'equal: weights_sha256 {killed.report["weights_sha256"]}' in capsys.readouterr().out
    assert 'sk-' not in json.dumps(killed.events)
