"""Problems of the task `code`: families of small Python functions with reference solutions and tests.

A test is [arguments, result]; the reference solutions computed the results. The visible tests of a problem tell its
solution apart from a constant, from each of its arguments, and from the solution of every other problem of its family.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np

from areal_jax.files import JsonObject
from areal_jax.tasks.code.family_table import Variant, list_families
from areal_jax.tasks.code.function_inputs import InputKind, draw_inputs
from areal_jax.tasks.task import hash_fraction

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
    """Whether all problems of a family are kept from training."""
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
