"""The schema of the event log: its file and the names of its lanes."""

from __future__ import annotations

FILE = 'events.jsonl'  # in the workdir
LEARNER, REWARD, DISK = 'learner', 'reward', 'disk'  # lanes


def engine_lane(index: int) -> str:
    """Decoding of one engine; also the engine's name."""
    return f'engine/{index}'


def publish_lane(index: int) -> str:
    """Fetching of weights by one engine."""
    return f'publish/{index}'
