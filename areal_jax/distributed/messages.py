"""What the processes of a run send each other, and how a failure of one is raised in another. jax-free.

messages.py turns messages into bytes. Each message belongs to a lane: the other end executes the commands of one lane in
the order of sending, and the lanes run concurrently.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from areal_jax.distributed.messages import CodecError, decode, encode
from areal_jax.errors import UserError

LEARNER, CHECKPOINT, PUBLICATION, RELAY = LANES = ('learner', 'checkpoint', 'publication', 'relay')
CLOSE = 'close'  # the command after which the other end returns


class RemoteUserError(UserError):
    """What the user can mend, as another process of the run said it."""


class RemoteValueError(ValueError):
    """A ValueError of another process, which it says more of."""


class RemoteError(RuntimeError):
    """A bug in another process of the run; its own output has the traceback."""


class Command(NamedTuple):
    """Asks another process to execute something."""

    name: str  # on the lane of the learner a method of it
    args: tuple[Any, ...] = ()
    lane: str = LEARNER


class Failure(NamedTuple):
    """Why a command failed."""

    kind: str  # type of the exception
    text: str
    is_user_error: bool
    is_value_error: bool

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        return cls(type(error).__name__, str(error), isinstance(error, UserError), isinstance(error, ValueError))

    def __str__(self) -> str:
        """Type and first line."""
        return f'{self.kind}: {(self.text.splitlines() or [""])[0][:300]}'


class Answer(NamedTuple):
    """To a command: its result, or why it failed."""

    value: Any = None
    failure: Failure | None = None


class Message(NamedTuple):
    """What is on the wire."""

    lane: str
    number: int  # of the command, also in its answer
    content: Command | Answer


def encode_message(message: Message) -> bytes:
    """Raises CodecError for arguments or results that do not travel."""
    content = message.content
    if isinstance(content, Command):
        return encode([True, message.lane, message.number, content.name, tuple(content.args)])
    failure = None if content.failure is None else tuple(content.failure)
    return encode([False, message.lane, message.number, content.value, failure])


def decode_message(body: bytes | bytearray) -> Message:
    """Raises CodecError for anything else."""
    try:
        is_command, lane, number, first, second = decode(body)
        if lane not in LANES or type(number) is not int:
            raise CodecError(f'a message for the lane {lane!r} with the number {number!r}')
        if is_command:
            return Message(lane, number, Command(first, second, lane))
        return Message(lane, number, Answer(first, None if second is None else Failure(*second)))
    except (TypeError, ValueError) as error:
        raise error if isinstance(error, CodecError) else CodecError(f'a message cannot be read ({error})') from error


def raise_failure(failure: Failure, where: str) -> None:
    """Raises what the other process raised as this process can: a user error as it was said, else with its place."""
    if failure.is_user_error:
        raise RemoteUserError(failure.text)
    told = f'{where}: {failure.kind}: {failure.text}'
    if failure.is_value_error:
        raise RemoteValueError(told)
    raise RemoteError(f'{told} (the traceback is in the output of that process)')
