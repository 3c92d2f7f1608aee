"""Which request is in which slot of an engine, and which requests wait for one."""

from __future__ import annotations

import collections
import heapq

from areal_jax.rollout.running_request import RunningRequest


class SlotTable:
    """Slots and the queue before them, in constant time per request."""

    def __init__(self, slots: int):
        self.slots: list[RunningRequest | None] = [None] * slots
        self._slot_of: dict[str, int] = {}  # by request id, in the order of admission
        self._free = list(range(slots))  # a heap
        self._waiting: collections.OrderedDict[str, RunningRequest] = collections.OrderedDict()  # by request id

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._slot_of or request_id in self._waiting

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def taken(self) -> int:
        """Slots with a request."""
        return len(self._slot_of)

    @property
    def is_full(self) -> bool:
        """Whether no slot is free."""
        return not self._free

    def has_slot(self, running: RunningRequest) -> bool:
        return running.request_id in self._slot_of

    def running(self) -> list[tuple[int, RunningRequest]]:
        """(slot, request) by slot."""
        return [(slot, running) for slot, running in enumerate(self.slots) if running is not None]

    def admitted(self) -> list[RunningRequest]:
        """Requests in slots, in the order in which they came there."""
        return [running for slot in self._slot_of.values() if (running := self.slots[slot]) is not None]

    def youngest(self) -> RunningRequest:
        """The request that came to a slot last."""
        return self._at(next(reversed(self._slot_of.values())))

    def open_requests(self) -> list[RunningRequest]:
        """Requests in slots by slot, then waiting ones in their order."""
        return [*(running for _, running in self.running()), *self._waiting.values()]

    @property
    def is_empty(self) -> bool:
        return not self._slot_of and not self._waiting

    def version(self) -> int | None:
        """The version that the requests in slots ask for, of the first waiting one where no slot is taken."""
        first = next(iter(self._slot_of.values()), None)
        running = next(iter(self._waiting.values())) if first is None else self._at(first)
        return running.request.version

    def add(self, running: RunningRequest) -> None:
        """Puts the request at the end of the queue."""
        self._waiting[running.request_id] = running

    def next_waiting(self, *, only_begun: bool = False) -> RunningRequest | None:
        """The first request of the queue, or of those that already have tokens, if it may have a slot now.

        Requests in slots all ask for one version: one of another waits until all slots are free.
        """
        if not self._waiting or not self._free:
            return None
        running = next((one for one in self._waiting.values() if one.has_begun or not only_begun), None)
        return running if running is not None and running.request.version == self.version() else None

    def enter(self, running: RunningRequest) -> None:
        """Moves a waiting request into the lowest free slot."""
        del self._waiting[running.request_id]
        slot = heapq.heappop(self._free)
        self.slots[slot] = running
        self._slot_of[running.request_id] = slot

    def leave(self, running: RunningRequest) -> None:
        """Empties the slot of a request."""
        slot = self._slot_of.pop(running.request_id)
        self.slots[slot] = None
        heapq.heappush(self._free, slot)

    def remove(self, request_id: str) -> RunningRequest | None:
        """Takes the request out, wherever it is; None where it is not here."""
        if request_id in self._waiting:
            return self._waiting.pop(request_id)
        if request_id not in self._slot_of:
            return None
        running = self._at(self._slot_of[request_id])
        self.leave(running)
        return running

    def return_to_queue(self, running: RunningRequest) -> None:
        """Moves a request from its slot to the head of the queue."""
        self.leave(running)
        self.add(running)
        self._waiting.move_to_end(running.request_id, last=False)

    def requeue(self) -> None:
        """Returns the requests in slots to the head of the queue, in slot order."""
        for _, running in reversed(self.running()):
            self.return_to_queue(running)

    def _at(self, slot: int) -> RunningRequest:
        running = self.slots[slot]
        assert running is not None
        return running
