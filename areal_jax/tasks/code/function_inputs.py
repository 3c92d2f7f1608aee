"""Seeded arguments of small functions, by kind of input: short ones, wide ones and edge cases."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

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


def _draw_xs(rng: random.Random, wide: bool) -> Arguments:
    return [_draw_list(rng, wide)]


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


def _draw_numbers(separator: str) -> _Draw:
    return lambda rng, wide: [separator.join(map(str, _draw_list(rng, wide)))]


def _draw_items(separator: str, sign: str) -> _Draw:
    def draw(rng: random.Random, wide: bool) -> Arguments:
        values = _draw_dict(rng, wide)[0]
        assert isinstance(values, dict)
        return [separator.join(f'{key}{sign}{value}' for key, value in values.items())]

    return draw


def _one(*values: Argument) -> tuple[Arguments, ...]:
    return tuple([value] for value in values)


XS = InputKind('xs', _draw_xs, _one([], [0], [5], [-7, -7], [3, 3, 3, 3], [9, 8, 7, 6, 5, 4, 3, 2, 1]))
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
    """Texts of one or more integers."""
    edges = [[0], [-7], [5, 5], [12, 11, 10, 9, 8]]
    return InputKind('s', _draw_numbers(separator), _one(*(separator.join(map(str, xs)) for xs in edges)))


def items_between(separator: str, sign: str) -> InputKind:
    """Texts of one or more items: a letter, a sign, an integer."""
    edges: Sequence[Sequence[str]] = [['a', '0'], ['b', '-7'], ['j', '12', 'c', '12']]
    texts = [separator.join(f'{k}{sign}{v}' for k, v in zip(e[::2], e[1::2], strict=True)) for e in edges]
    return InputKind('s', _draw_items(separator, sign), _one(*texts))
