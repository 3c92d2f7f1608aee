"""The routes that report a server's state: health, models, facts and metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
from aiohttp import web

from areal_jax.files import JsonObject
from areal_jax.rollout.http.server.connections import ConnectionTable
from areal_jax.rollout.http.server.limits import FAILED
from areal_jax.rollout.http.server.replies import BRIDGE
from areal_jax.rollout.http.service import ServiceStatus
from areal_jax.rollout.http.wire.control import render_pauses
from areal_jax.rollout.http.wire.exchange import Call, CallSampling, ReplyInfo, RequestError
from areal_jax.rollout.http.wire.openai import render_models

_PREFIX = 'areal_jax_'  # of the metrics
_UNHEALTHY = 503


@dataclasses.dataclass
class Facts:
    """The facts of a running server; only `draining` and `holder` change."""

    model: str
    model_path: str
    architecture: str
    program_version: str
    started_s: int  # seconds since 1970
    draining: bool = False  # the server ends when its open requests have ended
    holder: str = ''  # name of this process in the registry of a run; '' = it is in none


FACTS: web.AppKey[Facts] = web.AppKey('facts', Facts)
CONNECTIONS: web.AppKey[ConnectionTable] = web.AppKey('connections', ConnectionTable)


def list_routes() -> list[web.RouteDef]:
    return [
        web.get('/health', health),
        web.get('/ping', health),
        web.get('/health_generate', health_generate),
        web.get('/ready', ready),
        web.get('/v1/models', models),
        web.get('/v1/models/{name:.+}', one_model),
        web.get('/model_info', model_info),
        web.get('/get_model_info', model_info),
        web.get('/server_info', server_info),
        web.get('/get_server_info', server_info),
        web.get('/version', version),
        web.get('/get_world_size', world_size),
        web.get('/metrics', metrics),
    ]


async def health(request: web.Request) -> web.Response:
    """Answers 200 if the host's side answers, as it does during a dispatch too, and the weights give finite numbers."""
    return await _describe_state(request)


async def health_generate(request: web.Request) -> web.Response:
    """Answers 200 if one token can be generated."""
    bridge = request.app[BRIDGE]
    sampling = CallSampling(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    exchange = bridge.open(Call((np.zeros(1, np.int32),), 'input_ids', (sampling,), ('',)))
    try:
        await exchange.finish_within(bridge.limits.reply_s)
    except TimeoutError:
        return _describe_health(f'no token within {bridge.limits.reply_s:g} s')
    except RequestError as error:
        if error.status != FAILED:
            raise
        return _describe_health(str(error))
    finally:
        exchange.close()
    return web.Response()


async def ready(request: web.Request) -> web.Response:
    """Answers 200 if the server takes requests: if it is healthy and does not drain."""
    draining = 'this server is ending' if request.app[FACTS].draining else ''
    return _describe_health(draining) if draining else await _describe_state(request)


async def models(request: web.Request) -> web.Response:
    facts = request.app[FACTS]
    info = ReplyInfo(facts.model, facts.started_s)
    return web.json_response(render_models(info, request.app[BRIDGE].context_tokens))


async def one_model(request: web.Request) -> web.Response:
    """Answers the model's entry; 404 for another name, although requests may name any model."""
    facts, name = request.app[FACTS], request.match_info['name']
    if name != facts.model:
        raise RequestError('model', f'model={name!r} is not served here: this server has {facts.model!r}', 404)
    info = ReplyInfo(facts.model, facts.started_s)
    return web.json_response(render_models(info, request.app[BRIDGE].context_tokens)['data'][0])


async def model_info(request: web.Request) -> web.Response:
    facts, status = request.app[FACTS], await request.app[BRIDGE].look()
    return web.json_response({
        'model_path': status.model_path,
        'tokenizer_path': facts.model_path,
        'is_generation': True,
        'weight_version': status.weight_version,
        'manifest_hash': status.digest or None,
        'architectures': [facts.architecture],
        'preferred_sampling_params': None,
    })  # fmt: skip


async def server_info(request: web.Request) -> web.Response:
    facts, bridge = request.app[FACTS], request.app[BRIDGE]
    status = await bridge.look()
    return web.json_response({
        'model_path': status.model_path,
        'served_model_name': facts.model,
        'context_length': bridge.context_tokens,
        'version': facts.program_version,
        'weight_version': status.weight_version,
        'limits': dataclasses.asdict(bridge.limits),
        'internal_states': [_state(status)],
    })  # fmt: skip


async def version(request: web.Request) -> web.Response:
    return web.json_response({'version': request.app[FACTS].program_version})


async def world_size(request: web.Request) -> web.Response:
    return web.json_response({'world_size': 1})


async def metrics(request: web.Request) -> web.Response:
    """Answers the metrics in the text format of Prometheus."""
    bridge, connections = request.app[BRIDGE], request.app[CONNECTIONS]
    status = await bridge.look()
    engine, counts = status.engine, bridge.counts
    lines = [
        *_metric('requests_running', 'gauge', 'requests in slots', engine.running),
        *_metric(
            'requests_waiting', 'gauge', 'requests that wait for a slot or for the end of a pause', _waiting(status)
        ),
        *_metric('answers_open', 'gauge', 'answers that HTTP requests wait for', bridge.load.answers),
        *_metric('streams_open', 'gauge', 'open responses with server-sent events', bridge.load.streams),
        *_metric('connections_open', 'gauge', 'connections to this server', len(connections)),
        *_metric(
            'connections_closed_for_room_total',
            'counter',
            'silent connections closed for others',
            connections.closed_for_room,
        ),
        *_metric('paused', 'gauge', '1 while generation is paused', int(status.pause is not None)),
        *_metric(
            'paused_seconds',
            'gauge',
            'since the first of the pauses under way began',
            max((pause.paused_s for pause in status.pauses), default=0.0),
        ),
        *_metric('requests_failed_total', 'counter', 'answers with a log-prob that is no number', status.failed),
        *_metric('prompt_tokens_total', 'counter', 'prompt tokens of requests that began', status.prompt_tokens),
        *_metric('generated_tokens_total', 'counter', 'tokens delivered', status.generated_tokens),
        *_metric('scored_tokens_total', 'counter', 'tokens of scoring passes', status.scored_tokens),
        *_metric('scoring_waiting', 'gauge', 'sequences that wait for a scoring pass', status.scoring_waiting),
        *_metric('scoring_programs', 'gauge', 'programs of scoring compiled so far', status.scoring_programs),
        *_metric('decode_tokens_per_second', 'gauge', 'decoded tokens a second of decoding', engine.tokens_per_s),
        *_metric('weight_updates_total', 'counter', 'updates of the weights', status.updates),
        *_metric('weight_update_pause_seconds', 'gauge', 'pause of decoding of the last update', status.update_pause_s),
        *_labelled('requests_finished_total', 'answers by how they ended', 'reason', status.finished.items()),
        *_metric('tool_calls_total', 'counter', 'calls of tools in answers', counts.calls),
        *_metric('tool_calls_unparsed_total', 'counter', 'broken calls of tools, which stay text', counts.unparsed),
        *_metric('tool_calls_hidden_total', 'counter', 'calls after the first, where one was wanted', counts.hidden),
        *_labelled(
            'fields_ignored_total', 'requests with a field that has no influence', 'field', counts.ignored.items()
        ),
        *_labelled('wishes_total', 'requests for a call or for JSON', 'field', counts.wishes.items()),
        *_labelled('wishes_missed_total', 'of these, those with an answer without', 'field', counts.missed.items()),
        f'# HELP {_PREFIX}weight_version_info the weight version in use',
        f'# TYPE {_PREFIX}weight_version_info gauge',
        f'{_PREFIX}weight_version_info{{version="{_escape(status.weight_version)}"}} 1',
    ]
    return web.Response(text='\n'.join([*lines, '']), headers={'Content-Type': 'text/plain; version=0.0.4'})


def _metric(name: str, kind: str, meaning: str, value: float) -> list[str]:
    return [f'# HELP {_PREFIX}{name} {meaning}', f'# TYPE {_PREFIX}{name} {kind}', f'{_PREFIX}{name} {value}']


def _labelled(name: str, meaning: str, label: str, counts: Iterable[tuple[str, int]]) -> list[str]:
    lines = [f'{_PREFIX}{name}{{{label}="{_escape(value)}"}} {count}' for value, count in counts]
    return [f'# HELP {_PREFIX}{name} {meaning}', f'# TYPE {_PREFIX}{name} counter', *lines]


def _escape(label: str) -> str:
    return label.replace('\\', r'\\').replace('"', r'\"').replace('\n', r'\n')


def _state(status: ServiceStatus) -> JsonObject:
    engine = status.engine
    return {
        'running_requests': engine.running,
        'waiting_requests': _waiting(status),
        'tokens_per_second': engine.tokens_per_s,
        'devices': list(engine.devices),
        'pause': status.pause,
        'pauses': render_pauses(status.pauses),
        'client': status.client or None,
        'updates': status.updates,
        'update_pause_seconds': status.update_pause_s,
    }


def _waiting(status: ServiceStatus) -> int:
    return status.engine.waiting + status.held


async def _describe_state(request: web.Request) -> web.Response:
    """Answers 503 if this server is not reliable; 200 while it is paused, with the pauses and their holders."""
    bridge = request.app[BRIDGE]
    try:
        status = await bridge.look()
    except TimeoutError:
        return _describe_health(f'the engine has not answered for {bridge.limits.reply_s:g} s')
    if status.fault or not status.pauses:
        return _describe_health(status.fault)
    return web.json_response({'status': 'paused', 'pauses': render_pauses(status.pauses)})


def _describe_health(fault: str) -> web.Response:
    """Answers 503 with the fault; without a fault 200 with an empty body, as probes expect."""
    return web.json_response({'status': 'unhealthy', 'reason': fault}, status=_UNHEALTHY) if fault else web.Response()
