from fractions import Fraction

import pytest

from areal_jax.tasks.answers.kinds import NUMBER
from areal_jax.tasks.answers.number_reader import read_answer, read_marked
from areal_jax.tasks.scoring.score_call import score_answer


@pytest.mark.parametrize(
    ('text', 'value'),
    [
        # worked solutions as models write them
        ('Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72', 72),
        ('He pays 12 * $1.50 = $18.00 in total.', 18),
        ('so she has $1,080.50 left.', Fraction(2161, 2)),
        ('The answer is 5 apples for 3 people.', 5),  # the first number after the mark
        ('The answer is 2 + 3 = 5 of 7.', 5),  # after the last '='
        ('There are 7 days; 24 hours', 24),  # no mark: the last number
        ('#### 18 dollars', 18),
        (r'Hence $x = \boxed{-\frac{7}{2}}$.', Fraction(-7, 2)),
        (r'\boxed{\frac{1,000}{4}}', 250),
        (r'area \boxed{25\pi \text{ cm}^2}', None),
        (r'area \boxed{25 \text{ cm}^2}', 25),
        (r'\boxed{\text{about } 40\%}', 40),
        ('#### Summary\nThe answer is 9', 9),  # a heading has no number: the next mark
        ('It is 10:45', 45),
        ('−3', -3),
        ('7 - 3', 3),  # an operator between blanks, not a sign
        ('(-3)', -3),
        ('x=-3', -3),
        ('2-3', 3),
        ('+4', 4),
        ('1.', 1),
        ('.5', Fraction(1, 2)),
        ('Rs.500', 500),
        ('12,34', 34),  # no thousands
        ('1,234,567.50', Fraction(2469135, 2)),
        ('H2O', None),
        ('cm^2', None),
        ('cm^{-1}', None),
        ('5 cm^{-1}', 5),
        ('2**5', None),
        ('**5**', 5),
        ('1/0', None),
        ('9' * 5000, None),  # more digits than int() takes
        ('1e99999999999', None),
        ('', None),
    ],
)
def test_the_number_that_an_answer_comes_to(text, value):
    numeral = read_answer(text)
    assert (None if numeral is None else numeral.value) == value


@pytest.mark.parametrize(
    ('text', 'value'),
    [('36', 36), (r'\$1{,}234', 1234), (r'10\%', 10), (r'90^\circ', 90), ('-1/2.', Fraction(-1, 2)), ('5 cm', 5),
     ('x=5', 5), ('5x', None), ('(5)', None), ('1 2', None), (r'\frac{1}{2}', Fraction(1, 2))],
)  # fmt: skip
def test_a_marked_text_is_a_number_as_a_whole(text, value):
    numeral = read_marked(text)
    assert (None if numeral is None else numeral.value) == value


def test_equal_are_equal_fractions():
    assert NUMBER.read_gold('#### 0.50') == NUMBER.final_answer('1/2') == '1/2'
    assert [NUMBER.score({'answer': '1/2'}, text, 'stop') for text in ('.5', '2/4', '0.5001', '50%')] == [1, 1, 0, 0]
    assert NUMBER.score({'answer': '1/2'}, '.5', 'length') == 0.0
    assert score_answer(NUMBER.score, {'answer': '1/2'}, 'a half', 'stop').label == 'unparsed'
    assert NUMBER.final_answer('a half') == 'a half'
