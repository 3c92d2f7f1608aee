"""Problems of the task `code`: families of small Python functions with reference solutions and tests.

A test is [arguments, result]; the reference solutions computed the results. The visible tests of a problem tell its
solution apart from a constant, from each of its arguments, and from the solution of every other problem of its family.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import cast

import numpy as np

from areal_jax.files import JsonObject
from areal_jax.tasks.code import family_parts as inputs
from areal_jax.tasks.code import family_parts as parts
from areal_jax.tasks.code.family_parts import InputKind, draw_inputs
from areal_jax.tasks.task import hash_fraction


@dataclasses.dataclass(frozen=True)
class Variant:
    """A problem before its tests are chosen."""

    inputs: InputKind
    returned: str  # after 'a function f(xs) that returns'
    body: str  # of the reference solution, without its indentation

    @property
    def question(self) -> str:
        return f'Write a Python function f({self.inputs.signature}) that returns {self.returned}.'.replace(
            ' 1 elements', ' element'
        )

    @property
    def solution(self) -> str:
        return '\n'.join([f'def f({self.inputs.signature}):', *(f'    {line}' for line in self.body.split('\n'))])


def list_families() -> dict[str, list[Variant]]:
    return {
        **_list_families(),
        **_order_families(),
        **_pair_families(),
        **_integer_families(),
        **_text_families(),
        **_parsing_families(),
        **_dict_families(),
    }


def _variants(kind: InputKind, pairs: Iterable[tuple[str, str]]) -> list[Variant]:
    return [Variant(kind, returned, f'return {expression}') for returned, expression in pairs]


def _list_families() -> dict[str, list[Variant]]:
    conditions, values = parts.conditions('x'), parts.values('x')
    both = [(value, condition) for value in values for condition in conditions]
    pairs = {
        'filter_list': ((f'a list of all x in xs that are {p}', f'[x for x in xs if {c}]') for p, c in conditions),
        'map_list': ((f'a list of {q} for all x in xs', f'[{v} for x in xs]') for q, v in values),
        'filter_map_list': (
            (f'a list of {q} for all x in xs that are {p}', f'[{v} for x in xs if {c}]') for (q, v), (p, c) in both
        ),
        'filter_sum': ((f'the sum of all x in xs that are {p}', f'sum(x for x in xs if {c})') for p, c in conditions),
        'map_sum': ((f'the sum of {q} for all x in xs', f'sum({v} for x in xs)') for q, v in values),
        'filter_map_sum': (
            (f'the sum of {q} for all x in xs that are {p}', f'sum({v} for x in xs if {c})') for (q, v), (p, c) in both
        ),
        'filter_count': ((f'the number of x in xs that are {p}', f'sum(1 for x in xs if {c})') for p, c in conditions),
        'filter_extreme': (
            (
                f'the {word} x in xs that is {p}, or {default} if there is none',
                f'{name}((x for x in xs if {c}), default={default})',
            )
            for word, name in (('largest', 'max'), ('smallest', 'min'))
            for p, c in conditions
            for default in (0, None)
        ),
        'first_match': (
            (
                f'the {word} x in xs that is {p}, or {default} if there is none',
                f'next((x for x in {source} if {c}), {default})',
            )
            for word, source in (('first', 'xs'), ('last', 'xs[::-1]'))
            for p, c in conditions
            for default in (0, None)
        ),
        'positions': (
            (f'a list of the indices of all x in xs that are {p}', f'[i for i, x in enumerate(xs) if {c}]')
            for p, c in conditions
        ),
        'choose_list': (
            (
                f'a list with {q} for each x in xs that is {p}, and {r} for each other x',
                f'[{v} if {c} else {w} for x in xs]',
            )
            for (q, v), (p, c) in both
            for r, w in (('x', 'x'), ('0', '0'), ('-1', '-1'))
        ),
        'flatten': (
            (f'{q} of all x in the lists in rows that are {p}', f'{left}x for row in rows for x in row if {c}{right}')
            for p, c in conditions
            for q, left, right in (('a list', '[', ']'), ('the sum', 'sum(', ')'))
        ),
    }
    kinds = {'flatten': inputs.ROWS}
    return {name: _variants(kinds.get(name, inputs.XS), found) for name, found in pairs.items()}


def _order_families() -> dict[str, list[Variant]]:
    orders = [
        ('smallest', 'in ascending order', 'sorted({})[:{}]'),
        ('smallest', 'in descending order', 'sorted({})[:{}][::-1]'),
        ('largest', 'in ascending order', 'sorted({})[-{}:]'),
        ('largest', 'in descending order', 'sorted({})[::-1][:{}]'),
    ]
    reductions = [('{}', 'a list'), ('sum({})', 'the sum'), ('max({})', 'the largest element'), ('{}[0]', 'the first')]
    steps = [
        *((f'multiplying by {k} and adding x', f'total * {k} + x') for k in (2, 3, 5)),
        *((f'adding {k} times x', f'total + {k} * x') for k in (2, 3, 4)),
        *((f'adding x and taking the remainder by {k}', f'(total + x) % {k}') for k in (3, 5, 7, 9)),
        *((f'adding x and then {k}', f'total + x + {k}') for k in (1, 2, 3)),
        ('subtracting x', 'total - x'),
        ('taking the absolute difference to x', 'abs(total - x)'),
        ('adding the square of x', 'total + x * x'),
        ('adding x if x is larger and subtracting x otherwise', 'total + x if x > total else total - x'),
    ]
    return {
        'order': _variants(
            inputs.LONG_XS,
            (
                (f'the {k} {word} {noun} of xs {order}', code.format(source, k))
                for k in range(2, 6)
                for word, order, code in orders
                for noun, source in (('elements', 'xs'), ('distinct elements', 'set(xs)'))
            ),
        ),
        'rearrange': _variants(inputs.LONG_XS, parts.rearrangements()),
        'pieces': _variants(
            inputs.LONG_XS,
            (
                (f'a list with {word} of each {piece}', f'[{code.format(f"xs[i:i + {k}]")} for i in range({indices})]')
                for k in (2, 3, 4)
                for code, word in reductions
                for piece, indices in (
                    (f'piece when xs is cut into pieces of {k} elements', f'0, len(xs), {k}'),
                    (f'window of {k} neighbouring elements of xs', f'len(xs) - {k - 1}'),
                )
            ),
        ),
        'running': [
            Variant(
                inputs.XS,
                f'the result of starting with {start} and, for each x in xs, {words}',
                f'total = {start}\nfor x in xs:\n    total = {code}\nreturn total',
            )
            for start in (0, 1, 4, 10)
            for words, code in steps
        ],
    }


def _pair_families() -> dict[str, list[Variant]]:
    values = parts.pair_values()
    reductions = [('a list', '[', ']'), ('the sum', 'sum(', ')')]
    sources = {
        'neighbours': (inputs.XS, 'for all neighbours a, b in xs', 'zip(xs, xs[1:])'),
        'two_lists': (inputs.XS_AND_YS, 'for all a, b at equal positions of xs and ys', 'zip(xs, ys)'),
    }
    families = {
        name: _variants(
            kind,
            (
                (f'{q} of {p} {where}', f'{left}{v} for a, b in {source}{right}')
                for p, v in values
                for q, left, right in reductions
            ),
        )
        for name, (kind, where, source) in sources.items()
    }
    families['two_integers'] = _variants(
        inputs.A_AND_B,
        (
            (f'{p} if a is {q}, otherwise {r}', f'{v} if {c} else {w}')
            for p, v in values
            for q, c in [*parts.conditions('a'), ('greater than b', 'a > b')]
            for r, w in values[::4]
            if v != w
        ),
    )
    return families


def _integer_families() -> dict[str, list[Variant]]:
    values, conditions = parts.values('n'), parts.conditions('n')
    reductions = [('a list', '[', ']'), ('the sum', 'sum(', ')'), ('the sum of the squares', 'sum(i * i ', ')')]
    return {
        'branch': _variants(
            inputs.INTEGER,
            (
                (f'{p} if n is {q}, otherwise {r}', f'{v} if {c} else {w}')
                for p, v in values
                for q, c in conditions
                for r, w in values[::4]
                if v != w
            ),
        ),
        'digits': _variants(
            inputs.NATURAL,
            (
                (f'{q} of all decimal digits x of n that are {p}', f'{code} for x in map(int, str(n)) if {c})')
                for p, c in parts.conditions('x')
                for q, code in (('the sum', 'sum(x'), ('the number', 'sum(1'))
                if 'negative' not in p
            ),
        ),
        'range': _variants(
            inputs.BOUND,
            (
                (
                    f'{q} of all i from 1 to n that are {p}',
                    f'{left if left.endswith(" ") else left + "i "}for i in range(1, n + 1) if {c}{right}',
                )
                for p, c in parts.conditions('i')
                for q, left, right in reductions
            ),
        ),
        'count_steps': [
            Variant(
                inputs.NATURAL,
                f'how often n must be {words} until it is {until}',
                f'steps = 0\nwhile n {sign} {bound}:\n    n {code}\n    steps += 1\nreturn steps',
            )
            for words, code in [(f'divided by {k} and rounded down', f'//= {k}') for k in range(2, 11)]
            for until, sign, bound in [
                *((f'less than {b}', '>=', b) for b in (1, 4, 7)),
                *((f'at most {b}', '>', b) for b in (1, 5, 9)),
            ]
        ],
    }


def _text_families() -> dict[str, list[Variant]]:
    characters, words, values = parts.character_conditions(), parts.word_conditions(), parts.word_values()
    separators = [('spaces', "' '"), ("'-'", "'-'"), ("','", "','"), ('nothing', "''")]
    return {
        'count_characters': _variants(
            inputs.TEXT,
            ((f'the number of characters of s that are {p}', f'sum(1 for c in s if {q})') for p, q in characters),
        ),
        'filter_characters': _variants(
            inputs.TEXT,
            (
                (f'the characters of s that are {p}, {order}', f"''.join(c for c in {source} if {q})")
                for p, q in characters
                for order, source in (('in their order', 's'), ('in reverse order', 's[::-1]'))
            ),
        ),
        'edit_text': _variants(inputs.TEXT, parts.text_edits()),
        'filter_words': _variants(
            inputs.SENTENCE,
            ((f'a list of the words w of s that {p}', f'[w for w in s.split() if {q}]') for p, q in words),
        ),
        'map_words': _variants(
            inputs.SENTENCE,
            (
                (f'a list of {p} for all words w of s that {q}', f'[{v} for w in s.split() if {c}]')
                for p, v in [*values, ('the length of w', 'len(w)')]
                for q, c in words
            ),
        ),
        'join_words': _variants(
            inputs.SENTENCE,
            (
                (f'a text of {p} for each word w of s, joined by {q}', f'{c}.join({v} for w in s.split())')
                for p, v in values
                for q, c in separators
            ),
        ),
    }


def _parsing_families() -> dict[str, list[Variant]]:
    reductions = [('a list', '[x ', ']'), ('the sum', 'sum(x ', ')'), ('the number', 'sum(1 ', ')')]
    return {
        'parse_numbers': [
            variant
            for separator in ',;/|'
            for variant in _variants(
                inputs.numbers_between(separator),
                (
                    (
                        f'{q} of all integers x in s that are {p}, where s holds integers separated by {separator!r}',
                        f'{left}for x in map(int, s.split({separator!r})) if {c}{right}',
                    )
                    for p, c in parts.conditions('x')
                    for q, left, right in reductions
                ),
            )
        ],
        'parse_items': [
            variant
            for separator in ',;/|'
            for sign in '=:'
            for variant in _variants(
                inputs.items_between(separator, sign),
                (
                    (
                        f'{words}, where s holds items like {f"a{sign}1{separator}b{sign}2"!r}',
                        code.format(f'for p in s.split({separator!r})', repr(sign)),
                    )
                    for words, code in (
                        ('a list of the letters in s', '[p.split({1})[0] {0}]'),
                        ('a list of the integers in s', '[int(p.split({1})[1]) {0}]'),
                        ('the sum of the integers in s', 'sum(int(p.split({1})[1]) {0})'),
                        ('the largest integer in s', 'max(int(p.split({1})[1]) {0})'),
                        ('a dict from the letters in s to their texts', 'dict(p.split({1}) {0})'),
                        ('the letters in s as one text', "''.join(p.split({1})[0] {0})"),
                    )
                ),
            )
        ],
    }


def _dict_families() -> dict[str, list[Variant]]:
    return {
        'filter_dict': _variants(
            inputs.DICT,
            (
                (f'{words} of d whose values v are {p}', code.format(c))
                for p, c in parts.conditions('v')
                for words, code in (
                    ('a sorted list of the keys', 'sorted(k for k, v in d.items() if {})'),
                    ('a dict of the items', '{{k: v for k, v in d.items() if {}}}'),
                )
            ),
        ),
        'map_dict': _variants(
            inputs.DICT,
            (
                (f'a dict from each key of d to {p}, where v is its value', f'{{k: {v} for k, v in d.items()}}')
                for p, v in parts.values('v')
            ),
        ),
    }


VISIBLE_TESTS, HIDDEN_TESTS = 6, 12
MOST_PROBLEMS = 120  # of a family
HELD_OUT_FAMILIES = ('filter_map_sum', 'filter_count', 'flatten', 'first_match', 'join_words')
_POOL = 80  # arguments from which the tests of a problem are chosen, for visible and for hidden ones
_ENTRY_POINT = 'f'
_Behaviour = tuple[InputKind, tuple[str, ...]]  # results for all arguments that are drawn of a kind


def list_problems(seed: int = 0) -> list[JsonObject]:
    """Every problem, a function of the seed, which chooses the problems of large families and all tests.

    Each is a dict of family, question, entry_point, solution, tests and hidden_tests. No two behave alike.
    """
    return [json.loads(problem) for problem in _list_texts(seed)]


def is_held_out_family(name: str) -> bool:
    return name in HELD_OUT_FAMILIES


def is_held_out(question: str, held_out_fraction: float) -> bool:
    """Whether a problem of the other families is held out; this depends on its text alone."""
    return hash_fraction(question) < held_out_fraction


@functools.lru_cache(maxsize=2)
def _list_texts(seed: int) -> tuple[str, ...]:
    """The problems as JSON: a caller that changes a problem changes its own copy."""
    known: set[_Behaviour] = set()  # of all families
    families = sorted(list_families().items())
    return tuple(
        json.dumps(problem) for name, variants in families for problem in _list_family(name, variants, seed, known)
    )


def _list_family(name: str, variants: Sequence[Variant], seed: int, known: set[_Behaviour]) -> Iterator[JsonObject]:
    chosen = random.Random(f'{name} {seed}').sample(variants, min(len(variants), MOST_PROBLEMS))
    by_kind: dict[InputKind, list[Variant]] = {}
    for variant in chosen:
        by_kind.setdefault(variant.inputs, []).append(variant)
    for kind, of_kind in by_kind.items():  # a problem with inputs of another kind fails the tests of this one
        yield from _choose_tests(name, kind, of_kind, seed, known)


def _choose_tests(
    name: str, kind: InputKind, variants: Sequence[Variant], seed: int, known: set[_Behaviour]
) -> Iterator[JsonObject]:
    """Yields the problems with inputs of one kind that VISIBLE_TESTS tests can tell apart from the others."""
    texts = {repr(one) for one in kind.edges}
    visible = [one for one in draw_inputs(kind, _POOL, str(seed), wide=False) if repr(one) not in texts]
    texts |= {repr(one) for one in visible}
    wide = [one for one in draw_inputs(kind, _POOL, str(seed), wide=True) if repr(one) not in texts]
    arguments = [*visible, *kind.edges, *wide]
    found: dict[tuple[str, ...], Variant] = {}
    for variant in variants:
        function = load_function(variant.solution)
        results = tuple(repr(function(*one)) for one in arguments)
        if (kind, results) not in known:
            known.add((kind, results))
            found[results] = variant
    identities = [tuple(repr(one[i]) for one in arguments) for i in range(len(arguments[0]))]
    codes = _as_codes([*found, *identities])[:, : len(visible)]
    edges = list(range(len(visible), len(visible) + len(kind.edges)))
    others = list(range(len(visible) + len(kind.edges), len(arguments)))
    for index, variant in enumerate(found.values()):
        rng = random.Random(f'{variant.question} {seed}')
        if shown := _pick_visible(codes[index], np.delete(codes, index, axis=0), rng):
            hidden = [*edges, *rng.sample(others, min(len(others), HIDDEN_TESTS - len(edges)))]
            function = load_function(variant.solution)
            tests, hidden_tests = ([[arguments[i], function(*arguments[i])] for i in part] for part in (shown, hidden))
            yield {
                'family': name,
                'question': variant.question,
                'entry_point': _ENTRY_POINT,
                'solution': variant.solution,
                'tests': tests,
                'hidden_tests': hidden_tests,
            }


def _as_codes(rows: Sequence[tuple[str, ...]]) -> np.ndarray:
    """int64 [rows, columns]: equal texts have equal numbers."""
    numbers: dict[str, int] = {}
    return np.array([[numbers.setdefault(text, len(numbers)) for text in row] for row in rows])


def _pick_visible(own: np.ndarray, others: np.ndarray, rng: random.Random) -> list[int]:
    """Indices of inputs on which each row of `others`, and each constant, differs from `own` at least once.

    The next input is always the one that tells most rows apart; `rng` breaks ties. [] if that does not suffice.
    """
    order = list(range(len(own)))
    rng.shuffle(order)
    equal = others == own  # [others, inputs]
    picked: list[int] = []
    while len(picked) < VISIBLE_TESTS:
        shown = {own[i] for i in picked}
        left = equal.sum(axis=0) + (own == own[picked[0]] if len(shown) == 1 else 0)
        picked.append(min((i for i in order if i not in picked), key=lambda i: (left[i], own[i] in shown)))
        equal = equal[equal[:, picked[-1]]]
    return [] if len(equal) or len({own[i] for i in picked}) == 1 else picked


def load_function(source: str) -> Callable[..., object]:
    """The function that a reference solution defines. Only for sources of this package: nothing isolates it."""
    namespace: dict[str, object] = {}
    exec(source, namespace)
    return cast(Callable[..., object], namespace[_ENTRY_POINT])
