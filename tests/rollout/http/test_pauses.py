"""Who has paused a server and until when, under the virtual clock: leases end at their exact time."""

import pytest

from areal_jax.rollout.http.pauses import FencedError, Lease, LeasedError
from tests.rollout.http.test_service import WHOLE, ServiceRig, tokens_of

LEASE = Lease('run', 5.0)


def run(script):
    async def registered(rig):
        await rig.service.register('run')
        return await script(rig)

    return ServiceRig().run(registered)


async def is_served(rig, sample=0):
    """Whether a request is answered."""
    found = rig.submit(sample)
    await rig.decode(60)
    return tokens_of(found) != []


def test_a_lease_that_is_not_renewed_ends_its_pause_at_its_time_and_fences_its_holder():
    async def script(rig):
        began_s = rig.clock.now()
        await rig.service.pause('abort', LEASE)
        held = rig.submit()
        paused_s = rig.clock.now() - began_s
        await rig.pass_time(4.999 - paused_s)
        status = await rig.service.look()
        assert (status.pause, status.client, held) == ('abort', 'run', [])
        (pause,) = status.pauses
        assert (pause.holder, pause.mode) == ('run', 'abort')
        assert pause.paused_s == pytest.approx(4.999)
        assert pause.left_s == pytest.approx(0.001)
        await rig.pass_time(0.002)
        status = await rig.service.look()
        assert (status.pause, status.pauses, status.client) == (None, (), '')
        await rig.decode(60)
        return tokens_of(held)

    assert run(script) == WHOLE


def test_a_lease_lasts_as_long_as_it_is_renewed():
    async def script(rig):
        await rig.service.pause('abort', LEASE)
        for _ in range(5):
            await rig.pass_time(4.0)
            assert await rig.service.renew(LEASE)
        status = await rig.service.look()
        assert status.pause == 'abort'
        assert status.pauses[0].paused_s == pytest.approx(20.0)
        assert status.pauses[0].left_s == pytest.approx(5.0)
        held = rig.submit()
        await rig.pass_time(4.99)
        assert held == []
        await rig.pass_time(0.02)
        await rig.decode(60)
        assert tokens_of(held) == WHOLE
        assert (await rig.service.look()).client == ''

    run(script)


def test_a_renewal_begins_no_pause():
    """One that comes after the resume that it has crossed on its way would pause the server for the time of a lease."""

    async def script(rig):
        await rig.service.pause('abort', LEASE)
        await rig.service.resume('run')
        assert not await rig.service.renew(LEASE)
        assert await is_served(rig)

    run(script)


def test_a_pause_again_goes_on_from_its_beginning_with_a_lease_of_its_own():
    async def script(rig):
        await rig.service.pause('retract', LEASE)
        await rig.pass_time(3.0)
        await rig.service.pause('abort', LEASE)
        await rig.pass_time(4.0)  # the first lease would have ended
        (pause,) = (await rig.service.look()).pauses
        assert (pause.mode, round(pause.paused_s), round(pause.left_s)) == ('abort', 7, 1)
        await rig.service.resume('run')
        await rig.pass_time(10.0)
        assert (await rig.service.look()).client == 'run'  # a lease of a pause that has ended fences nobody

    run(script)


LATE = {
    'pause': lambda service: service.pause('abort', LEASE),
    'renew': lambda service: service.renew(LEASE),
    'resume': lambda service: service.resume('run'),
    'stage': lambda service: service.stage('3', client='run'),
    'swap': lambda service: service.swap('next', client='run'),
    'relabel': lambda service: service.relabel('next', client='run'),
    'flush_cache': lambda service: service.flush_cache('run'),
}


@pytest.mark.parametrize('late', LATE)
def test_what_a_fenced_holder_asks_for_is_refused_until_it_registers_anew(late):
    async def script(rig):
        await rig.service.stage('3', client='run')
        await rig.service.pause('abort', LEASE)
        await rig.pass_time(6.0)
        with pytest.raises(FencedError, match=r'run is fenced \(its lease has lapsed after a pause of 5.0 s\)'):
            await LATE[late](rig.service)
        status = await rig.service.look()
        assert (status.pause, status.weight_version) == (None, 'first')
        await rig.service.register('run')
        await LATE[late](rig.service)

    run(script)


def test_a_client_that_has_never_registered_is_refused():
    async def script(rig):
        with pytest.raises(FencedError, match=r'other is fenced \(it has not registered here'):
            await rig.service.pause('abort', Lease('other', 5.0))

    run(script)


def test_a_new_client_ends_what_another_has_paused_and_fences_it():
    async def script(rig):
        await rig.service.pause('abort', LEASE)
        held = rig.submit()
        await rig.pass_time(1.0)
        assert held == []
        await rig.service.register('next run')
        assert held[-1].finish == 'cancelled'
        assert await is_served(rig, 1)
        with pytest.raises(FencedError, match='next run has registered since'):
            await rig.service.swap('late', client='run')
        await rig.service.pause('abort', Lease('next run', 5.0))
        with pytest.raises(FencedError):
            await rig.service.resume('run')
        assert (await rig.service.look()).pause == 'abort'

    run(script)


def test_a_registration_ends_what_runs():
    async def script(rig):
        found = rig.submit()
        await rig.decode(2)
        await rig.service.register('run')
        return found[-1].finish

    assert run(script) == 'cancelled'


def test_a_client_without_a_name_cannot_end_the_pause_of_a_lease():
    async def script(rig):
        await rig.service.pause('abort', LEASE)
        await rig.pass_time(2.0)
        with pytest.raises(LeasedError, match=r'paused for 2\.0 s by run, whose lease lasts 3\.0 s more: wait'):
            await rig.service.resume()
        assert (await rig.service.look()).pause == 'abort'

    run(script)


@pytest.mark.parametrize('last', ['run', ''])
def test_each_ends_its_own_pause_and_the_last_one_ends_the_pause_of_the_server(last):
    async def script(rig):
        await rig.service.pause('abort', LEASE)
        await rig.service.pause('in_place')
        assert [one.holder for one in (await rig.service.look()).pauses] == ['run', '']
        await rig.service.resume('' if last else 'run')
        assert not await is_served(rig)
        await rig.service.resume(last)
        assert await is_served(rig, 1)

    run(script)


def test_a_pause_without_a_lease_stays_whatever_lapses():
    async def script(rig):
        await rig.service.pause('abort')
        await rig.service.pause('abort', LEASE)
        await rig.pass_time(1000.0)
        status = await rig.service.look()
        assert [(one.holder, one.left_s) for one in status.pauses] == [('', None)]
        assert status.pauses[0].describe() == (
            'paused for 1000.0 s by a client without a lease: POST /resume or /continue_generation ends it'
        )
        await rig.service.resume()
        assert await is_served(rig)

    run(script)


def test_a_lease_that_lapses_while_answers_end_ends_that_pause_too():
    async def script(rig):
        found = rig.submit()
        await rig.decode(2)
        pause = rig.ask(lambda service: service.pause('wait', Lease('run', 1e-3)))
        await rig.decode(2)
        late = rig.submit(1)
        await rig.decode(60)
        assert pause == [(None, None)]
        return tokens_of(found), tokens_of(late) != []

    assert run(script) == (WHOLE, True)


def test_a_server_that_ends_waits_for_no_lease():
    async def script(rig):
        await rig.service.pause('abort', LEASE)
        await rig.service.pause('abort')
        held = rig.submit()
        await rig.pass_time(0.1)
        await rig.service.drain()
        return tokens_of(held), rig.clock.now()

    tokens, now_s = run(script)
    assert tokens == WHOLE
    assert now_s < 5.0
