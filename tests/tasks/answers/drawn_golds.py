r"""Gold answers in the forms that contests use, drawn: (text, what it means).

Golds of one form are equal where what they mean is. A form with the meaning None can be refused when a file is loaded.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction

Drawn = tuple[str, object]
Form = Callable[[random.Random], Drawn]
NAMES = ('Evelyn', 'Monday', 'north', 'Alice', 'Tuesday', 'pentagon', 'blue', 'odd', 'Yes', 'never')
SQUARE_FREE = (2, 3, 5, 6, 7, 10, 11, 13, 14, 15)


def number(template: str, low: int = -99, high: int = 100) -> Form:
    def draw(random: random.Random) -> Drawn:
        value = random.randrange(low, high)
        return template.format(value), value

    return draw


def pair(template: str, in_order: bool = True) -> Form:
    """Two different integers, the smaller first."""

    def draw(random: random.Random) -> Drawn:
        low, high = sorted(random.sample(range(-20, 21), 2))
        return template.format(low, high), (low, high) if in_order else frozenset((low, high))

    return draw


def numbers(template: str, n: int, low: int = -20, high: int = 21) -> Form:
    def draw(random: random.Random) -> Drawn:
        values = tuple(random.randrange(low, high) for _ in range(n))
        return template.format(*values), values

    return draw


def fraction(template: str) -> Form:
    def draw(random: random.Random) -> Drawn:
        value = Fraction(random.randrange(1, 60), random.randrange(2, 60))
        value = value if value.denominator > 1 else value + Fraction(1, 2)
        return template.format(value.numerator, value.denominator), value

    return draw


def mixed(random: random.Random) -> Drawn:
    whole, denominator = random.randrange(1, 30), random.randrange(2, 12)
    numerator = random.randrange(1, denominator)
    return rf'{whole}\frac{{{numerator}}}{{{denominator}}}', whole + Fraction(numerator, denominator)


def decimal(random: random.Random) -> Drawn:
    cents = random.randrange(1, 10**5)
    return f'{cents / 100:.2f}', cents


def thousands(random: random.Random) -> Drawn:
    value = random.randrange(1000, 10**9)
    return f'{value:,}'.replace(',', random.choice((',', '{,}', r'\,', r',\!'))), value


def scientific(random: random.Random) -> Drawn:
    digits, exponent = random.randrange(101, 1000), random.randrange(-30, 31)
    return rf'{digits / 100:.2f} \times 10^{{{exponent}}}', Fraction(digits, 100) * Fraction(10) ** exponent


def power(random: random.Random) -> Drawn:
    base, exponent = random.randrange(2, 12), random.randrange(2, 12)
    return f'{base}^{{{exponent}}}', base**exponent


def surd(template: str) -> Form:
    def draw(random: random.Random) -> Drawn:
        factor, root = random.randrange(2, 20), random.choice(SQUARE_FREE)
        return template.format(factor, root), (factor, root)

    return draw


def polynomial(random: random.Random) -> Drawn:
    a, b, c = (random.randrange(2, 10) for _ in range(3))
    terms = [f'{a}x^2', f'{b}x', str(c)]
    random.shuffle(terms)
    return '+'.join(terms), (a, b, c)


def factors(random: random.Random) -> Drawn:
    a, b = random.randrange(1, 10), random.randrange(1, 10)
    return f'(x+{a})(x-{b})', (a, b)


def letters(random: random.Random) -> Drawn:
    chosen = random.sample('abcdkmnpqrst', 3)
    return ''.join(chosen), frozenset(chosen)


def based(random: random.Random) -> Drawn:
    base = random.randrange(2, 10)
    value, digits = random.randrange(base, base**6), ''
    rest = value
    while rest:
        rest, digit = divmod(rest, base)
        digits = str(digit) + digits
    return random.choice((f'{digits}_{base}', f'{digits}_{{{base}}}')), (value, base)


def hexadecimal(random: random.Random) -> Drawn:
    value = random.randrange(1, 10) * 16**3 + random.randrange(16**3)
    return f'{value:X}_{{16}}', value


def periodic(random: random.Random) -> Drawn:
    digits = random.randrange(1, 99)
    return rf'0.\overline{{{digits:02d}}}', Fraction(digits, 99)


def matrix(random: random.Random) -> Drawn:
    a, b, c, d = (random.randrange(-9, 10) for _ in range(4))
    return rf'\begin{{pmatrix}} {a} & {b} \\ {c} & {d} \end{{pmatrix}}', (a, b, c, d)


def ratio(random: random.Random) -> Drawn:
    a, b = random.randrange(1, 20), random.randrange(1, 20)
    return f'{a}:{b}', Fraction(a, b)


def name(template: str) -> Form:
    def draw(random: random.Random) -> Drawn:
        chosen = random.choice(NAMES)
        return template.format(chosen), chosen

    return draw


def choice(template: str) -> Form:
    def draw(random: random.Random) -> Drawn:
        chosen = random.choice('ABCDFGH')
        return template.format(chosen), chosen

    return draw


def clock(random: random.Random) -> Drawn:
    return f'{random.randrange(1, 13)}:{random.randrange(0, 60):02d} \\text{{ p.m.}}', None


def logarithm(random: random.Random) -> Drawn:
    base, argument = random.choice(((2, 3), (2, 5), (3, 5), (5, 7), (3, 7), (2, 7), (5, 3), (7, 3)))
    return rf'\log_{{{base}}} {argument}', math.log(argument) / math.log(base)


FORMS: dict[str, Form] = {
    'integer': number('{}'),
    'integer in dollars': number('${}$'),
    'decimal': decimal,
    'thousands': thousands,
    'scientific': scientific,
    'fraction': fraction(r'\frac{{{}}}{{{}}}'),
    'negative fraction': fraction(r'-\dfrac{{{}}}{{{}}}'),
    'slash': fraction('{}/{}'),
    'mixed number': mixed,
    'percent': number(r'{}\%', 1),
    'degrees': number(r'{}^\circ', 1),
    'degrees in braces': number(r'{}^{{\circ}}', 1),
    'centimetres': number(r'{} \text{{ cm}}^2', 1),
    'units in mathrm': number(r'{}\,\mathrm{{km/h}}', 1),
    'words': number(r'{} \text{{ square units}}', 1),
    'currency': number(r'\${}.50', 1),
    'power': power,
    'periodic decimal': periodic,
    'root': surd(r'{}\sqrt{{{}}}'),
    'root over two': surd(r'\frac{{{}\sqrt{{{}}}}}{{101}}'),
    'root with a unit': surd(r'{}\sqrt{{{}}} \text{{ inches}}'),
    'pi': number(r'{}\pi', 2),
    'pi over': fraction(r'\frac{{{}\pi}}{{{}}}'),
    'polynomial': polynomial,
    'factors': factors,
    'rational function': numbers(r'\frac{{{}x+1}}{{x^2+{}}}', 2, 2, 15),
    'line': numbers('y = {}x + {}', 2, 2, 20),
    'assignment': number('x = {}'),
    'letters': letters,
    'point': numbers('({}, {})', 2, -20, 21),
    'point in space': numbers(r'\left( {}, {}, {} \right)', 3),
    'interval': pair('[{}, {}]'),
    'half-open interval': pair('({}, {}]'),
    'open to infinity': number(r'({}, \infty)'),
    'union': pair(r'(-\infty, {}) \cup ({}, \infty)'),
    'member of': pair(r'x \in [{}, {}]'),
    'set': pair(r'\{{{}, {}\}}', False),
    'list': pair('{}, {}', False),
    'or': pair(r'{} \text{{ or }} {}', False),
    'plus or minus': surd(r'{} \pm \sqrt{{{}}}'),
    'inequality': number('x > {}'),
    'two inequalities': pair(r'{} < x \le {}'),
    'complex': numbers('{}+{}i', 2, 2, 20),
    'vector': numbers(r'\begin{{pmatrix}} {} \\ {} \\ {} \end{{pmatrix}}', 3),
    'matrix': matrix,
    'base': based,
    'hexadecimal': hexadecimal,
    'ratio': ratio,
    'factorial': number('{}!', 3, 20),
    'binomial': numbers(r'\binom{{40}}{{{}}} + x^{{{}}}', 2, 2, 9),
    'logarithm': logarithm,
    'exponential': number('e^{{{}}}', 2, 30),
    'sine': number(r'\sin {}x', 2, 40),
    'name': name(r'\text{{{}}}'),
    'plain name': name('{}'),
    'choice': choice(r'\text{{({})}}'),
    'letter': choice('{}'),
    'congruence': lambda random: (rf'x \equiv {random.randrange(7)} \pmod 7', None),
    'cases': lambda random: (rf'\begin{{cases}} x={random.randrange(9)} \\ y=2 \end{{cases}}', None),
    'clock': clock,
    'condition': lambda random: (f'{random.randrange(2, 9)}k where k is any integer', None),
    'zero denominator': lambda random: (rf'\frac{{{random.randrange(1, 9)}}}{{0}}', None),
}
