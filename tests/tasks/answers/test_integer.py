from __future__ import annotations

import pytest

from areal_jax.tasks.answers.number_reader import read_integer


@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        ('6', '6'),
        ('The answer is 6.', '6'),
        ('<answer>6</answer>', '6'),
        ('3 - 7 = -4', '-4'),  # a minus after a blank is a sign
        ('5-3', '3'),  # after a digit it is an operator
        ('(5)-3', '3'),
        ('3-7=-4', '-4'),
        ('1,234', '1234'),
        ('12,345,678 dollars', '12345678'),
        ('12,3', '3'),  # no thousands: two numbers
        ('$6.00', '6'),
        ('6.5', None),
        ('6 and then 6.5', None),  # what stands last is the answer
        ('6.5, so 6', '6'),
        ('007', '7'),
        ('-0', '0'),
        ('', None),
        ('none', None),
        ('9' * 5000, None),  # more digits than int() takes
        ('9' * 4000, '9' * 4000),
        ('The answer is 6, not 7.', '6'),
        ('3/4', None),
        ('6/2', '3'),
        ('2^{10}', None),
        ('1.5e3', '1500'),
        ('−7', '-7'),
    ],
)
def test_the_integer_of_an_answer(text, expected):
    assert read_integer(text) == expected
