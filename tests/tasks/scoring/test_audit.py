"""The second comparison: which answers it takes, what it keeps, and that it changes no reward."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from areal_jax.tasks.scoring import verifier as audit_module
from areal_jax.tasks.scoring.verifier import Audit, ProcessVerifier, TaskScoring
from areal_jax.types import Prompt, Verdict
from tests.tasks.fake_clock import FakeClock


def make_prompt(draw: int = 0) -> Prompt:
    return Prompt(draw, np.zeros(1, np.int32), 'jsonl', {'question': 'q', 'answer': '5', 'do': 'length'})


def compare(gold: str, text: str) -> bool | None:
    return {'same': True, 'other': False}.get(text)


def lines(workdir):
    path = workdir / audit_module.FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_disagreements_are_kept_with_their_text_and_nothing_else_is(tmp_path):
    audit = Audit(tmp_path, 1.0, compare)
    outcomes = [audit.check(make_prompt(3), text, reward) for text in ('same', 'other', 'odd') for reward in (1.0, 0.0)]
    assert outcomes == ['agrees', 'disagrees', 'disagrees', 'agrees', 'undecided', 'undecided']
    assert lines(tmp_path) == [
        {'draw': 3, 'question': 'q', 'gold': '5', 'reward': reward, 'text': text}
        for text, reward in (('same', 0.0), ('other', 1.0))
    ]


def test_a_share_of_the_answers_by_draw_and_text_alone(tmp_path):
    checked = [
        [bool(Audit(tmp_path, fraction, compare).check(make_prompt(draw), 'same', 1.0)) for draw in range(2000)]
        for fraction in (0.1, 0.1, 0.2, 0.0, 1.0)
    ]
    assert checked[0] == checked[1]
    assert 150 < sum(checked[0]) < 250  # 2000 * .1 = 200, standard deviation 13
    assert all(second for first, second in zip(checked[0], checked[2], strict=True) if first)
    assert (sum(checked[3]), sum(checked[4])) == (0, 2000)


def test_a_resumed_run_writes_no_line_twice_and_the_file_is_bounded(tmp_path, monkeypatch):
    Audit(tmp_path, 1.0, compare).check(make_prompt(1), 'other', 1.0)
    again = Audit(tmp_path, 1.0, compare)
    assert again.check(make_prompt(1), 'other', 1.0) == 'disagrees'
    assert len(lines(tmp_path)) == 1
    size = (tmp_path / audit_module.FILE).stat().st_size
    monkeypatch.setattr(audit_module, 'MOST_BYTES', 2 * size)
    assert [again.check(make_prompt(draw), 'other', 1.0) for draw in (2, 3)] == ['disagrees', 'disagrees']
    assert [line['draw'] for line in lines(tmp_path)] == [1, 2]


@pytest.mark.parametrize(('finish_reason', 'audit'), [('stop', 'disagrees'), ('length', '')])
def test_the_verifier_compares_answers_that_ended_and_changes_no_reward(tmp_path, finish_reason, audit):
    judge = ProcessVerifier(
        FakeClock(), {'': TaskScoring('tests.tasks.bad_scorer:score', audit=Audit(tmp_path, 1.0, compare))},
        lambda tokens: 'other', workers=1, deadline_s=30.0, attempts=1, memory_mb=2048,
    )  # fmt: skip
    judge.start()
    try:
        verdict = asyncio.run(judge.verify(make_prompt(), np.zeros(0, np.int32), finish_reason))
    finally:
        judge.close()
    assert verdict == Verdict(5.0, audit=audit)  # the length of 'other'
