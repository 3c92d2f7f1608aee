"""The queue of scoring passes under the virtual clock: rows, turns on the lane, pauses, updates and ends."""

import numpy as np
import pytest

from areal_jax.rollout.scoring import Scorer, ScoringError, ScoringRequest
from areal_jax.rollout.stream import LogprobError
from areal_jax.types import TokenScores
from tests.rollout.engine_rig import Rig, collect, request
from tests.rollout.scripted import scripted
from tests.rollout.toy_scoring import ToyScoring, score_of
from tests.toys import PRICES

STEP = PRICES['decode']
PASS = 0.004  # a second for each token of a pass, at this price
WORK = PRICES | {'score': PASS / 4, 'compile': 0.5}


def sequence(name, length=4, k=1):
    tokens = np.arange(1, length + 1, dtype=np.int32)
    return ScoringRequest(name, tokens, 1, np.ones(length - 1, np.float32), k)


class ScoringRig(Rig):
    def __init__(self, **backend):
        super().__init__(prices=WORK)
        self.scoring = ToyScoring(**backend)
        self.scorer = Scorer(self.engine, self.scoring, self.clock)
        self.results = {}

    def run(self, script):
        async def whole(rig):
            self.supervisor.start('scoring', self.scorer.serve())
            return await script(rig)

        return super().run(whole)

    def ask(self, *requests):
        """Results come into `results` by name."""

        async def follow(one):
            try:
                self.results[one.name] = await self.scorer.score(one)
            except (ScoringError, LogprobError) as error:
                self.results[one.name] = error

        for one in requests:
            self.supervisor.start(f'score {one.name}', follow(one))


def values(w, length=4):
    return [score_of(w, p, p + 1) for p in range(1, length)]


@scripted(ScoringRig)
async def test_a_pass_takes_in_their_order_what_a_row_holds(rig):
    rig.ask(*(sequence(name, length) for name, length in (('a', 9), ('b', 9), ('c', 5), ('d', 2), ('e', 30))))
    await rig.pass_time(2)
    # a row of 16 tokens and 3 sequences: a leaves room for c and d, not for b, and e needs a row of its own
    assert rig.scoring.passes == [['a', 'c', 'd'], ['b'], ['e']]


@scripted(ScoringRig)
async def test_requests_with_few_and_with_many_alternatives_have_passes_of_their_own(rig):
    rig.ask(sequence('a', k=1), sequence('b', k=5), sequence('c', k=0), sequence('d', k=20))
    await rig.pass_time(3)
    assert (rig.scoring.passes, rig.scoring.programs) == ([['a', 'c'], ['b', 'd']], 2)


@scripted(ScoringRig)
async def test_scores_are_delivered_with_the_version_of_the_weights(rig):
    rig.ask(sequence('a'))
    await rig.pass_time(1)
    await rig.load(3, (3, 3))
    rig.ask(sequence('b'))
    await rig.pass_time(1)
    found = rig.results
    assert [(found[name][0], found[name][1].logprobs.tolist()) for name in 'ab'] == [(0, values(0)), (3, values(3))]


@scripted(ScoringRig)
async def test_a_pass_has_one_version_though_weights_are_swapped_while_it_runs(rig):
    rig.ask(sequence('warm up'))
    await rig.pass_time(1)
    rig.ask(sequence('a'))
    await rig.pass_time(PASS / 4)
    await rig.load(3, (3, 3))  # takes PRICES['load'], more than the rest of the pass
    rig.ask(sequence('b'))
    await rig.pass_time(1)
    found = rig.results
    assert (found['a'][0], found['a'][1].logprobs.tolist()) == (0, values(0))
    assert (found['b'][0], found['b'][1].logprobs.tolist()) == (3, values(3))


@scripted(ScoringRig)
async def test_passes_and_dispatches_of_decoding_take_turns_on_the_lane(rig):
    rig.ask(sequence('warm up'))
    await rig.pass_time(1)
    decoded = []  # dispatches in front of each pass
    score = rig.scoring.score

    def note(*arguments):
        decoded.append(len(rig.backend.batches))
        return score(*arguments)

    rig.scoring.score = note
    running = rig.engine.generate(request(0))
    rig.ask(*(sequence(f's{i}', 16) for i in range(3)))
    segments = await collect(running)
    assert sum(len(segment.tokens) for segment in segments) == 7  # in as many dispatches
    assert decoded == sorted(set(decoded)), 'two passes without a dispatch between them'
    assert len(decoded) == 3


@scripted(ScoringRig)
async def test_compiling_does_not_hold_up_decoding(rig):
    rig.ask(sequence('a'))
    segments = await collect(rig.engine.generate(request(0)))
    tokens, now, results = sum(len(segment.tokens) for segment in segments), rig.clock.now(), rig.results
    assert (tokens, results) == (7, {})  # the answer is complete, and the program is not compiled yet
    assert now < WORK['compile']


@scripted(ScoringRig)
async def test_what_is_paused_waits_and_what_is_being_scored_ends_first(rig):
    rig.ask(sequence('warm up'))
    await rig.pass_time(1)
    rig.ask(sequence('a'))
    await rig.pass_time(PASS / 4)
    await rig.scorer.pause()
    assert 'a' in rig.results
    rig.ask(sequence('b'))
    await rig.pass_time(1)
    assert ('b' in rig.results, rig.scorer.waiting) == (False, 1)
    rig.scorer.resume()
    await rig.pass_time(1)
    assert rig.results['b'][1].logprobs.tolist() == values(0)


@scripted(ScoringRig)
async def test_a_resume_ends_a_pause_that_still_waits(rig):
    rig.ask(sequence('a', 400))
    await rig.pass_time(0.51)  # compiled, and being scored
    ended = []

    async def pause():
        await rig.scorer.pause()
        ended.append(rig.clock.now())

    rig.supervisor.start('pause', pause())
    await rig.pass_time(0.01)
    assert ended == []
    rig.scorer.resume()
    await rig.pass_time(0.01)
    assert len(ended) == 1
    assert rig.results == {}


@scripted(ScoringRig)
async def test_what_is_cancelled_is_told_so_whether_it_waits_or_is_being_scored(rig):
    rig.ask(sequence('a', 16), sequence('b', 16), sequence('c', 16))
    await rig.pass_time(0.501)
    asked = rig.scorer.open_requests()
    assert [request.name for request in asked] == ['a', 'b', 'c']
    rig.scorer.cancel([*asked[:2], sequence('c', 16)])  # another one of that name
    await rig.pass_time(1)
    results, passes, waiting = rig.results, rig.scoring.passes, rig.scorer.waiting
    assert (results['a'], results['b']) == (None, None)
    assert results['c'][1].logprobs.tolist() == values(0, 16)
    assert (passes, waiting) == ([['a'], ['c']], 0)


@scripted(ScoringRig)
async def test_a_drain_returns_when_nothing_waits(rig):
    await rig.scorer.drain()
    rig.ask(sequence('a', 16), sequence('b', 16))
    await rig.pass_time(0.001)
    await rig.scorer.drain()
    names, totals = sorted(rig.results), rig.scorer.totals
    assert names == ['a', 'b']
    assert (totals.passes, totals.tokens) == (2, 32)


@scripted(ScoringRig, longest=20)
async def test_a_sequence_that_no_row_holds_is_refused(rig):
    rig.ask(sequence('a', 21))
    await rig.pass_time(1)
    assert '21 tokens are more than this server scores' in str(rig.results['a'])


@pytest.mark.parametrize('value', [np.nan, np.inf, 0.5])
@scripted(ScoringRig)
async def test_log_probs_that_no_policy_has_are_refused(rig, value):
    logprobs = np.array([-1, value, -1], np.float32)
    rig.scoring.score = lambda *_: [TokenScores(logprobs, np.zeros((3, 1), np.int32), np.zeros((3, 1), np.float32))]
    rig.ask(sequence('a'))
    await rig.pass_time(1)
    assert f'the log-prob of a scored token is {np.float32(value)}' in str(rig.results['a'])
