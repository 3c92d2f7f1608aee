from __future__ import annotations

import ast
import asyncio
import os
import pathlib
import signal
from typing import Any

import numpy as np
import pytest

from areal_jax.control.clocks.loop import CallDeadlineError
from areal_jax.control.clocks.real import RealClock
from areal_jax.control.clocks.virtual import VirtualClock
from areal_jax.control.event_writer import EventLog
from areal_jax.tasks.scoring import verifier
from areal_jax.tasks.scoring.verifier import InlineVerifier, ProcessVerifier, TaskScoring, VerifierError
from areal_jax.tasks.task import TaskError
from areal_jax.types import Prompt, Verdict
from areal_jax.workers import worker_process as process
from areal_jax.workers.worker_process import WorkerProcess
from tests.tasks import bad_scorer
from tests.tasks.fake_clock import FakeClock
from tests.tasks.process_table import all_end, is_alive, read_pids

SCORER = 'tests.tasks.bad_scorer:score'
SCORINGS = {'': TaskScoring(SCORER)}


def decode(tokens: np.ndarray) -> str:
    return ''.join(map(chr, tokens))


def encode(text: str) -> np.ndarray:
    return np.array([ord(character) for character in text], np.int32)


def make_prompt(draw: int = 0, **problem: Any) -> Prompt:
    return Prompt(draw, np.zeros(1, np.int32), 'bad', problem)


def ask(judge: Any, text: str = 'abc', draw: int = 0, **problem: Any) -> Any:
    return judge.verify(make_prompt(draw, **problem), encode(text), 'stop')


@pytest.fixture
def make(request):
    """Started verifiers that are closed when the test ends; `started` has their workers, the last one last."""
    started: list[WorkerProcess] = []

    def start_worker(scorer: str, memory_mb: int) -> WorkerProcess:
        started.append(WorkerProcess(scorer, memory_mb))
        return started[-1]

    def build(clock: Any = None, *, workers: int = 1, deadline_s: float = 30.0, attempts: int = 2) -> ProcessVerifier:
        judge = ProcessVerifier(
            clock or FakeClock(), SCORINGS, decode, workers=workers, deadline_s=deadline_s, attempts=attempts,
            memory_mb=2048, start_worker=start_worker,
        )  # fmt: skip
        request.addfinalizer(judge.close)
        judge.start()
        return judge

    build.started = started
    return build


def test_reward_comes_back_through_the_clocks_reward_lane(make):
    clock = FakeClock()
    judge = make(clock)
    assert asyncio.run(ask(judge, 'abcd', draw=5, do='length')) == Verdict(4.0)
    [(lane, work)] = clock.calls
    assert (lane, work.kind, work.amount, work.detail) == ('reward', 'reward', 1.0, {'draw': 5, 'attempt': 1})
    assert judge.attempts_by_label == {'ok': 1}


def test_text_larger_than_a_pipe_holds(make):
    # a pipe holds 64 KiB
    assert asyncio.run(ask(make(), 'é' * 300_000, do='length')).reward == 300_000


def test_worker_that_does_not_read_holds_nobody_up(make):
    judge = make()
    pid = make.started[0].pid

    async def main():
        os.kill(pid, signal.SIGSTOP)
        job = asyncio.ensure_future(ask(judge, 'é' * 300_000, do='length'))
        await asyncio.sleep(0.1)  # comes back: the event loop turns although the pipe is full
        assert not job.done()
        os.kill(pid, signal.SIGCONT)
        return await job

    assert asyncio.run(main()).reward == 300_000


def test_answers_are_scored_in_order_of_request(make, tmp_path):
    judge, record = make(workers=1), tmp_path / 'record'

    async def main():
        jobs = [ask(judge, str(n), draw=n, do='sleep', seconds=0.02, record=str(record)) for n in range(5)]
        return await asyncio.gather(*jobs)

    assert [verdict.reward for verdict in asyncio.run(main())] == [1.0] * 5
    assert [line.split()[1] for line in record.read_text().splitlines()] == ['0', '1', '2', '3', '4']


def test_two_workers_score_at_once(make, tmp_path):
    judge, record = make(workers=2), tmp_path / 'record'

    async def main():
        await asyncio.gather(*(ask(judge, do='sleep', seconds=0.3, record=str(record)) for _ in range(2)))

    asyncio.run(main())
    assert len({line.split()[0] for line in record.read_text().splitlines()}) == 2


def test_an_answer_that_cannot_be_read_is_scored_once_and_is_no_failure(make):
    judge = make(attempts=3)
    verdict = asyncio.run(ask(judge, do='unparsed'))
    assert verdict == Verdict(0.0, attempts=1, label='unparsed')
    assert not verdict.failed
    assert judge.attempts_by_label == {'unparsed': 1}


def test_mathematics_that_is_never_done_ends_at_the_deadline_and_its_worker_is_replaced(request):
    started = []
    start_worker = lambda *scorer: started.append(WorkerProcess(*scorer)) or started[-1]
    judge = ProcessVerifier(
        FakeClock(), {'': TaskScoring('areal_jax.tasks.answers.mathematics:score')},
        lambda tokens: ANSWERS[tokens[0]], workers=1, deadline_s=6.0, attempts=1, memory_mb=2048,
        start_worker=start_worker,
    )  # fmt: skip
    request.addfinalizer(judge.close)
    judge.start()

    async def main():
        ask = lambda n: judge.verify(make_prompt(answer='5'), np.array([n]), 'stop')
        return [await ask(n) for n in range(4)]

    hung, right, wrong, unread = asyncio.run(main())
    assert hung == Verdict(0.0, attempts=1, label='timeout')
    assert hung.failed
    assert [right, wrong, unread] == [Verdict(1.0), Verdict(0.0), Verdict(0.0, label='unparsed')]
    assert [worker.is_killed for worker in started] == [True, False]


ANSWERS = (r'\boxed{9^{9^{9^9}}}', r'\boxed{\frac{10}{2}}', r'\boxed{6}', 'I do not know.')


def test_hanging_worker_is_killed_with_its_children_and_replaced(make, tmp_path):
    judge, pids = make(deadline_s=0.4, attempts=2), tmp_path / 'pids'

    async def main():
        failed = await ask(judge, do='hang', pids=str(pids))
        return failed, await ask(judge, do='length')

    failed, after = asyncio.run(main())
    assert failed == Verdict(0.0, attempts=2, label='timeout')
    assert failed.failed
    assert after == Verdict(3.0)
    assert judge.attempts_by_label == {'ok': 1, 'timeout': 2}
    started = read_pids(pids, 4)  # worker and child of both attempts
    assert len(set(started)) == 4
    assert all_end(started)


def test_second_attempt_may_succeed(make, tmp_path):
    judge = make(deadline_s=0.4, attempts=2)
    verdict = asyncio.run(ask(judge, do='hang_once', marker=str(tmp_path / 'marker')))
    assert verdict == Verdict(1.0, attempts=2, label='ok')
    assert judge.attempts_by_label == {'ok': 1, 'timeout': 1}


def test_crash_is_seen_at_once_although_a_child_lives_on(make, tmp_path):
    judge, pids = make(deadline_s=30.0, attempts=2), tmp_path / 'pids'
    verdict = asyncio.run(asyncio.wait_for(ask(judge, do='crash', pids=str(pids)), 10))
    assert verdict == Verdict(0.0, attempts=2, label='crash')
    assert judge.attempts_by_label == {'crash': 2}
    assert all_end(read_pids(pids, 4))


def test_worker_that_died_while_idle_costs_an_attempt_and_no_answer(make):
    judge = make()

    async def main():
        pid = make.started[0].pid
        os.kill(pid, signal.SIGKILL)
        assert all_end([pid])
        return await ask(judge, do='length')

    assert asyncio.run(main()) == Verdict(3.0, attempts=2)


def test_scorer_that_raises_is_labelled_and_its_worker_stays(make, tmp_path):
    judge, record = make(), tmp_path / 'record'

    async def main():
        return [await ask(judge, do=do, record=str(record)) for do in ('raise', 'length')]

    # a reward of 0 that is no judgement: not asked again, since it would raise again
    assert asyncio.run(main()) == [Verdict(0.0, attempts=1, label='error'), Verdict(3.0)]
    assert len({line.split()[0] for line in record.read_text().splitlines()}) == 1


@pytest.mark.parametrize('seconds_before_cancel', [0.0, 0.1])
def test_cancelled_answer_leaves_no_reply_for_the_next(make, seconds_before_cancel):
    judge = make()

    async def main():
        first = asyncio.ensure_future(ask(judge, 'a' * 7, do='sleep', seconds=0.3))
        second = asyncio.ensure_future(ask(judge, 'b', do='length'))
        third = asyncio.ensure_future(ask(judge, 'cc', do='length'))
        await asyncio.sleep(seconds_before_cancel)
        first.cancel()
        second.cancel()  # waits for the worker
        with pytest.raises(asyncio.CancelledError):
            await first
        with pytest.raises(asyncio.CancelledError):
            await second
        return await third

    assert asyncio.run(main()) == Verdict(2.0)  # the length of 'cc'


def test_answer_cancelled_in_its_turn_passes_the_worker_on(make):
    judge = make()

    async def main():
        async def cancel_the_next_when_done():
            await ask(judge, do='length')
            second.cancel()  # the worker is its own by now, but it has not run yet

        first = asyncio.ensure_future(cancel_the_next_when_done())
        second = asyncio.ensure_future(ask(judge, do='length'))
        third = asyncio.ensure_future(ask(judge, 'cc', do='length'))
        await first
        with pytest.raises(asyncio.CancelledError):
            await second
        return await third

    assert asyncio.run(asyncio.wait_for(main(), 10)) == Verdict(2.0)


def test_a_surplus_reply_is_a_crash_of_the_worker_and_shifts_no_other(make, tmp_path):
    judge, go, done = make(attempts=2), tmp_path / 'go', tmp_path / 'done'

    async def main():
        first = await ask(judge, do='answer_again', go=str(go), done=str(done))
        go.touch()
        while not done.exists():  # the second reply to the first answer is on its way
            await asyncio.sleep(0.02)
        return [first, *[await ask(judge, 'x' * n, do='length') for n in range(2, 6)]]

    assert asyncio.run(main()) == [Verdict(1.0), Verdict(2.0, attempts=2), *(Verdict(float(n)) for n in range(3, 6))]
    assert judge.attempts_by_label == {'ok': 5, 'crash': 1}


def test_a_limit_below_what_a_worker_needs_names_its_field(tmp_path):
    scorer = tmp_path / 'large.py'  # a small one may fit into what the allocator holds already
    scorer.write_text('TABLE = bytearray(2**24)\n\n\ndef score(problem, text):\n    return 1.0\n')
    judge = ProcessVerifier(
        FakeClock(), {'': TaskScoring(f'{scorer}:score')}, decode, workers=1, deadline_s=1, attempts=1, memory_mb=1
    )
    with pytest.raises(VerifierError, match=r'has ended.*\(task\.verifier_memory_mb=1\)'):
        judge.start()


@pytest.mark.parametrize('text', ['\ud800 and \x00 and \n', 'x' * 10**6])
def test_any_text_reaches_the_scorer_whole(make, text):
    assert asyncio.run(ask(make(), text, do='length')).reward == len(text)


def test_close_kills_everything(make, tmp_path):
    judge, pids = make(workers=2), tmp_path / 'pids'
    workers = [worker.pid for worker in make.started]

    async def main():
        hanging = asyncio.ensure_future(ask(judge, do='hang', pids=str(pids)))
        while not pids.exists() or len(pids.read_text().split()) < 2:
            await asyncio.sleep(0.02)
        assert all(map(is_alive, workers))
        judge.close()
        with pytest.raises(VerifierError, match='was closed'):
            await hanging
        with pytest.raises(VerifierError, match='has no workers'):
            await ask(judge, do='length')

    asyncio.run(main())
    assert all_end([*workers, *read_pids(pids, 2)])


def test_scorer_that_cannot_be_loaded_is_an_error_of_start():
    judge = ProcessVerifier(
        FakeClock(), {'': TaskScoring('no.such:score')}, decode, workers=2, deadline_s=1.0, attempts=1, memory_mb=2048
    )
    with pytest.raises(VerifierError, match=r"scorer 'no\.such:score'.*has ended; its traceback"):
        judge.start()


def test_start_has_a_deadline():
    settings = {'workers': 1, 'deadline_s': 1.0, 'attempts': 1, 'memory_mb': 2048}
    started = []
    start_worker = lambda *scorer: started.append(WorkerProcess(*scorer)) or started[-1]
    judge = ProcessVerifier(
        FakeClock(), SCORINGS, decode, **settings, start_deadline_s=0.001, start_worker=start_worker
    )
    with pytest.raises(VerifierError, match=r'within 0\.001 s: .* was not ready in time'):
        judge.start()
    assert [worker.is_gone() for worker in started] == [True]


def test_settings_without_sense_are_named():
    with pytest.raises(TaskError, match=r'task\.verifier_workers=0'):
        ProcessVerifier(FakeClock(), SCORINGS, decode, workers=0, deadline_s=1.0, attempts=1, memory_mb=2048)


def test_killed_worker_tells_whoever_waits():
    worker = WorkerProcess(SCORER, 0)

    async def main():
        waiting = asyncio.ensure_future(worker.become_ready())
        await asyncio.sleep(0)
        worker.kill()
        with pytest.raises(process.WorkerDiedError, match='was killed'):
            await waiting
        with pytest.raises(process.WorkerDiedError, match='was killed'):
            await worker.ask({})

    asyncio.run(main())
    worker.close()
    assert worker.is_gone()


@pytest.mark.parametrize(
    ('do', 'reason'),
    [
        ('length', ''),
        ('unparsed', ''),
        ('hang', "call 'reward' on lane 'reward' exceeded its deadline of 1.0 s"),
        (
            'crash',
            "the worker has ended; its traceback, if any, is on stderr: the scorer's process ended with exit code 3",
        ),
        ('raise', 'ZeroDivisionError: division by zero'),
    ],
)
def test_the_verdict_on_an_answer_that_failed_has_the_reason(make, do, reason):
    clock = RealClock({'reward': 1}, EventLog(), 60.0)
    judge = make(clock, deadline_s=1.0, attempts=1)
    verdict = clock.execute(ask(judge, do=do))
    assert verdict.failed == bool(reason)
    assert verdict.reason.startswith(reason)
    assert bool(verdict.reason) == bool(reason)


@pytest.mark.parametrize('with_workers', [False, True])
def test_an_answer_may_be_given_as_text(make, with_workers):
    judge = make() if with_workers else InlineVerifier(bad_scorer.score, decode)
    verdict = asyncio.run(judge.verify(make_prompt(do='length'), 'é' * 7, 'stop'))
    assert verdict == asyncio.run(ask(judge, 'é' * 7, do='length')) == Verdict(7.0)


def test_inline_verifier_labels_like_the_other():
    judge = InlineVerifier(bad_scorer.score, decode)

    async def main():
        return [await ask(judge, do='length'), await ask(judge, do='raise')]

    verdicts = asyncio.run(main())
    assert verdicts == [Verdict(3.0), Verdict(0.0, label='error')]
    assert verdicts[1].reason == 'ZeroDivisionError: division by zero'
    assert judge.attempts_by_label == {'ok': 1, 'error': 1}


# Under the clocks of the program.


def test_real_clock_cuts_a_hanging_call_and_goes_on(make, tmp_path):
    log = EventLog()
    clock = RealClock({'reward': 2}, log, stall_timeout_s=30.0)
    judge, pids = make(clock, workers=2, deadline_s=0.4, attempts=1), tmp_path / 'pids'

    async def main():
        jobs = [ask(judge, do='hang', pids=str(pids)), *(ask(judge, 'x' * n, do='length') for n in range(4))]
        return [await job for job in [asyncio.ensure_future(job) for job in jobs]]

    verdicts = clock.execute(main())
    assert verdicts == [Verdict(0.0, label='timeout'), *(Verdict(float(n)) for n in range(4))]
    assert all_end(read_pids(pids, 2))


def test_real_clock_survives_a_cancelled_answer(make):
    clock = RealClock({'reward': 1}, EventLog(), stall_timeout_s=30.0)
    judge = make(clock)

    async def main():
        first = asyncio.ensure_future(ask(judge, 'aaa', do='sleep', seconds=0.3))
        await clock.wait(clock.event('never'), 0.1)
        first.cancel()
        return await ask(judge, 'b', do='length')

    assert clock.execute(main()) == Verdict(1.0)


def test_virtual_clock_prices_answers_whatever_they_take(make):
    log = EventLog()
    clock = VirtualClock({'reward': 1}, log, {'reward': 0.5})
    judge = make(clock)

    async def main():
        slow = asyncio.ensure_future(ask(judge, do='sleep', seconds=0.2))
        fast = asyncio.ensure_future(ask(judge, do='length'))
        return await slow, await fast

    assert clock.execute(main()) == (Verdict(3.0), Verdict(3.0))
    assert clock.now() == 1.0  # 2 answers of .5 s each on a lane of width 1


def test_virtual_clock_ends_the_run_at_a_deadline(make):
    clock = VirtualClock({'reward': 1}, EventLog(), {'reward': 0.5})
    judge = make(clock, deadline_s=0.3)
    with pytest.raises(CallDeadlineError, match="call 'reward'"):
        clock.execute(ask(judge, do='hang'))


def test_the_verifier_waits_through_the_clock_alone():
    tree = ast.parse(pathlib.Path(verifier.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert imported & {'asyncio', 'threading', 'select'} == set()
