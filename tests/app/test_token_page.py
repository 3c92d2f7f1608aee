"""The page of coloured tokens of a real run: every token equal to log, checkpoints and rewards, computed again here."""

from __future__ import annotations

import math
import pathlib
import re

import numpy as np
import pytest

from areal_jax import main_rollouts
from areal_jax.telemetry.rollout_views import read_rollouts
from tests.app.small import SmallRun
from tests.app.test_session import fresh_logprobs
from tests.report.pages.test_token_page import read_view

STEPS, GROUPS, ANSWERS = 13, 2, 4
EPSILON, OLDEST = 0.02, 1
# two passes over each batch, so that the ratio leaves 1 and is clipped; tokens older than one version are masked
FIELDS = {
    'telemetry__rollouts': 'all', 'run__steps': STEPS, 'learner__epochs': 2, 'loss__clip_epsilon': EPSILON,
    'staleness__max_token_age': OLDEST, 'staleness__over_age': 'mask', 'rollout__max_new_tokens': 10,
    'rollout__max_running_groups': 8,
}  # fmt: skip


@pytest.fixture(scope='module')
def run(tmp_path_factory) -> SmallRun:
    return SmallRun(tmp_path_factory.mktemp('pages') / 'run', **FIELDS).train()


@pytest.fixture(scope='module')
def groups(run: SmallRun) -> dict[int, dict]:
    """The groups of the page by draw, all of them."""
    page = run.workdir / 'page.html'
    assert main_rollouts.main([str(run.workdir), f'--page={page}', '--limit=0']) == 0
    return {group['draw']: group for group in read_view(page.read_text())['groups']}


def numbers_of(groups: dict[int, dict], name: str) -> list:
    return [
        value
        for group in groups.values() for answer in group['answers']
        for value in answer['numbers'].get(name, ()) if value is not None
    ]  # fmt: skip


def test_versions_and_ages_are_those_of_the_log(run: SmallRun, groups: dict[int, dict]):
    finished = {(e['draw'], e['sample']): e for e in run.events if e['kind'] == 'finish'}
    updates = {draw: e['update'] for e in run.events if e['kind'] == 'consume' for draw in e['draws']}
    assert groups.keys() == updates.keys()
    assert sum(len(group['answers']) for group in groups.values()) == STEPS * GROUPS * ANSWERS > 100
    interrupted = 0
    for draw, group in groups.items():
        for answer in group['answers']:
            event = finished[draw, answer['sample']]
            spans = zip(event['lengths'], event['versions'], strict=True)
            versions = [version for length, version in spans for _ in range(length)]
            interrupted += len(set(versions)) > 1
            assert answer['numbers']['version'] == versions
            assert answer['numbers']['age'] == [updates[draw] - 1 - version for version in versions]
    assert interrupted > 10
    assert max(numbers_of(groups, 'age')) > OLDEST


def test_behavior_and_proximal_are_those_of_the_weights(run: SmallRun, groups: dict[int, dict]):
    """Proximal / behavior by dense passes under the weights of the update and of each token."""
    compared = 0
    for group in groups.values():
        for answer in group['answers']:
            numbers = answer['numbers']
            whole = np.array(group['prompt']['tokens'] + answer['tokens'], np.int32)
            under = lambda version: fresh_logprobs(run.session, run.weights[version], whole)[-len(answer['tokens']) :]
            behavior = [under(version)[place] for place, version in enumerate(numbers['version'])]
            np.testing.assert_allclose(numbers['behavior_logprobs'], behavior, atol=1e-5)
            if 'proximal_over_behavior' not in numbers:
                continue
            proximal = under(group['update'] - 1)
            for place, ratio in enumerate(numbers['proximal_over_behavior']):
                assert (ratio is None) == (numbers['age'][place] > OLDEST)
                if ratio is not None:
                    compared += 1
                    assert ratio == pytest.approx(math.exp(proximal[place] - behavior[place]), rel=1e-4)
    assert compared > 200


def test_ratio_clip_and_advantage_follow_from_the_stored_columns(run: SmallRun, groups: dict[int, dict]):
    marks: set[str] = set()
    for record in read_rollouts(run.workdir):
        rewards = np.array([answer['reward'] for answer in record['answers']])
        assert record['trained'] == (len(set(rewards.tolist())) > 1)
        for answer, stored in zip(groups[record['draw']]['answers'], record['answers'], strict=True):
            numbers = answer['numbers']
            assert (answer['tokens'], answer['text']) == (stored['tokens'], stored['text'])
            if 'loss_mask' not in stored:  # filtered, or the update had no token to train
                assert not record['trained'] or min(numbers['age']) > OLDEST
                assert numbers.keys() == {'version', 'age', 'behavior_logprobs'}
                continue
            advantage = (answer['reward'] - rewards.mean()) / (rewards.std() + 1e-4)
            marks |= {find_mark(numbers, stored, place, advantage) for place in range(len(numbers['age']))}
    assert marks == {'+', '-', '.', 'o'}


def find_mark(numbers: dict, stored: dict, place: int, advantage: float) -> str:
    """The mark of a token's clip, after its numbers were compared with those that the stored log-probs give."""
    mark, found, shown = (numbers[name][place] for name in ('clip', 'policy_over_behavior', 'advantage'))
    if numbers['age'][place] > OLDEST:
        assert (mark, found, shown) == ('o', None, None)
        return mark
    policy, proximal, behavior = (stored[f'{name}_logprobs'][place] for name in ('policy', 'proximal', 'behavior'))
    assert found == pytest.approx(math.exp(policy - behavior), rel=1e-5)
    assert shown == pytest.approx(advantage, rel=1e-4, abs=1e-6)
    ratio = math.exp(policy - proximal)
    above, below = advantage > 0 and ratio > 1 + EPSILON, advantage < 0 and ratio < 1 - EPSILON
    if abs(abs(ratio - 1) - EPSILON) > 1e-6:  # at the edge itself, rounding decides
        assert mark == ('+' if above else '-' if below else '.')
    return mark


def test_the_pieces_of_the_tokens_are_the_text(run: SmallRun, groups: dict[int, dict]):
    decode = run.session.program.parts.host.model.tokenizer.decode
    for group in groups.values():
        for texts in (group['prompt'], *group['answers']):
            start = 0
            for place, length in enumerate(texts['characters'][:-1]):
                assert (
                    texts['text'][start : start + length]
                    == decode(np.array([*texts['tokens'][place : place + 1], 1]))[:-1]
                )
                start += length
            assert texts['text'] == decode(np.array(texts['tokens']))


def test_a_selection_and_its_size_are_said(run: SmallRun, tmp_path: pathlib.Path, capsys):
    page = tmp_path / 'some.html'
    assert main_rollouts.main([str(run.workdir), f'--page={page}', '--step=4', '--limit=1']) == 0
    said = capsys.readouterr().out
    assert re.fullmatch(rf'{page}: 1 groups, 4 answers, 0\.\d+ MB; 1 more groups: --limit=0\n', said)
    assert [group['update'] for group in read_view(page.read_text())['groups']] == [4]
    draw = read_rollouts(run.workdir)[0]['draw']
    assert main_rollouts.main([str(run.workdir), f'--page={page}', f'--draw={draw}', '--sample=2']) == 0
    (group,) = read_view(page.read_text())['groups']
    assert [answer['sample'] for answer in group['answers']] == [2]
    assert main_rollouts.main([str(run.workdir), f'--page={tmp_path / "none" / "some.html"}']) == 2
    assert 'is a directory, or in none' in capsys.readouterr().err
