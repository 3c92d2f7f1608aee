"""The evaluator around the toy engine: every answer, and so every score, is known (tests/toys.py)."""

import numpy as np
import pytest

from areal_jax.config.generation import RolloutSection
from areal_jax.control.clocks.virtual import VirtualClock
from areal_jax.control.event_writer import EventLog
from areal_jax.control.groups import UnverifiedError
from areal_jax.control.supervisor import Supervisor
from areal_jax.evaluation.evaluator import Evaluator
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.rollout.pool import Pool
from areal_jax.types import SamplingParams, Verdict, Work
from tests.toys import LONGEST, PRICES, STOP, ToyBackend, length, toy_prompt


class LengthVerifier:
    """1 when the answer has more than two tokens."""

    async def verify(self, prompt, answer_tokens, finish_reason, describe_episode=None):
        return Verdict(float(len(answer_tokens) > 2))


def build(slots=4, verifier=None, max_failed=32):
    log = EventLog()
    clock = VirtualClock({'engine/0': 1, 'publish/0': 1, 'script': 1}, log, PRICES | {'script': 1.0})
    supervisor = Supervisor(clock)
    engine = LocalEngine(
        0, ToyBackend(slots), clock, log, receive=None, version=0, params=(0, 0),
        rollout=RolloutSection(decode_steps=1),
    )  # fmt: skip
    pool = Pool([engine], clock, log, supervisor)
    evaluator = Evaluator(
        pool=pool, verifier=verifier or LengthVerifier(), clock=clock, supervisor=supervisor, log=log,
        problems=[toy_prompt(draw) for draw in range(5)],
        sampling=SamplingParams(LONGEST, 1.0, 0, 1.0, (STOP,)), samples=3, seed=0,
        decode=lambda tokens: ' '.join(map(str, tokens)), final_answer=lambda text: text.split()[-1],
        max_failed=max_failed,
    )  # fmt: skip
    return evaluator, engine, clock, supervisor


def evaluate(stop_after_s=None, **fields):
    evaluator, engine, clock, supervisor = build(**fields)
    stop = clock.event('stop')

    async def program():
        engine.start(supervisor)
        if stop_after_s is not None:

            async def stop_later():
                await clock.run('script', lambda: None, Work('script', stop_after_s))
                stop.set()

            supervisor.start('stop', stop_later())
        scores = await evaluator.evaluate('before', stop)
        return scores, engine.open_requests()

    return *clock.execute(supervisor.run(program())), clock.log


def test_each_problem_is_answered_greedily_once_and_sampled():
    scores, open_requests, log = evaluate()
    # the toy's answer of (draw, sample) has length(draw, sample) tokens; column 0 is greedy, 1..3 are sampled
    assert scores.greedy == tuple(float(length(draw, 0) > 2) for draw in range(5))
    assert scores.sampled == tuple(tuple(float(length(d, s) > 2) for s in (1, 2, 3)) for d in range(5))
    assert open_requests == []
    assert [e['mode'] for e in log.events if e['kind'] == 'evaluate'] == ['start', 'done']


def test_the_most_frequent_answer_is_counted_by_what_answers_come_to():
    # every toy answer ends with the token 0
    scores, _, _ = evaluate()
    assert scores.most_frequent_answer_share == 1.0


def test_a_stop_ends_the_evaluation_and_leaves_no_request_behind():
    scores, _, log = evaluate(stop_after_s=0.035)
    assert scores is None
    assert log.events[-1]['kind'] != 'decode'


@pytest.mark.parametrize('most_open', [1, 3, 7, 1000])
def test_answers_under_way_are_bounded_and_the_bound_changes_none(most_open):
    found, most = answer_all(most_open)
    assert found == answer_all(None)[0]
    assert sorted(found) == [(row, column) for row in range(5) for column in range(4)]
    assert most == min(20, most_open)


def answer_all(most_open):
    """({(row, column): (text, reward)}, most requests open at once) of the evaluator in `evaluate`."""
    found, most = {}, 0
    evaluator, engine, clock, supervisor = build()

    def deliver(row, column, answer):
        assert answer.final == answer.text.split()[-1]
        found[row, column] = answer.text, answer.verdict.reward

    generate = engine.generate

    def watch(request):
        nonlocal most
        generation = generate(request)
        most = max(most, len(engine.open_requests()))
        return generation

    engine.generate = watch

    async def program():
        engine.start(supervisor)
        return await evaluator.answer_all('alone', clock.event('stop'), deliver, most_open)

    assert clock.execute(supervisor.run(program()))
    return found, most


def test_the_number_of_slots_changes_no_score():
    np.testing.assert_array_equal(evaluate(slots=1)[0].sampled, evaluate(slots=9)[0].sampled)


class FailingVerifier:
    """Fails all answers but every `every`-th; counts them."""

    def __init__(self, every):
        self.every, self.asked = every, 0

    async def verify(self, prompt, answer_tokens, finish_reason, describe_episode=None):
        self.asked += 1
        return Verdict(1.0) if self.asked % self.every == 0 else Verdict(0.0, attempts=2, label='timeout')


def test_a_scorer_that_always_fails_ends_the_evaluation():
    verifier = FailingVerifier(every=1000)
    message = r"^6 answers of the evaluation 'before' in a row \(task\.max_failed_groups\).* ended in: timeout\."
    with pytest.raises(UnverifiedError, match=message):
        evaluate(verifier=verifier, max_failed=6)
    assert 6 <= verifier.asked < 20  # of 5 problems x 4 answers


def test_a_verified_answer_starts_the_count_of_failures_again():
    verifier = FailingVerifier(every=6)  # five in a row fail, 17 in all
    scores, _, log = evaluate(verifier=verifier, max_failed=6)
    assert sum(scores.greedy) + np.sum(scores.sampled) == 3  # 20 // 6; a failed answer counts as 0
    assert log.events[-1]['unverified'] == ['timeout'] * 17
