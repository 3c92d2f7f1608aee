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
from areal_jax.tasks.code.function_inputs import Arguments, InputKind, draw_inputs
from areal_jax.tasks.task import hash_fraction

VISIBLE_TESTS, HIDDEN_TESTS = 6, 12
MOST_PROBLEMS = 120  # of a family
HELD_OUT_FAMILIES = ('filter_map_sum', 'filter_count', 'flatten', 'first_match', 'join_words')
_POOL = 60  # arguments from which the tests of a problem are chosen, for visible and for hidden ones
_ENTRY_POINT = 'f'
_RAISED = '"raised"'  # in place of the JSON text of a result


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
    known: set[tuple[str, ...]] = set()  # results of the problems so far, which other families may have
    families = sorted(list_families().items())
    return tuple(
        json.dumps(problem) for name, variants in families for problem in _list_family(name, variants, seed, known)
    )


def _list_family(
    name: str, variants: Sequence[Variant], seed: int, known: set[tuple[str, ...]]
) -> Iterator[JsonObject]:
    rng = random.Random(f'{name} {seed}')
    chosen = rng.sample(variants, min(len(variants), MOST_PROBLEMS))
    by_kind: dict[InputKind, list[Variant]] = {}
    for variant in chosen:
        by_kind.setdefault(variant.inputs, []).append(variant)
    for kind, of_kind in by_kind.items():
        yield from _choose_tests(name, kind, of_kind, seed, known)


def _choose_tests(
    name: str, kind: InputKind, variants: Sequence[Variant], seed: int, known: set[tuple[str, ...]]
) -> Iterator[JsonObject]:
    """The problems with inputs of one kind; one whose visible tests cannot tell it apart from others is left out.

    Problems with inputs of other kinds take other parameters or raise for these inputs.
    """
    visible = draw_inputs(kind, _POOL, f'{seed}', wide=False)
    texts = {json.dumps(arguments) for arguments in [*visible, *kind.edges]}
    wide = [one for one in draw_inputs(kind, _POOL, f'{seed}', wide=True) if json.dumps(one) not in texts]
    arguments = [*visible, *kind.edges, *wide]
    place = repr(kind.signature)
    results: dict[tuple[str, ...], Variant] = {}
    for variant in variants:
        function = load_function(variant.solution)
        row = tuple(json.dumps(function(*json.loads(json.dumps(one)))) for one in arguments)
        if (place, *row) not in known:
            results[row] = variant
    known.update((place, *row) for row in results)
    table = np.array(list(results))  # [problems, inputs], JSON texts
    identities = [[json.dumps(one[i]) for one in visible] for i in range(len(visible[0]))]
    for index, (row, variant) in enumerate(results.items()):
        rng = random.Random(f'{variant.question} {seed}')
        others = np.concatenate([np.delete(table, index, axis=0)[:, : len(visible)], np.array(identities)])
        shown = _pick_visible(np.array(row[: len(visible)]), others, rng)
        if shown is None:
            continue
        rest = list(range(len(visible) + len(kind.edges), len(arguments)))
        edges = list(range(len(visible), len(visible) + len(kind.edges)))
        hidden = [*edges, *rng.sample(rest, min(len(rest), HIDDEN_TESTS - len(edges)))]
        test = lambda i, row=row: [arguments[i], json.loads(row[i])]
        yield {
            'family': name,
            'question': variant.question,
            'entry_point': _ENTRY_POINT,
            'solution': variant.solution,
            'tests': [test(i) for i in shown],
            'hidden_tests': [test(i) for i in hidden],
        }


def _pick_visible(own: np.ndarray, others: np.ndarray, rng: random.Random) -> list[int] | None:
    """Indices of inputs on which each row of `others`, and each constant, differs from `own` at least once.

    None where so few inputs cannot do it. Each choice is the best next one; ties are broken by `rng`.
    """
    order = list(range(len(own)))
    rng.shuffle(order)
    equal = others == own  # [others, inputs]
    alive = np.ones(len(others), bool)
    picked: list[int] = []
    while len(picked) < VISIBLE_TESTS:
        shown = {own[i] for i in picked}
        left = {i: int(equal[alive, i].sum()) for i in order if i not in picked}
        best = min(left, key=lambda i: (left[i] + (len(shown) == 1 and own[i] in shown), own[i] in shown))
        picked.append(best)
        alive &= equal[:, best]
    return None if alive.any() or len({own[i] for i in picked}) == 1 else picked


def load_function(source: str) -> Callable[..., object]:
    """The function that a reference solution defines. Only for sources of this package: nothing isolates it."""
    namespace: dict[str, object] = {}
    exec(source, namespace)
    return cast(Callable[..., object], namespace[_ENTRY_POINT])
