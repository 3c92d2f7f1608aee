"""The contract of RolloutEngine, put to every engine of this project, and to engines that break it."""

from __future__ import annotations

import dataclasses
from typing import get_args, get_type_hints

import numpy as np
import pytest

from areal_jax.config.generation import RolloutSection
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.types import EngineCapabilities, PublishedWeights
from tests.rollout.engine_contract import ASSERTED, CHECKS, Subject
from tests.rollout.toy_engine import ToyEngine
from tests.toys import ToyBackend


def local(kv_policy='recompute', slots=2, decode_steps=2, pinned=0):
    def make(clock, log):
        def published(version, equal):
            return PublishedWeights(version, '', (0 if equal else version, 0))

        engine = LocalEngine(
            0, ToyBackend(slots), clock, log, receive=lambda p: p.handle, version=0, params=(0, 0),
            rollout=RolloutSection(kv_policy=kv_policy, decode_steps=decode_steps),
            evaluation=ToyBackend(pinned) if pinned else None, every_dispatches=3,
        )  # fmt: skip
        return Subject(engine, engine.start, published)

    return make


def toy(engine=ToyEngine):
    def make(clock, log):
        found = engine(0, clock)
        return Subject(
            found, found.start, lambda version, equal: PublishedWeights(version, '', 0 if equal else version)
        )

    return make


class AbortsInAPause(ToyEngine):
    capabilities = dataclasses.replace(ToyEngine.capabilities, pause_modes=('abort',))

    async def pause(self):
        await super().pause()
        for generation in self.generations.values():
            generation.deliver(reason='cancelled')
        self.generations.clear()


ENGINES = {
    'local, recompute': local(),
    'local, keep': local(kv_policy='keep'),
    'local, wait': local(kv_policy='wait'),
    'local, one slot': local(slots=1, decode_steps=1),
    'local, wide': local(slots=9, decode_steps=3),
    'local, pinned': local(pinned=2),
    'local, one pinned slot': local(pinned=1, decode_steps=1),
    'toy': toy(),
    'toy, aborts in a pause': toy(AbortsInAPause),
}


@pytest.mark.parametrize('check', CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize('engine', ENGINES)
def test_the_contract_holds(engine, check):
    if (engine, check.__name__) == ('local, wide', 'open_requests_are_in_the_order_of_service'):
        pytest.skip('nine slots serve all nine requests at the same time')
    check(ENGINES[engine])


class CallsACancelledAnswerLong(ToyEngine):
    def cancel(self, request_id):
        if request_id in self.generations:
            self.generations.pop(request_id).deliver(reason='length')


class CannotCancel(ToyEngine):
    def cancel(self, request_id): ...


class SwapsWhenItStages(ToyEngine):
    async def stage(self, published):
        await super().stage(published)
        await self.swap(published.version)


class KeepsItsVersion(ToyEngine):
    async def swap(self, version):
        self.w = self._staged.handle
        return 0.0


class KeepsItsWeights(ToyEngine):
    async def swap(self, version):
        self.version = version
        return 0.0


class GoesOnInAPause(ToyEngine):
    async def pause(self): ...


class ReversesItsQueue(ToyEngine):
    def open_requests(self):
        return super().open_requests()[::-1]


class LosesARequestInAPause(ToyEngine):
    async def pause(self):
        await super().pause()
        self.generations.popitem()


class StartsAPrefixAgain(ToyEngine):
    def generate(self, request):
        generation = super().generate(request)
        generation.tokens = 0
        return generation


class ForgetsLogprobs(ToyEngine):
    def emit(self, generation, version, w):
        deliver = generation.deliver
        empty = np.zeros(0, np.float32)
        generation.deliver = lambda s, reason: deliver(type(s)(s.tokens, empty, s.policy_version), reason)
        super().emit(generation, version, w)
        generation.deliver = deliver


class PinsTheWeightsInUse(ToyEngine):
    async def pin(self, published):
        self._pinned[published.version] = self.w


class TagsPinnedTokensWithItsOwnVersion(ToyEngine):
    def emit(self, generation, version, w):
        super().emit(generation, self.version, w)


class KeepsItsCacheAndSaysItDoesNot(ToyEngine):
    """The first weights that a request meets decode it to its end."""

    capabilities = dataclasses.replace(ToyEngine.capabilities, update=('recompute',))

    def emit(self, generation, version, w):
        generation.w = getattr(generation, 'w', w)
        super().emit(generation, version, generation.w)


class SaysThatItAbortsInAPause(ToyEngine):
    capabilities = AbortsInAPause.capabilities


class DeclaresASecondKindOfLogprobs(ToyEngine):
    capabilities = dataclasses.replace(ToyEngine.capabilities, logprobs=('behavior', 'sampling'))


@pytest.mark.parametrize(
    ('engine', 'broken'),
    [
        (CallsACancelledAnswerLong, 'a_cancelled_request_ends_as_cancelled_and_the_others_go_on'),
        (CannotCancel, 'a_cancelled_request_ends_as_cancelled_and_the_others_go_on'),
        (SwapsWhenItStages, 'staging_does_not_disturb_decoding'),
        (KeepsItsVersion, 'a_swap_changes_the_version_of_later_tokens_and_tells_the_pause'),
        (KeepsItsWeights, 'a_swap_changes_the_version_of_later_tokens_and_tells_the_pause'),
        (GoesOnInAPause, 'a_pause_delivers_everything_and_a_resume_continues'),
        (ReversesItsQueue, 'open_requests_are_in_the_order_of_service'),
        (LosesARequestInAPause, 'open_requests_are_in_the_order_of_service'),
        (StartsAPrefixAgain, 'a_prefix_is_continued_and_not_repeated'),
        (ForgetsLogprobs, 'an_answer_is_whole_and_aligned'),
        (PinsTheWeightsInUse, 'requests_of_a_pinned_version_are_decoded_with_its_weights'),
        (TagsPinnedTokensWithItsOwnVersion, 'requests_of_a_pinned_version_are_decoded_with_its_weights'),
        (GoesOnInAPause, 'a_pause_holds_pinned_requests_too_and_loses_nothing'),
        (KeepsItsCacheAndSaysItDoesNot, 'a_recomputed_answer_continues_as_its_prefix_does'),
        (SaysThatItAbortsInAPause, 'a_pause_that_aborts_ends_requests_and_keeps_what_was_delivered'),
        (DeclaresASecondKindOfLogprobs, 'a_cut_softmax_has_its_logprobs_where_they_are_declared'),
    ],
)
def test_an_engine_that_breaks_the_contract_is_found(engine, broken):
    (check,) = (check for check in CHECKS if check.__name__ == broken)
    with pytest.raises((AssertionError, TypeError)):
        check(toy(engine))


def test_every_capability_is_asserted():
    fields = {name: get_args(kind) for name, kind in get_type_hints(EngineCapabilities).items()}
    names = {check.__name__ for check in CHECKS}
    wanted = {(name, value) for name, kinds in fields.items() if kinds for value in get_args(kinds[0])}
    wanted |= {name for name, kinds in fields.items() if not kinds}
    assert set(ASSERTED) == wanted
    assert all(checks and set(checks) <= names for checks in ASSERTED.values())


def test_what_an_engine_does_not_declare_is_not_asked_of_it():
    class CannotCancelAndSaysSo(CannotCancel):
        capabilities = dataclasses.replace(ToyEngine.capabilities, abort=False)

    for check in CHECKS:
        check(toy(CannotCancelAndSaysSo))
