"""The learner of one of several independent clients, which average the blocks that they have trained.

A turn is over when its block has had all its updates (learning/blockwise/blocks.py). With overlap, a thread sends the
block of turn t and fetches its mean while turn t + 1 trains another block; at the end of turn t + 1 the mean replaces
this client's weights of the block. So a block is one turn behind the other clients while it is averaged, but not while
it is trained. Without overlap, the client waits for the mean at the end of each turn.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from areal_jax.distributed.averages import Average, Block
from areal_jax.learning.blockwise.block_learner import BlockLearner
from areal_jax.learning.diagnostics.measurement import Metrics
from areal_jax.telemetry import names
from areal_jax.telemetry.metrics import merge
from areal_jax.types import TrajectoryGroup, Tree


class Exchange(Protocol):
    """Computes means over the clients (averages.Averages)."""

    def exchange(self, turn: int, block: Block) -> Average:
        """Sends a block, waits, returns the mean; runs on a separate thread."""
        ...


class ClientSettings(NamedTuple):
    """The part of this client in the averaging."""

    overlap: bool
    steps: int  # updates of the run: after the last one, no mean may be left pending


class _Pending(NamedTuple):
    """A block whose mean is being fetched."""

    turn: int
    mean: concurrent.futures.Future[Average]


class AveragedLearner(BlockLearner):
    """A BlockLearner whose blocks are replaced by their means over the clients.

    A resumed learner sends a block again that was pending at the checkpoint, and gets the same mean.
    """

    def __init__(self, *args: Any, averages: Exchange, client: ClientSettings, **settings: Any):
        self._averages, self._client = averages, client
        self._pending: _Pending | None = None
        super().__init__(*args, **settings)

    def update(self, groups: Sequence[TrajectoryGroup], version: int) -> Metrics:
        """See BlockLearner.update. At the end of a turn a mean replaces a block; metrics name it and count its clients.

        Raises AverageError for a mean that cannot be made.
        """
        turn = self.blocks.turn_of(version)
        if self._client.overlap and self._pending is None and turn:  # resumed: send the pending block again
            self._send(turn - 1)
        metrics = super().update(groups, version)
        if not self.blocks.ends_turn(version + 1):
            return metrics
        means: Metrics = {}
        if self._pending is not None:
            means = self._take_mean()
        self._send(turn)
        if not self._client.overlap or version + 1 == self._client.steps:
            means = self._take_mean()
        self._version = version + 1
        return merge(learner=metrics, means=means)

    def restore(self, saved: Mapping[str, Tree]) -> None:
        self._pending = None
        super().restore(saved)

    def _send(self, turn: int) -> None:
        block = self.read_block(self.blocks.block_of_turn(turn))
        mean: concurrent.futures.Future[Average] = concurrent.futures.Future()

        def exchange() -> None:
            try:
                mean.set_result(self._averages.exchange(turn, block))
            except BaseException as error:
                mean.set_exception(error)

        threading.Thread(target=exchange, name='averages', daemon=True).start()
        self._pending = _Pending(turn, mean)

    def _take_mean(self) -> Metrics:
        """Waits for the pending mean, and replaces its block."""
        assert self._pending is not None
        (turn, mean), self._pending = self._pending, None
        average, block = mean.result(), self.blocks.block_of_turn(turn)
        self.replace_block(block, average.values)
        return {
            names.AVERAGED_BLOCK: float(block),
            names.AVERAGED_CLIENTS: float(len(average.clients)),
            names.AVERAGE_SECONDS: average.waited_s,
        }
