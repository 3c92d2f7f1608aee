"""What every kind of answer reads in the ways to write a number that notations.py has."""

import random

import pytest

from areal_jax.tasks import jsonl
from areal_jax.tasks.answers import mathematics
from tests.tasks.answers.notations import CARRIERS, NOTATIONS, draw_other, draw_value

DRAWS = 40


def kinds_of(value) -> list[str]:
    return ['number', 'math', 'integer'] if value.denominator == 1 else ['number', 'math']


@pytest.mark.parametrize('name', NOTATIONS)
def test_a_notation_is_read_as_its_number_in_every_kind_and_equals_no_other(name):
    random_ = random.Random(name)
    read = 0
    for _ in range(DRAWS):
        value = draw_value(random_)
        written, other = NOTATIONS[name](value), draw_other(value, random_)
        if written is None:
            continue
        read += 1
        text, wrong = random_.choice(CARRIERS).format(written), NOTATIONS[name](other)
        for kind in kinds_of(value):
            answers = jsonl.KINDS[kind]
            assert answers.final_answer(text) == str(value), (kind, text)
            assert answers.score({'answer': str(value)}, text, 'stop') == 1.0, (kind, text)
            gold = answers.read_gold(written)
            assert answers.score({'answer': gold}, f'#### {value}', 'stop') == 1.0, (kind, written)
            assert answers.score({'answer': gold}, f'#### {other}', 'stop') == 0.0, (kind, written, other)
            assert answers.score({'answer': str(value)}, f'Answer: {wrong or other}', 'stop') == 0.0, (kind, wrong)
        assert mathematics.compare_texts(str(value), text) is True
        assert mathematics.compare_texts(str(other), text) is False
    assert read >= 3
