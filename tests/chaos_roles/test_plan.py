"""The deck of a pass deals every cell once, the kinds first, and gives back what was missed."""

import collections
import random

import pytest

from tests.chaos_roles.plan import CELLS, KINDS, PHASES, PROCESSES, RUNS, Deck, count_cells, find_missing, order_cells


def deal(deck):
    runs = []
    while deck:
        runs.append(deck.draw())
    return runs


@pytest.mark.parametrize('seed', range(5))
def test_a_pass_meets_each_cell_once_in_its_runs(seed):
    runs = deal(Deck(seed))
    assert len(runs) == RUNS
    assert collections.Counter(strike.cell for run in runs for strike in run) == collections.Counter(CELLS)
    for run in runs:
        phases = [PHASES.index(strike.cell.phase) for strike in run]
        assert phases == sorted(set(phases))  # a run comes to its phases in this order, and strikes differ in theirs
        assert all(strike.process in PROCESSES[strike.cell.role] for strike in run)


@pytest.mark.parametrize('seed', range(5))
def test_three_runs_meet_every_kind(seed):
    met = [strike.cell for run in deal(Deck(seed))[:3] for strike in run]
    assert len(met) == 6  # there are five phases
    assert find_missing(met) == []


def test_a_seed_is_a_pass():
    assert deal(Deck(3)) == deal(Deck(3)) != deal(Deck(4))


def test_a_missed_cell_comes_again_but_not_for_ever():
    deck = Deck(0)
    missed = deck.draw()[0].cell
    tries = 1
    deck.give_back(missed)
    for _ in range(2 * RUNS):
        for strike in deck.draw() if deck else ():
            if strike.cell == missed:
                tries += 1
                deck.give_back(missed)
    assert tries == 3
    assert not deck


def test_what_was_not_met_is_named():
    assert find_missing([]) == list(KINDS)
    first = order_cells(random.Random(0))[0]
    assert set(find_missing([first])) == set(KINDS) - set(first.kinds)
    assert count_cells([first, first])[' '.join(first.kinds)] == 2
    assert sum(count_cells([first]).values()) == 1
