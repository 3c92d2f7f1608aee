"""What the processes of a run send each other. Used by leader.py and follower.py; peers.py carries it.

Messages are pickled. Commands and answers alternate on the main threads; write requests and their answers belong to
checkpoints and may come at any time between them, so each kind of message has its own queue at the receiver.
"""

from __future__ import annotations

from typing import NamedTuple

from areal_jax.checkpoint.shards import Index

CLOSE = 'close'  # the command after which the follower returns


class Command(NamedTuple):
    """From process 0: call this method of the learner with these arguments (numbers and numpy arrays)."""

    name: str
    args: tuple[object, ...] = ()


class Answer(NamedTuple):
    """From a follower, after each command."""

    error: str | None  # None = executed


class WriteRequest(NamedTuple):
    """From process 0: write the shards that the last `save` copied."""

    directory: str


class WriteAnswer(NamedTuple):
    """From a follower: which shards it wrote, or why it failed."""

    directory: str  # of the request
    outcome: Index | str


Message = Command | Answer | WriteRequest | WriteAnswer
