"""What is done about JetStream's own loop."""

from __future__ import annotations

import pytest

from tests.rollout.jetstream.rig import needs_jetstream

pytestmark = [pytest.mark.slow, needs_jetstream]


@pytest.fixture
def run_through_idleness():
    from areal_jax.rollout.jetstream.server.compatibility import import_jetstream

    import_jetstream()
    from areal_jax.rollout.jetstream.server.engine import run_through_idleness

    return run_through_idleness


def test_the_loop_goes_on_where_all_slots_have_become_free(run_through_idleness):
    """The order of JetStream 0.2.2: one slot is seen free, no call comes, the other slot is given back, it asserts."""
    free, rounds = [1], []

    def loop():
        rounds.append(len(free))
        if len(rounds) == 1:
            slot = free.pop()
            free.append(slot)
            free.append(2)  # the detokenizer
            assert len(free) < 2, 'At this point we must have some requests inserted into the slots.'

    run_through_idleness(loop, lambda: len(free) == 2)
    assert rounds == [1, 2]


def test_any_other_assertion_ends_it(run_through_idleness):
    def loop():
        raise AssertionError('another one')

    with pytest.raises(AssertionError, match='another one'):
        run_through_idleness(loop, lambda: False)


def test_one_client_after_the_other_finds_the_server_there():
    """Every answer leaves all slots free, so the loop is at its assertion again and again."""
    from tests.rollout.jetstream.rig import JetstreamToyServer

    with JetstreamToyServer(slots=1, decode_steps=4) as server:
        server.backend.step_s = 0.0

        async def script(talk):
            return [len((await talk.read(talk.decode(new=1)))[0]) for _ in range(500)]

        assert server.talk(script) == [1] * 500
        assert server.death is None
