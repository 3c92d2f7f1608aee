"""Which request decodes in which slot of an engine, and which requests wait for one; used by stream.py."""

from __future__ import annotations

import collections

from areal_jax.rollout.running_request import RunningRequest


class SlotTable:
    """Slots and the queue before them, in constant time per request."""

    def __init__(self, slots: int):
        self.slots: list[RunningRequest | None] = [None] * slots
        self._slot_of: dict[str, int] = {}  # by request id
        self._waiting: collections.OrderedDict[str, RunningRequest] = collections.OrderedDict()  # by request id
        self._prefixes: collections.Counter[bytes] = collections.Counter()  # waiting requests by prefix key
        self._dead: list[int] = []  # slots that the backend still decodes although nobody is in them

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._slot_of or request_id in self._waiting

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def running(self) -> list[tuple[int, RunningRequest]]:
        """(slot, request) by slot."""
        return [(slot, running) for slot, running in enumerate(self.slots) if running is not None]

    def open_requests(self) -> list[RunningRequest]:
        """Requests in slots by slot, then waiting ones in their order."""
        return [*(running for _, running in self.running()), *self._waiting.values()]

    @property
    def is_empty(self) -> bool:
        return not self._slot_of and not self._waiting

    def version(self) -> int | None:
        """The version that the requests in slots ask for, of the first waiting one where no slot is taken."""
        first = next(iter(self._slot_of), None) or next(iter(self._waiting))
        return self._find(first).request.version

    def is_awaited(self, prefix_key: bytes) -> bool:
        """Whether a waiting request begins with this prefix."""
        return self._prefixes[prefix_key] > 0

    def add(self, running: RunningRequest) -> None:
        """Puts the request at the end of the queue."""
        self._waiting[running.request_id] = running
        self._prefixes[running.prefix_key] += 1

    def fill(self) -> list[tuple[int, RunningRequest]]:
        """Moves waiting requests into free slots, the lowest slot first; returns the new (slot, request) pairs.

        Requests in slots all ask for one version: one of another waits until all slots are free.
        """
        filled: list[tuple[int, RunningRequest]] = []
        if not self._waiting:
            return filled
        version = self.version()
        for slot, occupant in enumerate(self.slots):
            if not self._waiting or self._find(next(iter(self._waiting))).request.version != version:
                break
            if occupant is None:
                running = self._take(next(iter(self._waiting)))
                self.slots[slot] = running
                self._slot_of[running.request_id] = slot
                filled.append((slot, running))
        return filled

    def free(self, running: RunningRequest) -> None:
        """Empties the slot of a request whose answer ended: the backend has stopped decoding it."""
        self.slots[self._slot_of.pop(running.request_id)] = None

    def remove(self, request_id: str) -> RunningRequest | None:
        """Takes the request out, wherever it is; None where it is not here."""
        if request_id in self._waiting:
            return self._take(request_id)
        slot = self._slot_of.get(request_id)
        if slot is None:
            return None
        running = self.slots[slot]
        assert running is not None
        self.free(running)
        self._dead.append(slot)
        return running

    def requeue(self) -> None:
        """Returns the requests in slots to the head of the queue, in slot order."""
        for slot, running in reversed(self.running()):
            self.free(running)
            self._dead.append(slot)
            self.add(running)
            self._waiting.move_to_end(running.request_id, last=False)

    def take_dead(self) -> list[int]:
        """Slots that the next dispatch must release before anything else, ascending."""
        dead, self._dead = self._dead, []
        return sorted(set(dead))

    def _find(self, request_id: str) -> RunningRequest:
        if request_id in self._waiting:
            return self._waiting[request_id]
        running = self.slots[self._slot_of[request_id]]
        assert running is not None
        return running

    def _take(self, request_id: str) -> RunningRequest:
        running = self._waiting.pop(request_id)
        self._prefixes[running.prefix_key] -= 1
        if not self._prefixes[running.prefix_key]:
            del self._prefixes[running.prefix_key]
        return running
