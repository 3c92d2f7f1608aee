from __future__ import annotations

import dataclasses
import json
import math
import pathlib

import pytest

from areal_jax.files import FileError
from areal_jax.telemetry.facts import EvaluationScores, RunFacts, most_frequent_share, read_scores
from tests.telemetry.logs import two_facts


@pytest.mark.parametrize('eta', [0.0, 4.0, math.inf, None])
def test_saved_facts_come_back_equal(tmp_path: pathlib.Path, eta: float):
    facts = two_facts(eta=eta)
    facts.save(tmp_path)
    assert RunFacts.load(tmp_path) == facts
    assert 'Infinity' not in (tmp_path / 'facts.json').read_text()


def test_facts_without_evaluation(tmp_path: pathlib.Path):
    facts = two_facts(evaluation_before=None, evaluation_after=None)
    facts.save(tmp_path)
    assert RunFacts.load(tmp_path) == facts


def test_what_a_run_lists_comes_back(tmp_path: pathlib.Path):
    prolonged = ({'at_update': 60, 'from_steps': 60, 'to_steps': 80},)
    listed = {'idle_fields': ('lora.alpha',), 'warnings': ('One.',), 'prolonged': prolonged}
    facts = two_facts(eta=None, schedule='fixed(2)', finished=False, **listed)
    facts.save(tmp_path)
    assert RunFacts.load(tmp_path) == facts


@pytest.mark.parametrize('text', ['{"config": "x', '[]', '{"config": "x"}'])
def test_facts_that_are_not_whole_are_refused_by_name(tmp_path: pathlib.Path, text: str):
    (tmp_path / 'facts.json').write_text(text)
    with pytest.raises(FileError, match=r'facts\.json .*remove it'):
        RunFacts.load(tmp_path)


def test_unknown_facts_are_refused(tmp_path: pathlib.Path):
    two_facts().save(tmp_path)
    values = json.loads((tmp_path / 'facts.json').read_text()) | {'color': 'red'}
    (tmp_path / 'facts.json').write_text(json.dumps(values))
    with pytest.raises(FileError, match=r"missing or unknown: \['color'\]"):
        RunFacts.load(tmp_path)


def test_most_frequent_answer():
    assert most_frequent_share(['7', '7', '8', '']) == 0.5
    assert most_frequent_share([]) is None


BROKEN_SCORES = {
    'no JSON': ('{"before": ', r'is no JSON'),
    'a list': ('[]', r'holds a list, not an object'),
    'no scores': ('{"before": 3}', r"'before' does not hold the scores of an evaluation"),
    'nothing': ('{"before": null}', r"'before' does not hold the scores"),
    'a key is missing': ('{"after": {"greedy": [1.0]}}', r"'after' does not hold the scores"),
    'text': (
        '{"after": {"greedy": ["a"], "sampled": [], "most_frequent_answer_share": null}}',
        r"'after' does not hold the scores",
    ),
}


@pytest.mark.parametrize('case', BROKEN_SCORES)
def test_scores_that_were_edited_are_named(tmp_path, case):
    content, message = BROKEN_SCORES[case]
    path = tmp_path / 'evaluations.json'
    path.write_text(content)
    with pytest.raises(FileError, match=rf'^{path}:? {message}.*; restore the file as the run wrote it, or remove it$'):
        read_scores(path)


def test_scores_come_back_equal(tmp_path):
    path = tmp_path / 'evaluations.json'
    assert read_scores(path) == {}
    scores = EvaluationScores((1.0, 0.0), ((1.0, 0.5), (0.0, 0.0)), 0.25)
    path.write_text(json.dumps({'before': dataclasses.asdict(scores)}))
    assert read_scores(path) == {'before': scores}
