"""An exception of a dispatch: it ends the engine, or the answers in slots where the engine is built to survive it."""

import pytest

from areal_jax.rollout.local_engine import MOST_FAILED
from areal_jax.rollout.stream import DispatchError
from tests.rollout.engine_rig import Rig, collect, request


def fail_at(rig, *calls, of='generate'):
    """The named calls of the backend raise, counted from 1, after they have consumed the state."""
    dispatch, counted = getattr(rig.backend, of), []

    def broken(*arguments):
        counted.append(1)
        outcome = dispatch(*arguments)
        if len(counted) in calls:
            raise ArithmeticError('out of memory')
        return outcome

    setattr(rig.backend, of, broken)


async def outcome(running):
    """(tokens delivered, the error or None)."""
    segments = []
    try:
        async for segment in running:
            segments.append(segment)
    except DispatchError as error:
        return [int(token) for s in segments for token in s.tokens], str(error)
    return [int(token) for s in segments for token in s.tokens], None


async def answer_all(rig, samples):
    running = [rig.engine.generate(request(sample)) for sample in samples]
    return [await outcome(one) for one in running]


@pytest.mark.parametrize('of', ['generate', 'prefill'])
def test_the_answers_in_slots_end_and_the_others_are_what_they_always_are(of):
    told = []
    rig, sound = Rig(slots=2, on_failed_dispatch=told.append), Rig(slots=2)
    fail_at(rig, 1, of=of)
    found = rig.run(lambda rig: answer_all(rig, range(4)))
    expected = sound.run(lambda rig: answer_all(rig, range(4)))
    message = 'engine/0, request 0/4/{}: a dispatch failed (ArithmeticError: out of memory); send the request again'
    # both slots were taken; samples 2 and 3 waited, share the prompt, and find none of its blocks that were lost
    assert found[:2] == [([], message.format(0)), ([], message.format(1))]
    assert found[2:] == expected[2:]
    assert [str(error) for error in told] == ['out of memory']
    rig.check_blocks()
    assert rig.backend.prefills[-1][0] == [1, 2]  # the prompt was computed again


def test_what_was_delivered_before_stays_and_a_new_request_of_the_same_name_is_whole():
    rig = Rig(on_failed_dispatch=lambda error: None)
    fail_at(rig, 4)

    async def script(rig):
        return await outcome(rig.engine.generate(request(0))), await outcome(rig.engine.generate(request(0)))

    # the toy backend goes on from what it has drawn for a request, which is another one the second time
    (lost, error), (whole, none) = rig.run(script)
    assert (len(lost), len(whole), none) == (3, 7, None)
    assert lost == whole[:3]
    assert 'a dispatch failed' in error


def test_an_engine_that_fails_again_and_again_ends():
    told = []
    rig = Rig(on_failed_dispatch=told.append)
    fail_at(rig, *range(1, 10))

    async def script(rig):
        return [await outcome(rig.engine.generate(request(sample))) for sample in range(9)]

    with pytest.raises(ArithmeticError, match='out of memory'):
        rig.run(script)
    assert len(told) == MOST_FAILED - 1


def test_a_dispatch_that_succeeds_begins_the_count_again():
    rig = Rig(on_failed_dispatch=lambda error: None)
    fail_at(rig, 1, 2, 4, 5)

    async def script(rig):
        return [(await outcome(rig.engine.generate(request(sample))))[1] is None for sample in (0, 1, 5, 5, 5, 5)]

    # sample 5 has one token; its third dispatch succeeds, and two more failures are not three in a row
    assert rig.run(script) == [False, False, True, False, False, True]


def test_without_somebody_to_tell_the_engine_ends_at_once():
    rig = Rig()
    fail_at(rig, 1)
    with pytest.raises(ArithmeticError, match='out of memory'):
        rig.run(lambda rig: collect(rig.engine.generate(request(0))))
