from __future__ import annotations

import asyncio
import contextlib
import fractions
import json

import numpy as np
import pytest

from areal_jax.tasks.scoring.score_call import (
    REASON_CHARACTERS,
    UNPARSED,
    Score,
    ScoringError,
    describe_error,
    score_answer,
    to_reward,
)
from areal_jax.tasks.scoring.verifier import InlineVerifier
from areal_jax.tasks.scoring.worker import reply_to
from areal_jax.types import Prompt, Verdict
from tests.tasks import hostile_scorers
from tests.tasks.hostile_scorers import HOSTILE_SCORERS

# those that return or raise and do nothing else: harmless inline
INLINE = [
    *(name for name in HOSTILE_SCORERS if name.startswith(('returns_', 'raises', 'exits', 'recurses'))),
    'empties_the_problem', 'puts_a_reward_into_the_problem',
]  # fmt: skip


def test_numbers_of_every_kind_are_rewards():
    values = [1, -1.5, True, np.bool_(False), np.int8(3), np.float64(0.5), np.array(0.25), fractions.Fraction(1, 2)]
    rewards = [to_reward(value) for value in values]
    assert rewards == [1.0, -1.5, 1.0, 0.0, 3.0, 0.5, 0.25, 0.5]
    assert {type(reward) for reward in rewards} == {float}


def test_jax_scalars_are_rewards():
    import jax.numpy as jnp

    assert to_reward(jnp.float32(0.5)) == to_reward(jnp.bfloat16(0.5)) == 0.5


@pytest.mark.parametrize(
    'value',
    ['1.0', b'1', bytearray(b'1'), memoryview(b'1'), None, 1j, np.complex64(1), [1.0], (1.0,), {}, float,
     np.array([1.0]), np.array('1'), np.array('1', object), np.datetime64(1, 's'), np.timedelta64(1, 's')],
    ids=lambda value: f"{type(value).__name__}-{str(value)[:6]}" if not isinstance(value, memoryview) else "memoryview",
)  # fmt: skip
def test_what_is_no_number_is_no_reward(value):
    with pytest.raises(TypeError, match=f'returned a {type(value).__name__}, which is not a number'):
        to_reward(value)


@pytest.mark.parametrize('value', [float('nan'), float('inf'), -float('inf'), 1e6 + 1, -1e300, np.float32('nan')])
def test_rewards_without_sense_are_refused(value):
    with pytest.raises(ValueError, match='must be finite and at most 1e\\+06 in size'):
        to_reward(value)


def test_an_exception_of_the_scorer_is_described_whatever_it_is():
    class Unprintable(Exception):
        def __str__(self):
            raise SystemExit

    assert describe_error(Unprintable()) == 'Unprintable, whose text cannot be read'
    assert len(describe_error(ValueError('x' * 10**6))) < 3000
    assert describe_error(ValueError('x' * 10**6)).endswith(' more characters')
    long_name = type('A' * 10**6 + '\n', (Exception,), {})
    assert len(describe_error(long_name('x'))) < 200
    of_its_own = type('Own', (type,), {'__name__': property(lambda kind: 1 / 0)})('Kind', (Exception,), {})
    assert describe_error(of_its_own('x')) == 'Kind: x'

    class Text(str):
        def __getitem__(self, place):
            return 'y' * 10**6

        def __len__(self):
            return 0

    assert len(describe_error(type('Own', (Exception,), {'__str__': lambda error: Text('x' * 10**6)})())) < 3000


def test_ctrl_c_during_a_scoring_inline_is_the_users():
    def score(problem, text, finish_reason):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_answer(score, {}, '', 'stop')
    assert reply_to(score, b'{"id": 1, "problem": {}, "text": "", "finish_reason": "stop"}') == {
        'id': 1, 'error': 'KeyboardInterrupt: ',
    }  # fmt: skip


@pytest.mark.filterwarnings('ignore:coroutine .* was never awaited')
@pytest.mark.parametrize('name', [name for name in INLINE if name != 'raises_keyboard_interrupt'])
def test_inline_and_in_a_worker_the_verdict_is_the_same(name):
    score, expected, problem = getattr(hostile_scorers, name), HOSTILE_SCORERS[name], {'of': ['the', 'task']}
    judge = InlineVerifier(score, lambda tokens: '')
    prompt = Prompt(0, np.zeros(1, np.int32), 'hostile', problem)
    for _ in range(2):  # twice: the first scoring must not change the problem of the second
        verdict = asyncio.run(judge.verify(prompt, np.zeros(0, np.int32), 'stop'))
        assert verdict == Verdict(expected.reward, label=expected.label)
    assert problem == {'of': ['the', 'task']}
    assert judge.attempts_by_label == {expected.label: 2}

    reply = reply_to(score, json.dumps({'id': 1, 'problem': problem, 'text': '', 'finish_reason': 'stop'}).encode())
    assert reply.get('reward') == (expected.reward if expected.label == 'ok' else None)
    assert ('error' in reply) == (expected.label == 'error')
    with contextlib.suppress(ScoringError):
        assert score_answer(score, problem, '', 'stop') == expected.reward


def test_a_description_is_one_line_that_every_log_can_show():
    assert describe_error(ValueError('a\nb \ud800')) == 'ValueError: a\\nb \\ud800'
    assert describe_error(ValueError('größer')) == 'ValueError: größer'


@pytest.mark.parametrize(
    ('value', 'reward', 'label'),
    [(UNPARSED, 0.0, 'unparsed'), (Score(0.5), 0.5, 'ok'), (Score(0.0), 0.0, 'ok'), (0.0, 0.0, 'ok'), (1, 1.0, 'ok')],
)
def test_a_scorer_may_give_a_label_inline_and_in_a_worker(value, reward, label):
    scorer = lambda problem, text, finish_reason: value
    judge = InlineVerifier(scorer, lambda tokens: '')
    verdict = asyncio.run(judge.verify(Prompt(0, np.zeros(1, np.int32), 'own', {}), np.zeros(0, np.int32), 'stop'))
    assert verdict == Verdict(reward, label=label)
    assert type(verdict.reward) is float
    assert not verdict.failed
    assert judge.attempts_by_label[label] == 1
    reply = json.loads(json.dumps(reply_to(scorer, b'{"id": 1, "problem": {}, "text": "", "finish_reason": "stop"}')))
    assert reply == {'id': 1, 'reward': reward} | ({'label': label} if label != 'ok' else {})


@pytest.mark.parametrize(('reward', 'label'), [(1.0, 'unparsed'), (0.0, 'timeout'), (0.0, '')])
def test_no_other_label_and_no_reward_for_what_was_not_read(reward, label):
    with pytest.raises(ValueError, match='labels are ok, and unparsed for reward 0'):
        Score(reward, label)


def test_a_reason_is_cut_and_seconds_are_seconds():
    score = score_answer(lambda *_: Score(1.0, reason='a\n' * 10**6, cpu_s=1), {}, '', 'stop')
    assert len(score.reason) < 2 * REASON_CHARACTERS  # with its line ends spelled out
    assert score.reason.isprintable()
    for seconds in (float('nan'), float('inf'), -1.0):
        with pytest.raises(ScoringError, match='seconds are finite, and not negative'):
            score_answer(lambda *_, seconds=seconds: Score(1.0, wall_s=seconds), {}, '', 'stop')


def test_a_label_that_a_scorer_has_tampered_with_is_an_error():
    score = Score(1.0)
    score.label = 'timeout'
    with pytest.raises(ScoringError, match=r"a score of 1\.0 with the label 'timeout'"):
        score_answer(lambda *_: score, {}, '', 'stop')
