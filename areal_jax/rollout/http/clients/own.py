"""A server of our own as an engine: it stages new weights while it decodes, and its answers come as they grow.

Unlike a server of others it goes on generating while weights are exchanged, and tells the version of each token. What
it has streamed is delivered at once, so that it is kept when the server dies.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from areal_jax.control.event_writer import EventLog
from areal_jax.lanes import ServerLanes
from areal_jax.protocols import Clock
from areal_jax.rollout.http.clients.calls import make_own_call, require_fit, require_own
from areal_jax.rollout.http.clients.connection import Connection, NoReplyError, StatusError
from areal_jax.rollout.http.clients.engine import Arrival, ClientParts, ServerEngine
from areal_jax.rollout.http.clients.own_dialect import OwnDialect, StagingDialect
from areal_jax.rollout.http.clients.request import ServerRequest
from areal_jax.rollout.http.clients.server import ServerLimits, read_version
from areal_jax.rollout.http.wire.exchange import Call, Piece
from areal_jax.rollout.servers.remote_engine import HeldWeights, OutcomeUnknownError, RefusedError
from areal_jax.types import (
    NOT_GENERATED,
    EngineCapabilities,
    GenerationRequest,
    KvPolicy,
    PublishedWeights,
    Work,
)

Result = TypeVar('Result')


class OwnEngine(ServerEngine):
    """Implements remote_engine.RemoteEngine.

    Args:
      dialect: how a server of ours is spoken to.
      kv_policy: what the server does at a swap (rollout.kv_policy of its config).
    """

    def __init__(
        self,
        lanes: ServerLanes,
        dialect: StagingDialect,
        connection: Connection,
        clock: Clock,
        log: EventLog,
        *,
        locate: Callable[[PublishedWeights], str],
        limits: ServerLimits,
        kv_policy: KvPolicy,
    ):
        self._dialect, self._connection = dialect, connection
        super().__init__(lanes, dialect, connection, clock, log, locate=locate, limits=limits)
        self.capabilities = EngineCapabilities(
            logprobs=('behavior', 'sampling'),
            spans=True,
            abort=True,
            pause_modes=('retract',),
            staging=True,
            update=(kv_policy,),
            pinned=False,
        )
        self._control_lane, self._publish_lane = lanes.control, lanes.publish

    async def stage(self, published: PublishedWeights) -> None:
        directory = self._locate(published)
        work = Work('load', 1, {'version': published.version}, in_background=True)
        stage = lambda: self._dialect.stage(self._connection, directory)
        await self._control(self._publish_lane, f'stage of version {published.version}', stage, work)
        self._staged = published, directory

    async def swap(self, version: int) -> float:
        if self._staged is None or self._staged[0].version != version:
            raise RuntimeError(f'{self.name}: version {version} is to be swapped in, and another or none is staged')
        swap = lambda: self._dialect.swap(self._connection, str(version))
        pause_s = await self._control(self._control_lane, f'swap of version {version}', swap, Work('control'))
        self._note_interruption(version)
        self._version, self._staged = version, None
        self._send_waiting()
        return pause_s

    async def ask(self) -> HeldWeights:
        """Weights without a digest are those that the server began with: no version of this run."""
        if self._is_held:
            await self._go_on()  # from an action that was given up half-way
        ask = lambda: self._dialect.ask(self._connection)
        name, digest = await self._control(self._control_lane, 'question what it holds', ask, Work('control'))
        self._version = read_version(name) if digest else NOT_GENERATED
        self._send_waiting()
        return HeldWeights(self._version, digest or None)

    def _require_servable(self, request: GenerationRequest) -> None:
        require_fit(request, self.name, self._limits.vocab_size, self._limits.context_tokens)
        require_own(request, self.name)

    def _note_interruption(self, version: int) -> None:
        requests = [name for name in self._open if name not in self._waiting]
        if requests and self._version != NOT_GENERATED:
            versions = {'from_version': self._version, 'to_version': version}
            self._log.write('interrupt', self.name, engine=self.name, requests=requests, **versions)

    def _make_call(self, request: ServerRequest) -> Call:
        return make_own_call(request.request, request.tokens, request.wire_id, self._limits.forms)

    def _find_fault(self, piece: Piece, version: int, arrival: Arrival) -> str:
        room = arrival.request.room_tokens
        if version == NOT_GENERATED or len(piece.tokens) > room:
            return f'{len(piece.tokens)} tokens under version {piece.version!r}, {room} were left'
        return ''

    async def _control(self, lane: str, action: str, act: Callable[[], Awaitable[Result]], work: Work) -> Result:
        """Raises RefusedError for what the server says that it has not done, OutcomeUnknownError without a reply."""
        try:
            return await self._clock.call(lane, act, work, self._limits.load_s)
        except StatusError as error:
            kind = RefusedError if 400 <= error.status < 500 else OutcomeUnknownError
            raise kind(f'{self.name}: {action}: {error}') from error
        except (NoReplyError, TimeoutError) as error:
            raise OutcomeUnknownError(f'{self.name}: {action}: {error}') from error


def connect(parts: ClientParts) -> OwnEngine:
    """The client of one server of this project."""
    return connect_dialect(parts, OwnDialect(), Connection(parts.entry.url, parts.api_key, parts.entry.holder))


def connect_dialect(parts: ClientParts, dialect: StagingDialect, connection: Connection) -> OwnEngine:
    """The client of one server of this project that is spoken to in `dialect`."""
    return OwnEngine(
        parts.lanes, dialect, connection, parts.clock, parts.log,
        locate=parts.locate, limits=parts.limits, kv_policy=parts.kv_policy,
    )  # fmt: skip
