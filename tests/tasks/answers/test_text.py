"""The kinds that compare text, and the normal form of LaTeX."""

import pytest

from areal_jax.tasks.answers import mathematics
from areal_jax.tasks.answers.kinds import EXACT, normalise


def test_exact_means_every_character():
    texts = ('Paris', 'The answer is Paris.', '#### Paris', 'paris', 'Paris!', 'Paris, I think')
    assert [EXACT.score({'answer': 'Paris'}, text, 'stop') for text in texts] == [1, 1, 1, 0, 0, 0]
    assert EXACT.score({'answer': 'Paris'}, 'Paris', 'length') == 0.0


@pytest.mark.parametrize(
    ('a', 'b'),
    [
        ('  The   Louvre ', 'louvre'),
        ('“It’s”', 'it’s'),
        ('STRASSE', 'Straße'),
        ('ﬁve', 'five'),
        ('**(B)**.', 'b'),
        ('`x`', 'X'),
        ('an  apple;', 'Apple'),
        ('5−3', '5-3'),
        ('x²', 'x2'),
    ],
)
def test_equal_after_normalisation(a, b):
    assert normalise(a) == normalise(b)


@pytest.mark.parametrize(
    ('a', 'b'),
    [('5', '-5'), ('1,234', '1234'), ('C', 'C++'), ('.5', '5'), ('[1,2)', '(1,2]'), ('a', ''), ('cat', 'a cat s'),
     ('(a)(b)', 'a)(b')],
)  # fmt: skip
def test_different_after_normalisation(a, b):
    assert normalise(a) != normalise(b)


@pytest.mark.parametrize('text', ['The  “(An) Apple”!', '((a))', '* the * the', 'x', '', '“”'])
def test_a_normal_form_is_its_own_normal_form(text):
    assert normalise(normalise(text)) == normalise(text)


@pytest.mark.parametrize(
    ('text', 'form'),
    [
        (r'\left( 3,\, \dfrac{\pi}{2} \right)', r'(3,\frac{\pi}{2})'),
        (r'x = 5', '5'),
        (r'\frac12', '1/2'),
        (r'\text{Evelyn}.', 'Evelyn'),
        (r'11\sqrt2', r'11\sqrt{2}'),
        (r'\$32,\!348', '32348'),
        (r'5.4 \text{ cents}', '27/5'),
        (r'5x \text{ cents}', '5xcents'),
        ('1 2', '1 2'),  # is not 12
        (r'\begin{pmatrix} 1 \\ 2 \end{pmatrix}', r'\begin{pmatrix}1\\2\end{pmatrix}'),
        (r'1011_{2}', '1011_2'),
        (r'-0.50', '-1/2'),
        (r'y = 2x + 3', '2x+3'),
        (r'a = b = c', 'a=b=c'),
        ('', ''),
    ],
)
def test_normal_form_of_latex(text, form):
    assert mathematics.normalise(text) == form


def test_what_a_form_is():
    closed = ('0.5', r'\frac{4}{2}', '2^{-3}', '12_5', 'no solution', r'\text{Yes}')
    texts = (*closed, 'x', 'abc', r'\frac{\pi}{2}', '3t', '')
    kinds = ['number'] * 3 + ['based'] + ['words'] * 2 + ['expression'] * 5
    assert [mathematics.read_form(text).kind for text in texts] == kinds
