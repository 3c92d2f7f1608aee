"""Every process of a run but process 0: executes the commands that process 0 sends, in the order of sending.

A second thread writes the shards of checkpoints, so that commands go on meanwhile. Used by app/processes.py; uses
peers.py. Process 0 runs leader.py.
"""

from __future__ import annotations

import collections
import pathlib
import threading
from multiprocessing.connection import Connection

from areal_jax.checkpoint.shards import Index, brief, named_leaves, write_shards
from areal_jax.distributed.messages import CLOSE, Answer, Command, WriteAnswer, WriteRequest
from areal_jax.distributed.peers import OnLost, Peer, end_process
from areal_jax.learning.learner import SpmdLearner
from areal_jax.types import Tree

_Copies = collections.deque[Tree]


def follow(learner: SpmdLearner, leader: Connection, *, on_lost: OnLost = end_process) -> None:
    """Executes the commands of process 0 until it closes.

    An error is reported to process 0, which decides how the run goes on; the next command is awaited.
    """
    peer = Peer(leader, 'process 0', on_lost)
    copies: _Copies = collections.deque(maxlen=1)  # what the last `save` returned, until it is written
    threading.Thread(target=_write_copies, args=(peer, copies), daemon=True).start()
    while True:
        command = peer.take(Command, None)
        if command.name == CLOSE:
            peer.close()
            return
        peer.send(_execute(learner, command, copies))


def _execute(learner: SpmdLearner, command: Command, copies: _Copies) -> Answer:
    try:
        if command.name == 'save':
            copies.append(learner.save())
        else:
            getattr(learner, command.name)(*command.args)
    except Exception as error:
        return Answer(f'{type(error).__name__}: {error}')
    return Answer(None)


def _write_copies(peer: Peer, copies: _Copies) -> None:
    """Writes the last copy for each request and answers with the shards written or the error. Never returns."""
    while True:
        request = peer.take(WriteRequest, None)
        try:
            outcome: Index | str = write_shards(pathlib.Path(request.directory), named_leaves(copies.pop()))
        except Exception as error:
            outcome = brief(error)
        peer.send(WriteAnswer(request.directory, outcome))
