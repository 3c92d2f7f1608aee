"""A pool of engines that are servers in other processes: they join, leave, die, hang and return during the run.

The controller and the workflows use it like pool.Pool, whose engines are in this process and whose failures end the
run. member.py is an engine with its requests, keeper.py brings engines into service.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Literal

from areal_jax.control.event_writer import EventLog
from areal_jax.control.groups import RequestLostError
from areal_jax.control.supervisor import Supervisor
from areal_jax.protocols import Clock, Event, Generation
from areal_jax.rollout.pool import EngineError, Requirement, require_capabilities
from areal_jax.rollout.servers.keeper import Keeper, Score
from areal_jax.rollout.servers.member import (
    Member,
    MovingRequest,
    RemoteEngine,
    RemoteError,
    ServerSettings,
    find_fault,
)
from areal_jax.rollout.spare_engines import Entry, Ledger
from areal_jax.types import EngineFinish, EngineStatus, GenerationRequest, PublishedWeights


class Placement:
    """The open requests of a pool of servers.

    Args:
      members: the engines of the pool by name; the pool changes it.
      max_retries: see ServerSettings.
      distrust: called with an engine that delivered an impossible segment, and the fault.
      note_failure: called with an engine that failed a request, and the cause; before the request moves.
    """

    def __init__(
        self,
        clock: Clock,
        log: EventLog,
        supervisor: Supervisor,
        *,
        members: Mapping[str, Member],
        max_retries: int,
        distrust: Callable[[Member, str], None],
        note_failure: Callable[[Member, str], None],
    ):
        self._clock, self._log, self._supervisor = clock, log, supervisor
        self._members, self._max_retries = members, max_retries
        self._distrust, self._note_failure = distrust, note_failure
        self.ledger = Ledger()
        self._open: dict[str, MovingRequest] = {}  # by id, in the order of arrival
        self._waiting: dict[str, MovingRequest] = {}  # requests that no engine has
        self._is_held = False

    # Engines.

    def add_engine(self, member: Member) -> None:
        self.ledger.add_engine(member.name)
        self.place_waiting()

    def withdraw_engine(self, member: Member) -> None:
        if self.ledger.is_routed(member.name):
            self.ledger.withdraw_engine(member.name)

    def remove_engine(self, member: Member) -> None:
        if member.name in self.ledger.outstanding():
            self.ledger.remove_engine(member.name)

    def move_all(self, member: Member, reason: str, *, is_failure: bool) -> None:
        """Moves the requests of a withdrawn engine to other engines."""
        for moving in list(member.requests.values()):
            self._move(moving, reason, is_failure=is_failure)

    def hold(self) -> None:
        """Makes requests wait until `release`."""
        self._is_held = True

    def release(self) -> None:
        self._is_held = False
        self.place_waiting()

    def place_waiting(self) -> None:
        """Sends waiting requests to serving engines, lowest draw first."""
        if self._is_held:
            return
        waiting, self._waiting = self._waiting, {}
        for moving in sorted(waiting.values(), key=lambda one: (one.request.draw, one.request.sample)):
            self._place(moving)

    # Requests.

    def generate(self, request: GenerationRequest, prefer: str = '') -> MovingRequest:
        """Starts the request, on the engine `prefer` if that serves; it waits if no engine does."""
        if request.version is not None:
            raise RuntimeError('servers keep no earlier versions; app/ refuses what needs them')
        if request.request_id in self._open:
            raise RuntimeError(f'request {request.request_id} is open already')
        moving = self._open[request.request_id] = MovingRequest(request, self._clock)
        self._place(moving, prefer=prefer)
        return moving

    def cancel(self, request: GenerationRequest) -> None:
        if (moving := self._open.get(request.request_id)) is None:
            return
        if moving.engine in self._members and moving.entry is not None:
            self._members[moving.engine].engine.cancel(moving.request.request_id)
        self._end(moving, 'cancelled')

    def cancel_all(self) -> None:
        for moving in list(self._open.values()):
            self.cancel(moving.request)

    def open_requests(self) -> int:
        return len(self._open)

    def state(self) -> dict[str, Any]:
        """Returns {}: a resumed run measures its servers again, because they may be other ones."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        pass

    def order(self) -> list[tuple[str, int, int]]:
        """Lists requests engine by engine, in the order of arrival; then those that wait for an engine, under ''."""
        placed = [(name, moving) for name, member in self._members.items() for moving in member.requests.values()]
        found = [*placed, *(('', moving) for moving in self._waiting.values())]
        return [(name, moving.request.draw, moving.request.sample) for name, moving in found]

    def _place(self, moving: MovingRequest, *, prefer: str = '', avoid: str = '') -> None:
        name = None if self._is_held else self._choose(moving.request, prefer, avoid)
        if name is None:
            self._waiting[moving.request.request_id] = moving
            return
        member, request = self._members[name], moving.rest()
        assert member.version is not None
        moving.engine, moving.lowest_version, moving.taken_here = name, member.version, 0
        moving.entry = self.ledger.open(request, name)
        member.requests[request.request_id] = moving
        self._log.write('route', request=request.request_id, draw=request.draw, sample=request.sample, engine=name)
        pump = self._pump(moving, moving.entry, member, member.engine.generate(request))
        moving.pump = self._supervisor.start(f'{name}: request {request.request_id}', pump)

    def _choose(self, request: GenerationRequest, prefer: str, avoid: str) -> str | None:
        """Chooses the engine: the same for all samples of a group and all turns of an answer, while it serves."""
        for name in (prefer, self.ledger.engine_of_group(request)):
            if name and name != avoid and self.ledger.is_routed(name):
                return name
        return self.ledger.least_outstanding(avoid)

    async def _pump(self, moving: MovingRequest, entry: Entry, member: Member, generation: Generation) -> None:
        try:
            async for segment in generation:
                if fault := find_fault(segment, moving.lowest_version, member.highest_version, moving.room_tokens):
                    self._distrust(member, f'request {moving.request.request_id}: {fault}')
                    return
                moving.take(segment)
                self.ledger.note_generated(entry, len(segment.tokens))
        except (RemoteError, TimeoutError) as error:
            self._note_failure(member, str(error))
            if moving.entry is entry:  # it has not moved already with the engine's other requests
                self._move(moving, str(error), is_failure=True)
            return
        reason = generation.finish_reason
        if reason is None or reason == 'cancelled':  # by the engine: a caller that cancels here ends this coroutine too
            self._move(moving, 'the engine gave it back', is_failure=not moving.taken_here)
        else:
            member.failed_requests = 0
            self._end(moving, reason)

    def _move(self, moving: MovingRequest, reason: str, *, is_failure: bool) -> None:
        left = moving.engine
        self._detach(moving)
        if left in self._members:
            self._members[left].engine.cancel(moving.request.request_id)  # it may still be generating
        if (finish := moving.end_in_received()) is not None:
            self._end(moving, finish)
            return
        moving.attempts += is_failure
        fields = {'request': moving.request.request_id, 'tokens': moving.received_tokens, 'attempt': moving.attempts}
        self._log.write('move', left, from_engine=left, reason=reason, **fields)
        if moving.attempts > self._max_retries:
            del self._open[moving.request.request_id]
            moving.fail(
                RequestLostError(
                    f'request {moving.request.request_id} was given up by {moving.attempts} engines '
                    f'(rollout.max_retries={self._max_retries}), the last, {left}: {reason}'
                )
            )
        else:
            self._place(moving, avoid=left if is_failure else '')

    def _end(self, moving: MovingRequest, reason: EngineFinish) -> None:
        del self._open[moving.request.request_id]
        self._detach(moving)
        self._waiting.pop(moving.request.request_id, None)
        moving.end(reason)

    def _detach(self, moving: MovingRequest) -> None:
        if moving.entry is None:
            return
        assert moving.pump is not None
        self.ledger.close(moving.entry)
        moving.entry, pump = None, moving.pump
        pump.cancel()
        if (member := self._members.get(moving.engine)) is not None:
            member.requests.pop(moving.request.request_id, None)
            if member.is_leaving:
                member.news.set()


_CLOSE_S = 5.0
_LOOK_S = 0.2  # between two counts of the serving engines
_Withdrawn = Literal['syncing', 'unknown', 'quarantined']
_Out = Literal['syncing', 'unknown', 'quarantined', 'gone']


class ServerPool:
    """Routes requests like pool.Pool, among the engines that serve.

    Implements protocols.Pool.

    Args:
      published: the weights that engines get first.
      score: see keeper.Score.
      on_no_server: called with a sentence when no engine has served for `settings.no_server_s`.
      requirements: abilities of every engine; `join` raises EngineError, naming the engine, if it lacks any.
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
        """Adds an engine; a later incarnation replaces an earlier one, and an earlier one is ignored."""
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
        member = self._members[name] = Member(engine, incarnation, self._clock, self._log, self._supervisor, url)
        keeper = Keeper(member, self, self._clock, self._log, self._settings, self._score)
        member.keeper = self._supervisor.start(f'{name}: keeper', keeper.run())

    def leave(self, name: str, reason: str) -> None:
        """Sends the engine no further requests, and removes it when its requests have ended, or after `drain_s`."""
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
        """Removes an engine that is gone; its requests move to other engines. Does nothing for an unknown name."""
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
        """Notes that the run cannot use the server that registered as `name`."""
        self._refused[name] = reason
        self._log.write('engine_state', engine=name, state='refused', reason=reason)
        self._warn(f'a server is refused: {reason}')

    def suspect(self, name: str, reason: str) -> None:
        """Takes a silent engine out of service until it answers."""
        if (member := self._members.get(name)) is not None:
            self.withdraw(member, 'unknown', reason)

    def quarantine(self, name: str, reason: str) -> None:
        """Takes an engine with wrong output out of service until it has passed another probe."""
        if (member := self._members.get(name)) is not None:
            self.withdraw(member, 'quarantined', reason)

    def statuses(self) -> list[EngineStatus]:
        return [member.engine.status() for member in self._members.values()]

    async def await_serving(self, count: int, deadline_s: float, stop: Event, patience_s: float = math.inf) -> int:
        """Waits until `count` engines serve, `stop` is set or the deadline has passed; returns how many serve.

        Args:
          patience_s: after this time one engine is enough.
        """
        begun_s = self._clock.now()
        end_s, few_s = begun_s + deadline_s, begun_s + patience_s
        while (serving := sum(one.state == 'serving' for one in self._members.values())) < count and not stop.is_set():
            now_s = self._clock.now()
            if now_s >= end_s or (serving and now_s >= few_s):
                break
            await self._clock.wait(stop, min(_LOOK_S, end_s - now_s))
        return serving

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
        """Sets the target: every engine gets this version as soon as it can."""
        self.target = published
        for member in self._members.values():
            member.news.set()

    async def load_weights(self, published: PublishedWeights) -> float:
        """Returns when every serving engine has acknowledged the version, refused it or is out of service.

        An engine that does not hold the version by then gets it from its keeper as soon as it can.
        """
        asked = [member for member in self._members.values() if member.state == 'serving']
        self.offer(published)
        for one in asked:  # in turn: checking all of them at each answer would be quadratic
            while one.state == 'serving' and one.settled_version != published.version:
                self._settled.clear()
                await self._clock.wait(self._settled)
        return max((one.pause_s for one in asked if one.version == published.version), default=0.0)

    async def pin(self, published: PublishedWeights) -> None:
        raise RuntimeError('servers keep no earlier versions; app/ refuses what needs them')

    def unpin(self, version: int) -> None:
        raise RuntimeError('servers keep no earlier versions; app/ refuses what needs them')

    def pinned_versions(self) -> Sequence[int]:
        """The versions that engines, also unresponsive ones, may still be reading."""
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
        """Ends the pauses of all engines and closes their clients, at every end of a run.

        Waits for _CLOSE_S at most: any pause that is left ends when its lease lapses.
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
        """Notes a failed request. New requests avoid the engine until its keeper has made a health check.

        Further failures before that check count as one: a lost connection fails all its requests. A failure does not
        mean wrong answers: an engine that fails too often is asked, fenced and probed, not quarantined.
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
