"""The pauses of a server: their holders, begins and ends.

A client that names itself pauses for the time of a lease, which it renews while it wants the pause. A lease that lapses
ends its pause and fences its holder: later requests of the holder are refused until it registers again, because it may
assume that the server is unchanged. A client that does not name itself, like clients of SGLang and vLLM, has no lease:
its pause stays until a client without a name ends it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Awaitable, Callable, Collection
from typing import Literal

from areal_jax.control.supervisor import Supervisor
from areal_jax.errors import UserError
from areal_jax.protocols import Clock, Event
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.rollout.scoring import Scorer

ServerPause = Literal['abort', 'retract', 'in_place', 'wait']  # 'wait': running requests end first
CLIENT = 'X-Areal-Client'  # header: the name of the sending process
FENCED = 412  # status: the client of that name has to register first
LONGEST_LEASE_S = 3600.0
_STRANGER = ''  # the holder of a pause without a lease


class FencedError(UserError):
    """The client is not the registered one, or its lease has lapsed: it must register again."""


class LeasedError(UserError):
    """A client without a name tried to end a pause that another client holds."""


@dataclasses.dataclass(frozen=True)
class Lease:
    """The lease of a client that names itself: its pause ends `seconds` after the last renewal."""

    holder: str
    seconds: float


@dataclasses.dataclass(eq=False)
class Pause:
    """A pause of a server; times are seconds of the clock."""

    mode: ServerPause
    holder: str  # '' = a client that did not name itself
    since_s: float
    until_s: float  # infinity without a lease
    ended: Event


@dataclasses.dataclass(frozen=True)
class PauseStatus:
    """A snapshot of a pause."""

    mode: ServerPause
    holder: str
    paused_s: float
    left_s: float | None  # of the lease; None = it has none

    def describe(self) -> str:
        """Returns 'paused for 12.0 s by HOLDER, whose lease lasts 80.0 s more'."""
        if self.left_s is None:
            ends = 'by a client without a lease: POST /resume or /continue_generation ends it'
        else:
            ends = f'by {self.holder}, whose lease lasts {self.left_s:.1f} s more'
        return f'paused for {self.paused_s:.1f} s {ends}'


class Pauses:
    """The pauses of one server, one for each holder, and its registered client."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._open: dict[str, Pause] = {}
        self.client = ''  # the last one to register, unless it is fenced
        self._why_fenced: dict[str, str] = {}  # of the client that was fenced last

    @property
    def mode(self) -> ServerPause | None:
        """The mode of the pause that began last; None without a pause."""
        return next(reversed(self._open.values())).mode if self._open else None

    def is_open(self, pause: Pause) -> bool:
        return self._open.get(pause.holder) is pause

    def look(self) -> tuple[PauseStatus, ...]:
        """Returns the pauses in the order in which they began."""
        now_s = self._clock.now()
        return tuple(
            PauseStatus(
                one.mode, one.holder, now_s - one.since_s, None if one.until_s == math.inf else one.until_s - now_s
            )
            for one in self._open.values()
        )

    def register(self, client: str) -> None:
        """Makes this client the only obeyed one among clients that name themselves; ends pauses of the others."""
        if self.client not in ('', client):
            self._fence(f'{client} has registered since')
        self.client = client
        for pause in list(self._open.values()):
            if pause.holder not in (_STRANGER, client):
                self.end(pause)

    def require(self, client: str) -> None:
        """Raises FencedError for a client that names itself and has not registered, or was fenced since."""
        if client in ('', self.client):
            return
        why = self._why_fenced.get(client, 'it has not registered here')
        raise FencedError(f'{client} is fenced ({why}): register again, and load the weights again')

    def begin(self, mode: ServerPause, lease: Lease | None) -> Pause:
        """Begins a pause, which replaces an earlier one of the same holder; raises FencedError."""
        holder, seconds = (_STRANGER, math.inf) if lease is None else (lease.holder, lease.seconds)
        self.require(holder)
        now_s, before = self._clock.now(), self._open.get(holder)
        if before is not None:
            self.end(before)
        since_s = now_s if before is None else before.since_s
        ended = self._clock.event(f'end of the pause of {holder or "a client without a lease"}')
        pause = self._open[holder] = Pause(mode, holder, since_s, now_s + seconds, ended)
        return pause

    def renew(self, lease: Lease) -> bool:
        """Extends the holder's pause by its lease from now; returns whether there is one. Raises FencedError."""
        self.require(lease.holder)
        pause = self._open.get(lease.holder)
        if pause is not None:
            pause.until_s = self._clock.now() + lease.seconds
        return pause is not None

    def find(self, holder: str) -> Pause | None:
        """Returns the holder's pause; raises FencedError, and LeasedError for '' if only other clients have paused."""
        self.require(holder)
        pause = self._open.get(holder)
        if pause is None and holder == _STRANGER and self._open:
            raise LeasedError(f'this server is {self.look()[0].describe()}: wait for one of the two, or ask the holder')
        return pause

    def end(self, pause: Pause) -> None:
        if self.is_open(pause):
            del self._open[pause.holder]
            pause.ended.set()

    def end_all(self) -> None:
        for pause in list(self._open.values()):
            self.end(pause)

    async def lapse(self, pause: Pause) -> bool:
        """Waits for the end of a pause with a lease; returns True if the lease lapsed, and fences its holder then."""
        while not await self._clock.wait(pause.ended, pause.until_s - self._clock.now()):
            now_s = self._clock.now()
            if now_s >= pause.until_s and self.is_open(pause):
                self._fence(f'its lease has lapsed after a pause of {now_s - pause.since_s:.1f} s')
                self.end(pause)
                return True
        return False

    def _fence(self, why: str) -> None:
        """Fences the registered client."""
        self._why_fenced, self.client = {self.client: why}, ''


# The effects of pauses on a server's engine and scorer; the service exposes these methods.


_REGISTRATION_S = 60.0  # lease of the pause in which a new client ends leftover requests


class Pausing:
    """Pauses and resumes an engine and its scorer; used on the host's loop.

    Args:
      scorer: of the same engine; None = without scoring.
      open_requests: the names of the requests in the engine, a live collection.
      emptied: set when no request is open.
      cancel_all: ends all requests, also requests that wait for the end of a pause.
      start_held: starts the waiting requests, when the last pause has ended.
    """

    def __init__(
        self,
        engine: LocalEngine,
        clock: Clock,
        supervisor: Supervisor,
        scorer: Scorer | None,
        *,
        open_requests: Collection[str],
        emptied: Event,
        cancel_all: Callable[[], Awaitable[None]],
        start_held: Callable[[], None],
    ):
        self._engine, self._clock, self._supervisor, self._scorer = engine, clock, supervisor, scorer
        self._open, self._emptied = open_requests, emptied
        self._cancel_all, self._start_held = cancel_all, start_held
        self.pauses = Pauses(clock)

    async def register(self, client: str) -> None:
        """Ends every request and all pauses with a lease; makes `client` the only obeyed one with a name.

        A client registers before its first commit, and again after it was fenced.
        """
        self.pauses.register(client)
        await self._cancel_all()
        await self.pause('abort', Lease(client, _REGISTRATION_S))
        await self.resume(client)

    async def pause(self, mode: ServerPause, lease: Lease | None = None) -> None:
        """Returns when generation has stopped and aborted requests are answered; new requests wait for `resume`.

        A pause with a lease ends and fences its holder if it is not renewed. Raises FencedError.
        """
        pause = self.pauses.begin(mode, lease)
        if lease is not None:
            self._supervisor.start(f'lease of {lease.holder}', self._watch_lease(pause))
        if mode == 'abort':
            for name in [*self._open]:
                self._engine.cancel(name)
        if mode in ('abort', 'wait'):
            while self._open and self.pauses.is_open(pause):
                self._emptied.clear()
                await self._clock.wait(self._emptied)
        if self._scorer is not None:
            if mode == 'abort':
                self._scorer.cancel(self._scorer.open_requests())
            await self._scorer.pause()
        if self.pauses.is_open(pause):
            await self._engine.pause('in_place' if mode == 'in_place' else 'retract')

    async def renew(self, lease: Lease) -> bool:
        """Extends the holder's pause by its lease from now; returns whether there is one. Raises FencedError."""
        return self.pauses.renew(lease)

    async def resume(self, holder: str = '') -> None:
        """Ends the pause of this holder, '' = clients without a lease; generation resumes after the last pause.

        Raises FencedError, and LeasedError if a client without a name would end the pause of another client.
        """
        pause = self.pauses.find(holder)
        if pause is not None:
            self.pauses.end(pause)
            self._go_on()

    def end_all(self) -> None:
        """Ends every pause, because the server is ending."""
        if self.pauses.mode is not None:
            self.pauses.end_all()
            self._go_on()

    async def _watch_lease(self, pause: Pause) -> None:
        if await self.pauses.lapse(pause):
            self._go_on()

    def _go_on(self) -> None:
        """Resumes generation after the end of a pause, unless there is another pause."""
        self._emptied.set()  # wakes `pause`, whose pause may have ended while it waited
        if self.pauses.mode is not None:
            return
        self._engine.resume()
        if self._scorer is not None:
            self._scorer.resume()
        self._start_held()
