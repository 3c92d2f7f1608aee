"""The registry: who may register, what a reader sees, and what the pool is told; addresses of servers."""

from __future__ import annotations

import dataclasses
import os

import pytest

from areal_jax.config.kinds import EXTERNAL, OWN_CLIENT
from areal_jax.errors import UserError
from areal_jax.registry import Entry, Registration
from areal_jax.rollout.pool import needs_spans
from areal_jax.rollout.servers.keeper import SAYS_NOTHING, ServerFacts, require_fit
from areal_jax.rollout.servers.server_entries import (
    RegistryWatch,
    ServerEntry,
    describe_server,
    read_address,
    read_registry,
)
from tests.rollout.scripted import scripted
from tests.rollout.servers.rig import ServerRig, request


def register(workdir, name='a', facts=SAYS_NOTHING):
    return Registration(workdir, describe_server(name, 'http://host:1', 'own', facts, index=3))


def test_servers_are_read_and_other_roles_are_not(tmp_path):
    server = register(tmp_path)
    Registration(tmp_path, Entry('learner-0', 0, '', 'host:2', role='learner', index=0))
    (read,) = read_registry(tmp_path)
    token = server.entry.token
    assert dataclasses.replace(read, heartbeat=None) == ServerEntry(
        'a', 1, 'http://host:1', 'own', os.getpid(), token=token, index=3
    )
    assert read.heartbeat is not None
    assert read.holder == f'1-{token}'
    assert ServerEntry('own+http://host:1', 1, 'http://host:1', 'own', 0).holder == ''
    server.close()
    assert read_registry(tmp_path)[0].is_leaving


def test_a_server_that_is_being_built_takes_the_name_and_is_no_server_yet(tmp_path):
    register(tmp_path)
    server = Registration(tmp_path, describe_server('a', '', 'own', index=3))
    assert read_registry(tmp_path) == []
    server.update(address='http://host:2')
    assert [(read.incarnation, read.url) for read in read_registry(tmp_path)] == [(2, 'http://host:2')]


@pytest.mark.parametrize('name', ['key', 'learner.json'])
def test_a_file_beside_the_entries_is_passed_over(tmp_path, name):
    (tmp_path / 'registry').mkdir()
    (tmp_path / 'registry' / name).write_text('of the learner processes')
    assert read_registry(tmp_path) == []


def entry(index, incarnation=1, heartbeat=0, is_leaving=False):
    return ServerEntry(f'engine/{index}', incarnation, f'toy:{index}', 'own', 1, is_leaving, heartbeat)


class WatchedRig(ServerRig):
    """Servers join and leave as the watch reads the entries in the list `looks`."""

    def __init__(self, servers, *looks, patience_s=10.0, **settings):
        super().__init__(servers, join=False, **settings)
        self.looks, self.patience_s = list(looks), patience_s

    def run(self, script):
        async def program(rig):
            def made(one):
                require_fit(one.name, one.facts, ServerFacts(context_tokens=2))
                return self.servers[int(one.name.split('/')[1])]

            watch = RegistryWatch(
                self.clock, self.pool, lambda: list(self.looks), made, every_s=0.1, patience_s=self.patience_s
            )
            self.supervisor.start('registry', watch.run())
            return await script(rig)

        return super().run(program)


@scripted(WatchedRig, 2, entry(0))
async def test_servers_join_as_they_register_and_leave_as_they_say_so(rig):
    await rig.until(lambda: rig.pool.states() == {'engine/0': 'serving'})
    rig.looks.append(entry(1))
    await rig.until(lambda: rig.pool.states().get('engine/1') == 'serving')
    rig.looks[0] = entry(0, is_leaving=True)
    await rig.until(lambda: list(rig.pool.states()) == ['engine/1'])
    rig.looks[0] = entry(0, incarnation=2)
    await rig.until(lambda: rig.pool.states().get('engine/0') == 'serving')
    rig.looks[0] = entry(0, incarnation=1)  # the file of a dead incarnation
    await rig.pass_time(0.5)
    rig.looks[:] = [entry(0, incarnation=2)]
    await rig.until(lambda: list(rig.pool.states()) == ['engine/0'])
    assert [(e['engine'], e['incarnation']) for e in rig.kinds('register')] == [
        ('engine/0', 1), ('engine/1', 1), ('engine/0', 2),
    ]  # fmt: skip
    assert [state for state, _ in rig.reasons('engine/1')][-1] == 'gone'


@scripted(WatchedRig, 1, dataclasses.replace(entry(0), token='aa'))
async def test_of_two_that_started_at_the_same_time_the_later_one_seen_replaces_the_other(rig):
    await rig.until(lambda: rig.pool.states() == {'engine/0': 'serving'})
    rig.looks[0] = dataclasses.replace(entry(0), token='bb')
    await rig.until(lambda: len(rig.kinds('register')) == 2)
    rig.looks[0] = dataclasses.replace(entry(0), token='aa')
    await rig.pass_time(0.5)
    assert len(rig.kinds('register')) == 2
    assert 'another process that started at the same time has its name' in dict(rig.reasons('engine/0'))['gone']


@scripted(WatchedRig, 2, entry(0), entry(1), patience_s=1.0, health_every_s=100.0)
async def test_a_server_whose_heart_stops_gets_no_requests_until_it_answers(rig):
    await rig.until(lambda: set(rig.pool.states().values()) == {'serving'})
    answers = rig.ask(*(request(draw, tokens=200) for draw in range(2)))
    for beat in range(20):
        rig.looks[1] = entry(1, heartbeat=beat)
        if beat == 5:
            rig.servers[0].trouble = {'hangs'}
        await rig.pass_time(0.1)
    assert rig.pool.states() == {'engine/0': 'unknown', 'engine/1': 'serving'}
    assert answers[0].generation.engine == 'engine/1'
    rig.servers[0].heal()
    rig.looks[0] = entry(0, heartbeat=1)
    await rig.until(lambda: rig.pool.states()['engine/0'] == 'serving')
    assert 'no heartbeat for 1.' in dict(rig.reasons('engine/0'))['unknown']


@scripted(WatchedRig, 1, entry(0, heartbeat=None), patience_s=1.0)
async def test_an_entry_without_a_heartbeat_is_never_silent(rig):
    await rig.pass_time(5.0)
    assert rig.pool.states() == {'engine/0': 'serving'}


def test_what_a_server_says_of_itself_is_read_again(tmp_path):
    facts = ServerFacts('keep', 512, 'bfloat16', 'processed')
    registration = register(tmp_path, facts=facts)
    assert read_registry(tmp_path)[0].facts == facts
    registration.update(details={'facts': dataclasses.asdict(facts) | {'unknown': 1}})
    assert read_registry(tmp_path)[0].facts == facts


RUN = ServerFacts('recompute', 512, 'float32', 'processed')


@pytest.mark.parametrize(('change', 'says'), [
    ({'kv_policy': 'keep'}, "kv_policy='keep', and this run needs 'recompute' (rollout.kv_policy)"),
    ({'context_tokens': 511}, 'context_tokens=511, and this run needs 512 (rollout.context_tokens)'),
    ({'dtype': 'bfloat16'}, "dtype='bfloat16', and this run needs 'float32' (publication.dtype)"),
    ({'logprobs_mode': 'raw'}, "logprobs_mode='raw', and this run needs 'processed' (rollout.temperature)"),
])  # fmt: skip
def test_a_server_that_computes_something_else_is_refused_by_name_with_both_values(change, says):
    with pytest.raises(UserError) as refused:
        require_fit('a at http://host:1', dataclasses.replace(RUN, **change), RUN)
    assert str(refused.value) == f'the server a at http://host:1 has {says}: start it with the config of the run'
    require_fit('a', RUN, dataclasses.replace(RUN, **dict.fromkeys(change)))  # the run has no need of it


def test_a_longer_context_fits_and_so_does_what_is_not_said():
    require_fit('a', dataclasses.replace(RUN, context_tokens=4096), RUN)
    require_fit('a', ServerFacts(), RUN)


def misfit(index):
    """An entry that the maker of a WatchedRig refuses."""
    return dataclasses.replace(entry(index), facts=ServerFacts(context_tokens=1))


def test_a_server_that_does_not_fit_ends_the_run_where_there_is_no_other():
    async def script(rig):
        await rig.pass_time(100.0)

    rig = WatchedRig(1, misfit(0), patience_s=1.0)
    with pytest.raises(UserError, match='the server engine/0 has context_tokens=1'):
        rig.run(script)
    assert 1.0 <= rig.clock.now() < 2.0
    assert len(rig.warnings) == 1


@pytest.mark.parametrize('others', [[entry(1)], []])
@scripted(WatchedRig, 2, misfit(0), patience_s=1.0)
async def test_beside_another_one_it_is_named_and_gets_no_work(rig, others):
    rig.looks += others
    await rig.pass_time(0.5)
    rig.looks[1:] = [entry(1)]
    await rig.until(lambda: rig.pool.states() == {'engine/1': 'serving'})
    await rig.pass_time(3.0)
    ((state, reason),) = rig.reasons('engine/0')
    assert (state, rig.warnings) == ('refused', [f'a server is refused: {reason}'])
    assert 'context_tokens=1, and this run needs 2' in reason


def test_a_server_without_a_capability_is_refused_like_one_that_does_not_fit():
    async def script(rig):
        await rig.until(lambda: rig.pool.states() == {'engine/1': 'serving'})
        assert rig.servers[0].closed

    rig = WatchedRig(2, entry(0), entry(1), requirements=[needs_spans('learning')])
    rig.servers[0].capabilities = dataclasses.replace(rig.servers[0].capabilities, spans=False)
    rig.run(script)
    assert rig.warnings == [
        'a server is refused: engine/0 cannot tell the version of each token after a swap, which learning needs: '
        'change that setting or use other engines'
    ]


@pytest.mark.parametrize(
    ('address', 'kind', 'url'),
    [
        ('vllm+http://127.0.0.1:8000', 'vllm', 'http://127.0.0.1:8000'),
        ('sglang+https://host.example:30000/', 'sglang', 'https://host.example:30000'),
    ],
)
def test_an_address_names_the_protocol_and_the_server(address, kind, url):
    entry = read_address(address, EXTERNAL.clients)
    assert (entry.kind, entry.url) == (kind, url)


def test_a_kind_without_addresses_is_none_of_them():
    with pytest.raises(UserError, match=r'is no address'):
        read_address('own+http://host:1', [*EXTERNAL.clients, OWN_CLIENT])


@pytest.mark.parametrize('address', ['', 'http://host:1', 'vllm+host:1', 'other+http://host:1', 'vllm+http://host/v1'])
def test_what_is_no_address_is_refused_by_its_value(address):
    with pytest.raises(UserError, match=r"' is no address of a server \(rollout.urls\): write sglang\+http") as refused:
        read_address(address, EXTERNAL.clients)
    assert repr(address) in str(refused.value)
