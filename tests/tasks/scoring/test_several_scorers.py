"""One worker scores the answers of several sources, each with the scorer of its own."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest

from areal_jax.tasks.scoring.verifier import (
    InlineMixture,
    InlineVerifier,
    ProcessVerifier,
    TaskScoring,
    VerifierError,
)
from areal_jax.tasks.scoring.worker import join_scorers, split_scorers
from areal_jax.types import Verdict
from areal_jax.workers.worker_process import WorkerProcess
from tests.tasks.fake_clock import FakeClock
from tests.tasks.scoring.test_verifier import make_prompt

SCORERS = """
def length(problem, text, finish_reason):
    return len(text)

def turns(problem, text, finish_reason, episode):
    return 100 + episode['turns']

def fails(problem, text, finish_reason):
    raise ValueError(f'it fails at {problem}')
"""


def ask(judge, source, text, **problem):
    prompt = dataclasses.replace(make_prompt(**problem), source=source)
    return asyncio.run(judge.verify(prompt, text, 'stop'))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / 'scorers.py'
    path.write_text(SCORERS)
    return path


def test_each_answer_goes_to_the_scorer_of_its_source_in_one_process(file, request):
    started = []
    start_worker = lambda *scorer: started.append(WorkerProcess(*scorer)) or started[-1]
    scorings = {
        'long': TaskScoring(f'{file}:length', trial={'question': 'q'}),
        'talk': TaskScoring(f'{file}:turns', with_episode=True),
        'bad': TaskScoring(f'{file}:fails'),
    }
    judge = ProcessVerifier(
        FakeClock(), scorings, str, workers=1, deadline_s=30.0, attempts=1, memory_mb=2048, start_worker=start_worker
    )
    request.addfinalizer(judge.close)
    judge.start()
    assert [ask(judge, source, 'abc').reward for source in ('long', 'talk', 'long')] == [3.0, 101.0, 3.0]
    failed = ask(judge, 'bad', 'abc', key=1)
    assert failed == Verdict(0.0, label='error', reason=failed.reason)
    assert 'it fails at' in failed.reason
    assert ask(judge, 'long', 'abcd').reward == 4.0  # in the same process: an error is no crash
    assert len(started) == 1
    assert judge.attempts_by_label == {'ok': 4, 'error': 1}


def test_a_scorer_that_fails_at_the_start_is_named(file, request):
    scorings = {
        'long': TaskScoring(f'{file}:length', trial={'question': 'q'}),
        'bad': TaskScoring(f'{file}:fails', trial={'question': 'first'}),
    }
    judge = ProcessVerifier(FakeClock(), scorings, str, workers=1, deadline_s=30.0, attempts=1, memory_mb=2048)
    request.addfinalizer(judge.close)
    with pytest.raises(VerifierError, match=r'the scorer .*scorers\.py:fails fails at an empty answer to the first'):
        judge.start()


def test_inline_verifiers_are_chosen_by_source():
    verifiers = {
        'long': InlineVerifier(lambda problem, text, finish_reason: len(text), str),
        'none': InlineVerifier(lambda problem, text, finish_reason: -1, str),
    }
    judge = InlineMixture(verifiers)
    judge.launch()
    judge.start()
    assert [ask(judge, source, 'abc').reward for source in ('long', 'none', 'none')] == [3.0, -1.0, -1.0]
    assert judge.attempts_by_label == {'ok': 3}
    judge.close()


def test_an_inline_scorer_that_fails_at_the_start_is_named():
    def fails(problem, text, finish_reason):
        raise ValueError('never')

    judge = InlineMixture(
        {'a': InlineVerifier(lambda *_: 1.0, str), 'b': InlineVerifier(fails, str, {'q': 1}, 'b.py:f')}
    )
    with pytest.raises(VerifierError, match=r'the scorer b\.py:f fails'):
        judge.start()


def test_the_argument_of_a_worker_for_one_task_is_its_scorer():
    assert join_scorers({'': 'a.py:score'}) == 'a.py:score'
    assert split_scorers('a.py:score') == {'': 'a.py:score'}
    several = {'x': 'a.py:score', 'y': '/b c/d,e.py:score'}
    assert split_scorers(join_scorers(several)) == json.loads(join_scorers(several)) == several
