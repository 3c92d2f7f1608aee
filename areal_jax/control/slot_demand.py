"""How many more answers the decoding slots can take: what admission asks where rollout.max_running_groups is 0.

A group keeps its place until its longest answer ends, so a fixed number of groups leaves slots idle as its answers end.
Here the open answers are counted in place of the groups, whatever their lengths are: a group starts while the engines
have fewer open requests than slots, and one group for each engine that waits for the next free slot.
"""

from __future__ import annotations

from collections.abc import Callable

from areal_jax.protocols import Pool


class SlotDemand:
    """The slots of the engines that serve, against the requests that are open or about to be.

    Args:
      slots: of one engine.
      not_begun: answers of admitted groups whose first request has not reached the pool yet.
    """

    def __init__(self, pool: Pool, not_begun: Callable[[], int], *, slots: int, group_size: int):
        self._pool, self._not_begun, self._slots, self._group_size = pool, not_begun, slots, group_size

    def open_answers(self) -> int:
        """Training requests that decode or wait, including groups that were just admitted."""
        return self._pool.open_requests() + self._not_begun()

    def wanted_answers(self) -> int:
        """Open answers with which no slot waits for a group: one group waits at each engine."""
        return self._pool.serving_engines() * (self._slots + self._group_size)

    def idle_slots(self) -> int:
        """Slots for which no answer is open."""
        return max(0, self._pool.serving_engines() * self._slots - self.open_answers())
