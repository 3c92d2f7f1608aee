"""The routes that control a server, in SGLang's and in vLLM's form; both call the same actions of the service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from aiohttp import web

from areal_jax.rollout.http.pauses import CLIENT, Lease, ServerPause
from areal_jax.rollout.http.server.replies import BRIDGE, Handler, read_body
from areal_jax.rollout.http.service import UpdateError
from areal_jax.rollout.http.wire import control as wire
from areal_jax.rollout.http.wire.bodies import BodyT, read
from areal_jax.rollout.http.wire.encoding import refuse
from areal_jax.rollout.http.wire.exchange import RequestError
from areal_jax.types import KvPolicy

_VLLM_PAUSES = ('abort', 'wait', 'keep')
_ID_PREFIXES = ('generate-tokens-', 'cmpl-', 'chatcmpl-')  # prefixes of a request's id in replies


def list_routes() -> list[web.RouteDef]:
    return [
        _post('/abort_request', abort_request),
        _post('/pause_generation', pause_generation),
        _post('/continue_generation', continue_generation),
        web.get('/flush_cache', _knowing((), flush_cache)),
        _post('/flush_cache', flush_cache),
        _post('/update_weights_from_disk', update_weights_from_disk),
        _post('/update_weight_version', update_weight_version),
        _post('/pause', pause, 'mode', 'clear_cache', 'lease_s'),
        _post('/resume', resume),
        web.get('/is_paused', is_paused),
        web.get('/weight_info', weight_info),
        _post('/abort_requests', abort_requests),
        _post('/reset_prefix_cache', reset_prefix_cache),
        _post('/start_weight_update', start_weight_update),
        _post('/update_weights', update_weights),
        _post('/finish_weight_update', finish_weight_update),
        _post('/collective_rpc', collective_rpc),
        _post('/register_client', register_client),
        _post('/renew_pause', renew_pause, 'lease_s'),
    ]


def _post(path: str, handler: Handler, *query: str) -> web.RouteDef:
    """Makes a POST route; refuses query parameters not in `query`, like unknown fields of a body."""
    return web.post(path, _knowing(query, handler))


def _knowing(query: tuple[str, ...], handler: Handler) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        for name, value in request.query.items():
            if name not in query:
                raise refuse(name, value, 'is an unknown parameter: leave it out')
        return await handler(request)

    return answer


# SGLang.


async def abort_request(request: web.Request) -> web.Response:
    asked = await _read(request, wire.Abort)
    await _cancel(request, () if asked.abort_all else (asked.rid,))
    return web.Response()


async def pause_generation(request: web.Request) -> web.Response:
    if not request.body_exists:
        raise RequestError('', 'the body is empty: send {} or {"mode": "abort"}')
    asked = await _read(request, wire.Pause)
    await _pause(request, asked.mode)
    return web.json_response({'message': 'Generation paused successfully.', 'status': 'ok'})


async def continue_generation(request: web.Request) -> web.Response:
    await _read(request, wire.Continue)
    await _resume(request)
    return web.json_response({'message': 'Generation continued successfully.', 'status': 'ok'})


async def flush_cache(request: web.Request) -> web.Response:
    await _read(request, wire.Nothing)
    bridge, client = request.app[BRIDGE], _client(request)
    await bridge.act('flush', lambda service: service.flush_cache(client), bridge.limits.reply_s)
    return web.Response(text='Cache flushed.\n')


async def update_weights_from_disk(request: web.Request) -> web.Response:
    """Loads and swaps weights; answers 400 with success=false if it fails. No refusal changes anything."""
    asked = await _read(request, wire.UpdateFromDisk)
    label = asked.weight_version
    try:
        await _load(request, asked.model_path, label)
        await _swap(request, label or None, flush=asked.flush_cache, cancel=asked.abort_all_requests)
    except UpdateError as error:
        return web.json_response({'success': False, 'message': str(error), 'num_paused_requests': 0}, status=400)
    version = f' Weight version updated to {label}.' if label else ''
    message = f'Succeeded to update model weights.{version}'
    return web.json_response({'success': True, 'message': message, 'num_paused_requests': 0})


async def update_weight_version(request: web.Request) -> web.Response:
    """Sets the weight version; SGLang and vLLM share this route."""
    asked = await _read(request, wire.NewVersion)
    client, label = _client(request), asked.new_version
    if asked.abort_all_requests:
        await _cancel(request, ())
    await request.app[BRIDGE].act('relabel', lambda service: service.relabel(label, client))
    message = f'Weight version updated to {label}'
    return web.json_response({'success': True, 'message': message, 'new_version': label})


# vLLM.


async def pause(request: web.Request) -> web.Response:
    await _read(request, wire.Nothing)
    mode = _query(request, 'mode', _VLLM_PAUSES)
    clear = _query(request, 'clear_cache', ('true', 'false')) == 'true'
    pause = ('retract' if clear else 'in_place') if mode == 'keep' else mode
    await _pause(request, cast(ServerPause, pause))
    return web.json_response({'status': 'paused'})


async def resume(request: web.Request) -> web.Response:
    await _read(request, wire.Nothing)
    await _resume(request)
    return web.json_response({'status': 'resumed'})


async def is_paused(request: web.Request) -> web.Response:
    status = await request.app[BRIDGE].look()
    return web.json_response({'is_paused': status.pause is not None})


async def weight_info(request: web.Request) -> web.Response:
    status = await request.app[BRIDGE].look()
    return web.json_response({
        'weight_version': status.weight_version,
        'manifest_hash': status.digest or None,
        'client': status.client or None,
        'pauses': wire.render_pauses(status.pauses),
    })  # fmt: skip


async def abort_requests(request: web.Request) -> web.Response:
    """Ends requests by their ids, with or without the prefix that replies add; an empty list ends all."""
    given = (await _read(request, wire.AbortRequests)).request_ids
    given = [given] if isinstance(given, str) else given
    names = [*given, *(name.removeprefix(prefix) for name in given for prefix in _ID_PREFIXES)]
    await _cancel(request, [*names, *(name.removesuffix('-0') for name in names)])
    return web.json_response({'status': 'aborted', 'aborted': len(given)})


async def reset_prefix_cache(request: web.Request) -> web.Response:
    await _read(request, wire.Nothing)
    bridge, client = request.app[BRIDGE], _client(request)
    await bridge.act('flush', lambda service: service.flush_cache(client), bridge.limits.reply_s)
    return web.json_response({'success': True})


async def start_weight_update(request: web.Request) -> web.Response:
    """First phase: announces an update; this server has nothing to prepare."""
    await _read(request, wire.Nothing)
    return web.json_response({'message': 'Weight update started'})


async def update_weights(request: web.Request) -> web.Response:
    """Second phase: loads the directory of `update_info` while decoding continues with the old weights."""
    asked = await _read(request, wire.Update)
    await _load(request, asked.update_info.weights_path)
    return web.json_response({'message': 'Weights updated'})


async def finish_weight_update(request: web.Request) -> web.Response:
    """Third phase: swaps between two dispatches; answers once no more tokens are drawn under the old weights."""
    label = (await _read(request, wire.FinishUpdate)).weight_version or None
    await _swap(request, label, flush=True, cancel=False)
    pause_s = (await request.app[BRIDGE].look()).update_pause_s
    return web.json_response({'message': 'Weight update finished', 'weight_version': label, 'pause_seconds': pause_s})


async def collective_rpc(request: web.Request) -> web.Response:
    """Runs vLLM's method that loads weights, no other; the weight version stays until /update_weight_version."""
    asked = await _read(request, wire.Rpc)
    await _load(request, asked.kwargs.weights_path)
    await _swap(request, None, flush=True, cancel=False)
    return web.json_response({'results': [None]})


# Our own clients, which name themselves in a header.


async def register_client(request: web.Request) -> web.Response:
    """Registers a client; ends every request and the pauses of other such clients, which are refused from now on."""
    await _read(request, wire.Nothing)
    client = wire.require_client(_client(request))
    await request.app[BRIDGE].act('register', lambda service: service.register(client))
    return web.json_response({'status': 'registered'})


async def renew_pause(request: web.Request) -> web.Response:
    """Renews the lease of a pause; never begins a pause again that has ended."""
    await _read(request, wire.Nothing)
    wire.require_client(_client(request))
    lease, bridge = _lease(request), request.app[BRIDGE]
    assert lease is not None
    found = await bridge.act('renew', lambda service: service.renew(lease), bridge.limits.reply_s)
    return web.json_response({'renewed': found})


# Shared by all routes.


async def _read(request: web.Request, kind: type[BodyT]) -> BodyT:
    """Returns the body; counts fields without influence."""
    body, ignored = read(kind, await read_body(request))
    request.app[BRIDGE].counts.note_ignored(ignored)
    return body


async def _cancel(request: web.Request, names: Sequence[str]) -> None:
    """Ends the requests with these names; without names all."""
    bridge = request.app[BRIDGE]
    act = (lambda service: service.cancel(names)) if names else (lambda service: service.cancel_all())
    await bridge.act('abort', act, bridge.limits.reply_s)


async def _pause(request: web.Request, mode: ServerPause) -> None:
    lease = _lease(request)
    await request.app[BRIDGE].act('pause', lambda service: service.pause(mode, lease))


async def _resume(request: web.Request) -> None:
    bridge, client = request.app[BRIDGE], _client(request)
    await bridge.act('resume', lambda service: service.resume(client), bridge.limits.reply_s)


async def _load(request: web.Request, path: str, label: str = '') -> None:
    client = _client(request)
    await request.app[BRIDGE].act('stage', lambda service: service.stage(path, label, client))


async def _swap(request: web.Request, label: str | None, *, flush: bool, cancel: bool) -> None:
    """Swaps weights; requests paused in place keep their KV unless `flush`, others follow the engine's policy."""
    bridge, client = request.app[BRIDGE], _client(request)
    policy: KvPolicy | None = None
    if (await bridge.look()).pause == 'in_place':
        policy = 'recompute' if flush else 'keep'
    await bridge.act('swap', lambda service: service.swap(label, policy, cancel=cancel, client=client))


def _client(request: web.Request) -> str:
    return wire.read_client(request.headers.get(CLIENT, ''))


def _lease(request: web.Request) -> Lease | None:
    return wire.read_lease(_client(request), wire.read_seconds(request.query.get('lease_s', '')))


def _query(request: web.Request, name: str, choices: tuple[str, ...]) -> str:
    """Returns the value of a query parameter; the first choice if it is absent."""
    value = request.query.get(name, choices[0])
    if value not in choices:
        raise refuse(name, value, f'must be {" or ".join(map(repr, choices))}')
    return value
