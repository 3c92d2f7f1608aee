"""Conditions and results in words and in Python: the parts from which the families of functions are composed."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence

Argument = int | str | list[int] | list[list[int]] | dict[str, int]
Arguments = list[Argument]
_Draw = Callable[[random.Random, bool], Arguments]  # the flag asks for a wide draw

_WORDS = (
    'a an at be do in it of so to ant ape arm art bat bee bus cat cod cow ear eel egg owl sea tea toe top '
    'area atom baby bear beer bell best boat cake cost east echo even oboe open seat silk star tape text tree '
    'above apple basic beach bread chess eagle earth extra ocean sense sauce table taste total under '
    'adjust banana basket better coffee effect estate office secret sister street active'
)
_KEYS = 'abcdefghij'
# Characters that conditions on characters tell apart. Repeated ones are drawn more often.
_CHARACTERS = 'aaeeiouabcestmnxyzABESTZ0123789  .-'


@dataclasses.dataclass(frozen=True, eq=False)  # a kind equals only itself
class InputKind:
    """The parameters of a function and how their values are drawn."""

    signature: str  # the names between the parentheses: 'xs, ys'
    draw: _Draw
    edges: tuple[Arguments, ...]  # cases that random draws may miss


def draw_inputs(kind: InputKind, count: int, seed: str, *, wide: bool) -> list[Arguments]:
    """`count` distinct arguments, a function of kind and seed."""
    rng = random.Random(f'{kind.signature} {wide} {seed}')
    found: dict[str, Arguments] = {}
    for _ in range(100 * count):
        if len(found) == count:
            break
        arguments = kind.draw(rng, wide)
        found.setdefault(repr(arguments), arguments)
    return list(found.values())


def _draw_list(rng: random.Random, wide: bool) -> list[int]:
    low, high, longest = (-40, 60, 10) if wide else (-9, 16, 6)
    return [rng.randint(low, high) for _ in range(rng.randint(2, longest))]


def _draw_long_xs(rng: random.Random, wide: bool) -> Arguments:
    low, high, longest = (-40, 60, 14) if wide else (0, 9, 9)
    return [[rng.randint(low, high) for _ in range(rng.randint(3, longest))]]


def _draw_xs_and_ys(rng: random.Random, wide: bool) -> Arguments:
    xs = _draw_list(rng, wide)
    return [xs, [rng.randint(-9, 16) for _ in xs]]


def _draw_rows(rng: random.Random, wide: bool) -> Arguments:
    return [[_draw_list(rng, wide)[: rng.randint(1, 4)] for _ in range(rng.randint(1, 5 if wide else 3))]]


def _draw_integer(low: int, high: int, wide_low: int, wide_high: int) -> _Draw:
    return lambda rng, wide: [rng.randint(*((wide_low, wide_high) if wide else (low, high)))]


def _draw_a_and_b(rng: random.Random, wide: bool) -> Arguments:
    low, high = (-99, 99) if wide else (-12, 20)
    return [rng.randint(low, high), rng.randint(low, high)]


def _draw_text(rng: random.Random, wide: bool) -> Arguments:
    return [''.join(rng.choice(_CHARACTERS) for _ in range(rng.randint(3, 24 if wide else 9)))]


def _draw_words(rng: random.Random, wide: bool) -> Arguments:
    words = _WORDS.split()
    return [' '.join(rng.choice(words) for _ in range(rng.randint(1, 9 if wide else 5)))]


def _draw_dict(rng: random.Random, wide: bool) -> Arguments:
    keys = rng.sample(_KEYS, rng.randint(2, 8 if wide else 5))
    low, high = (-40, 60) if wide else (-9, 16)
    return [{key: rng.randint(low, high) for key in keys}]


def _draw_items(separator: str, sign: str) -> _Draw:
    def draw(rng: random.Random, wide: bool) -> Arguments:
        values = _draw_dict(rng, wide)[0]
        assert isinstance(values, dict)
        return [separator.join(f'{key}{sign}{value}' for key, value in values.items())]

    return draw


def _one(*values: Argument) -> tuple[Arguments, ...]:
    return tuple([value] for value in values)


XS = InputKind(
    'xs',
    lambda rng, wide: [_draw_list(rng, wide)],
    _one([], [0], [5], [-7, -7], [3, 3, 3, 3], [9, 8, 7, 6, 5, 4, 3, 2, 1]),
)
LONG_XS = InputKind('xs', _draw_long_xs, _one([], [4], [2, 1], [6, 6, 6, 6, 6, 6], list(range(10))))
XS_AND_YS = InputKind('xs, ys', _draw_xs_and_ys, ([[], []], [[0], [0]], [[1, 2, 3], [3, 2, 1]], [[-5, 5], [5, -5]]))
ROWS = InputKind('rows', _draw_rows, _one([], [[0]], [[1], [2], [3]], [[4, 4, 4, 4], [-1, -2]]))
INTEGER = InputKind('n', _draw_integer(-20, 40, -500, 500), _one(0, 1, -1, 2, 1000))
NATURAL = InputKind('n', _draw_integer(10, 99999, 0, 10**9), _one(0, 7, 10, 1000, 99, 1234567890))
BOUND = InputKind('n', _draw_integer(1, 30, 31, 120), _one(0, 1, 2, 3))
A_AND_B = InputKind('a, b', _draw_a_and_b, ([0, 0], [1, 0], [0, 1], [7, 7], [-3, 3]))
TEXT = InputKind('s', _draw_text, _one('', 'a', ' ', 'ZZZ', '0.5', 'aeiou'))
SENTENCE = InputKind('s', _draw_words, _one('', 'a', 'tree', 'to be or not to be', 'at  sea'))
DICT = InputKind('d', _draw_dict, _one({}, {'a': 0}, {'b': 5, 'a': 5}, {'j': -1, 'c': 12, 'e': 3}))


def numbers_between(separator: str) -> InputKind:
    edges = [[0], [-7], [5, 5], [12, 11, 10, 9, 8]]
    draw: _Draw = lambda rng, wide: [separator.join(map(str, _draw_list(rng, wide)))]
    return InputKind('s', draw, _one(*(separator.join(map(str, xs)) for xs in edges)))


def items_between(separator: str, sign: str) -> InputKind:
    """Texts of one or more items: a letter, a sign, an integer."""
    edges: Sequence[Sequence[str]] = [['a', '0'], ['b', '-7'], ['j', '12', 'c', '12']]
    texts = [separator.join(f'{k}{sign}{v}' for k, v in zip(e[::2], e[1::2], strict=True)) for e in edges]
    return InputKind('s', _draw_items(separator, sign), _one(*texts))


Part = tuple[str, str]  # in words, in Python
_WORD_LETTERS = 'abest'


def conditions(name: str) -> list[Part]:
    """Conditions on an integer, after 'that is'; no two are equal on all integers."""
    bounds = [
        *(('greater than', '>', k) for k in (1, 3, 5, 7, 9)),
        *(('at least', '>=', k) for k in (3, 5, 7, 9)),
        *(('less than', '<', k) for k in (1, 3, 5, 7, 9)),
        *(('at most', '<=', k) for k in (3, 5, 7, 9)),
        *(('different from', '!=', k) for k in (2, 4, 6, 8)),
    ]
    return [
        *((f'{words} {k}', f'{name} {sign} {k}') for words, sign, k in bounds),
        ('positive', f'{name} > 0'),
        ('negative', f'{name} < 0'),
        ('even', f'{name} % 2 == 0'),
        ('odd', f'{name} % 2 == 1'),
        *((f'divisible by {k}', f'{name} % {k} == 0') for k in (3, 4, 5, 6, 7)),
        *((f'not divisible by {k}', f'{name} % {k} != 0') for k in (3, 4, 5)),
        *((f'between {a} and {b}', f'{a} <= {name} <= {b}') for a, b in ((2, 6), (4, 9), (0, 5), (1, 8), (5, 12))),
    ]


def values(name: str) -> list[Part]:
    """Values that are computed from one integer; no two are equal on all integers."""
    return [
        (f'the square of {name}', f'{name} * {name}'),
        (f'the cube of {name}', f'{name} ** 3'),
        (f'the absolute value of {name}', f'abs({name})'),
        *((f'{name} plus {k}', f'{name} + {k}') for k in range(2, 10)),
        *((f'{name} minus {k}', f'{name} - {k}') for k in range(2, 10)),
        *((f'{k} minus {name}', f'{k} - {name}') for k in (3, 5, 8, 10)),
        *((f'{k} times {name}', f'{name} * {k}') for k in range(2, 10)),
        *((f'{k} times {name} plus {j}', f'{name} * {k} + {j}') for k in (2, 3, 4) for j in (1, 5)),
        *((f'the remainder of {name} divided by {k}', f'{name} % {k}') for k in range(3, 8)),
        *((f'{name} divided by {k} and rounded down', f'{name} // {k}') for k in range(2, 6)),
    ]


def pair_values() -> list[Part]:
    """Values that are computed from two integers a and b; no two are equal on all integers."""
    return [
        ('a plus b', 'a + b'),
        ('a minus b', 'a - b'),
        ('b minus a', 'b - a'),
        ('a times b', 'a * b'),
        ('the larger of a and b', 'max(a, b)'),
        ('the smaller of a and b', 'min(a, b)'),
        ('the absolute difference of a and b', 'abs(a - b)'),
        *((f'{k} times a plus b', f'{k} * a + b') for k in range(2, 7)),
        *((f'a plus {k} times b', f'a + {k} * b') for k in range(2, 7)),
        *((f'a times b plus {k}', f'a * b + {k}') for k in range(1, 6)),
        *((f'the remainder of a plus b divided by {k}', f'(a + b) % {k}') for k in range(3, 8)),
        *((f'a minus {k} times b', f'a - {k} * b') for k in range(2, 5)),
    ]


def character_conditions() -> list[Part]:
    """Conditions on a character c, after 'that is'."""
    return [
        *((f'equal to {letter!r}', f'c == {letter!r}') for letter in 'aeiost'),
        *((f'different from {letter!r}', f'c != {letter!r}') for letter in 'aest'),
        *((f'one of {letters!r}', f'c in {letters!r}') for letters in ('aeiou', 'abc', 'est', 'xyz', 'mn', 'ABE')),
        *((f'none of {letters!r}', f'c not in {letters!r}') for letters in ('aeiou', 'abc', 'est', 'xyz', 'mn')),
        ('a digit', 'c.isdigit()'),
        ('no digit', 'not c.isdigit()'),
        ('a letter', 'c.isalpha()'),
        ('no letter', 'not c.isalpha()'),
        ('an upper case letter', 'c.isupper()'),
        ('a lower case letter', 'c.islower()'),
        ('no upper case letter', 'not c.isupper()'),
        ('no lower case letter', 'not c.islower()'),
        ('a space', "c == ' '"),
        ('no space', "c != ' '"),
        *((f'greater than {letter!r}', f'c > {letter!r}') for letter in 'bgq'),
    ]


def word_conditions() -> list[Part]:
    """Conditions on a word w, after 'words that'."""
    return [
        *((f'have more than {k} letters', f'len(w) > {k}') for k in range(2, 6)),
        *((f'have fewer than {k} letters', f'len(w) < {k}') for k in range(3, 7)),
        *((f'have exactly {k} letters', f'len(w) == {k}') for k in range(2, 6)),
        *((f'begin with {letter!r}', f'w.startswith({letter!r})') for letter in _WORD_LETTERS),
        *((f'end with {letter!r}', f'w.endswith({letter!r})') for letter in 'etar'),
        *((f'contain {letter!r}', f'{letter!r} in w') for letter in 'aeost'),
        *((f'do not contain {letter!r}', f'{letter!r} not in w') for letter in 'aeost'),
    ]


def word_values() -> list[Part]:
    """Texts that are made of a word w, which is not empty."""
    return [
        ('w in upper case', 'w.upper()'),
        ('w reversed', 'w[::-1]'),
        ('the first letter of w', 'w[0]'),
        ('the last letter of w', 'w[-1]'),
        ('w without its first letter', 'w[1:]'),
        ('w without its last letter', 'w[:-1]'),
        ('w with a capital first letter', 'w.capitalize()'),
        *((f'the first {k} letters of w', f'w[:{k}]') for k in (2, 3)),
        *((f'w repeated {k} times', f'w * {k}') for k in (2, 3)),
        *((f'w followed by {mark!r}', f'w + {mark!r}') for mark in '!?s'),
    ]


def rearrangements() -> Iterator[Part]:
    """Lists made of the elements of xs by position."""
    for k in range(1, 5):
        yield f'xs with its first {k} elements moved to the end', f'xs[{k}:] + xs[:{k}]'
        yield f'xs with its last {k} elements moved to the front', f'xs[-{k}:] + xs[:-{k}]'
        yield f'xs without its first {k} elements', f'xs[{k}:]'
        yield f'xs without its last {k} elements', f'xs[:-{k}]'
        yield f'the last {k} elements of xs in reverse order', f'xs[-{k}:][::-1]'
        yield f'xs with its first {k} elements in reverse order', f'xs[:{k}][::-1] + xs[{k}:]'
        for v in (0, 1, 5):
            yield f'the first {k} elements of xs followed by {v}', f'xs[:{k}] + [{v}]'
            yield f'xs with {v} inserted at index {k}', f'xs[:{k}] + [{v}] + xs[{k}:]'
        for step in (2, 3):
            yield f'every element of xs at the indices {k}, {k + step}, {k + 2 * step} and so on', f'xs[{k}::{step}]'
    for a in (1, 2):
        for b in (1, 2, 3):
            yield f'xs without its first {a} and last {b} elements', f'xs[{a}:][:-{b}]'


def text_edits() -> Iterator[Part]:
    """Texts made of a text s as a whole."""
    for old, new in ('ae', 'eo', 'st', 'ia', 'b-', 't ', '-.', ' -', 'x1', '01'):
        yield f's with every {old!r} replaced by {new!r}', f's.replace({old!r}, {new!r})'
        yield f's in lower case with every {old!r} replaced by {new!r}', f's.lower().replace({old!r}, {new!r})'
        yield f's reversed, with every {old!r} replaced by {new!r}', f's[::-1].replace({old!r}, {new!r})'
    for k in (2, 3, 4):
        yield f's with each character repeated {k} times', f"''.join(c * {k} for c in s)"
        yield f'the first {k} characters of s in upper case', f's[:{k}].upper()'
        yield f'the last {k} characters of s in upper case', f's[-{k}:].upper()'
        yield f's with its first {k} characters in upper case', f's[:{k}].upper() + s[{k}:]'
        yield f'every character of s at the indices 0, {k}, {2 * k} and so on', f's[::{k}]'
    for mark in '*-.0':
        yield f's with {mark!r} between its characters', f'{mark!r}.join(s)'
        for k in (6, 8, 10):
            yield f's padded with {mark!r} on the left to {k} characters', f's.rjust({k}, {mark!r})'
            yield f's padded with {mark!r} on the right to {k} characters', f's.ljust({k}, {mark!r})'
