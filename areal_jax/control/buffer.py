"""The trajectory buffer: whole groups, lowest draw first, each used once; what is too old leaves with a reason."""

from __future__ import annotations

import heapq

from areal_jax.types import Dropped, TrajectoryGroup


class TrajectoryBuffer:
    """Finished groups in the order of their draws."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, TrajectoryGroup]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def put(self, group: TrajectoryGroup) -> None:
        if any(draw == group.draw for draw, _ in self._heap):
            raise ValueError(f'draw {group.draw} is in the buffer already')
        heapq.heappush(self._heap, (group.draw, group))

    def take(self, count: int) -> list[TrajectoryGroup]:
        """The `count` groups with the lowest draws; each is handed out once."""
        if count > len(self._heap):
            raise ValueError(f'{count} groups asked for, {len(self._heap)} buffered')
        return [heapq.heappop(self._heap)[1] for _ in range(count)]

    def drop_over_age(self, version: int, max_token_age: int) -> list[Dropped]:
        """Remove the groups with a token older than `max_token_age` versions at `version`."""
        dropped = [
            Dropped(draw, 'over_age', f'age {version - group.oldest_version()} > {max_token_age}')
            for draw, group in sorted(self._heap, key=lambda entry: entry[0])
            if version - group.oldest_version() > max_token_age
        ]
        gone = {drop.draw for drop in dropped}
        self._heap = [entry for entry in self._heap if entry[0] not in gone]
        heapq.heapify(self._heap)
        return dropped

    def groups(self) -> list[TrajectoryGroup]:
        """What is inside, lowest draw first."""
        return [group for _, group in sorted(self._heap, key=lambda entry: entry[0])]
