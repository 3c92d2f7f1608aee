"""Runs whose episodes are programs: exact rows, a log that keeps its rules, kill and resume, a replay without them."""

from __future__ import annotations

import json
import sys

import pytest

from areal_jax import main_check_log, main_replay
from areal_jax.telemetry.metrics import read_metrics
from tests.app.small import start_killed_and_resumed
from tests.app.test_agent_run import episodes
from tests.app.test_session import logprob_gaps

pytestmark = pytest.mark.whole

# Talks HTTP by itself: this starts in milliseconds.
PROGRAM = """
import json, os, sys, urllib.request

def ask(messages):
    body = json.dumps({'messages': messages, 'model': 'policy'}).encode()
    headers = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY'], 'Content-Type': 'application/json'}
    url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as reply:
        return json.loads(reply.read())['choices'][0]['message']

history = [{'role': 'user', 'content': json.load(sys.stdin)['question']}]
history += [ask(history), {'role': 'user', 'content': '='}]
open(sys.argv[1], 'a').write('.')
ask(history)
"""
FIELDS = {
    'run__clock': 'real', 'rollout__workflow': 'program', 'rollout__episode_deadline_s': 100.0, 'run__steps': 5,
    'rollout__max_new_tokens': 11, 'agent__max_turn_tokens': 5, 'checkpoint__every': 1, 'checkpoint__keep': 9,
}  # fmt: skip


@pytest.fixture(scope='module')
def killed(tmp_path_factory):
    """A run that was killed after its third update, and resumed."""
    directory = tmp_path_factory.mktemp('programs')
    (directory / 'program.py').write_text(PROGRAM)
    command = f'{sys.executable} {directory}/program.py {directory}/turns'
    fields = {**FIELDS, 'agent__command': command}
    resumed = start_killed_and_resumed(directory / 'run', 3, **fields)
    assert resumed.version_at_start >= 1
    return resumed.train()


def test_rows_of_programs_have_the_logprobs_that_were_recorded(killed):
    gaps, _ = logprob_gaps(killed)
    assert len(gaps) == sum(row.loss_mask.sum() for rows in episodes(killed) for row in rows)
    assert gaps.max() < 1e-5
    assert {len(rows) for rows in episodes(killed)} == {1}
    for line in read_metrics(killed.workdir / 'metrics.jsonl'):
        by_turn = [line.get(f'mismatch/turn/{turn}/n', 0) for turn in (1, 2, 3)]
        assert by_turn[2] == 0
        assert sum(by_turn) in (0, line['mismatch/n'])  # 0: the engine gave no second turn under this version
    assert any(not row.loss_mask[len(row.prompt.tokens) :].all() for rows in episodes(killed) for row in rows)


def test_the_log_of_programs_keeps_the_rules_and_a_replay_needs_none(killed, tmp_path, capsys):
    assert main_check_log.main([str(killed.workdir)]) == 0
    turns = killed.workdir.parent / 'turns'
    before = turns.read_text()
    assert main_replay.main([f'--workdir={killed.workdir}', f'--out={tmp_path / "out"}']) == 0
    assert f'equal: weights_sha256 {killed.report["weights_sha256"]}' in capsys.readouterr().out
    assert turns.read_text() == before  # no program ran
    ends = [event for event in killed.events if event['kind'] == 'finish']
    assert {event['reason'] for event in ends} <= {'stop', 'length'}
    assert 'sk-' not in json.dumps(killed.events)
