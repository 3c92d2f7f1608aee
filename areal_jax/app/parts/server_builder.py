"""Builds the pool of servers that answer in other processes, for rollout.server other than 'in_process'.

The servers are listed in a registry in the workdir or in rollout.urls; here each gets its client.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pathlib
import re
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from areal_jax.app.model.text_model import read_shape
from areal_jax.app.parts.host import EndedBy, Servers, ServersBeside
from areal_jax.app.parts.part_settings import build_requirements
from areal_jax.app.process.setup import find_key
from areal_jax.config import TrackedConfig
from areal_jax.config.cluster import parse_engines
from areal_jax.config.fields import ConfigError
from areal_jax.config.kinds import SERVER, ServerKind, find_server, resolve
from areal_jax.control.clocks.loop import LoopClock
from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.errors import UserError
from areal_jax.lanes import LEARNER, ServerLanes, evaluation_lanes, server_lanes
from areal_jax.rollout.http.clients.engine import ClientParts, ServerEngine
from areal_jax.rollout.http.clients.server import ServerLimits
from areal_jax.rollout.http.wire.exchange import ColumnForm, list_forms
from areal_jax.rollout.servers.evaluation import EvaluatedPool, EvaluationLog
from areal_jax.rollout.servers.keeper import LogprobsMode, MismatchWatch, Score, ServerFacts, require_fit, state_facts
from areal_jax.rollout.servers.member import ProbeSettings, ServerSettings
from areal_jax.rollout.servers.server_entries import RegistryWatch, ServerEntry, read_address, read_registry
from areal_jax.rollout.servers.server_pool import ServerPool
from areal_jax.types import PublishedWeights, Work

_CONTROL_CALLS = 4  # at the same time, to one server
_PROBE_TOKENS = 16
_PROBE_SLACK = 4.0  # largest of 16 differences over their mean; max_mismatch bounds the mean


class Scorer(Protocol):
    """The learner, as seen by the probe of a server."""

    def score(self, version: int, prompt_tokens: np.ndarray, answer_tokens: np.ndarray) -> np.ndarray | None:
        """Returns float32 [A]: log-probs of the answer under that version; None if the learner no longer has it."""
        ...


def find_max_mismatch(config: TrackedConfig) -> float:
    """Returns rollout.max_mismatch or, if it is None, the mismatch that rounding explains."""
    if config.rollout.max_mismatch is not None:
        return config.rollout.max_mismatch
    exact = config.publication.dtype == config.learner.dtype == 'float32'
    return 1e-3 if exact else 5e-2


def find_needs(config: TrackedConfig) -> ServerFacts:
    """Returns the facts that a server must match for this run; at temperature 1 both kinds of log-probs are equal."""
    mode: LogprobsMode | None = None if config.rollout.temperature == 1.0 else 'processed'
    return state_facts(config.rollout, config.publication.dtype, mode)


def find_forms(config: TrackedConfig) -> dict[str, ColumnForm]:
    """Returns the columns that servers must report for the run's model; raises ConfigError if it has no columns."""
    if not config.rollout.record_routes:
        return {}
    shape = read_shape(config)
    if not shape.columns:
        raise ConfigError(
            f'rollout.record_routes=True needs a model with experts, and model.path={config.model.path!r} has none: '
            'set it to False'
        )
    return list_forms(shape)


def build_server_settings(config: TrackedConfig, probe_prompt: np.ndarray) -> ServerSettings:
    """Builds the settings; servers must answer `probe_prompt`, int32 [P], before they get work."""
    most = find_max_mismatch(config)
    probe = ProbeSettings(
        probe_prompt,
        max_difference=_PROBE_SLACK * most,
        max_mean=most,
        new_tokens=min(_PROBE_TOKENS, config.rollout.max_new_tokens),
        temperature=config.rollout.temperature,
    )
    return ServerSettings(max_retries=config.rollout.max_retries, no_server_s=config.run.stall_timeout_s, probe=probe)


def build_servers(
    config: TrackedConfig,
    clock: LoopClock,
    log: EventLog,
    supervisor: Supervisor,
    *,
    workdir: pathlib.Path,
    learner: Scorer,
    vocab_size: int,
    published: PublishedWeights,
    probe_prompt: np.ndarray,
    stop: Callable[[], None],
) -> Servers:
    """Builds the pool, and the coroutine that tells it which servers exist; `stop` asks the run to save and end."""

    async def score(version: int, prompt: np.ndarray, answer: np.ndarray) -> np.ndarray | None:
        return await clock.run(LEARNER, lambda: learner.score(version, prompt, answer), Work('score'))

    kind = find_server(config.rollout.server)
    config.note_used(kind.reads)
    ended_by = EndedBy(stop)
    builder = _PoolBuilder(
        config, clock, supervisor, vocab_size, published, score, _find_reader(config, kind, workdir), ended_by.note,
        find_key(None if kind.takes_urls else workdir),
    )  # fmt: skip
    settings, first = build_server_settings(config, probe_prompt), find_first_beside(config)
    is_beside = lambda entry: entry.index is not None and entry.index >= first
    pool, watch = builder.build(log, settings, lambda entry: not is_beside(entry), server_lanes)
    beside = None
    if config.evaluation.engines:
        settings = dataclasses.replace(settings, max_versions_behind=0)
        own, own_watch = builder.build(EvaluationLog(log), settings, is_beside, evaluation_lanes)
        beside = ServersBeside(EvaluatedPool(pool, own, clock, supervisor), own_watch)
    return Servers(pool, watch, MismatchWatch(find_max_mismatch(config), pool.quarantine), ended_by, beside)


def find_first_beside(config: TrackedConfig) -> float:
    """Returns the index of the first engine used only for evaluations during training; infinity without one."""
    own = config.evaluation.engines
    return parse_engines(config.cluster.engines).count - own if own else math.inf


@dataclasses.dataclass(frozen=True)
class _PoolBuilder:
    """Builds the pool of some of the servers, with the watch that tells it which servers exist."""

    config: TrackedConfig
    clock: LoopClock
    supervisor: Supervisor
    vocab_size: int
    published: PublishedWeights
    score: Score
    read: Callable[[], Sequence[ServerEntry]]
    on_no_server: Callable[[str], None]
    api_key: str

    def build(
        self,
        log: EventLog,
        settings: ServerSettings,
        is_own: Callable[[ServerEntry], bool],
        name_lanes: Callable[[int], ServerLanes],
    ) -> tuple[ServerPool, RegistryWatch]:
        pool = ServerPool(
            self.clock, log, self.supervisor, settings,
            published=self.published, score=self.score, on_no_server=self.on_no_server,
            requirements=build_requirements(self.config),
            warn=lambda sentence: print(f'warning: {sentence}', file=sys.stderr, flush=True),
        )  # fmt: skip
        make = ClientMaker(self.config, self.clock, log, self.supervisor, self.vocab_size, self.api_key, name_lanes)
        read = lambda: [entry for entry in self.read() if is_own(entry)]
        return pool, RegistryWatch(self.clock, pool, read, make)


class ClientMaker:
    """Makes the client of each server.

    An engine of a run in roles is numbered by its index, other servers by order of arrival; a restarted one keeps its
    number.

    Raises UserError, naming the server, if its kind differs from rollout.server, or if its facts differ from the run's.
    """

    def __init__(
        self,
        config: TrackedConfig,
        clock: LoopClock,
        log: EventLog,
        supervisor: Supervisor,
        vocab_size: int,
        api_key: str,
        name_lanes: Callable[[int], ServerLanes] = server_lanes,
    ):
        rollout, server = config.rollout, config.server
        self._rollout = rollout
        kind = find_server(rollout.server)
        self._clients = {client.name: client for client in kind.clients}
        self._clock, self._log, self._supervisor = clock, log, supervisor
        self._api_key = api_key
        slots = min(server.max_streams, server.max_requests) if kind.limits_streams else rollout.slots
        self._limits = ServerLimits(slots, vocab_size, rollout.context_tokens, find_forms(config))
        self._needs = find_needs(config)
        self._client = _name_client()
        self._lease_s = rollout.pause_lease_s if kind.leases_pauses else 0.0
        self._name_lanes = name_lanes
        self._numbers: dict[str, int] = {}  # by name in the registry

    def __call__(self, entry: ServerEntry) -> ServerEngine:
        self._require_kind(entry)
        require_fit(f'{entry.name} at {entry.url}', entry.facts, self._needs)
        lanes = self._name_lanes(self._find_number(entry))
        self._clock.declare(lanes.engine, self._limits.slots + 1)
        self._clock.declare(lanes.publish, 1)
        self._clock.declare(lanes.control, _CONTROL_CALLS)
        engine = self._make(entry, lanes)
        engine.start(self._supervisor)
        return engine

    def _find_number(self, entry: ServerEntry) -> int:
        taken = set(self._numbers.values())
        free = next(number for number in range(len(taken) + 1) if number not in taken)
        wanted = free if entry.index is None or entry.index in taken else entry.index
        return self._numbers.setdefault(entry.name, wanted)

    def _make(self, entry: ServerEntry, lanes: ServerLanes) -> ServerEngine:
        parts = ClientParts(
            entry, lanes, self._clock, self._log, _locate, self._limits, self._api_key, self._rollout,
            client=self._client, lease_s=self._lease_s,
        )  # fmt: skip
        engine: ServerEngine = resolve(self._clients[entry.kind].connect, SERVER)(parts)
        engine.hardware = entry.facts.hardware or ''
        return engine

    def _require_kind(self, entry: ServerEntry) -> None:
        if entry.kind not in self._clients:
            raise UserError(
                f'the server {entry.name} at {entry.url} is of the kind {entry.kind!r}, and rollout.server='
                f'{self._rollout.server!r}: stop it, or set rollout.server={entry.kind!r}'
            )


def _find_reader(config: TrackedConfig, kind: ServerKind, workdir: pathlib.Path) -> Callable[[], Sequence[ServerEntry]]:
    if not kind.takes_urls:
        return functools.partial(read_registry, workdir)
    entries = [read_address(address, kind.clients) for address in config.rollout.urls]
    return lambda: entries


def _name_client() -> str:
    """Makes up the name of this attempt of the run for servers; no other process, earlier or later, has it."""
    host = re.sub(r'[^!-~]', '?', socket.gethostname())[:100] or 'unknown'
    return f'{host}/{os.getpid()}/{secrets.token_hex(8)}'


def _locate(published: PublishedWeights) -> str:
    """Returns a directory on a file system that servers share, or the name of a version at an address."""
    return str(published.handle)
