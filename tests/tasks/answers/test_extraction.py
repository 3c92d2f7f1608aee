import time

import pytest

from areal_jax.tasks.answers import mathematics
from areal_jax.tasks.answers.extraction import final_text, last_boxed, marked_answers, unwrap, without_thoughts
from areal_jax.tasks.answers.kinds import EXACT, INTEGER, NORMALISED, NUMBER


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
    text = 'The answer is 1.\n#### 2\nThe final ANSWER is: **4**.'
    assert marks(text) == ['2', '4']
    assert marks(text + r' \boxed{3}') == ['3']  # a box is the only one
    assert marks(text + r' \boxed{3} <answer>5</answer>') == ['5']
    assert marks(r'<answer>so \boxed{6}, not 7</answer> \boxed{8}') == ['6']
    assert marks('####\n\n36\nand more') == ['36']
    assert marks('It has answers.') == []
    assert marks(r'\boxed{} <answer> </answer> Answer: 9') == ['9']


@pytest.mark.parametrize(
    ('text', 'answer'),
    [
        ('**Answer:** _x_', 'x'),
        ('**Answer**: B', 'B'),
        ('**Answer: B**', 'B'),
        ('**The final answer is B**.', 'B**'),  # the emphasis ends behind the full stop: it is no mark of the answer
        ('Answer：B', 'B'),
        ('Answer = $B$', 'B'),
        ('Answer: C*', 'C*'),
        ('Final Answer: The final answer is $5$. I hope it is correct.', '5'),
        ('The answer is\n\n  5.', '5'),
        ('#### Answer: B', 'B'),
        ('İ think: the ANSWER is: y', 'y'),  # in lower case the first letter is two characters
    ],
)
def test_what_stands_behind_a_mark(text, answer):
    assert marks(text)[0] == answer


def marks(text: str) -> list[str]:
    return [marked.text for marked in marked_answers(text)]


@pytest.mark.parametrize(
    ('text', 'inner'),
    [
        (r'$\text{B}$', 'B'),
        (r'\textbf{(\text{B})}', r'(\text{B})'),
        (r'\[ \frac{1}{2} \]', r'\frac{1}{2}'),
        ('$3$ and $4$', '$3$ and $4$'),
        ('{1}{2}', '{1}{2}'),
        (r'\{1, 2\}', r'\{1, 2\}'),
        ('**a** b', '**a** b'),
        ('__init__', '__init__'),
        ('__Bold__', 'Bold'),
        ('`` ` ``', '`` ` ``'),
        ('$$', '$$'),
    ],
)
def test_marks_around_the_whole_text_are_removed(text, inner):
    assert unwrap(text) == inner


def test_thoughts_are_no_answer_where_one_follows():
    assert without_thoughts('<think>5</think> 6') == ' 6'
    assert without_thoughts('<think>5</think>\n') == '<think>5'
    assert final_text(r'<think>or \boxed{4}?</think>It is 5') == 'It is 5'


def test_without_a_mark_it_is_the_last_line():
    assert final_text('one\n two \n\n') == 'two'
    assert final_text(' \n') is None


HOSTILE = [
    '9' * 10**5, '1,111' * 25000, '111' + ',111' * 25000 + '1',
    '1 ' * 50000, ' ' * 10**5, r'\frac' * 20000, r'\boxed{' * 15000, '{' * 10**5,
    r'\boxed ' + ' ' * 10**5, 'answer is ' * 10000, '#### ' * 20000, '-' * 10**5, '1/' * 50000, '1 * 10 ^ ' * 10000,
    'answer' + ' ' * 10**5 + 'x', 'answer*' * 20000, '**answer: **' * 10000, '{' * 10000 + '}' * 10000, '$' * 10**5,
    '<answer>' * 20000 + '</answer>' * 10000, '1{,}234' * 6000, '\\text{' * 20000, '5 cm' * 30000, '**' * 40000 + 'x',
    '1 234 ' * 20000, '#### 5 ' + 'a ' * 50000, '#### ' + '1/' * 4000, '#### 5 ' + 'or ' * 3000, 'I hope ' * 20000,
    r'\boxed{' + '- ' * 4000 + '5}', r'\boxed{' + '9' * 9000 + '}', r'\boxed{' + '1 ' * 4000 + '}', '²' * 30000,
    '½' * 30000, '1e9' * 30000, '(' * 10**5 + ')' * 10**5, '1' + ' ' * 10**5 + 'x', '=1' * 40000,
]  # fmt: skip


@pytest.mark.parametrize('text', HOSTILE, ids=lambda text: repr(text[:10]))
def test_the_time_does_not_grow_with_the_square_of_the_text(text):
    # a search that is quadratic in 1e5 characters takes minutes
    for final_answer in (NUMBER.final_answer, INTEGER.final_answer, EXACT.final_answer, NORMALISED.final_answer,
                         mathematics.normalise, mathematics.final_answer):  # fmt: skip
        start_s = time.process_time()
        final_answer(text)
        assert time.process_time() - start_s < 5
