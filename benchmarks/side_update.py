"""Our server under load while it loads new weights: what its event log says of every update.

Engine, service and HTTP thread are the same as in main_serve, but in this process, so that the log can be read. The
clients are a process of their own and keep every slot busy.
"""

from __future__ import annotations

import functools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Mapping
from typing import Any

import jax

from areal_jax.app.roles.serve import load_directory
from areal_jax.config.generation import RolloutSection
from areal_jax.control.clocks.real import RealClock
from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.events.schema import Event
from areal_jax.publication.files_channel import FilesChannel
from areal_jax.rollout.http.server.bridge import Texts
from areal_jax.rollout.http.server.limits import Limits
from areal_jax.rollout.http.server.state import Facts
from areal_jax.rollout.http.server.thread import HttpThread, ServedModel, bind, describe_url
from areal_jax.rollout.http.service import Action, GenerationService
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.text.tokenizer import CharacterTokenizer
from benchmarks.side_engine import LANES, STALL_S, load_model, make_backend
from benchmarks.sides import ROOT, Call, Start, serve

STEADY_S = 3.0  # from the first full dispatch to the first update, and between two updates
UPDATE_S = 600.0
VERSIONS = 2  # on the disk, loaded again and again
FOUND = 'found'  # key of the lists in `facts`


class UpdateWatch:
    """For every update: dispatches from staged to loaded, tokens of old weights after that, seconds of the rebuild."""

    def __init__(self, slots: int):
        self.updates: list[dict[str, float]] = []
        self.is_full = threading.Event()  # all slots are decoded
        self._slots = slots
        self._staged_s: float | None = None
        self._swapped_s = 0.0
        self._interrupted = 0  # requests, by the swap
        self._dispatches = 0
        self._version = 0  # in use

    def __call__(self, event: Event) -> None:
        if event['kind'] == 'run_done' and event['work'] == 'load':
            self._staged_s, self._dispatches, self._interrupted = event['time'], 0, 0
        elif event['kind'] == 'interrupt':
            self._swapped_s, self._interrupted = event['time'], len(event['requests'])
        elif event['kind'] == 'load':
            assert self._staged_s is not None, 'weights that nobody has fetched'
            if not self._interrupted:
                raise RuntimeError('weights were exchanged while no answer was decoded: there was no load')
            self._version = event['version']
            self.updates.append({
                'dispatches': float(self._dispatches), 'old_tokens': 0.0, 'interrupted': float(self._interrupted),
                'staged_to_swapped_s': self._swapped_s - self._staged_s, 'rebuild_s': event['pause_seconds'],
            })  # fmt: skip
            self._staged_s = None
        elif event['kind'] == 'decode':
            if sum(slot is not None for slot in event['slots']) == self._slots:
                self.is_full.set()
            if self._staged_s is not None:
                self._dispatches += event['version'] == self._version
            elif event['version'] < self._version:
                self.updates[-1]['old_tokens'] += event['tokens']


def prepare(arguments: dict[str, Any]) -> Start:
    decoder, weights = load_model(arguments['model'])

    def start() -> tuple[Call, Any]:
        backend = make_backend(decoder, arguments['engine'])
        programs = backend.warm_up(backend.prepare(weights))
        found: list[dict[str, float]] = []

        def call() -> Mapping[str, float]:
            with tempfile.TemporaryDirectory() as directory:
                channel = FilesChannel(directory, decoder.config, verify=True)
                folders = [
                    channel.transfer(version, jax.tree.map(lambda leaf: leaf * (1 + 1e-4 * version), weights)).handle
                    for version in range(1, 1 + min(VERSIONS, arguments['updates']))
                ]
                updates = serve_and_update(backend, decoder, weights, folders, arguments)
            found.extend(updates)
            worst = {f'most_{name}': max(update[name] for update in updates) for name in updates[0]}
            middle = {f'median_{name}': statistics.median(update[name] for update in updates) for name in updates[0]}
            return worst | middle | {'updates': float(len(updates))}

        return call, lambda: {'clock': 'real', 'programs': programs, FOUND: found}

    return start


def serve_and_update(
    backend: Any, decoder: Any, weights: Any, folders: list[str], arguments: Mapping[str, Any]
) -> list[dict[str, float]]:
    """Serves, keeps the slots busy, and loads one folder after the other, from the first again after the last."""
    log, watch = EventLog(keeps=False), UpdateWatch(backend.slots)
    log.listeners.append(watch)
    clock = RealClock(LANES, log, STALL_S)
    supervisor = Supervisor(clock)
    engine = LocalEngine(
        0, backend, clock, log,
        receive=functools.partial(load_directory, decoder=decoder, place=jax.local_devices()[0], dtype='float32'),
        version=0, params=weights, rollout=RolloutSection(decode_steps=arguments['engine']['decode_steps']),
    )  # fmt: skip
    service = GenerationService(engine, clock, supervisor)
    listener = bind('127.0.0.1', 0)
    url = describe_url(listener)
    facts = Facts('m', '', '', '', 0)
    characters = ''.join(map(chr, range(256, 255 + decoder.config.vocab_size)))  # a text for every id
    served = ServedModel(
        Texts(CharacterTokenizer(characters)), backend.context_tokens, decoder.config.vocab_size, 0, facts
    )  # fmt: skip
    http = HttpThread(service.inbox, served, listener, limits=Limits())
    end, errors = clock.event('the last update'), list[BaseException]()

    async def stop(service: GenerationService) -> None:
        end.set()

    def update() -> None:
        clients = subprocess.Popen(
            [sys.executable, '-m', 'benchmarks.http_clients', url, arguments['requests'], str(arguments['clients'])],
            cwd=ROOT,
        )  # fmt: skip
        try:
            if not watch.is_full.wait(UPDATE_S):
                raise RuntimeError('the clients never filled the slots')
            for number in range(arguments['updates']):
                time.sleep(STEADY_S)
                if clients.poll() is not None:
                    raise RuntimeError('the clients have ended')
                version = number % len(folders)
                update = {'model_path': folders[version], 'weight_version': str(1 + version)}
                post(f'{url}/update_weights_from_disk', update)
            time.sleep(STEADY_S)
        except BaseException as error:
            errors.append(error)
        finally:
            clients.kill()
            clients.wait()
            service.inbox.put(Action('end', stop, lambda result, error: None))

    async def program() -> None:
        engine.start(supervisor)
        supervisor.start('service', service.serve())
        await clock.wait(end)

    updating = threading.Thread(target=update)
    with http:
        updating.start()
        clock.execute(supervisor.run(program()))
        updating.join()
    if errors:
        raise errors[0]
    return watch.updates


def post(url: str, body: Mapping[str, Any]) -> None:
    request = urllib.request.Request(url, json.dumps(body).encode(), {'Content-Type': 'application/json'})
    with urllib.request.urlopen(request, timeout=UPDATE_S) as reply:
        if not json.loads(reply.read())['success']:
            raise RuntimeError(f'{url} refused the update')


if __name__ == '__main__':
    serve(prepare)
