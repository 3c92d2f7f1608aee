from __future__ import annotations

import pytest

from areal_jax.tasks import token_reversal
from areal_jax.tasks.task import TaskError
from areal_jax.text.tokenizer import CharacterTokenizer


def build(symbols=2, length=4, held_out_fraction=0.25):
    tokenizer = CharacterTokenizer(token_reversal.characters(symbols))
    return token_reversal.build(tokenizer, symbols=symbols, length=length, held_out_fraction=held_out_fraction)


def test_sixteen_strings_twelve_to_train_on():
    # 2**4 strings, a quarter held out
    task = build()
    questions = {side: {problem['question'] for problem in task.problems[side]} for side in ('train', 'held_out')}
    assert (len(questions['train']), len(questions['held_out'])) == (12, 4)
    assert len(questions['train'] | questions['held_out']) == 16


@pytest.mark.parametrize(('symbols', 'length', 'sizes'), [(2, 1, (1, 1)), (3, 3, (20, 7)), (8, 5, (24576, 8192))])
def test_sides_never_overlap_and_are_never_empty(symbols, length, sizes):
    # 27 strings: round(6.75) = 7; 2 strings: round(.5) = 0, so one; 8**5 = 32768
    task = build(symbols, length)
    sides = [{problem['question'] for problem in task.problems[side]} for side in ('train', 'held_out')]
    assert tuple(map(len, sides)) == sizes
    assert sides[0] & sides[1] == set()


def test_prompt_and_answer_by_hand():
    prompt = next(p for p in build().held_out(4, seed=0) if p.problem['question'] == 'abbb=')
    assert prompt.tokens.tolist() == [1, 2, 2, 2, 3]  # a = 1, b = 2, the mark comes after the letters
    assert prompt.problem['answer'] == 'bbba'


@pytest.mark.parametrize(
    ('text', 'finish_reason', 'reward'),
    [
        ('bbba', 'stop', 1.0),
        ('bbba', 'length', 4 / 5),  # all symbols, no end
        ('aaaa', 'stop', 2 / 5),  # the last symbol and the end
        ('bbbab', 'stop', 4 / 6),  # the fifth should be the end, the end should not be there
        ('bbb', 'stop', 3 / 5),  # ended a symbol too early
        ('', 'stop', 0.0),
        ('b' * 16, 'length', 3 / 16),
        ('b=ba', 'stop', 4 / 5),
        ('b<eos>ba', 'length', 3 / 5),  # an EOS that ends nothing is one wrong symbol
    ],
)
def test_reward_by_hand(text, finish_reason, reward):
    assert token_reversal.score({'answer': 'bbba'}, text, finish_reason) == pytest.approx(reward)


@pytest.mark.parametrize(('symbols', 'length'), [(1, 4), (9, 2), (2, 0), (2, 17)])
def test_impossible_sizes_are_named(symbols, length):
    with pytest.raises(TaskError, match=rf'task\.symbols={symbols}, task\.length={length}: choose'):
        token_reversal.build(CharacterTokenizer('ab='), symbols=symbols, length=length, held_out_fraction=0.25)
