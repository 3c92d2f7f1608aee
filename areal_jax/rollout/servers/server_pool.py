"""The engines of a run that are servers in other processes: they join, leave, die, hang and return while it goes on.

The controller and the workflows use it like pool.Pool, whose engines are in this process and whose failures end the
run. member.py is a request here, member.py an engine, keeper.py brings engines into service.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Literal

from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.protocols import Clock, Event
from areal_jax.rollout.pool import EngineError, Requirement, require_capabilities
from areal_jax.rollout.servers.keeper import Keeper, Score
from areal_jax.rollout.servers.member import Member, MovingRequest, RemoteEngine, RemoteError, ServerSettings
from areal_jax.rollout.servers.server_pool import Placement
from areal_jax.types import EngineStatus, GenerationRequest, PublishedWeights

_CLOSE_S = 5.0
_LOOK_S = 0.2  # between two looks at how many serve
_Withdrawn = Literal['syncing', 'unknown', 'quarantined']
_Out = Literal['syncing', 'unknown', 'quarantined', 'gone']


class ServerPool:
    """Routes requests like pool.Pool, among the engines that serve.

    Implements protocols.Pool.

    Args:
      published: the weights that engines get first.
      score: see probe.Score.
      on_no_server: called with a sentence when no engine has served for `settings.no_server_s`.
      requirements: what every engine must be able to do; `join` raises EngineError, naming it, where one cannot.
      warn: called with a sentence for the user.
    """

    def __init__(
        self,
        clock: Clock,
        log: EventLog,
        supervisor: Supervisor,
        settings: ServerSettings,
        *,
        published: PublishedWeights,
        score: Score,
        on_no_server: Callable[[str], None],
        requirements: Sequence[Requirement] = (),
        warn: Callable[[str], None] = lambda sentence: None,
    ):
        self._clock, self._log, self._supervisor, self._settings = clock, log, supervisor, settings
        self._score, self._on_no_server, self._requirements, self._warn = score, on_no_server, requirements, warn
        self.target = published
        self._members: dict[str, Member] = {}
        self._refused: dict[str, str] = {}  # servers that the run cannot use: why, by their name in the registry
        placement = self._placement = Placement(
            clock, log, supervisor, members=self._members, max_retries=settings.max_retries,
            distrust=lambda member, fault: self.withdraw(member, 'quarantined', fault), note_failure=self._note_failure,
        )  # fmt: skip
        self.ledger = self._placement.ledger  # which request is open on which engine
        self.cancel, self.open_requests, self.order = placement.cancel, placement.open_requests, placement.order
        self.state, self.restore = placement.state, placement.restore
        self._is_paused = False
        self._resumed = clock.event('pool: resumed')
        self._settled = clock.event('pool: an engine has settled a version')
        self._admitted = clock.event('pool: an engine serves')
        self._emptied = clock.event('pool: the last serving engine is gone')
        self._on_each = functools.partial(_act_on_each, clock, supervisor)

    def start(self) -> None:
        self._supervisor.start('pool: watch for an engine', self._watch_for_engine())

    # Engines: server_entries.py calls these.

    def join(self, engine: RemoteEngine, incarnation: int, url: str) -> None:
        """Takes in an engine; a later incarnation replaces an earlier one, and an earlier one is ignored."""
        known = self._members.get(engine.name)
        if known is not None:
            if incarnation <= known.incarnation:
                return
            self.remove(engine.name, f'it was started again (incarnation {incarnation})')
        name = engine.name
        try:
            require_capabilities([engine], self._requirements)
        except EngineError:
            self._supervisor.start(f'{name}: close', engine.close())
            raise
        self._log.write('register', name, engine=name, incarnation=incarnation, url=url)
        member = self._members[name] = Member(
            engine, incarnation, self._clock, self._log, self._supervisor, url
        )  # fmt: skip
        keeper = Keeper(member, self, self._clock, self._log, self._settings, self._score)
        member.keeper = self._supervisor.start(f'{name}: keeper', keeper.run())

    def leave(self, name: str, reason: str) -> None:
        """The engine gets no further requests and is removed when it has none, or at the deadline of the settings."""
        member = self._members.get(name)
        if member is None or member.is_leaving:
            return
        if member.state != 'serving':
            self.remove(name, reason)
            return
        member.is_leaving = True
        self._stop_routing(member)
        member.change_state('draining', reason)
        member.news.set()
        self._settled.set()

    def remove(self, name: str, reason: str) -> None:
        """The engine is gone; requests that it has go elsewhere. Nothing for an unknown name."""
        member = self._members.pop(name, None)
        if member is None:
            return
        self._give_up(member, 'gone', reason)
        self._placement.remove_engine(member)
        self._log.write('leave', name, engine=name, reason=reason)
        if member.keeper is not None:
            member.keeper.cancel()
        self._supervisor.start(f'{name}: close', member.engine.close())

    def note_refused(self, name: str, reason: str) -> None:
        """The run cannot use the server that registered as `name`."""
        self._refused[name] = reason
        self._log.write('engine_state', engine=name, state='refused', reason=reason)
        self._warn(f'a server is refused: {reason}')

    def suspect(self, name: str, reason: str) -> None:
        """The engine is silent: it gets no requests until it answers."""
        if (member := self._members.get(name)) is not None:
            self.withdraw(member, 'unknown', reason)

    def quarantine(self, name: str, reason: str) -> None:
        """What the engine generates is wrong: it gets no requests until it has answered another probe."""
        if (member := self._members.get(name)) is not None:
            self.withdraw(member, 'quarantined', reason)

    def statuses(self) -> list[EngineStatus]:
        return [member.engine.status() for member in self._members.values()]

    async def await_serving(self, count: int, deadline_s: float, stop: Event, patience_s: float = math.inf) -> int:
        """Waits until so many engines serve, `stop` is set or the deadline has passed; returns how many serve.

        Args:
          patience_s: after so long one engine is enough.
        """
        begun_s = self._clock.now()
        end_s, few_s = begun_s + deadline_s, begun_s + patience_s
        while (serving := self._count_serving()) < count and not stop.is_set():
            now_s = self._clock.now()
            if now_s >= end_s or (serving and now_s >= few_s):
                break
            await self._clock.wait(stop, min(_LOOK_S, end_s - now_s))
        return serving

    def _count_serving(self) -> int:
        return sum(member.state == 'serving' for member in self._members.values())

    def states(self) -> dict[str, str]:
        return {name: member.state for name, member in self._members.items()}

    # Requests.

    def generate(self, request: GenerationRequest, prefer: str = '') -> MovingRequest:
        return self._placement.generate(request, prefer)

    def cancel_all(self, version: int | None = None) -> None:
        if version is None:  # servers have no requests of a pinned version
            self._placement.cancel_all()

    def serving_engines(self) -> int:
        return self.ledger.routed_engines()

    def watch(self, note_room: Callable[[], None]) -> None:
        self.ledger.on_room = note_room

    # Weights and pauses.

    def offer(self, published: PublishedWeights) -> None:
        """Every engine gets the version as soon as it can."""
        self.target = published
        for member in self._members.values():
            member.news.set()

    async def load_weights(self, published: PublishedWeights) -> float:
        """Returns when every serving engine has acknowledged the version, refused it or is out of service.

        An engine that is not at the version by then gets it from its keeper as soon as it can.
        """
        asked = [member for member in self._members.values() if member.state == 'serving']
        self.offer(published)
        for one in asked:  # one after another: to look at all of them at each answer would cost their number squared
            while one.state == 'serving' and one.settled_version != published.version:
                self._settled.clear()
                await self._clock.wait(self._settled)
        return max((one.pause_s for one in asked if one.version == published.version), default=0.0)

    async def pin(self, published: PublishedWeights) -> None:
        raise RuntimeError('servers keep no earlier versions; app/ refuses what needs them')

    def unpin(self, version: int) -> None:
        raise RuntimeError('servers keep no earlier versions; app/ refuses what needs them')

    def pinned_versions(self) -> Sequence[int]:
        """Those that an engine without an answer may still be reading."""
        return tuple(dict.fromkeys(one.reading for one in self._members.values() if one.reading is not None))

    async def pause(self) -> None:
        self._is_paused = True
        self._placement.hold()
        self._resumed.clear()
        members = [one for one in self._members.values() if one.state in ('serving', 'draining')]
        await self._on_each('pause', members, self._pause_member)

    async def _pause_member(self, member: Member) -> None:
        while member.swapping_to is not None:
            member.swapped.clear()
            await self._clock.wait(member.swapped)
        if member.state not in ('serving', 'draining'):
            return
        try:
            member.is_paused = True
            await member.act('pause', member.engine.pause, self._settings.pause_s)
        except RemoteError as error:
            self.withdraw(member, 'unknown', str(error))

    def resume(self) -> None:
        self._is_paused = False
        for member in self._members.values():
            if member.is_paused and member.state in ('serving', 'draining'):
                member.is_paused = False
                member.engine.resume()
        self._resumed.set()
        self._placement.release()

    async def close(self) -> None:
        """Ends the pauses of all engines, and lets them go: at the end of a run, however it ends.

        Waits for _CLOSE_S at most: a lease ends what is left of a pause.
        """
        for member in self._members.values():
            if member.keeper is not None:
                member.keeper.cancel()
        await self._on_each('close', list(self._members.values()), lambda member: member.engine.close(), _CLOSE_S)

    # What keepers call; keeper.PoolSide has the docstrings.

    async def wait_running(self) -> None:
        while self._is_paused:
            await self._clock.wait(self._resumed)

    def admit(self, member: Member) -> None:
        status = member.engine.status()
        hardware = {'hardware': status.hardware} if status.hardware else {}
        fields = {'version': member.version, 'devices': list(status.devices), **hardware}
        self._log.write('join', member.name, engine=member.name, **fields)
        member.change_state('serving', 'it holds the newest version')
        member.settled_version = self.target.version
        self._admitted.set()
        self._placement.add_engine(member)

    def withdraw(self, member: Member, state: _Withdrawn, reason: str) -> None:
        if member.state in (state, 'gone'):
            return
        self._give_up(member, state, reason)
        member.is_probed = member.is_probed and state == 'syncing'
        member.news.set()

    def note_paused(self, member: Member, pause: str) -> None:
        reason = f'it is paused {pause}'
        if not member.reason.startswith('it is paused '):
            self._warn(f'{member.name} ({member.url}): {reason}')
        self.withdraw(member, 'unknown', reason)
        member.reason = reason

    def note_settled(self, member: Member) -> None:
        self._settled.set()

    def note_healthy(self, member: Member) -> None:
        self._placement.add_engine(member)

    def _note_failure(self, member: Member, reason: str) -> None:
        """Of a request. Others go elsewhere until the keeper has asked the engine how it is.

        Requests that fail until then count as one: a lost connection fails all that it carries. No failure is a sign of
        wrong answers: an engine that fails too often is asked, fenced and probed, not suspected of a lie.
        """
        if member.state != 'serving' or member.is_suspect:
            return
        member.failed_requests += 1
        if member.failed_requests >= self._settings.max_failures:
            times = f'requests failed {member.failed_requests} times, and it said each time that it is well'
            self.withdraw(member, 'unknown', f'{times}; the last: {reason}')
        else:
            member.is_suspect = True
            self._placement.withdraw_engine(member)
            member.news.set()

    def _give_up(self, member: Member, state: _Out, reason: str) -> None:
        self._stop_routing(member)
        member.change_state(state, reason)
        if state != 'syncing':
            member.interrupt()
        self._placement.move_all(member, reason, is_failure=state in ('unknown', 'quarantined'))
        self._settled.set()

    def _stop_routing(self, member: Member) -> None:
        self._placement.withdraw_engine(member)
        if not any(one.state == 'serving' and one is not member for one in self._members.values()):
            self._admitted.clear()
            self._emptied.set()

    async def _watch_for_engine(self) -> None:
        while True:
            if await self._clock.wait(self._admitted, self._settings.no_server_s):
                while self._admitted.is_set():
                    self._emptied.clear()
                    await self._clock.wait(self._emptied)
            else:
                self._on_no_server(
                    f'no server has served for {self._settings.no_server_s:g} s (run.stall_timeout_s): '
                    f'{_describe(self._members.values(), self._refused)}; see their logs'
                )
                return


async def _act_on_each(
    clock: Clock,
    supervisor: Supervisor,
    action: str,
    members: Sequence[Member],
    act: Callable[[Member], Coroutine[object, object, None]],
    deadline_s: float | None = None,
) -> None:
    """Does it to all members at the same time; returns when it is done, or at the deadline."""
    done, left = clock.event(f'{action} of every engine'), len(members)

    async def run(member: Member) -> None:
        nonlocal left
        await act(member)
        left -= 1
        if not left:
            done.set()

    for member in members:
        supervisor.start(f'{member.name}: {action}', run(member))
    if members:
        await clock.wait(done, deadline_s)


def _describe(members: Iterable[Member], refused: Iterable[str]) -> str:
    found = [*(one.describe() for one in members), *(f'{name} is refused' for name in refused)]
    return ', '.join(found) or 'none has registered'
