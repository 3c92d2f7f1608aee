"""Ways to write a number, and ways to mark an answer: what is drawn for the properties of the readers."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction

Notation = Callable[[Fraction], str | None]  # None: it cannot write this number

_FULL_WIDTH = str.maketrans('0123456789.-', '０１２３４５６７８９．－')
_ARABIC = str.maketrans('0123456789', '٠١٢٣٤٥٦٧٨٩')
_RAISED = str.maketrans('0123456789-', '⁰¹²³⁴⁵⁶⁷⁸⁹⁻')
_VULGAR = {Fraction(1, 2): '½', Fraction(1, 4): '¼', Fraction(3, 4): '¾', Fraction(1, 3): '⅓', Fraction(5, 8): '⅝'}


def decimal(value: Fraction) -> str | None:
    """'-12.5'; None for a value without a finite decimal of at most 30 digits."""
    for places in range(31):
        if (scaled := value * 10**places).denominator == 1:
            digits = str(abs(scaled.numerator)).rjust(places + 1, '0')
            whole, rest = (digits[:-places], '.' + digits[-places:]) if places else (digits, '')
            return ('-' if value < 0 else '') + whole + rest
    return None


def grouped(separator: str) -> Notation:
    def write(value: Fraction) -> str | None:
        text = decimal(value)
        if text is None or abs(value) < 1000:
            return None
        whole, point, rest = text.partition('.')
        return f'{int(whole):,}'.replace(',', separator) + point + rest

    return write


def scientific(join: str, close: str = '') -> Notation:
    def write(value: Fraction) -> str | None:
        text = decimal(value)
        if text is None or not value:
            return None
        digits = text.lstrip('-').replace('.', '').lstrip('0')
        exponent = len(text.lstrip('-').partition('.')[0]) - 1
        if abs(value) < 1:
            exponent = -(len(text.partition('.')[2]) - len(text.partition('.')[2].lstrip('0')) + 1)
        mantissa = digits[0] + ('.' + digits[1:] if digits[1:] else '')
        power = str(exponent).translate(_RAISED) if join.endswith('10') and not close else str(exponent)
        return ('-' if value < 0 else '') + mantissa + join + power + close

    return write


def fraction(template: str) -> Notation:
    def write(value: Fraction) -> str | None:
        if value.denominator == 1:
            return None
        return ('-' if value < 0 else '') + template.format(abs(value.numerator), value.denominator)

    return write


def mixed(template: str) -> Notation:
    def write(value: Fraction) -> str | None:
        whole, rest = divmod(abs(value), 1)
        if not rest or not whole:
            return None
        return ('-' if value < 0 else '') + template.format(whole, rest.numerator, rest.denominator)

    return write


def vulgar(value: Fraction) -> str | None:
    whole, rest = divmod(abs(value), 1)
    return f'{"-" if value < 0 else ""}{whole or ""}{_VULGAR[rest]}' if rest in _VULGAR else None


def around(template: str, inner: Notation = decimal) -> Notation:
    def write(value: Fraction) -> str | None:
        text = inner(value)
        return None if text is None else template.format(text)

    return write


def translated(table: dict[int, str]) -> Notation:
    def write(value: Fraction) -> str | None:
        text = decimal(value)
        return None if text is None else text.translate(table)

    return write


def plus(value: Fraction) -> str | None:
    text = decimal(value)
    return None if text is None or value < 0 else f'+{text}'


def minus(sign: str) -> Notation:
    def write(value: Fraction) -> str | None:
        text = decimal(value)
        return None if text is None or value >= 0 else text.replace('-', sign)

    return write


def full_stop(value: Fraction) -> str | None:
    return f'{value}.' if value.denominator == 1 else None


def digits_of_a_fraction(value: Fraction) -> str | None:
    small = value.denominator in range(2, 10) and abs(value.numerator) < 10
    return f'{"-" if value < 0 else ""}\\frac{abs(value.numerator)}{value.denominator}' if small else None


NOTATIONS: dict[str, Notation] = {
    'decimal': decimal,
    'plus': plus,
    'full stop': full_stop,
    'minus sign': minus('−'),
    'minus in dollars': minus('$-$'),
    'minus and blank': minus('- '),
    'figure dash': minus('‒'),
    'comma': grouped(','),
    'LaTeX comma': grouped('{,}'),
    'LaTeX blank': grouped(r'\,'),
    'LaTeX negative blank': grouped(r',\!'),
    'thin blank': grouped('\u202f'),
    'backslash blank': grouped(r'\ '),
    'e': scientific('e'),
    'E+': lambda value: scientific('E+')(value) if abs(value) >= 1 else None,
    'times': scientific(r'\times10^{', '}'),
    'cdot': scientific(r' \cdot 10^{', '}'),
    'raised': scientific(' × 10'),
    'slash': fraction('{}/{}'),
    'frac': fraction(r'\frac{{{}}}{{{}}}'),
    'dfrac': fraction(r'\dfrac{{{}}}{{{}}}'),
    'tfrac': fraction(r'\tfrac {{{}}} {{{}}}'),
    'short frac': digits_of_a_fraction,
    'mixed': mixed('{} {}/{}'),
    'mixed frac': mixed(r'{}\frac{{{}}}{{{}}}'),
    'vulgar': vulgar,
    'dollars': around('${}$'),
    'parentheses of LaTeX': around(r'\({}\)'),
    'bold': around('**{}**'),
    'mathbf': around(r'\mathbf{{{}}}'),
    'text': around(r'\text{{{}}}'),
    'currency': around(r'\${}'),
    'percent': around(r'{}\%'),
    'degrees': around(r'{}^\circ'),
    'degree sign': around('{}°'),
    'unit': around(r'{}\text{{ cm}}^2'),
    'unit of a fraction': around(r'{} \text{{ cm}}', fraction(r'\frac{{{}}}{{{}}}')),
    'word': around('{} apples'),
    'variable': around('x = {}'),
    'full width': translated(_FULL_WIDTH),
    'Arabic digits': translated(_ARABIC),
}
CARRIERS = (
    r'so \boxed{{{}}}', '3 steps.\n#### {}', 'The answer is {}', '**Answer:** {}',
    '<think>7</think><answer>{}</answer>', 'Final Answer: {}\n', '#### {}\n', r'\boxed{{7}} or \boxed{{{}}}.',
)  # fmt: skip


def draw_value(random: random.Random) -> Fraction:
    """Small and large integers, decimals and fractions, of either sign."""
    sign = random.choice((1, -1))
    sort = random.randrange(6)
    if sort == 0:
        return Fraction(sign * random.randrange(100))
    if sort == 1:
        return Fraction(sign * random.randrange(10 ** random.randrange(4, 20)))
    if sort == 2:
        return sign * Fraction(random.randrange(10**6), 10 ** random.randrange(1, 7))
    if sort == 3:
        return sign * Fraction(random.randrange(1, 1000), 10 ** random.randrange(3, 28))
    if sort == 4:
        return sign * Fraction(random.randrange(1, 10), random.randrange(2, 10))
    return sign * (random.randrange(20) + random.choice(list(_VULGAR)))


def draw_other(value: Fraction, random: random.Random) -> Fraction:
    """A number near the value, or one that a careless reader would take for it."""
    changes = (
        -value, value + 1, value * 10, value / 10, value * 1000, value / 100, value + Fraction(1, 10**9),
        value * (1 + Fraction(1, 10**12)), Fraction(value.numerator), Fraction(int(value)), value % 1000,
        1 / value if value else Fraction(1),
    )  # fmt: skip
    return random.choice([other for other in changes if other != value])
