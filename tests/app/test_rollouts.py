"""What a run keeps of its answers: equal to what was trained, whole after a kill, and without influence on the run."""

from __future__ import annotations

import functools
import itertools
import json
import pathlib

import jax
import numpy as np
import pytest

from areal_jax.checkpoint.store import CheckpointStore
from areal_jax.telemetry.rollout_views import read_rollouts
from tests.app.small import SmallRun, train_until_killed
from tests.app.test_session import fresh_logprobs

STEPS = 13  # of 2 groups of 4 answers
FIELDS = {'telemetry__rollouts': 'all', 'run__steps': STEPS, 'checkpoint__every': 1, 'checkpoint__keep': STEPS}


@pytest.fixture(scope='module')
def kept(tmp_path_factory) -> SmallRun:
    """All groups of a run that is interrupted, with a checkpoint of every version."""
    directory = tmp_path_factory.mktemp('rollouts') / 'kept'
    return SmallRun(directory, **FIELDS).train()


def require_equal(records, batches, tokenizer):
    """The records are those groups, with every number by token in its place."""
    trained = {group.draw: group for batch in batches for group in batch}
    assert [record['draw'] for record in records] == [draw for b in batches for draw in sorted(g.draw for g in b)]
    for record in records:
        group = trained[record['draw']]
        shared = group.trajectories[0].prompt
        assert record['prompt'] == describe_text(shared.tokens, tokenizer)
        assert record['problem'] == shared.problem
        for answer, row in zip(record['answers'], group.trajectories, strict=True):
            own = answer.get('prompt', record['prompt'])
            assert own == describe_text(row.prompt.tokens, tokenizer)
            start = len(row.prompt.tokens)
            generated = row.loss_mask[start:]
            versions = [version for count, version in answer['versions'] for _ in range(count)]
            np.testing.assert_array_equal(answer['tokens'], row.answer_tokens)
            np.testing.assert_array_equal(versions, row.policy_versions[start:])
            behavior = np.array(answer['behavior_logprobs'], np.float32)  # null is NaN
            np.testing.assert_array_equal(np.isnan(behavior), ~generated)
            np.testing.assert_array_equal(behavior[generated], row.behavior_logprobs[start:][generated])
            text = describe_text(row.answer_tokens, tokenizer)
            assert {name: answer[name] for name in text} == text
            assert answer['reward'] == row.reward
            assert (answer['sample'], answer['row'], answer['label']) == (row.sample, row.row, row.label)
            ages = [None if version < 0 else record['update'] - 1 - version for _, version in answer['versions']]
            assert answer['ages'] == ages
            if record['trained']:
                assert [mark in '01' for mark in answer['loss_mask']] == generated.tolist()


def describe_text(tokens, tokenizer):
    """What a record has of tokens: a plain token is one character here, and the EOS at the end has none."""
    text = tokenizer.decode(tokens)
    plain = next(token for token in range(tokenizer.vocab_size) if len(tokenizer.decode([token])) == 1)
    characters = [len(tokenizer.decode([token, plain])) - 1 for token in tokens[:-1].tolist()]
    characters += [len(text) - sum(characters)] if len(tokens) else []
    return {'tokens': tokens.tolist(), 'text': text, 'characters': characters}


def test_the_answers_are_those_that_were_trained(kept: SmallRun):
    records = read_rollouts(kept.workdir)
    require_equal(records, kept.batches, kept.session.program.parts.host.model.tokenizer)
    answers = [answer for record in records for answer in record['answers']]
    assert len(answers) >= 100
    assert sum(len(answer['versions']) > 1 for answer in answers) > 10


def test_the_answers_are_those_of_the_log(kept: SmallRun):
    of = lambda kind: {(e['draw'], e['sample']): e for e in kept.events if e['kind'] == kind}
    finished, rewards = of('finish'), of('reward')
    updates = {draw: event['update'] for event in kept.events if event['kind'] == 'consume' for draw in event['draws']}
    for record in read_rollouts(kept.workdir):
        assert record['update'] == updates[record['draw']]
        for answer in record['answers']:
            event = finished[record['draw'], answer['sample']]
            spans = [[n, v] for n, v in zip(event['lengths'], event['versions'], strict=True)]
            joined = [[sum(n for n, _ in same), v] for v, same in itertools.groupby(spans, lambda span: span[1])]
            assert joined == answer['versions']
            assert (event['tokens'], event['reason']) == (len(answer['tokens']), answer['finish'])
            verdict = rewards[record['draw'], answer['sample']]
            assert (verdict['value'], verdict['label']) == (answer['reward'], answer['label'])


def test_the_numbers_are_those_of_the_checkpoints_computed_again(kept: SmallRun):
    """Log-probs by a dense forward pass under saved weights, advantages by their formula."""
    store = CheckpointStore(kept.workdir / 'checkpoints', keep=99)
    saved = {0: kept.weights[0]} | {step: _whole(store.restore(step)[0]['params']) for step, _ in store.saves()}
    compared = 0
    for record in read_rollouts(kept.workdir):
        rewards = np.array([answer['reward'] for answer in record['answers']])
        for answer in record['answers']:
            compared += 1
            whole = np.array(record['prompt']['tokens'] + answer['tokens'], np.int32)
            own = functools.partial(_logprobs, kept, saved, whole, len(answer['tokens']))
            at = 0
            for count, version in answer['versions']:
                np.testing.assert_allclose(
                    answer['behavior_logprobs'][at : at + count], own(version)[at : at + count], atol=1e-5
                )
                at += count
            if record['trained']:
                np.testing.assert_allclose(answer['policy_logprobs'], own(record['update'] - 1), atol=1e-5)
                advantage = (answer['reward'] - rewards.mean()) / (rewards.std() + 1e-4)
                assert answer['advantage'] == pytest.approx(advantage, rel=1e-5, abs=1e-6)
    assert compared >= 100


def _logprobs(run, saved, tokens, answer, version):
    return fresh_logprobs(run.session, saved[version], tokens)[-answer:]


def _whole(params):
    return jax.tree.map(np.asarray, params)


def test_weights_and_log_do_not_depend_on_it(kept: SmallRun, tmp_path: pathlib.Path):
    off = SmallRun(tmp_path, **{**FIELDS, 'telemetry__rollouts': '0'}).train()
    assert off.report['weights_sha256'] == kept.report['weights_sha256']
    assert off.events == kept.events
    assert not (tmp_path / 'rollouts').exists()
    facts = json.loads((kept.workdir / 'facts.json').read_text())
    assert facts['rollouts']['groups'] == 2 * STEPS
    assert json.loads((tmp_path / 'facts.json').read_text())['rollouts'] == {}


def test_each_draw_is_there_once_after_a_kill(kept: SmallRun, tmp_path: pathlib.Path):
    """Killed after update 3, whose checkpoint is that of update 2; the last line is half written."""
    fields = {**FIELDS, 'checkpoint__every': 2, 'run__steps': 5}
    train_until_killed(SmallRun(tmp_path, **fields), 3)
    before = read_rollouts(tmp_path)
    assert {record['update'] for record in before} >= {1, 2, 3}
    newest = max((tmp_path / 'rollouts').glob('*.jsonl'))
    newest.write_bytes(newest.read_bytes() + b'{"update": 4, "dr')
    assert read_rollouts(tmp_path) == before
    SmallRun(tmp_path, resume=True, **fields).train()
    draws = [record['draw'] for record in read_rollouts(tmp_path)]
    assert len(draws) == len(set(draws)) == 10
    events = map(json.loads, (tmp_path / 'events.jsonl').read_text().splitlines())
    trained = [event['draws'] for event in events if event['kind'] == 'consume']
    assert draws == [draw for batch in trained for draw in sorted(batch)]
