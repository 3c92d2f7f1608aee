"""Where each request is: sends requests to serving engines in other processes, and on to others when one fails.

server_pool.py says which engines serve. The unit that waits, moves and is retried is the request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from areal_jax.control.event_writer import EventLog
from areal_jax.control.failures import RequestLostError
from areal_jax.control.supervisor import Supervisor
from areal_jax.protocols import Clock, Generation
from areal_jax.rollout.servers.member import Member, MovingRequest, RemoteError, find_fault
from areal_jax.rollout.spare_engines import Entry, Ledger
from areal_jax.types import EngineFinish, GenerationRequest


class Placement:
    """The open requests of a pool of servers.

    Args:
      members: the engines of the pool by name; the pool changes it.
      max_retries: see ServerSettings.
      distrust: called with an engine that delivered what cannot be, and the fault.
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
        self._waiting: dict[str, MovingRequest] = {}  # those that no engine has
        self._is_held = False

    # Engines.

    def add_engine(self, member: Member) -> None:
        """Requests may go there."""
        self.ledger.add_engine(member.name)
        self.place_waiting()

    def withdraw_engine(self, member: Member) -> None:
        """No new request goes there."""
        if self.ledger.is_routed(member.name):
            self.ledger.withdraw_engine(member.name)

    def remove_engine(self, member: Member) -> None:
        """Forgets an engine whose requests have moved."""
        if member.name in self.ledger.outstanding():
            self.ledger.remove_engine(member.name)

    def move_all(self, member: Member, reason: str, *, is_failure: bool) -> None:
        """The requests of an engine that was withdrawn go on elsewhere."""
        for moving in list(member.requests.values()):
            self._move(moving, reason, is_failure=is_failure)

    def hold(self) -> None:
        """Requests wait until `release`."""
        self._is_held = True

    def release(self) -> None:
        self._is_held = False
        self.place_waiting()

    def place_waiting(self) -> None:
        """Sends what waits to the engines that serve, lowest draw first."""
        if self._is_held:
            return
        waiting, self._waiting = self._waiting, {}
        for moving in sorted(waiting.values(), key=lambda one: (one.request.draw, one.request.sample)):
            self._place(moving)

    # Requests.

    def generate(self, request: GenerationRequest, prefer: str = '') -> MovingRequest:
        """Starts the request, on the engine `prefer` if that serves; it waits where none does."""
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
        """Those that an engine has, and those that wait for one."""
        return len(self._open)

    def state(self) -> dict[str, Any]:
        """Nothing: a resumed run measures its servers anew, which may be others."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        pass

    def order(self) -> list[tuple[str, int, int]]:
        """Engine by engine, first come first; then those that wait for an engine, under ''."""
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
        """All samples of a group and all turns of an answer on one engine, while it serves."""
        for name in (prefer, self.ledger.engine_of_group(request)):
            if name and name != avoid and self.ledger.is_routed(name):
                return name
        return self.ledger.least_outstanding(avoid)

    async def _pump(self, moving: MovingRequest, entry: Entry, member: Member, generation: Generation) -> None:
        """Takes what the engine delivers; cancelled when the request leaves the engine."""
        try:
            async for segment in generation:
                if fault := find_fault(segment, moving.lowest_version, member.highest_version, moving.room_tokens):
                    self._distrust(member, f'request {moving.request.request_id}: {fault}')
                    return
                moving.take(segment)
                self.ledger.note_generated(entry, len(segment.tokens))
        except (RemoteError, TimeoutError) as error:
            self._note_failure(member, str(error))
            if moving.entry is entry:  # it has not moved with all others
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
            self._members[left].engine.cancel(moving.request.request_id)  # it may go on with it
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
        """The engine that has the request has it no more; nothing where none has."""
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
