"""The prompts of one of several clients that share a stream: each prompt of it goes to exactly one of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from areal_jax.protocols import PromptStream
from areal_jax.tasks.task import TaskError
from areal_jax.types import Prompt


class ClientStream:
    """`protocols.PromptStream` of prompts client, client + clients, client + 2 clients, ... of the whole stream.

    Their draws are numbered 0, 1, 2, ...: a run knows no other clients.
    """

    def __init__(self, whole: PromptStream, client: int, clients: int):
        self._whole, self._client, self._clients = whole, client, clients
        self._next = 0

    def draw(self) -> Prompt:
        """The next prompt of this client."""
        prompts = [self._whole.draw() for _ in range(self._clients)]
        own = dataclasses.replace(prompts[self._client], draw=self._next)
        self._next += 1
        return own

    def state(self) -> Mapping[str, Any]:
        """Of the whole stream, with the place of this client in it."""
        whole = dict(self._whole.state())
        return {'whole': whole, 'next': self._next, 'client': self._client, 'clients': self._clients}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`; raises TaskError where it comes from another client."""
        for field, here in (('client', self._client), ('clients', self._clients)):
            if state.get(field) != here:
                raise TaskError(
                    f'the saved prompt stream has distributed.{field}={state.get(field)}, this one distributed.{field}='
                    f'{here}: its next draw would be another prompt. Restore with the client that saved'
                )
        self._whole.restore(state['whole'])
        self._next = int(state['next'])
