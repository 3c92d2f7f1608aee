"""The service of a server under the virtual clock: deliveries, pauses, updates and the cache, at exact times."""

import dataclasses

import pytest

from areal_jax.control.supervisor import Supervisor
from areal_jax.errors import UserError
from areal_jax.rollout.http.service import Action, GenerationService, Submission, UpdateError
from tests.rollout.engine_rig import DRAW, Rig, request
from tests.toys import PRICES, STOP, token

STEP = PRICES['decode']
WHOLE = [token(0, DRAW, 0, 3 + i) for i in range(6)] + [STOP]  # of sample 0, with weights 0


def receive(published):
    """A directory is named after its integer weights."""
    published.handle.digest = f'digest of {published.handle.path}'
    return int(published.handle.path), published.version


class ServiceRig(Rig):
    """An engine behind its service, and a script that submits and acts."""

    def __init__(self, **options):
        super().__init__(receive=receive, **options)

    def run(self, script):
        supervisor = Supervisor(self.clock)
        self.service = GenerationService(self.engine, self.clock, supervisor, label='first', model_path='toy')

        async def program():
            self.engine.start(supervisor)
            supervisor.start('service', self.service.serve())
            return await script(self)

        return self.clock.execute(supervisor.run(program()))

    def submit(self, sample=0, *, streams=False, prompt=(1, 2, 3), group='', **fields):
        """The deliveries that the request gets, as they come."""
        found = []
        wanted = dataclasses.replace(request(sample, prompt=prompt), **fields)
        self.service.inbox.put(Submission(wanted, streams, found.append, group))
        return found

    def ask(self, run):
        """What an action replies, as (result, error)."""
        found = []
        self.service.inbox.put(Action('action', run, lambda result, error: found.append((result, error))))
        return found

    async def decode(self, steps):
        """Waits until so many dispatches from now have ended, prefills aside."""
        await self.pass_time(steps * STEP)


def tokens_of(deliveries):
    return [one for delivery in deliveries for piece in delivery.pieces for one in piece.tokens.tolist()]


def spans_of(deliveries):
    """{version: number of tokens}, in order."""
    found = {}
    for delivery in deliveries:
        for piece in delivery.pieces:
            found[piece.version] = found.get(piece.version, 0) + len(piece.tokens)
    return found


@pytest.mark.parametrize('streams', [True, False])
def test_a_stream_is_told_of_every_dispatch_and_others_of_the_end(streams):
    async def script(rig):
        found = rig.submit(streams=streams)
        await rig.decode(4)
        early = len(tokens_of(found))
        await rig.decode(9)
        return early, found

    early, found = ServiceRig().run(script)
    assert early == (3 if streams else 0)
    assert len(found) == (7 if streams else 1)
    assert tokens_of(found) == WHOLE
    assert [one.finish for one in found] == [None] * (len(found) - 1) + ['stop']
    assert (found[-1].matched, found[-1].version) == (STOP, 'first')


@pytest.mark.parametrize('mode', ['retract', 'in_place'])
def test_what_is_paused_goes_on_with_the_same_tokens_and_what_comes_meanwhile_waits(mode):
    async def script(rig):
        found = rig.submit()
        await rig.decode(3)
        await rig.service.pause(mode)
        decoded, held = len(rig.kinds('decode')), rig.submit(1)
        await rig.decode(50)
        status = await rig.service.look()
        assert (status.pause, status.held, len(rig.kinds('decode')), held) == (mode, 1, decoded, [])
        await rig.service.resume()
        await rig.decode(50)
        return found, held

    rig = ServiceRig()
    found, held = rig.run(script)
    assert tokens_of(found) == WHOLE
    assert len(tokens_of(held)) == 3
    assert found[-1].retractions == (mode == 'retract')
    assert rig.service.open_requests() == 0


def test_a_pause_that_aborts_returns_when_what_there_is_was_told():
    async def script(rig):
        found = rig.submit()
        await rig.decode(3)
        await rig.service.pause('abort')
        assert found[-1].finish == 'cancelled'
        return tokens_of(found), rig.clock.now()

    tokens, now = ServiceRig().run(script)
    assert 0 < len(tokens) < 7
    assert tokens == WHOLE[: len(tokens)]
    assert now <= 5 * STEP


def test_answers_of_a_pause_in_place_can_be_aborted_after_all():
    async def script(rig):
        found = rig.submit()
        await rig.decode(3)
        await rig.service.pause('in_place')
        await rig.service.pause('abort')
        return list(found)

    assert ServiceRig().run(script)[-1].finish == 'cancelled'


def test_a_pause_that_waits_lets_answers_end_and_nothing_begin():
    async def script(rig):
        found = rig.submit()
        await rig.decode(3)
        pause = rig.ask(lambda service: service.pause('wait'))
        await rig.decode(1)
        late = rig.submit(1)
        await rig.decode(1)
        assert (pause, late) == ([], [])
        await rig.decode(50)
        assert (tokens_of(found), pause, late) == (WHOLE, [(None, None)], [])
        await rig.service.resume()
        await rig.decode(50)
        return late

    assert len(tokens_of(ServiceRig().run(script))) == 3


def test_a_resume_ends_a_pause_that_still_waits():
    async def script(rig):
        found = rig.submit()
        await rig.decode(3)
        pause = rig.ask(lambda service: service.pause('wait'))
        await rig.decode(1)
        await rig.service.resume()
        await rig.decode(1)
        assert pause == [(None, None)]
        assert (await rig.service.look()).pause is None
        await rig.decode(50)
        return found

    assert tokens_of(ServiceRig().run(script)) == WHOLE


def test_weights_are_staged_while_it_decodes_and_swapped_between_two_dispatches():
    async def script(rig):
        found = rig.submit(streams=True)
        await rig.decode(2.5)
        await rig.service.stage('3', 'next')
        staged, before = len(rig.kinds('decode')), len(tokens_of(found))
        assert (await rig.service.look()).weight_version == 'first'
        await rig.service.swap('next')
        status, loaded = await rig.service.look(), len(rig.kinds('decode'))
        assert (status.weight_version, status.digest, status.model_path) == ('next', 'digest of 3', '3')
        assert (status.updates, staged <= loaded <= staged + 2, before > 0) == (1, True, True)
        old = spans_of(found)
        await rig.decode(50)
        assert spans_of(found)['first'] == old['first']  # no token of the old weights after the reply
        return found

    rig = ServiceRig()
    found = rig.run(script)
    split = spans_of(found)['first']
    expected = [token(0 if i < split else 3, DRAW, 0, 3 + i) for i in range(6)] + [STOP]
    assert (tokens_of(found), found[-1].retractions) == (expected, 1)


def test_a_directory_that_can_not_be_read_leaves_the_old_weights():
    async def script(rig):
        with pytest.raises(UpdateError, match='broken was not loaded, the old weights are in use: ValueError'):
            await rig.service.stage('broken')
        with pytest.raises(UpdateError, match='no weights are staged'):
            await rig.service.swap('next')
        found = rig.submit()
        await rig.decode(50)
        return tokens_of(found)

    assert ServiceRig().run(script) == WHOLE


def test_a_failed_staging_does_not_leave_earlier_ones_to_be_swapped_in():
    async def script(rig):
        await rig.service.stage('3', 'next')
        with pytest.raises(UpdateError):
            await rig.service.stage('broken')
        with pytest.raises(UpdateError, match='no weights are staged'):
            await rig.service.swap('next')

    ServiceRig().run(script)


def test_two_updates_at_once_are_refused_and_the_reply_of_an_action_says_so():
    async def script(rig):
        first = rig.ask(lambda service: service.stage('3'))
        await rig.pass_time(PRICES['load'] / 2)
        second = rig.ask(lambda service: service.stage('4'))
        await rig.decode(10)
        return first, second

    first, [(result, error)] = ServiceRig().run(script)
    assert (first, result) == ([(None, None)], None)
    assert isinstance(error, UserError)
    assert 'another update of the weights is under way' in str(error)


def test_new_names_start_a_span_and_compute_nothing_again():
    async def script(rig):
        found = rig.submit(streams=True)
        await rig.decode(3)
        await rig.service.relabel('renamed')
        await rig.decode(50)
        return found

    rig = ServiceRig()
    found = rig.run(script)
    assert tokens_of(found) == WHOLE
    assert list(spans_of(found)) == ['first', 'renamed']
    assert (rig.backend.prefills, found[-1].retractions) == ([[[1, 2]]], 0)


def test_an_abort_means_a_request_and_its_numbered_answers_wherever_they_are():
    async def script(rig):
        running = [rig.submit(0, name='a_0', group='a'), rig.submit(2, name='a_1', group='a')]
        running.append(rig.submit(0, name='ab_0', group='ab'))
        await rig.decode(3)
        await rig.service.pause('in_place')
        held = [rig.submit(0, name='a_2', group='a'), rig.submit(1, name='b')]
        # called so by its client: no answer of a call named 'a'
        held.append(rig.submit(2, name='a_7'))
        await rig.decode(1)
        await rig.service.cancel(['a', 'unknown', ''])
        await rig.service.resume()
        await rig.decode(50)
        return [one[-1].finish for one in (*running, *held)]

    assert ServiceRig().run(script) == ['cancelled', 'cancelled', 'stop', 'cancelled', 'stop', 'stop']


def test_what_is_withdrawn_ends_and_another_request_of_that_name_does_not():
    async def script(rig):
        mine, theirs, ends = [], [], []
        refused, open_ = Submission(request(0), False, mine.append), Submission(request(0), False, theirs.append)
        running, held = (Submission(dataclasses.replace(request(1), name='b'), False, ends.append) for _ in range(2))
        for one in (open_, refused, running):
            rig.service.inbox.put(one)
        await rig.decode(3)
        await rig.service.withdraw([refused, running])
        await rig.service.pause('in_place')
        rig.service.inbox.put(held)
        await rig.decode(1)
        await rig.service.withdraw([running])
        assert len(ends) == 1
        await rig.service.withdraw([held])
        await rig.service.resume()
        await rig.decode(50)
        return [one.finish for one in theirs], [one.finish for one in ends], mine[0].error

    theirs, ends, error = ServiceRig().run(script)
    assert (theirs, ends) == (['stop'], ['cancelled', 'cancelled'])
    assert 'is open already' in str(error)


def test_an_id_that_is_open_is_refused_and_may_come_again_later():
    async def script(rig):
        first, second = rig.submit(name='a'), rig.submit(name='a')
        await rig.decode(50)
        third = rig.submit(name='a')
        await rig.decode(50)
        return first, second, third

    first, [refused], third = ServiceRig().run(script)
    assert tokens_of(first) == tokens_of(third) == WHOLE
    assert "request 'a' is open already" in str(refused.error)


def test_cached_tokens_are_those_that_were_not_computed_for_the_request():
    async def script(rig):
        found = [rig.submit(prompt=range(1, 10)), rig.submit(1, prompt=range(1, 10))]  # the second waits for the first
        await rig.decode(50)
        found += [rig.submit(prompt=range(1, 10)), rig.submit(1, prompt=range(1, 10), cache_salt='b')]
        await rig.decode(50)
        await rig.service.stage('3')
        await rig.service.swap('next')
        found.append(rig.submit(prompt=range(1, 10)))
        await rig.decode(50)
        return [one[-1].cached_tokens for one in found]

    rig = ServiceRig()
    assert rig.run(script) == [0, 8, 8, 0, 0]
    assert [len(piece) for pieces in rig.backend.prefills for piece in pieces] == [8, 8, 8]


def test_the_cache_is_flushed_where_nothing_is_generated():
    async def script(rig):
        found = rig.submit()
        await rig.decode(3)
        with pytest.raises(UserError, match='1 requests are open'):
            await rig.service.flush_cache()
        await rig.service.pause('abort')
        await rig.service.flush_cache()
        await rig.service.resume()
        again = rig.submit()
        await rig.decode(50)
        assert (found[-1].version, again[-1].version) == ('first', 'first')
        return again

    rig = ServiceRig()
    assert tokens_of(rig.run(script)) == WHOLE
    assert rig.backend.prefills == [[[1, 2]]] * 2


def test_draining_ends_a_pause_and_returns_with_the_last_answer():
    async def script(rig):
        found = rig.submit()
        await rig.decode(3)
        await rig.service.pause('retract')
        held = rig.submit(1)
        await rig.decode(1)
        await rig.service.drain()
        return found[-1].finish, held[-1].finish

    assert ServiceRig().run(script) == ('stop', 'stop')


def test_finished_answers_and_tokens_are_counted():
    async def script(rig):
        rig.submit(0)
        cut = rig.submit(2, name='cut')
        await rig.decode(3)
        await rig.service.cancel(['cut'])
        await rig.decode(50)
        return await rig.service.look(), len(tokens_of(cut))

    status, cut = ServiceRig().run(script)
    assert (status.finished, status.prompt_tokens) == ({'stop': 1, 'length': 0, 'cancelled': 1}, 6)
    assert status.generated_tokens == 7 + cut
