"""Every hostile scorer through a ProcessVerifier: the label, the answers after it, and what is left at the end."""

from __future__ import annotations

import asyncio
import collections
import time

import numpy as np
import pytest

from areal_jax.tasks.scoring.verifier import ProcessVerifier, TaskScoring
from areal_jax.types import Prompt, Verdict
from areal_jax.workers.descendants import list_marked
from areal_jax.workers.worker_process import WorkerProcess
from tests.tasks.fake_clock import FakeClock
from tests.tasks.hostile_scorers import HOSTILE_SCORERS
from tests.tasks.process_table import all_end

DEADLINE_S = 60.0  # where it is not waited for
AFTER = (0.125, 0.625, 0.375)  # rewards of the well-behaved answers that follow


def run_hostile(name, tmp_path, deadline_s):
    """(verdict on the hostile answer, verdicts on those after it, attempts by label); asserts that nothing is left."""
    started = []

    def start_worker(scorer, memory_mb):
        started.append(WorkerProcess(scorer, memory_mb))
        return started[-1]

    judge = ProcessVerifier(
        FakeClock(), {'': TaskScoring(f'tests.tasks.hostile_scorers:{name}')}, lambda tokens: '', workers=1,
        deadline_s=deadline_s, attempts=1, memory_mb=256, start_worker=start_worker,
    )  # fmt: skip

    async def score(**problem):
        return await judge.verify(Prompt(0, np.zeros(1, np.int32), 'hostile', problem), np.zeros(0, int), 'stop')

    async def score_all():
        return await score(pids=str(tmp_path / 'pids')), [await score(reward=reward) for reward in AFTER]

    judge.start()
    try:
        first, after = asyncio.run(score_all())
    finally:
        began = time.monotonic()
        judge.close()
    assert time.monotonic() - began < 30  # far above the bound of 5 s: the machine may be busy
    assert [pid for worker in started for pid in list_marked(worker.mark)] == []
    pids = (tmp_path / 'pids').read_text().split() if (tmp_path / 'pids').exists() else []
    assert all_end([int(pid) for pid in pids], within_s=0.0)
    return first, after, judge.attempts_by_label


def check(name, tmp_path, deadline_s):
    expected = HOSTILE_SCORERS[name]
    first, after, counts = run_hostile(name, tmp_path, deadline_s)
    assert first == Verdict(expected.reward, attempts=1, label=expected.label)
    assert after == [Verdict(reward) for reward in AFTER]
    labels = [expected.label, 'ok', 'ok', 'ok']
    assert counts == collections.Counter(labels)


@pytest.mark.parametrize('name', [name for name, expected in HOSTILE_SCORERS.items() if not expected.slow])
def test_hostile_scorer_costs_its_own_answer_at_most(name, tmp_path):
    check(name, tmp_path, DEADLINE_S)


@pytest.mark.slow
@pytest.mark.parametrize('name', [name for name, expected in HOSTILE_SCORERS.items() if expected.slow])
def test_slow_hostile_scorer_costs_its_own_answer_at_most(name, tmp_path):
    check(name, tmp_path, 5.0 if HOSTILE_SCORERS[name].label == 'timeout' else DEADLINE_S)


def test_there_are_enough_hostile_scorers():
    assert len(HOSTILE_SCORERS) >= 60
    assert {expected.label for expected in HOSTILE_SCORERS.values()} == {'ok', 'error', 'timeout', 'crash'}
