"""What the pool asks of an engine in another process besides protocols.RolloutEngine, and how such an engine fails.

The clients of rollout/http/ implement it, server_pool.py drives it. Every other exception is a bug and ends the run.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from areal_jax.protocols import RolloutEngine


class RemoteError(Exception):
    """Something that an engine in another process did not do; the message names engine, action and cause."""


class RequestFailedError(RemoteError):
    """A request did not end: a reply with an error, a cut connection, an answer that cannot be read.

    Raised by the iteration over a generation. Segments that were delivered before stay valid.
    """


class RefusedError(RemoteError):
    """An action was not done, and the engine holds what it held: it may be asked for the same again."""


class FencedError(RemoteError):
    """The engine obeys this run no longer: its lease of a pause has lapsed, or another run has taken the engine over.

    What it does now is not known. It is to be fenced, which registers the run anew, and to get its weights again.
    """


class OutcomeUnknownError(RemoteError):
    """An action may have been done, may be going on, or was not done: a deadline, or a lost connection."""


@dataclasses.dataclass(frozen=True)
class HeldWeights:
    """The weights that an engine decodes with, by its own word."""

    version: int
    manifest_hash: str | None = None  # PublishedWeights.manifest_hash; None: the engine cannot tell
    is_fenced: bool = False  # it obeys this run no longer: see FencedError
    paused: str = ''  # by whom and since when, where somebody else has paused it


class RemoteEngine(RolloutEngine, Protocol):
    """An engine behind a network.

    A pause holds as long as this client renews it, where the engine knows leases: see rollout/http/pauses.py.

    `generate`, `cancel`, `resume`, `open_requests` and `status` do not wait for the network; `status` gives what was
    heard last. `stage`, `swap` and `pause` raise RefusedError, FencedError or OutcomeUnknownError where they are not
    done. To stage
    the version that is staged or held already is allowed and may do nothing. The pool gives up whatever takes longer
    than its own deadline by cancelling it, and then takes the outcome for unknown. A request may come again after its
    `cancel`, with more of its prefix: on the wire it needs an id of its own then.
    """

    async def ask(self) -> HeldWeights:
        """Asks the engine what it holds, which also shows that it serves; raises OutcomeUnknownError without an answer.

        Never says a version before its weights are all in use.
        """
        ...

    async def fence(self) -> None:
        """Ends every request that this or an earlier client sent and that has not ended, also what it has paused.

        Nothing of those requests is delivered later. From then on the engine obeys this client alone, where it can tell
        clients apart. Raises RefusedError or OutcomeUnknownError.
        """
        ...

    async def close(self) -> None:
        """Ends what it has paused, and lets connections go; the engine is not used any more. Never fails."""
        ...
