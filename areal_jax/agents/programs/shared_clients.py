"""Clients of openai that share the connections of a process. Imports openai."""

from __future__ import annotations

import openai


class SharedClients:
    """Makes a client for each episode without a TLS context of its own.

    It takes no proxy from the environment, since the address is one of this machine.
    """

    def __init__(self) -> None:
        http_client = openai.DefaultAsyncHttpxClient(trust_env=False)
        self._shared = _OpenClient(api_key='none', http_client=http_client)

    def make(self, base_url: str, api_key: str) -> openai.AsyncOpenAI:
        return self._shared.copy(base_url=base_url, api_key=api_key)


class _OpenClient(openai.AsyncOpenAI):
    async def close(self) -> None:
        """Leaves the connections open, which are those of other episodes too."""
