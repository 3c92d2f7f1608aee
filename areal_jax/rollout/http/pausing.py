"""What the pauses of a server do to its engine and its scorer; the service has these methods as its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

from areal_jax.control.supervisor import Supervisor
from areal_jax.protocols import Clock, Event
from areal_jax.rollout.http.pauses import Lease, Pause, Pauses, ServerPause
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.rollout.scoring import Scorer

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
