"""Who has paused a server, since when and until when.

A client that names itself pauses for the time of a lease, which it renews while it wants the pause. A lease that lapses
ends its pause and fences its holder: what the holder asks for later is refused until it registers anew, because it may
take the server to be as it left it. A client that does not name itself, as those of SGLang and vLLM, has no lease: its
pause stays until somebody of its kind ends it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from areal_jax.errors import UserError
from areal_jax.protocols import Clock, Event

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
