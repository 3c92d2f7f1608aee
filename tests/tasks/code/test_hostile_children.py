"""Whatever an answer's process does, its answer has a verdict; a few draws here, many by the command."""

from __future__ import annotations

import json
import random

import pytest

from areal_jax.tasks.code.judge import Judge
from areal_jax.workers.sandbox.confinement import find_abi
from tests.tasks.code import hostile_children

pytestmark = pytest.mark.skipif(find_abi() < 1, reason='this kernel has no Landlock')


@pytest.mark.parametrize('draws', [2, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize('kind', hostile_children.KINDS)
def test_no_behaviour_of_its_process_costs_an_answer_its_verdict(kind, draws):
    rng, judge = random.Random(f'{kind} {draws}'), Judge('landlock')
    try:
        for _ in range(draws):
            code = hostile_children.KINDS[kind](rng)
            assert hostile_children.find_fault(judge, kind, code)[1] == '', code
    finally:
        judge.close()


def test_the_command_ends_with_1_for_a_fault_and_where_a_kind_is_missing(tmp_path, monkeypatch):
    out = tmp_path / 'rows.json'
    assert hostile_children.main(['--minutes=0', f'--json={out}']) == 1
    assert json.loads(out.read_text())['answers'] == 0
    monkeypatch.setattr(
        hostile_children, 'KINDS', {'ends': lambda rng: 'def f(x):\n    return "nobody guesses this"\n'}
    )
    assert hostile_children.main(['--minutes=0.001', f'--json={out}']) == 1
    assert json.loads(out.read_text())['faults'][0]['fault'] == 'a label that no such answer may have'
