"""Which servers a run takes: those of its kind that compute what it means."""

from __future__ import annotations

import dataclasses

import pytest

from areal_jax.app.parts.host import SERVERS_S, build_clock
from areal_jax.app.parts.server_builder import ClientMaker, build_server_settings, find_forms, find_needs
from areal_jax.columns import ROUTED_EXPERTS
from areal_jax.config import TrackedConfig
from areal_jax.control.event_writer import EventLog
from areal_jax.errors import UserError
from areal_jax.rollout.http.clients.own import OwnEngine
from areal_jax.rollout.servers.keeper import ServerFacts
from areal_jax.rollout.servers.server_entries import ServerEntry
from tests.app.small import small_config


class Clock:
    """What a client uses of a clock before it speaks to its server."""

    def __init__(self):
        self.widths = {}

    def declare(self, lane, width):
        self.widths[lane] = width

    def event(self, name): ...

    def inbox(self, name): ...


class Supervisor:
    def start(self, name, coroutine):
        coroutine.close()


def make_client(entry, **fields):
    config = TrackedConfig(small_config(rollout__server='own', **fields))
    clock = Clock()
    return ClientMaker(config, clock, None, Supervisor(), vocab_size=16, api_key='')(entry), clock


def entry(kind='own', **facts):
    return ServerEntry('a', 1, 'http://host:1', kind, 7, facts=ServerFacts(**facts))


def test_a_server_that_fits_gets_its_client_and_its_lanes():
    facts = dataclasses.asdict(find_needs(TrackedConfig(small_config(rollout__temperature=0.7))))
    assert facts == {
        'kv_policy': 'recompute', 'context_tokens': 16, 'dtype': 'float32', 'logprobs_mode': 'processed',
        'hardware': None,  # a run asks for none
    }  # fmt: skip
    client, clock = make_client(entry(**facts), rollout__temperature=0.7)
    assert isinstance(client, OwnEngine)
    assert set(clock.widths) == {'engine/0', 'publish/0', 'control/0'}


def test_an_engine_has_its_index_as_number_and_other_servers_the_next_free_one():
    config = TrackedConfig(small_config(rollout__server='own'))
    make = ClientMaker(config, Clock(), None, Supervisor(), vocab_size=16, api_key='')
    came = [('engine-2', 2), ('by-hand', None), ('engine-1', 1), ('engine-0', 0), ('engine-2', 2), ('by-hand', None)]
    names = [make(dataclasses.replace(entry(), name=name, index=index)).name for name, index in came]
    # engine-0 comes when its number is taken
    assert names == ['engine/2', 'engine/0', 'engine/1', 'engine/3', 'engine/2', 'engine/0']


@pytest.mark.parametrize(('facts', 'fields', 'says'), [
    ({'kv_policy': 'keep'}, {}, "kv_policy='keep', and this run needs 'recompute' (rollout.kv_policy)"),
    ({'context_tokens': 8}, {}, 'context_tokens=8, and this run needs 16 (rollout.context_tokens)'),
    ({'dtype': 'bfloat16'}, {}, "dtype='bfloat16', and this run needs 'float32' (publication.dtype)"),
    (
        {'logprobs_mode': 'raw'}, {'rollout__temperature': 0.7},
        "logprobs_mode='raw', and this run needs 'processed' (rollout.temperature)",
    ),
])  # fmt: skip
def test_a_server_that_does_not_fit_is_refused_by_name(facts, fields, says):
    with pytest.raises(UserError) as refused:
        make_client(entry(**facts), **fields)
    assert str(refused.value) == f'the server a at http://host:1 has {says}: start it with the config of the run'


EXPERTS = {
    'model__family': 'qwen3_moe', 'model__experts': 8, 'model__experts_per_token': 2, 'model__d_expert': 32,
}  # fmt: skip


def test_clients_know_the_routes_of_the_model_where_servers_record_them():
    assert find_forms(TrackedConfig(small_config(**EXPERTS))) == {}
    form = find_forms(TrackedConfig(small_config(rollout__record_routes=True, **EXPERTS)))[ROUTED_EXPERTS.name]
    layers = form.n_layers
    assert (form.row, form.experts, form.column.dtype) == ((layers, 2), 8, 'uint8')
    make_client(entry(), rollout__record_routes=True, **EXPERTS)
    with pytest.raises(UserError, match=r"record_routes=True needs a model with experts, and model\.path='' has"):
        find_forms(TrackedConfig(small_config(rollout__record_routes=True)))


def test_at_temperature_one_either_softmax_has_the_same_logprobs():
    make_client(entry(logprobs_mode='raw'))


def test_a_server_of_another_kind_is_refused_by_name():
    with pytest.raises(
        UserError, match=r"the server a at http://host:1 is of the kind 'vllm', and rollout.server='own'"
    ):
        make_client(entry('vllm'))


@pytest.mark.parametrize(('server', 'seconds'), [('in_process', 7.0), ('own', 7.0 + SERVERS_S)])
def test_with_servers_the_pool_gives_up_before_the_clock(server, seconds):
    fields = {'run__clock': 'real', 'run__stall_timeout_s': 7.0, 'rollout__server': server}
    config = TrackedConfig(small_config(**fields))
    assert build_clock(config, EventLog(), 0.0).stall_timeout_s == seconds
    settings = build_server_settings(config, None)
    assert settings.no_server_s == 7.0
    assert settings.max_failures * (settings.health_every_s + settings.ask_s) < SERVERS_S  # a dead one is out by then


def test_the_probe_keeps_to_the_bound_of_the_mismatch_on_average():
    config = TrackedConfig(small_config(rollout__server='own', rollout__max_mismatch=0.01))
    probe = build_server_settings(config, None).probe
    assert (probe.max_mean, probe.max_difference) == (0.01, 0.04)
