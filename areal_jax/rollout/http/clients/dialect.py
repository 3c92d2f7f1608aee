"""What the engine asks of a server, in the words of either protocol. The coroutines run on the I/O loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from areal_jax.rollout.http.clients.connection import Connection
from areal_jax.rollout.http.wire.exchange import Answer, Call, FinishWord, Piece
from areal_jax.types import EngineCapabilities

# A pause of the engine returns what was generated, and the rest is sent again afterwards. So does a swap of weights,
# unless the server keeps answers over it: either way the KV of answers is rebuilt. The weights of a version are loaded
# in the pause, none are kept beside them, and a cut softmax has no log-probs of its own in the replies.
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
    `keeps_answers`: replies say which version drew which token, and `pause` can keep answers on the server; it may
    become true with the first reply.
    """

    seeds: bool
    streams: bool
    keeps_answers: bool

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

    async def pause(self, connection: Connection, keeps_answers: bool = False) -> None:
        """Ends every request with what it has; later ones wait for `resume`.

        With `keeps_answers`, for servers that can, none ends: after `resume` each goes on, under the weights of that
        time and with its KV computed again.
        """
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
