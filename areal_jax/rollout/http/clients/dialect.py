"""What the engine asks of a server, in the words of either protocol. The coroutines run on the I/O loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from areal_jax.rollout.http.clients.connection import Connection
from areal_jax.rollout.http.wire.exchange import Answer, Call, FinishWord, Piece
from areal_jax.types import EngineCapabilities

# Whatever protocol the server speaks, the engine pauses it in the mode that returns what was generated, and sends the
# rest again afterwards: no call goes on under other weights, and the KV of answers is rebuilt. The weights of a version
# are loaded in the pause, none are kept beside them, and a cut softmax has no log-probs of its own in the replies.
CAPABILITIES = EngineCapabilities(
    logprobs=('behavior',),
    spans=True,
    abort=True,
    pause_modes=('retract',),
    staging=False,
    update=('recompute',),
    pinned=False,
)


class UpdateError(Exception):
    """The server says that an update failed, or names another version afterwards: its weights may be old or new."""


class Dialect(Protocol):
    """One protocol. Every method raises connection.NoReplyError and StatusError.

    `seeds`: noise can be seeded for each request. `streams`: what came of an answer outlives its server.
    """

    seeds: bool
    streams: bool

    async def generate(self, connection: Connection, call: Call, vocab_size: int) -> Answer:
        """The one answer of the call; raises wire.exchange.ReplyError where its tokens cannot be trusted."""
        ...

    async def stream(
        self, connection: Connection, call: Call, vocab_size: int, deliver: Callable[[Sequence[Piece]], None]
    ) -> FinishWord:
        """Calls `deliver` with what comes of the answer, in parts or at once; returns how it ended.

        Raises ReplyError where what was not delivered cannot be trusted.
        """
        ...

    async def abort(self, connection: Connection, request_id: str) -> None:
        """Ends the request with what it has; '' = every request. An unknown request is ignored."""
        ...

    async def pause(self, connection: Connection) -> None:
        """Ends every request with what it has; later ones wait for `resume`."""
        ...

    async def resume(self, connection: Connection) -> None:
        """Ends a pause, if there is one."""
        ...

    async def update(self, connection: Connection, directory: str, version: str) -> None:
        """While paused: loads the weights and names them, and reads the name back; may be sent again.

        Raises UpdateError.
        """
        ...

    async def ask_version(self, connection: Connection) -> str:
        """What the server calls the weights that it serves; '' = it gives them no name."""
        ...
