"""The evaluator around the toy engine, alone and beside training: every answer, and so every score, is known
(tests/toys.py)."""

import collections
import itertools
import math

import numpy as np
import pytest

from areal_jax.config.generation import RolloutSection
from areal_jax.control.clocks.virtual import VirtualClock
from areal_jax.control.event_writer import EventLog
from areal_jax.control.groups import UnverifiedError
from areal_jax.control.supervisor import Supervisor
from areal_jax.evaluation.evaluator import Evaluator, PoolAtVersion
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.rollout.pool import Pool
from areal_jax.types import GenerationRequest, SamplingParams, Verdict, Work
from tests.toys import LONGEST, PRICES, STOP, ToyBackend, ToyRun, length, token, toy_prompt


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
        decode=lambda tokens: ' '.join(map(str, tokens)), final_answer=lambda prompt, text: text.split()[-1],
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


PROBLEMS, EVERY = range(100, 108), 2
LOCK_STEP = [{'schedule': 'fixed(1)', 'eta': math.inf}, {'schedule': 'uniform(0,2)', 'eta': math.inf}]


def expected(w):
    """Scores of all problems under the weights w: greedy, and one sampled answer; the toy has no noise."""
    score = lambda draw, sample: float(answer_sum(w, draw, sample) % 2)
    return tuple(score(d, 0) for d in PROBLEMS), tuple((score(d, 1),) for d in PROBLEMS)


def answer_sum(w, draw, sample):
    prompt, count = len(toy_prompt(draw).tokens), length(draw, sample)
    return sum(token(w, draw, sample, prompt + i) for i in range(count - 1)) + STOP


def published_weights(run):
    found = {}
    transfer = run.channel.transfer

    def remember(version, copy):
        found[version] = copy
        return transfer(version, copy)

    run.channel.transfer = remember
    return found


def of_training(events, *left_out):
    """The events without those of an evaluation, and without the numbers that these move."""
    own = ('evaluation_slots', 'evaluation_start', 'evaluation_done', 'evaluation_skip', 'evaluation_prefill')
    own += ('evaluation_decode', 'evaluation_lost')
    kept = [e for e in events if e['kind'] not in own and not str(e.get('work')).startswith(('evaluation', 'pin'))]
    kept = [e for e in kept if e['lane'] != 'reward/evaluation']
    return [{k: v for k, v in e.items() if k not in ('seq', 'run', *left_out)} for e in kept]


@pytest.mark.parametrize('engines', [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize('how', [*LOCK_STEP, {}, {'checkpoint_every': 3}])
def test_training_does_not_notice_it(how, engines):
    """Under the virtual clock, event by event. A pause waits for a dispatch of the evaluation: it only moves times."""
    options = {'steps': 9, 'engines': engines, 'delays': [1, 4, 2], 'fail': [5], **how}
    plain, evaluated = ToyRun(**options).run(), ToyRun(**options, evaluation_every=EVERY).run()
    assert evaluated.rows
    assert evaluated.learner.w == plain.learner.w
    times = ('time', 'started', 'seconds')
    assert of_training(evaluated.log.events, *times) == of_training(plain.log.events, *times)
    if 'checkpoint_every' not in how:  # the only pause follows the last publication
        end = max(e['time'] for e in plain.log.events if e['kind'] == 'publish')
        until = lambda run: [e for e in run.log.events if e['time'] < end]
        assert of_training(until(evaluated)) == of_training(until(plain))


@pytest.mark.parametrize('how', [*LOCK_STEP, {}, {'engines': 2}])
def test_every_answer_is_of_the_version(how):
    run = ToyRun(steps=9, evaluation_every=EVERY, **how)
    weights = published_weights(run)
    run.run()
    skipped = [e['version'] for e in run.log.events if e['kind'] == 'evaluation_skip']
    assert sorted([row.version for row in run.rows] + skipped) == [2, 4, 6, 8]
    for row in run.rows:
        assert (row.scores.greedy, row.scores.sampled) == expected(weights[row.version])
    decoded = {e['version'] for e in run.log.events if e['kind'] == 'evaluation_decode'}
    assert decoded == {row.version for row in run.rows}
    assert run.pool.pinned_versions() == ()


def test_the_last_version_is_left_to_the_evaluation_after_training():
    run = ToyRun(steps=4, evaluation_every=2).run()
    assert [row.version for row in run.rows] == [2]


def test_one_that_is_due_while_another_is_under_way_is_skipped_and_said_so():
    slow = PRICES | {'evaluation_decode': 0.05}
    run = ToyRun(steps=9, evaluation_every=1, prices=slow).run()
    skipped = [(e['version'], e['under_way']) for e in run.log.events if e['kind'] == 'evaluation_skip']
    assert skipped
    for version, under_way in skipped:
        assert f'version {version} is not evaluated: the evaluation of version {under_way} is still' in str(run.said)
    assert sorted([row.version for row in run.rows] + [version for version, _ in skipped]) == [*range(1, 9)]


@pytest.mark.parametrize('every_dispatches', [2, 4, 6])
def test_beside_training_at_most_one_dispatch_in_so_many_is_its_own(every_dispatches):
    run = ToyRun(steps=9, evaluation_every=2, every_dispatches=every_dispatches, slots=2, eta=math.inf).run()
    dispatches = [e for e in run.log.events if e['kind'] == 'run_start' and e['lane'] == 'engine/0']
    kinds = ['E' if e['work'].startswith('evaluation') else 'T' for e in dispatches]
    busy_until = max(i for i, kind in enumerate(kinds) if kind == 'T')
    runs = [len(list(group)) for kind, group in itertools.groupby(kinds[:busy_until]) if kind == 'T']
    assert collections.Counter(kinds)['E'] > 5
    assert min(runs[1:-1]) >= every_dispatches - 1  # with two slots training always has a request


def test_the_requests_are_spread_over_the_engines_and_do_not_move_those_of_training():
    run = ToyRun(steps=4, engines=4, evaluation_every=2).run()
    count = collections.Counter()
    for event in run.log.events:
        if event['kind'] == 'evaluation_prefill':
            count[event['engine']] += len(event['requests'])
    assert set(count) == {f'engine/{i}' for i in range(4)}
    assert sum(count.values()) == 2 * len(PROBLEMS)


def test_a_pinned_version_is_kept_in_the_channel_until_its_answers_are_done():
    run = ToyRun(steps=9, evaluation_every=2, prices=PRICES | {'evaluation_decode': 0.03})
    released = []
    run.channel.release = lambda version, pinned=(): released.append((version, tuple(pinned)))
    run.run()
    kept = [(version, pinned) for version, pinned in released if pinned]
    assert kept
    assert all(pinned[0] < version for version, pinned in kept)


def resumed_at(step, whole, **options):
    (checkpoint,) = (c for c in whole.checkpoints if c['step'] == step)
    return checkpoint, ToyRun(**options, resume=checkpoint).run()


@pytest.mark.parametrize('how', [{}, *LOCK_STEP])
def test_a_resumed_run_trains_the_same_and_evaluates_the_version_of_its_checkpoint_again(how):
    slow = PRICES | {'evaluation_decode': 0.02, 'save': 0.001}
    options = {'steps': 9, 'evaluation_every': 2, 'checkpoint_every': 1, 'prices': slow, **how}
    whole = ToyRun(**options).run()
    by_version = {row.version: row.scores for row in whole.rows}
    lost = 0
    for step in range(1, 9):
        checkpoint, resumed = resumed_at(step, whole, **options)
        assert resumed.learner.w == whole.learner.w
        under_way = checkpoint['run_state']['observer']['evaluating']
        for row in resumed.rows:
            assert row.scores == by_version.get(row.version, row.scores)
        assert len({row.version for row in resumed.rows}) == len(resumed.rows)
        if step % 2 == 0:
            assert step in [row.version for row in resumed.rows]
        gone = [e['version'] for e in resumed.log.events if e['kind'] == 'evaluation_lost']
        assert gone == ([under_way] if under_way not in (None, step) else [])
        assert [f'version {v} was under way' in said for v, said in zip(gone, resumed.said, strict=False)] == [
            True
        ] * len(gone)
        lost += len(gone)
    assert lost > 0


def test_a_version_that_its_pool_loses_has_no_row_and_the_next_one_has():
    run = ToyRun(steps=9, evaluation_every=2)
    lost = run.lost

    def lose(event):
        if (event['kind'], event.get('version')) == ('evaluation_start', 2):
            lost.set()
        elif event['kind'] == 'evaluation_lost':
            lost.clear()  # as the pool does when it pins the next one

    run.log.listeners.append(lose)
    run.run()
    assert run.finished
    assert [e['version'] for e in run.log.events if e['kind'] == 'evaluation_lost'] == [2]
    evaluated = [row.version for row in run.rows]
    assert evaluated
    assert 2 not in evaluated
    assert 'the evaluation of version 2 ends after 0 s: no server has its weights' in run.said
    assert run.pool.pinned_versions() == ()


def test_a_stop_does_not_wait_for_an_evaluation():
    options = {'steps': 6, 'evaluation_every': 2, 'prices': PRICES | {'evaluation_decode': 5.0}}
    run = ToyRun(**options)
    stop = run.controller.stop_requested
    run.log.listeners.append(lambda e: stop.set() if (e['kind'], e.get('version')) == ('publish', 3) else None)
    run.run()
    assert (run.finished, run.rows) == (False, [])
    (checkpoint,) = run.checkpoints
    assert all(draw < 100 for _, draw, _ in checkpoint['run_state']['order'])  # no request of an evaluation


def test_a_stop_after_the_last_update_ends_the_wait_for_an_evaluation():
    options = {'steps': 3, 'evaluation_every': 2, 'prices': PRICES | {'evaluation_decode': 5.0}}
    run = ToyRun(**options)
    stop = run.controller.stop_requested
    run.log.listeners.append(
        lambda e: stop.set() if (e['kind'], e['time'] > 20) == ('evaluation_decode', True) else None
    )
    run.run()
    assert (run.finished, len(run.steps), run.rows) == (False, 3, [])


def test_a_scorer_that_always_fails_ends_the_run():
    run = ToyRun(steps=6, evaluation_every=2, unscored=PROBLEMS)
    with pytest.raises(UnverifiedError, match=r"3 answers of the evaluation 'of version 2' in a row"):
        run.run()


def test_a_request_for_a_version_that_is_not_pinned_is_a_bug_that_is_named():
    run = ToyRun(evaluation_every=2)
    request = GenerationRequest(100, 0, 0, toy_prompt(100).tokens, SamplingParams(3, 0.0, 0, 1.0, (STOP,)))
    with pytest.raises(RuntimeError, match=r'asks for version 7, and pinned are \[\]'):
        PoolAtVersion(run.pool, 7).generate(request)
