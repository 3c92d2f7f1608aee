import time

import pytest

from areal_jax.tasks.answers import exact, latex, normalised, number
from areal_jax.tasks.answers.extraction import final_text, last_boxed, marked_answers


@pytest.mark.parametrize(
    ('text', 'content'),
    [
        (r'\boxed{7}', '7'),
        (r'\boxed{\frac{1}{2}} and \boxed{ x^{2} }', 'x^{2}'),  # the last one, to its own brace
        (r'\boxed{\boxed{8}}', '8'),
        (r'\boxed{1, \{2\}}', r'1, \{2\}'),  # escaped braces do not count
        (r'\fbox{9}', '9'),
        (r'$\boxed 9$', '9'),
        (r'\boxed{5} or rather \boxed{6', '5'),  # cut: it was never closed
        (r'\boxed{}', None),
        ('no box', None),
    ],
)
def test_the_last_closed_box(text, content):
    assert last_boxed(text) == content


def test_marks_in_their_order():
    text = 'The answer is 1.\n#### 2\n' + r'\boxed{3}' + '\nThe final ANSWER is: **4**.'
    assert list(marked_answers(text)) == ['3', '2', '4']
    assert list(marked_answers('####\n\n36\nand more')) == ['36']
    assert list(marked_answers('**Answer:** _x_')) == ['x']
    assert list(marked_answers('It has answers.')) == []


def test_without_a_mark_it_is_the_last_line():
    assert final_text('one\n two \n\n') == 'two'
    assert final_text(' \n') is None


HOSTILE = [
    '9' * 10**5, '1,111' * 25000, '111' + ',111' * 25000 + '1',
    '1 ' * 50000, ' ' * 10**5, r'\frac' * 20000, r'\boxed{' * 15000, '{' * 10**5,
    r'\boxed ' + ' ' * 10**5, 'answer is ' * 10000, '#### ' * 20000, '-' * 10**5, '1/' * 50000, '1 * 10 ^ ' * 10000,
    '½' * 30000, '1e9' * 30000, '(' * 10**5 + ')' * 10**5, '1' + ' ' * 10**5 + 'x', '=1' * 40000,
]  # fmt: skip


@pytest.mark.parametrize('text', HOSTILE, ids=lambda text: repr(text[:10]))
def test_the_time_does_not_grow_with_the_square_of_the_text(text):
    # a search that is quadratic in 1e5 characters takes minutes
    for final_answer in (number.final_answer, exact.final_answer, normalised.final_answer, latex.normalise):
        start_s = time.process_time()
        final_answer(text)
        assert time.process_time() - start_s < 5
