"""An engine in another process, as the pool knows it: its state, what it holds and how it has behaved.

keeper.py drives it from state to state, server_pool.py sends it requests while it serves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Literal, TypeVar

from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.protocols import Clock, Event
from areal_jax.rollout.servers.member import MovingRequest, OutcomeUnknownError, RemoteEngine, RemoteError

MemberState = Literal[
    'registered', 'syncing', 'probing', 'serving', 'draining', 'unknown', 'quarantined', 'gone'
]  # events.EngineStateEvent has their meanings
Result = TypeVar('Result')


class Member:
    """One incarnation of an engine."""

    def __init__(
        self, engine: RemoteEngine, incarnation: int, clock: Clock, log: EventLog, supervisor: Supervisor, url: str
    ):
        self.url, self.engine, self.name, self.incarnation = url, engine, engine.name, incarnation
        self.state: MemberState = 'registered'
        self.reason = ''  # of that state
        self.version: int | None = None  # that it acknowledged last; None: not known
        self.swapping_to: int | None = None  # a version that it may decode with before it has acknowledged it
        self.reading: int | None = None  # a version that it may be fetching
        self.settled_version: int | None = None  # the last that it acknowledged, refused or was not there for
        self.pause_s = 0.0  # of its last swap
        self.is_probed = False
        self.is_paused = False
        self.is_leaving = False
        self.failed_requests = 0  # in a row, each after it was found well
        self.missed_checks = 0  # of its health, in a row
        self.is_suspect = False  # a request failed since it was found well
        self.requests: dict[str, MovingRequest] = {}  # that it has, by id, first come first
        self.keeper: asyncio.Task[None] | None = None
        self.news = clock.event(f'{self.name}: news for its keeper')
        self.swapped = clock.event(f'{self.name}: end of a swap')
        self._clock, self._log, self._supervisor = clock, log, supervisor
        self._under_way: list[Event] = []  # actions; an event is set at the end of its action

    @property
    def highest_version(self) -> int:
        """That it may decode with."""
        return max(-1 if version is None else version for version in (self.version, self.swapping_to))

    def change_state(self, state: MemberState, reason: str) -> None:
        self.reason = reason
        if state != self.state:
            self.state = state
            self._log.write('engine_state', self.name, engine=self.name, state=state, reason=reason)

    def describe(self) -> str:
        """'engine/0 is serving', with the reason where it is out of service."""
        why = f' ({self.reason})' if self.state in ('unknown', 'quarantined') else ''
        return f'{self.name} is {self.state}{why}'

    async def act(
        self, action: str, start: Callable[[], Coroutine[object, object, Result]], deadline_s: float
    ) -> Result:
        """What the engine was asked for; raises RemoteError, also at the deadline and after `interrupt`."""
        done = self._clock.event(f'{self.name}: {action}')
        results: list[Result] = []
        errors: list[RemoteError] = []

        async def run() -> None:
            try:
                results.append(await start())
            except RemoteError as error:
                errors.append(error)
            except TimeoutError as error:
                errors.append(OutcomeUnknownError(f'{self.name}: {action}: {error}'))
            done.set()

        task = self._supervisor.start(f'{self.name}: {action}', run())
        self._under_way.append(done)
        try:
            in_time = await self._clock.wait(done, deadline_s)
        finally:
            self._under_way.remove(done)
            task.cancel()
        if errors:
            raise errors[0]
        if results:
            return results[0]
        cause = 'was given up' if in_time else f'took longer than {deadline_s:g} s'
        raise OutcomeUnknownError(f'{self.name}: {action} {cause}')

    def interrupt(self) -> None:
        """Gives up every action under way: its outcome is unknown."""
        for done in self._under_way:
            done.set()
