"""What a run keeps of its answers: equal to what was trained, whole after a kill, and without influence on the run."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest

from areal_jax.telemetry.rollouts.reader import read_rollouts
from tests.app.small import SmallRun, train_until_killed


@pytest.fixture(scope='module')
def kept(tmp_path_factory) -> SmallRun:
    """All groups of five updates of a run that is interrupted."""
    directory = tmp_path_factory.mktemp('rollouts') / 'kept'
    return SmallRun(directory, telemetry__rollouts='all').train()


def test_the_answers_are_those_that_were_trained(kept: SmallRun):
    """Against the groups that the learner got, the weights of their versions, and the advantage by its formula."""
    records, decode = read_rollouts(kept.workdir), kept.session.program.parts.host.model.tokenizer.decode
    trained = {group.draw: group for batch in kept.batches for group in batch}
    assert [record['draw'] for record in records] == [g.draw for b in kept.batches for g in sorted(b, key=_draw)]
    compared = 0
    for record in records:
        group = trained[record['draw']]
        prompt = group.trajectories[0].prompt
        assert record['prompt'] == {'tokens': prompt.tokens.tolist(), 'text': decode(prompt.tokens)}
        assert record['problem'] == prompt.problem
        rewards = np.array([t.reward for t in group.trajectories])
        assert record['trained'] == bool(np.ptp(rewards))
        for answer, row in zip(record['answers'], group.trajectories, strict=True):
            versions = np.repeat(*reversed(list(zip(*answer['versions'], strict=True))))
            np.testing.assert_array_equal(answer['tokens'], row.answer_tokens)
            np.testing.assert_array_equal(versions, row.policy_versions[len(prompt.tokens) :])
            np.testing.assert_array_equal(
                np.float32(answer['behavior_logprobs']), row.behavior_logprobs[len(prompt.tokens) :]
            )
            assert (answer['text'], answer['reward'], answer['label']) == (decode(row.answer_tokens), row.reward, 'ok')
            ages = [record['update'] - 1 - s.policy_version for s in row.segments]
            assert [a for a, (n, _) in zip(answer['ages'], answer['versions'], strict=True) for _ in range(n)] == [
                a for a, s in zip(ages, row.segments, strict=True) for _ in s.tokens
            ]
            if record['trained']:
                compared += 1
                assert answer['advantage'] == pytest.approx(
                    (row.reward - rewards.mean()) / (rewards.std() + 1e-6), rel=0.05
                )
                assert len(answer['policy_logprobs']) == len(row.answer_tokens)
                log_ratio = np.subtract(answer['policy_logprobs'], answer['proximal_logprobs'])
                np.testing.assert_allclose(_whole(answer['ratio'], row), np.exp(log_ratio), rtol=1e-5)
                assert set(answer['loss_mask']) == {'1'}
    assert compared > 4
    assert any(len(answer['versions']) > 1 for record in records for answer in record['answers'])


def _draw(group):
    return group.draw


def _whole(values, row):
    return np.full(len(row.answer_tokens), values) if isinstance(values, float) else values


def test_weights_and_log_do_not_depend_on_it(kept: SmallRun, tmp_path: pathlib.Path):
    off = SmallRun(tmp_path, telemetry__rollouts='0').train()
    assert off.report['weights_sha256'] == kept.report['weights_sha256']
    assert off.events == kept.events
    assert not (tmp_path / 'rollouts').exists()
    facts = json.loads((kept.workdir / 'facts.json').read_text())
    assert facts['rollouts']['groups'] == 10
    assert json.loads((tmp_path / 'facts.json').read_text())['rollouts'] == {}


@pytest.mark.slow
def test_each_draw_is_there_once_after_a_kill(kept: SmallRun, tmp_path: pathlib.Path):
    fields = {'telemetry__rollouts': 'all', 'checkpoint__every': 2}
    train_until_killed(SmallRun(tmp_path, **fields), 3)
    before = read_rollouts(tmp_path)
    assert {record['update'] for record in before} >= {1, 2, 3}
    newest = max((tmp_path / 'rollouts').glob('*.jsonl'))
    newest.write_bytes(newest.read_bytes() + b'{"update": 4, "dr')  # as a kill -9 leaves it
    assert read_rollouts(tmp_path) == before
    SmallRun(tmp_path, resume=True, **fields).train()
    after = read_rollouts(tmp_path)
    draws = [record['draw'] for record in after]
    assert len(draws) == len(set(draws)) == 10
    strip = lambda records: [{**r, 'answers': [{**a, 'engine': ''} for a in r['answers']]} for r in records]
    assert [r['draw'] for r in strip(after)] == [r['draw'] for r in strip(read_rollouts(kept.workdir))]
