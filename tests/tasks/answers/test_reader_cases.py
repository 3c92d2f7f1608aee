"""Every sort of case of reader_cases.py, through a file: its line is read, and an answer is scored."""

import json

import pytest

from areal_jax.tasks import jsonl
from areal_jax.tasks.answers import gold_answers, mathematics
from areal_jax.tasks.answers.gold_answers import Fault
from areal_jax.tasks.scoring.score_call import score_answer
from areal_jax.tasks.task import TaskError
from tests.tasks.answers.reader_cases import SORTS, Case, Verdict


def judge(case: Case, path) -> Verdict | str:
    """What the loader and the scorer make of a case."""
    kind, gold, answer, _ = case
    value = gold.decode() if isinstance(gold, bytes) else json.dumps(gold)
    path.write_text(f'{{"question": "q", "answer": {value}}}\n')
    try:
        [problem] = jsonl.read_problems(path, kind)
    except TaskError as error:
        return 'refused' if str(error).startswith(f'{path}:1: ') else str(error)
    score = score_answer(jsonl.KINDS[kind].score, problem, answer, 'stop')
    return 'unparsed' if score.label == 'unparsed' else int(score)


def find_fault_here(golds):
    """What gold_answers.find_fault tells, without a process."""
    asked = (gold for gold in golds if mathematics.read_form(gold).kind == 'expression')
    return next((Fault(gold, reason) for gold in asked if (reason := mathematics.find_gold_fault(gold))), None)


@pytest.mark.parametrize('sort', SORTS)
def test_every_case_has_its_verdict(sort, tmp_path, monkeypatch):
    monkeypatch.setattr(gold_answers, 'find_fault', find_fault_here)
    cases = SORTS[sort]
    assert len(cases) >= 20
    found = [judge(case, tmp_path / 'rows.jsonl') for case in cases]
    wrong = [(*case, verdict) for case, verdict in zip(cases, found, strict=True) if verdict != case[3]]
    assert wrong == []
