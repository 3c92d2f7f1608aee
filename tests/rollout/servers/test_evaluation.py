"""Servers set aside for evaluation: their answers are all of one version, and training notices nothing of them."""

import dataclasses

import pytest

from areal_jax.rollout.servers.evaluation import EvaluatedPool, EvaluationLog
from areal_jax.rollout.servers.member import ServerSettings
from areal_jax.rollout.servers.server_pool import ServerPool
from tests.rollout.scripted import scripted
from tests.rollout.servers.rig import FAST, PROBE, Answer, ServerRig, request, weights

PATIENCE_S = 3.0


class EvaluatedRig(ServerRig):
    """engine/0 and engine/1 train, engine/2 evaluates; the learner scores its newest version alone."""

    def __init__(self, **settings):
        super().__init__(servers=3, **settings)
        self.own_server, self.learner_version = self.servers.pop(), 0

        async def score(version, prompt, tokens):
            return await self.truth(version, prompt, tokens) if version == self.learner_version else None

        beside = ServerSettings(**FAST | {'probe': PROBE, 'max_versions_behind': 0})
        self.own = ServerPool(
            self.clock, EvaluationLog(self.log), self.supervisor, beside,
            published=weights(0), score=score, on_no_server=pytest.fail,
        )  # fmt: skip
        self.both = EvaluatedPool(self.pool, self.own, self.clock, self.supervisor, PATIENCE_S)

    def run(self, script):
        async def begin(rig):
            self.own_server.start(self.supervisor)
            self.own.join(self.own_server, 1, 'toy:own')
            await self.until(lambda: self.is_serving())
            return await script(rig)

        return super().run(begin)

    def is_serving(self):
        return self.own.states() == {'engine/2': 'serving'}

    async def publish(self, version):
        self.learner_version = version
        await self.both.load_weights(weights(version))

    def ask_beside(self, version, *requests):
        found = [Answer(self.both.generate(dataclasses.replace(one, version=version))) for one in requests]
        for answer in found:
            self.supervisor.start('answer', answer.run())
        return found


@scripted(EvaluatedRig)
async def test_an_evaluated_version_stays_while_training_goes_on(rig):
    await rig.publish(1)
    await rig.both.pin(weights(1))
    asked = rig.ask_beside(1, *(request(draw, tokens=60) for draw in range(4)))
    for version in (2, 3):
        await rig.publish(version)
        assert rig.own_server.version == 1
        assert rig.both.pinned_versions() == (1,)
    trained = rig.ask(request(0), request(1))  # the same draws, beside those of the evaluation
    await rig.end_of([*asked, *trained])
    rig.both.unpin(1)
    await rig.until(lambda: rig.own_server.version == 3)
    assert {version for answer in asked for version in answer.versions} == {1}
    assert {len(answer.tokens) for answer in asked} == {60}
    assert {version for answer in trained for version in answer.versions} == {3}
    rig.check_closed()


@scripted(EvaluatedRig)
async def test_no_answer_is_asked_of_a_server_that_still_has_another_version(rig):
    rig.own_server.trouble = {'swap hangs'}
    await rig.publish(1)
    pinned = []

    async def pin():
        await rig.both.pin(weights(1))
        pinned.append(rig.own_server.version)

    rig.supervisor.start('pin', pin())
    await rig.pass_time(0.5)
    assert not pinned
    rig.own_server.heal()
    await rig.until(lambda: pinned)
    assert pinned == [1]


@scripted(EvaluatedRig)
async def test_while_nothing_is_evaluated_it_follows_training(rig):
    for version in (1, 2):
        await rig.publish(version)
        await rig.until(lambda: rig.own_server.version == rig.learner_version)
    assert rig.both.pinned_versions() == (2,)


@scripted(EvaluatedRig)
async def test_training_waits_for_no_server_of_the_evaluation(rig):
    rig.own_server.trouble = {'hangs'}
    before_s = rig.clock.now()
    await rig.publish(1)
    assert rig.clock.now() - before_s < 0.1


@scripted(EvaluatedRig)
async def test_nothing_of_it_is_counted_as_training(rig):
    before = len(rig.log.events)
    await rig.publish(1)
    await rig.both.pin(weights(1))
    await rig.end_of(rig.ask_beside(1, request(0), request(1)))
    rig.both.unpin(1)
    events = rig.log.events[before:]
    of_training = [e for e in events if e['kind'] in ('arrive', 'route', 'move', 'load', 'receive')]
    assert {e['engine'] for e in of_training} == {'engine/0', 'engine/1'}
    assert {e['kind'] for e in of_training} == {'load'}
    assert 'stage' in {e['kind'] for e in events if e.get('engine') == 'engine/2'}


@scripted(EvaluatedRig)
async def test_a_server_that_refuses_the_version_answers_nothing(rig):
    await rig.publish(1)
    await rig.until(lambda: rig.own_server.version == 1)
    rig.own_server.trouble = {'stage refused'}
    await rig.publish(2)
    await rig.both.pin(weights(2))
    (answer,) = rig.ask_beside(2, request(0))
    await rig.pass_time(1.0)
    assert not answer.segments
    rig.own_server.heal()
    rig.learner_version = 2  # still: it can be probed
    await rig.end_of([answer])
    assert set(answer.versions) == {2}


@scripted(EvaluatedRig)
async def test_a_version_is_lost_with_its_server_and_the_next_one_is_not(rig):
    await rig.publish(1)
    await rig.both.pin(weights(1))
    (answer,) = rig.ask_beside(1, request(0, tokens=2000))
    await rig.publish(2)
    rig.own_server.die()
    began_s = rig.clock.now()
    await rig.pass_time(0.5)
    rig.own_server.restart()  # it gets version 1, and the learner cannot judge its answer any more
    await rig.clock.wait(rig.both.lost, 60.0)
    took_s = rig.clock.now() - began_s
    assert rig.both.lost.is_set()
    rig.both.unpin(1)
    await rig.until(lambda: answer.ended)
    await rig.until(rig.is_serving)
    await rig.both.pin(weights(2))
    assert not rig.both.lost.is_set()
    (again,) = rig.ask_beside(2, request(0))
    await rig.end_of([again])
    assert PATIENCE_S - 1.0 < took_s < PATIENCE_S + 1.0
    assert answer.generation.finish_reason == 'cancelled'
    assert set(again.versions) == {2}
    assert ('probe', 'undecided') in {(e['kind'], e.get('outcome')) for e in rig.log.events}


@scripted(EvaluatedRig)
async def test_a_server_that_serves_is_not_lost(rig):
    await rig.both.pin(weights(0))
    await rig.pass_time(4 * PATIENCE_S)
    assert rig.both.lost.is_set() is False


@scripted(EvaluatedRig)
async def test_a_request_of_a_version_that_is_not_pinned_is_a_bug(rig):
    with pytest.raises(RuntimeError, match='asks for version 1, and pinned is None'):
        rig.ask_beside(1, request(0))
    await rig.both.pin(weights(0))
    with pytest.raises(RuntimeError, match='version 0 is pinned: servers hold one version'):
        await rig.both.pin(weights(1))


@scripted(EvaluatedRig)
async def test_a_stop_cancels_both(rig):
    await rig.both.pin(weights(0))
    asked = [*rig.ask_beside(0, request(0, tokens=2000)), *rig.ask(request(1, tokens=2000))]
    await rig.pass_time(0.1)
    rig.both.cancel_all(0)
    await rig.until(lambda: asked[0].ended)
    assert not asked[1].ended
    rig.both.cancel_all()
    await rig.end_of(asked)
    assert {answer.generation.finish_reason for answer in asked} == {'cancelled'}


@scripted(EvaluatedRig)
async def test_a_checkpoint_pauses_training_alone(rig):
    await rig.both.pin(weights(0))
    (beside,) = rig.ask_beside(0, request(0, tokens=40))
    (trained,) = rig.ask(request(1, tokens=40))
    await rig.both.pause()
    await rig.end_of([beside])
    assert not trained.ended
    assert [draw for _, draw, _ in rig.both.order()] == [1]
    rig.both.resume()
    await rig.end_of([trained])
