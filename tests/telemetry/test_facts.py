from __future__ import annotations

import json
import math
import pathlib

import pytest

from areal_jax.telemetry.facts import RunFacts, most_frequent_share
from tests.telemetry.logs import two_facts


@pytest.mark.parametrize('eta', [0.0, 4.0, math.inf])
def test_saved_facts_come_back_equal(tmp_path: pathlib.Path, eta: float):
    facts = two_facts(eta=eta)
    facts.save(tmp_path)
    assert RunFacts.load(tmp_path) == facts
    assert 'Infinity' not in (tmp_path / 'facts.json').read_text()


def test_facts_without_evaluation(tmp_path: pathlib.Path):
    facts = two_facts(evaluation_before=None, evaluation_after=None)
    facts.save(tmp_path)
    assert RunFacts.load(tmp_path) == facts


def test_no_facts_is_an_error_that_names_the_file(tmp_path: pathlib.Path):
    with pytest.raises(FileNotFoundError, match=r'facts\.json does not exist'):
        RunFacts.load(tmp_path)


def test_unknown_facts_are_refused(tmp_path: pathlib.Path):
    two_facts().save(tmp_path)
    values = json.loads((tmp_path / 'facts.json').read_text()) | {'color': 'red'}
    (tmp_path / 'facts.json').write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"unknown fields \['color'\]"):
        RunFacts.load(tmp_path)


def test_most_frequent_answer():
    assert most_frequent_share(['7', '7', '8', '']) == 0.5
    assert most_frequent_share([]) is None
