"""benchmarks/simulation/constants.py: nothing is tuned in silence, and what is not published says so."""

from benchmarks.simulation import constants
from benchmarks.simulation.constants import ALL, CHANGES, Constant, digest, table

FROZEN = '2f3b5d9c70f4'  # of 2026-11-27, before the first run against a row


def test_a_constant_that_was_changed_is_listed_with_both_results():
    newest = CHANGES[-1].digest if CHANGES else FROZEN
    assert digest() == newest, 'a constant, a chip or a model was changed: list it in CHANGES'
    assert all(change.date and change.reason and change.results for change in CHANGES)


def test_every_constant_has_a_source_and_is_in_the_table():
    named = {constant.name for constant in vars(constants).values() if isinstance(constant, Constant)}
    assert {constant.name for constant in ALL} == named
    assert len(ALL) == len(named)
    assert all(constant.source and constant.unit for constant in ALL)
    assert table().count('\n') == len(ALL) + 1


def test_values_lie_in_the_published_range():
    for constant in ALL:
        if constant.low is not None and isinstance(constant.value, int | float):
            assert constant.low <= constant.value <= constant.high, constant.name
