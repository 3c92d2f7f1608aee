"""Takes the requests of a server: over HTTP by default; a kind of server may have another front."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from areal_jax.config.kinds import OWN, OWN_CLIENT, SERVER, ClientKind, find_server, resolve

if TYPE_CHECKING:
    from areal_jax.protocols import Inbox
    from areal_jax.rollout.http.server.limits import Limits
    from areal_jax.rollout.http.server.replies import Callers
    from areal_jax.rollout.http.server.thread import ServedModel


class Front(Protocol):
    """A context manager: inside, its threads take requests; at the end, connections are closed."""

    def __enter__(self) -> Front: ...

    def __exit__(self, *_: object) -> None: ...

    def refuse_new(self) -> None:
        """Refuses new requests, because the server is ending; callable from any thread."""
        ...


@dataclasses.dataclass(frozen=True)
class FrontParts:
    """The arguments from which a front is built.

    Args:
      inbox: of the service that the requests are for.
      listener: the bound socket.
      decode_steps: most tokens of an answer in one dispatch.
      callers: the callers that the server obeys.
      on_death: called on a thread of the front if an error has ended that thread.
    """

    inbox: Inbox
    model: ServedModel
    listener: socket.socket
    limits: Limits
    decode_steps: int
    callers: Callers
    on_death: Callable[[BaseException], None]


@dataclasses.dataclass(frozen=True)
class FrontKind:
    """A protocol in which a model is served."""

    client: ClientKind  # speaks it
    build: Callable[[FrontParts], Front]
    survives: bool = False  # an exception of a dispatch ends the answers in slots, but not the server


def build_http(parts: FrontParts) -> Front:
    """Builds routes in the dialects of SGLang, vLLM, OpenAI and Anthropic."""
    from areal_jax.rollout.http.server.thread import HttpThread

    return HttpThread(
        parts.inbox, parts.model, parts.listener,
        limits=parts.limits, callers=parts.callers, on_death=parts.on_death,
    )  # fmt: skip


HTTP = FrontKind(OWN_CLIENT, build_http)


def find_front(server: str) -> FrontKind:
    """Returns the front for rollout.server=`server`: HTTP, unless its kind has another front."""
    launch = find_server(server).launch or OWN.launch
    found: FrontKind = resolve(launch.front, SERVER)() if launch and launch.front else HTTP
    return found


def enter_interpreter(server: str) -> None:
    """Restarts the command under the interpreter that the kind of server needs, if this is another interpreter.

    Call it before anything is bound or started. Raises UserError if the interpreter does not exist.
    """
    launch = find_server(server).launch
    if launch and launch.enter:
        resolve(launch.enter, SERVER)()
