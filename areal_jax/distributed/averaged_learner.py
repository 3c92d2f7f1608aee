"""Learners of independent clients, which average the blocks that they have trained through a shared directory.

    DIRECTORY/turn_000012/client_1         the block of client 1 after its turn 12, until the mean is there
    DIRECTORY/turn_000012/average/mean     the mean of the clients that average/clients.json names

All clients begin the turn with equal weights of the block, so the mean of their weights is the old weights plus the
mean of their changes. When all blocks are there, or the deadline has passed, one client writes the mean; clients take
turns, and another one steps in if that client does not write it. The writer renames a directory with the mean. The
rename succeeds only once, so every client, a resumed one too, reads the same mean.

A turn is over when its block has had all its updates (learning/blockwise.py). With overlap, a thread sends the block of
turn t and fetches its mean while turn t + 1 trains another block; at the end of turn t + 1 the mean replaces this
client's weights of the block. So a block is one turn behind the other clients while it is averaged, but not while it is
trained. Without overlap, the client waits for the mean at the end of each turn.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import errno
import math
import mmap
import os
import pathlib
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from areal_jax import files
from areal_jax.distributed.messages import CodecError, decode, encode_parts
from areal_jax.errors import UserError
from areal_jax.learning.blockwise import BlockLearner
from areal_jax.learning.diagnostics.measurement import Metrics
from areal_jax.telemetry import names
from areal_jax.telemetry.metrics import merge
from areal_jax.types import TrajectoryGroup, Tree

Block = Mapping[str, np.ndarray]  # float32 leaves by path
_LOOK_S = 0.02  # between two reads of the directory
_CHUNK = 1 << 16  # elements that are added up at once: float64 sums of a whole leaf would not fit the cache
_TURN = re.compile(r'turn_(\d{6,})')
_CLIENT = re.compile(r'client_(\d+)')
_MEAN, _CLIENTS = 'mean', 'clients.json'


class AverageError(UserError):
    """A mean cannot be made or read; the message names the directory and the fix."""


@dataclasses.dataclass(frozen=True)
class Average:
    """The mean of a block after one turn."""

    clients: tuple[int, ...]  # whose blocks are in the mean
    values: dict[str, np.ndarray]
    waited_s: float  # from the call of `exchange` to the mean


class Averages:
    """One client's access to the directory. For one thread.

    Args:
      directory: the same for all clients.
      client: the number of this client, from 0.
      clients: the number of clients at the start.
      run: digest of the settings that must be equal in all clients: model, seed and optimizer.
      deadline_s: how long this client waits for the others after it has sent its block.
      kept_turns: turns whose means stay, for clients that are resumed from an earlier checkpoint; 0 = all.
      patience_s: how long the others wait for the client whose turn it is to make the mean.
      pace: called with the bytes of each block that is sent or fetched; a simulated link waits in it.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        client: int,
        clients: int,
        *,
        run: str,
        deadline_s: float,
        kept_turns: int = 0,
        patience_s: float = 10.0,
        pace: Callable[[int], None] = lambda nbytes: None,
    ):
        self._directory, self._client, self._clients = directory, client, clients
        self._run, self._deadline_s, self._kept_turns, self._pace = run, deadline_s, kept_turns, pace
        self._patience_s = patience_s

    def require_new(self) -> None:
        """Raises AverageError if a mean, of an earlier run, already has this client. Call it when a run begins."""
        for turn in self._turns():
            if self._client in (self._read_clients(turn) or ()):
                raise AverageError(
                    f'distributed.average_directory={str(self._directory)!r} has means of an earlier run, with client '
                    f'{self._client} in them: give every run a directory of its own, or go on with --resume'
                )

    def exchange(self, turn: int, block: Block) -> Average:
        """Sends the block of this client and returns the mean over the clients, at once if it is already there.

        From then on the others do not wait for a late client, until it has sent a block in time again.

        Raises AverageError for a mean that is not kept any more, and for blocks of other leaves.
        """
        began_s, home = time.monotonic(), self._home(turn)
        if (found := self._read(turn)) is None:
            self._require_kept(turn)
            home.mkdir(parents=True, exist_ok=True)
            # unsynced: if the block is lost with its machine, the resumed client sends it again
            self._pace(_write(home / f'client_{self._client}', {'run': self._run, 'values': dict(block)}, synced=False))
            found = self._await(turn, block)
        clients, values = found
        self._pace(sum(leaf.nbytes for leaf in values.values()))
        if self._client not in clients:
            _warn(
                f'client {self._client} came after the deadline of turn {turn}: it goes on with the mean of clients '
                f'{_name(clients)}'
            )
        self._remove_old(turn)
        return Average(clients, values, time.monotonic() - began_s)

    def _await(self, turn: int, block: Block) -> tuple[tuple[int, ...], dict[str, np.ndarray]]:
        end_s = time.monotonic() + self._deadline_s
        patience_ends_s = math.inf
        before = self._read_clients(turn - 1)
        expected = set(range(self._clients)) if before is None else set(before)
        while True:
            if (found := self._read(turn)) is not None:
                return found
            there, is_late = self._list_clients(turn), time.monotonic() >= end_s
            is_complete = bool(there) and expected <= set(there)
            if is_complete and there[turn % len(there)] != self._client:
                patience_ends_s = min(patience_ends_s, time.monotonic() + self._patience_s)
                is_complete = time.monotonic() >= patience_ends_s
            if is_late or is_complete:
                if missing := sorted(expected - set(there)):
                    _warn(
                        f'clients {_name(missing)} sent no block of turn {turn} within distributed.average_deadline_s='
                        f'{self._deadline_s:g}: the mean is over clients {_name(there)}'
                    )
                with contextlib.suppress(FileNotFoundError):  # another client has made the mean meanwhile
                    self._decide(turn, there, block)
            else:
                time.sleep(_LOOK_S)

    def _decide(self, turn: int, clients: Sequence[int], block: Block) -> None:
        """Writes the mean over these clients, unless there is one; `block` is the block that this client sent."""
        home = self._home(turn)
        blocks = [block if client == self._client else self._read_sent(turn, client) for client in clients]
        mean = mean_blocks(blocks, home)
        own = home / f'.average_{self._client}'
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir()
        size = _write(own / _MEAN, mean)
        self._pace(size * (len(blocks) - (self._client in clients)))  # the blocks of others
        files.write_json(own / _CLIENTS, {'clients': list(clients), 'run': self._run})
        try:
            own.rename(home / 'average')
        except OSError as error:
            shutil.rmtree(own, ignore_errors=True)
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            return
        files.sync(home)
        for path in home.glob('client_*'):
            path.unlink(missing_ok=True)

    def _read_sent(self, turn: int, client: int) -> Block:
        record = _decode(self._home(turn) / f'client_{client}')
        self._require_same_run(record['run'], f'client {client}')
        values: Block = record['values']
        return values

    def _read(self, turn: int) -> tuple[tuple[int, ...], dict[str, np.ndarray]] | None:
        clients = self._read_clients(turn)
        return None if clients is None else (clients, _decode(self._home(turn) / 'average' / _MEAN))

    def _read_clients(self, turn: int) -> tuple[int, ...] | None:
        path = self._home(turn) / 'average' / _CLIENTS
        if not path.exists():
            return None
        record = files.read_json(path)
        self._require_same_run(record['run'], f'the mean of turn {turn}')
        return tuple(record['clients'])

    def _require_same_run(self, run: str, whose: str) -> None:
        if run != self._run:
            raise AverageError(
                f'{whose} in {self._directory} is of another run than client {self._client}: start all clients with '
                'one model, run.seed and optimizer, and give each run a distributed.average_directory of its own'
            )

    def _list_clients(self, turn: int) -> list[int]:
        found = [match for path in self._home(turn).iterdir() if (match := _CLIENT.fullmatch(path.name))]
        return sorted(int(match[1]) for match in found)

    def _require_kept(self, turn: int) -> None:
        later = [number for number in self._turns() if number > turn and self._read_clients(number) is not None]
        if later:
            raise AverageError(
                f'{self._directory} has the mean of turn {later[0]} and none of turn {turn}, at which this client is: '
                'resume it from a newer checkpoint, and raise distributed.kept_turns or lower checkpoint.every'
            )

    def _remove_old(self, turn: int) -> None:
        """Removes turns that need not be kept; another client may remove the same turn at the same time."""
        if self._kept_turns:
            for number in self._turns():
                if number <= turn - self._kept_turns:
                    shutil.rmtree(self._home(number), ignore_errors=True)

    def _turns(self) -> list[int]:
        if not self._directory.is_dir():
            return []
        return sorted(int(match[1]) for path in self._directory.iterdir() if (match := _TURN.fullmatch(path.name)))

    def _home(self, turn: int) -> pathlib.Path:
        return self._directory / f'turn_{turn:06d}'


def mean_blocks(blocks: Sequence[Block], where: pathlib.Path) -> dict[str, np.ndarray]:
    """The mean of each leaf, summed in float64 in the order of the blocks; the mean of one block equals it bit for bit.

    Raises AverageError, which names `where`, for blocks of other leaves or shapes.
    """
    shapes = [{path: leaf.shape for path, leaf in block.items()} for block in blocks]
    if any(shape != shapes[0] for shape in shapes):
        raise AverageError(
            f'the clients sent blocks of other leaves to {where}: start all clients of one model with one config, and '
            'give every run a distributed.average_directory of its own'
        )
    return {path: _mean([block[path] for block in blocks]) for path in blocks[0]}


def _mean(leaves: Sequence[np.ndarray]) -> np.ndarray:
    flat, mean = [leaf.reshape(-1) for leaf in leaves], np.empty(leaves[0].size, np.float32)
    for first in range(0, mean.size, _CHUNK):
        part = slice(first, first + _CHUNK)
        total = flat[0][part].astype(np.float64)
        for leaf in flat[1:]:
            total += leaf[part]
        mean[part] = total / len(flat)
    return mean.reshape(leaves[0].shape)


def _write(path: pathlib.Path, value: object, *, synced: bool = True) -> int:
    parts = encode_parts(value)
    files.write_parts(path, parts, synced=synced)
    return sum(len(part) for part in parts)


def _decode(path: pathlib.Path) -> Any:
    """Decodes the value in a file. Its arrays are views of the file, which may be removed meanwhile.

    Raises FileNotFoundError for a missing file, AverageError for other content.
    """
    try:
        with path.open('rb') as file:
            is_empty = not os.fstat(file.fileno()).st_size
            return decode(b'' if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except CodecError as error:
        raise AverageError(f'{path} holds no block ({error}): remove the directory of its turn, and resume') from error


def _name(clients: Sequence[int]) -> str:
    return ', '.join(map(str, clients))


def _warn(sentence: str) -> None:
    print(f'warning: {sentence}', file=sys.stderr, flush=True)


class ClientSettings(NamedTuple):
    """The part of this client in the averaging."""

    overlap: bool
    steps: int  # updates of the run: after the last one, no mean may be left pending


class _Pending(NamedTuple):
    turn: int
    mean: concurrent.futures.Future[Average]


class AveragedLearner(BlockLearner):
    """A BlockLearner whose blocks are replaced by their means over the clients.

    A resumed learner sends a block again that was pending at the checkpoint, and gets the same mean.
    """

    def __init__(self, *args: Any, averages: Averages, client: ClientSettings, **settings: Any):
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
        assert self._pending is not None
        (turn, mean), self._pending = self._pending, None
        average, block = mean.result(), self.blocks.block_of_turn(turn)
        self.replace_block(block, average.values)
        return {
            names.AVERAGED_BLOCK: float(block),
            names.AVERAGED_CLIENTS: float(len(average.clients)),
            names.AVERAGE_SECONDS: average.waited_s,
        }
