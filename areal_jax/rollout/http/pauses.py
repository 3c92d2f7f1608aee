"""Who has paused a server, since when and until when.

A client that names itself pauses for the time of a lease, which it renews while it wants the pause. A lease that lapses
ends its pause and fences its holder: what the holder asks for later is refused until it registers anew, because it may
take the server to be as it left it. A client that does not name itself, as those of SGLang and vLLM, has no lease: its
pause stays until somebody of its kind ends it.
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
CLIENT = 'X-Areal-Client'  # header: how the process that sends names itself
FENCED = 412  # status: the client of that name has to register first
LONGEST_LEASE_S = 3600.0
_STRANGER = ''  # the holder of a pause without a lease


class FencedError(UserError):
    """The client is not the one that has registered, or its lease has lapsed: it must register anew."""


class LeasedError(UserError):
    """Another client holds the pause that is to be ended."""


@dataclasses.dataclass(frozen=True)
class Lease:
    """What a client that names itself pauses with: its pause ends so many seconds after its last word."""

    holder: str
    seconds: float


@dataclasses.dataclass(eq=False)
class Pause:
    """Times are seconds of the clock."""

    mode: ServerPause
    holder: str  # '' = a client that did not name itself
    since_s: float
    until_s: float  # infinity without a lease
    ended: Event


@dataclasses.dataclass(frozen=True)
class PauseStatus:
    """A look at a pause."""

    mode: ServerPause
    holder: str
    paused_s: float
    left_s: float | None  # of the lease; None = it has none

    def describe(self) -> str:
        """'paused for 12.0 s by HOLDER, whose lease lasts 80.0 s more'."""
        if self.left_s is None:
            ends = 'by a client without a lease: POST /resume or /continue_generation ends it'
        else:
            ends = f'by {self.holder}, whose lease lasts {self.left_s:.1f} s more'
        return f'paused for {self.paused_s:.1f} s {ends}'


class Pauses:
    """The pauses of one server, one for each holder, and which client has registered."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._open: dict[str, Pause] = {}
        self.client = ''  # that has registered last and is not fenced
        self._why_fenced: dict[str, str] = {}  # of the client that was fenced last

    @property
    def mode(self) -> ServerPause | None:
        """Of the pause that began last; None while there is none."""
        return next(reversed(self._open.values())).mode if self._open else None

    def is_open(self, pause: Pause) -> bool:
        return self._open.get(pause.holder) is pause

    def look(self) -> tuple[PauseStatus, ...]:
        """In the order in which they began."""
        now_s = self._clock.now()
        return tuple(
            PauseStatus(
                one.mode, one.holder, now_s - one.since_s, None if one.until_s == math.inf else one.until_s - now_s
            )
            for one in self._open.values()
        )

    def register(self, client: str) -> None:
        """From now on this client alone is obeyed among those that name themselves; pauses of others end."""
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
        """The pause, in the place of an earlier one of the same holder; raises FencedError."""
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
        """Whether there is a pause of the holder, which then lasts so much longer; raises FencedError."""
        self.require(lease.holder)
        pause = self._open.get(lease.holder)
        if pause is not None:
            pause.until_s = self._clock.now() + lease.seconds
        return pause is not None

    def find(self, holder: str) -> Pause | None:
        """The pause that the holder ends; raises FencedError, and LeasedError where only others have paused."""
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
        """Waits for the end of a pause with a lease; True where the lease has lapsed: its holder is fenced then."""
        while not await self._clock.wait(pause.ended, pause.until_s - self._clock.now()):
            now_s = self._clock.now()
            if now_s >= pause.until_s and self.is_open(pause):
                self._fence(f'its lease has lapsed after a pause of {now_s - pause.since_s:.1f} s')
                self.end(pause)
                return True
        return False

    def _fence(self, why: str) -> None:
        """The client that has registered."""
        self._why_fenced, self.client = {self.client: why}, ''


# What the pauses of a server do to its engine and its scorer; the service has these methods as its own.


_REGISTRATION_S = 60.0  # lease of the pause in which a new client ends what others have left


class Pausing:
    """Used on the host's loop.

    Args:
      scorer: of the same engine; None = there is none.
      open_requests: the names of those in the engine, as they are now.
      emptied: set when there is none.
      cancel_all: ends all requests, also those that wait for the end of a pause.
      start_held: starts those, when the last pause has ended.
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
        """Ends every request and all pauses with a lease; of the clients that name themselves only this is obeyed now.

        A client registers before its first commit, and anew after it was fenced.
        """
        self.pauses.register(client)
        await self._cancel_all()
        await self.pause('abort', Lease(client, _REGISTRATION_S))
        await self.resume(client)

    async def pause(self, mode: ServerPause, lease: Lease | None = None) -> None:
        """Returns when nothing is generated and what is aborted was told; arrivals then wait for `resume`.

        With a lease the pause ends by itself where it is not renewed, and its holder is fenced. Raises FencedError.
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
        """Whether the holder has a pause, which then lasts for its lease from now on; raises FencedError."""
        return self.pauses.renew(lease)

    async def resume(self, holder: str = '') -> None:
        """Ends the pause of this holder, '' = those without a lease; nothing begins before the last pause has ended.

        Raises FencedError, and LeasedError where a client without a name would end the pause of another.
        """
        pause = self.pauses.find(holder)
        if pause is not None:
            self.pauses.end(pause)
            self._go_on()

    def end_all(self) -> None:
        """Ends every pause: the server is ending."""
        if self.pauses.mode is not None:
            self.pauses.end_all()
            self._go_on()

    async def _watch_lease(self, pause: Pause) -> None:
        if await self.pauses.lapse(pause):
            self._go_on()

    def _go_on(self) -> None:
        """After the end of a pause: generates again, unless there is another one."""
        self._emptied.set()  # a pause that waits has ended
        if self.pauses.mode is not None:
            return
        self._engine.resume()
        if self._scorer is not None:
            self._scorer.resume()
        self._start_held()
