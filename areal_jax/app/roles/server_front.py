"""What takes the requests of a server: HTTP by default; a kind of server may bring another front."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from areal_jax.config.kinds import OWN, OWN_CLIENT, SERVER, ClientKind, find_server, resolve

if TYPE_CHECKING:
    from areal_jax.protocols import Inbox
    from areal_jax.rollout.http.server.callers import Callers
    from areal_jax.rollout.http.server.limits import Limits
    from areal_jax.rollout.http.server.thread import ServedModel


class Front(Protocol):
    """A context manager: inside, requests are taken, on threads of its own; at its end connections are closed."""

    def __enter__(self) -> Front: ...

    def __exit__(self, *_: object) -> None: ...

    def refuse_new(self) -> None:
        """From any thread: the server is ending."""
        ...


@dataclasses.dataclass(frozen=True)
class FrontParts:
    """What a front is made of.

    Args:
      inbox: of the service that the requests are for.
      listener: the bound socket.
      decode_steps: most tokens of an answer in one dispatch.
      callers: whom the server obeys.
      on_death: called on a thread of the front where an error has ended it.
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

    client: ClientKind  # that speaks it
    build: Callable[[FrontParts], Front]
    survives: bool = False  # an exception of a dispatch ends the answers in slots, and not the server


def build_http(parts: FrontParts) -> Front:
    """Routes in the dialects of SGLang, vLLM, OpenAI and Anthropic."""
    from areal_jax.rollout.http.server.thread import HttpThread

    return HttpThread(
        parts.inbox, parts.model, parts.listener,
        limits=parts.limits, callers=parts.callers, on_death=parts.on_death,
    )  # fmt: skip


HTTP = FrontKind(OWN_CLIENT, build_http)


def find_front(server: str) -> FrontKind:
    """The front of a server whose config says rollout.server=`server`: HTTP, unless its kind brings another one."""
    launch = find_server(server).launch or OWN.launch
    found: FrontKind = resolve(launch.front, SERVER)() if launch and launch.front else HTTP
    return found


def enter_interpreter(server: str) -> None:
    """Goes on with the same command under the interpreter that the kind needs, where this one is another.

    Call it before anything is bound or started. Raises UserError where there is no such interpreter.
    """
    launch = find_server(server).launch
    if launch and launch.enter:
        resolve(launch.enter, SERVER)()
