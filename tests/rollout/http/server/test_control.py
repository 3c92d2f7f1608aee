"""Pauses, aborts and updates of a server under load, in the words of SGLang and of vLLM."""

import asyncio

import pytest

from tests.rollout.http.server.rig import PROMPT, ToyServer, body, until, write_weights
from tests.toys import token

LONG = 300


@pytest.fixture
def server():
    with ToyServer() as server:
        yield server


def tokens_under(spans, weights, seed_sample=0):
    """What an answer must be whose spans are of versions with these weights {version: w}."""
    found = []
    for span in spans:
        positions = range(len(PROMPT) + span['start'], len(PROMPT) + span['end'])
        found += [token(weights[span['version']], 0, seed_sample, position) for position in positions]
    return found


async def start(client, **changed):
    """A long request that has begun."""
    task = asyncio.ensure_future(client.post('/generate', body(LONG, **changed)))
    await until(lambda: running(client, 1))
    await asyncio.sleep(0.03)
    return task


async def running(client, count):
    _, info = await client.get('/server_info')
    return info['internal_states'][0]['running_requests'] == count


def test_an_abort_returns_what_there_is_and_the_rest_can_be_asked_for(server):
    async def script(client):
        task = await start(client, rid='g-1')
        assert await client.post('/abort_request', {'rid': 'unknown'}) == (200, '')
        assert await client.post('/abort_request', {'rid': 'g-1'}) == (200, '')
        return await task

    status, reply = server.run(script)
    meta, spans = reply['meta_info'], reply['meta_info']['weight_versions']
    assert (status, meta['finish_reason']['type'], meta['id']) == (200, 'abort', 'g-1')
    assert 0 < meta['completion_tokens'] < LONG
    assert reply['output_ids'] == tokens_under(spans, {'0': 0})


def test_abort_requests_knows_ids_with_the_prefix_of_vllm(server):
    async def script(client):
        sampling = {'max_tokens': LONG, 'ignore_eos': True}
        asked = {'token_ids': PROMPT, 'request_id': 'a', 'sampling_params': sampling}
        task = asyncio.ensure_future(client.post('/inference/v1/generate', asked))
        await until(lambda: running(client, 1))
        await client.post('/abort_requests', {'request_ids': ['generate-tokens-a']})
        return await task

    _, reply = server.run(script)
    assert reply['choices'][0]['finish_reason'] == 'abort'


@pytest.mark.parametrize('pause', [('/pause_generation', {'mode': 'abort'}), ('/pause?mode=abort', {})])
def test_a_pause_that_aborts_ends_what_runs_and_holds_what_comes(server, pause):
    async def script(client):
        task = await start(client)
        status, _ = await client.post(*pause)
        assert (status, task.done() or await asyncio.wait_for(task, 1) is not None) == (200, True)
        held = asyncio.ensure_future(client.post('/generate', body(3)))
        await asyncio.sleep(0.05)
        assert not held.done()
        assert (await client.get('/is_paused'))[1] == {'is_paused': True}
        await client.post('/resume', {})
        return (await task)[1], (await held)[1]

    aborted, held = server.run(script)
    assert aborted['meta_info']['finish_reason']['type'] == 'abort'
    assert held['meta_info']['finish_reason']['type'] == 'length'


@pytest.mark.parametrize(('mode', 'flush', 'stale'), [('retract', True, False), ('in_place', True, False),
                                                     ('in_place', False, True)])  # fmt: skip
def test_a_pause_that_keeps_answers_gives_them_two_spans_after_an_update(server, tmp_path, mode, flush, stale):
    async def script(client):
        task = await start(client)
        await client.post('/pause_generation', {'mode': mode})
        update = {'model_path': write_weights(tmp_path / 'v4', 3), 'weight_version': '4', 'flush_cache': flush}
        status, reply = await client.post('/update_weights_from_disk', update)
        assert (status, reply['success']) == (200, True)
        assert (await client.get('/model_info'))[1]['weight_version'] == '4'
        decoded = sum(e['kind'] == 'decode' for e in server.log.events)
        await asyncio.sleep(0.05)
        assert sum(e['kind'] == 'decode' for e in server.log.events) == decoded
        await client.post('/continue_generation', {})
        return (await task)[1]

    reply = server.run(script)
    spans = reply['meta_info']['weight_versions']
    assert [span['version'] for span in spans] == ['0', '4']
    assert reply['output_ids'] == tokens_under(spans, {'0': 0, '4': 3})
    worst = min(entry[0] for entry in reply['meta_info']['output_token_logprobs'])
    assert (worst < -900) is stale  # the toy shows a stale cache by a log-prob
    assert reply['meta_info']['num_retractions'] == (not stale)


def test_a_pause_that_waits_lets_answers_end(server):
    async def script(client):
        task = await start(client)
        assert await client.post('/pause?mode=wait', {}) == (200, {'status': 'paused'})
        await client.post('/resume', {})
        return (await task)[1]

    assert server.run(script)['meta_info']['completion_tokens'] == LONG


def test_an_update_under_load_interrupts_between_two_dispatches(server, tmp_path):
    async def script(client):
        task = await start(client)
        update = {'model_path': write_weights(tmp_path / 'v4', 3), 'weight_version': '4'}
        await client.post('/update_weights_from_disk', update)
        events = len(server.log.events)
        reply = (await task)[1]
        later = {e['version'] for e in server.log.events[events:] if e['kind'] == 'decode'}
        return reply, later

    reply, later = server.run(script)
    spans = reply['meta_info']['weight_versions']
    assert [span['version'] for span in spans] == ['0', '4']
    assert reply['output_ids'] == tokens_under(spans, {'0': 0, '4': 3})
    assert later == {1}  # no token is decoded under the old version after the reply


def test_the_phases_of_an_update_stage_first_and_swap_last(server, tmp_path):
    async def script(client):
        path = write_weights(tmp_path / 'v9', 2)
        assert (await client.post('/start_weight_update'))[0] == 200
        assert (await client.post('/update_weights', {'update_info': {'weights_path': path}}))[0] == 200
        before = (await client.get('/weight_info'))[1]
        _, old = await client.post('/generate', body(3))
        assert (await client.post('/finish_weight_update', {'weight_version': '9'}))[0] == 200
        _, new = await client.post('/generate', body(3))
        return before, old, (await client.get('/weight_info'))[1], new

    before, old, after, new = server.run(script)
    assert before['weight_version'] == '0'
    assert after == {'weight_version': '9', 'manifest_hash': 'digest of 2', 'client': None, 'pauses': []}
    assert old['output_ids'] == tokens_under(old['meta_info']['weight_versions'], {'0': 0})
    assert new['output_ids'] == tokens_under(new['meta_info']['weight_versions'], {'9': 2})


def test_a_client_of_vllm_reloads_and_names_the_version_afterwards(server, tmp_path):
    async def script(client):
        path = write_weights(tmp_path / 'v1', 5)
        await client.post('/pause?mode=abort', {})
        load = {'method': 'reload_weights', 'kwargs': {'weights_path': path}}
        assert await client.post('/collective_rpc', load) == (200, {'results': [None]})
        _, named = await client.post('/update_weight_version', {'new_version': '1'})
        assert named['success'] is True
        await client.post('/resume', {})
        return (await client.post('/generate', body(3)))[1]

    reply = server.run(script)
    assert reply['output_ids'] == tokens_under(reply['meta_info']['weight_versions'], {'1': 5})


def test_a_new_name_for_the_same_weights_starts_a_span(server):
    async def script(client):
        task = await start(client)
        await client.post('/update_weight_version', {'new_version': 'b'})
        return (await task)[1]

    reply = server.run(script)
    spans = reply['meta_info']['weight_versions']
    assert [span['version'] for span in spans] == ['0', 'b']
    assert reply['output_ids'] == tokens_under(spans, {'0': 0, 'b': 0})


def test_an_update_that_can_not_be_loaded_leaves_the_old_weights_and_says_so(server, tmp_path):
    async def script(client):
        missing = {'model_path': str(tmp_path / 'nowhere'), 'weight_version': '4'}
        refused = await client.post('/update_weights_from_disk', missing)
        phase = await client.post('/finish_weight_update', {'weight_version': '4'})
        return refused, phase, (await client.get('/model_info'))[1], (await client.post('/generate', body(3)))[1]

    (status, reply), (phase, _), info, answer = server.run(script)
    assert (status, reply['success'], phase) == (400, False, 400)
    assert 'the old weights are in use' in reply['message']
    assert info['weight_version'] == '0'
    assert answer['output_ids'] == tokens_under(answer['meta_info']['weight_versions'], {'0': 0})


def test_the_cache_is_flushed_where_nothing_runs(server):
    async def script(client):
        task = await start(client, rid='a')
        busy = await client.post('/flush_cache')
        await client.post('/abort_request', {'rid': 'a'})
        await task
        return busy[0], (await client.get('/flush_cache'))[0], (await client.post('/reset_prefix_cache'))[1]

    assert server.run(script) == (400, 200, {'success': True})


@pytest.mark.parametrize(('path', 'body', 'field'), [
    ('/pause_generation', {'mode': 'gently'}, 'mode'),
    ('/pause?mode=gently', {}, 'mode'),
    ('/abort_request', {}, 'rid'),
    ('/update_weights_from_disk', {}, 'model_path'),
    ('/update_weights_from_disk', {'model_path': 3}, 'model_path'),
    ('/update_weight_version', {'surprise': 1}, 'surprise'),
    ('/update_weights', {'update_info': {}}, 'update_info.weights_path'),
    ('/collective_rpc', {'method': 'exit'}, 'method'),
    ('/abort_requests', {'request_ids': [3]}, 'request_ids'),
])  # fmt: skip
def test_control_routes_refuse_by_name_with_400(server, path, body, field):
    status, reply = server.run(lambda client: client.post(path, body))
    assert status == 400
    assert field in str(reply)


@pytest.mark.parametrize('path', ['/abort_request', '/pause_generation', '/continue_generation', '/resume', '/pause',
                                  '/update_weights_from_disk', '/update_weights', '/collective_rpc'])  # fmt: skip
def test_control_routes_refuse_bodies_that_are_no_object(server, path):
    async def script(client):
        return [(await client.post(path, data=data))[0] for data in (b'{', b'[]', b'7', b'\xff\xfe')]

    assert server.run(script) == [400] * 4


# Clients that name themselves, and their leases; tests/rollout/http/test_pauses.py has the exact times.

NAMED, OTHER = ({'headers': {'X-Areal-Client': name}} for name in ('run', 'next-run-of-the-host'))


async def look(client):
    """Who has paused, by each route that says it."""
    _, health = await client.get('/health')
    _, ready = await client.get('/ready')
    _, weights = await client.get('/weight_info')
    _, info = await client.get('/server_info')
    _, paused = await client.get('/is_paused')
    holders = [one['holder'] for one in weights['pauses']]
    assert [one['holder'] for one in info['internal_states'][0]['pauses']] == holders
    for said in (health, ready):
        assert (said == '') == (not holders), said
        assert not said or (said['status'], [one['holder'] for one in said['pauses']]) == ('paused', holders)
    assert paused == {'is_paused': bool(holders)}
    return weights['client'], weights['pauses']


def test_a_pause_is_a_lease_of_the_client_that_names_itself_and_all_routes_say_whose(server):
    async def script(client):
        assert (await client.post('/register_client', **NAMED)) == (200, {'status': 'registered'})
        assert await look(client) == ('run', [])
        assert (await client.post('/pause?mode=abort&lease_s=60', **NAMED))[0] == 200
        name, (pause,) = await look(client)
        assert (name, pause['holder'], pause['mode']) == ('run', 'run', 'abort')
        assert 0 <= pause['paused_seconds'] < 30 < pause['lease_seconds'] <= 60
        assert 'areal_jax_paused_seconds' in (await client.get('/metrics'))[1]
        assert await client.post('/renew_pause?lease_s=600', **NAMED) == (200, {'renewed': True})
        _, (pause,) = await look(client)
        assert 60 < pause['lease_seconds'] <= 600
        status, reply = await client.post('/resume')
        assert (status, reply['error']['message'].startswith('this server is paused for ')) == (409, True)
        assert (await client.post('/continue_generation', {}))[0] == 409
        assert (await client.post('/resume', **NAMED))[0] == 200
        assert await look(client) == ('run', [])
        assert await client.post('/renew_pause?lease_s=60', **NAMED) == (200, {'renewed': False})
        assert (await client.post('/generate', body(3)))[0] == 200

    server.run(script)


def test_a_lease_that_lapses_serves_others_and_refuses_its_holder(server, tmp_path):
    async def script(client):
        await client.post('/register_client', **NAMED)
        await client.post('/pause?mode=abort&lease_s=0.2', **NAMED)
        status, _ = await client.post('/generate', body(3))  # it waits for the end of the lease
        assert status == 200
        path = write_weights(tmp_path / 'v9', 2)
        late = [
            ('/pause?mode=abort&lease_s=60', None),
            ('/resume', None),
            ('/renew_pause?lease_s=60', None),
            ('/update_weights', {'update_info': {'weights_path': path}}),
            ('/finish_weight_update', {'weight_version': '9'}),
            ('/update_weight_version', {'new_version': '9'}),
            ('/update_weights_from_disk', {'model_path': path}),
            ('/collective_rpc', {'method': 'reload_weights', 'kwargs': {'weights_path': path}}),
            ('/flush_cache', None),
        ]
        for route, sent in late:
            status, reply = await client.post(route, sent, **NAMED)
            assert (status, 'run is fenced (its lease has lapsed' in str(reply)) == (412, True), (route, reply)
        assert await look(client) == (None, [])
        assert (await client.get('/weight_info'))[1]['weight_version'] == '0'
        await client.post('/register_client', **NAMED)
        assert (await client.post('/update_weights', late[3][1], **NAMED))[0] == 200

    server.run(script)


def test_a_new_run_takes_the_server_over(server):
    async def script(client):
        await client.post('/register_client', **NAMED)
        await client.post('/pause?mode=abort&lease_s=600', **NAMED)
        await client.post('/register_client', **OTHER)
        assert (await client.post('/generate', body(3)))[0] == 200
        status, reply = await client.post('/pause?mode=abort&lease_s=600', **NAMED)
        assert (status, 'next-run-of-the-host has registered since' in str(reply)) == (412, True)

    server.run(script)


@pytest.mark.parametrize('route', ['/pause', '/pause?lease_s=0', '/pause?lease_s=1e9', '/pause?lease_s=4000',
                                   '/pause?lease_s=nan', '/pause?lease_s=-1', '/pause?lease_s=' + '9' * 5000,
                                   '/renew_pause', '/pause_generation'])  # fmt: skip
def test_a_client_that_names_itself_pauses_with_a_lease_alone(server, route):
    async def script(client):
        await client.post('/register_client', **NAMED)
        status, reply = await client.post(route, {}, **NAMED)
        assert (status, 'lease_s' in str(reply)) == (400, True), reply
        assert await look(client) == ('run', [])

    server.run(script)


@pytest.mark.parametrize(('route', 'name'), [
    ('/register_client', ''), ('/register_client', 'a b'), ('/register_client', 'a' * 201),
    ('/renew_pause?lease_s=60', ''), ('/pause?lease_s=60', ''), ('/pause?lease_s=60', 'ä'),
])  # fmt: skip
def test_a_name_that_is_missing_or_none_is_refused(server, route, name):
    async def script(client):
        status, reply = await client.post(route, headers={'X-Areal-Client': name} if name else {})
        assert (status, 'X-Areal-Client' in str(reply)) == (400, True), reply
        assert await look(client) == (None, [])

    server.run(script)


def test_a_pause_without_a_lease_is_told_of_and_stays(server):
    async def script(client):
        await client.post('/pause_generation', {'mode': 'abort'})
        _, (pause,) = await look(client)
        assert (pause['holder'], pause['lease_seconds']) == (None, None)
        assert (await client.post('/resume'))[0] == 200
        assert await look(client) == (None, [])

    server.run(script)
