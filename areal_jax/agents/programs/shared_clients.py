"""Clients of openai that share the connections of a process. Imports openai."""

from __future__ import annotations

import openai


class SharedClients:
    """Makes a client for each episode; all clients share one TLS context.

    Proxies of the environment are ignored, since the address is on this machine.
    """

    def __init__(self) -> None:
        http_client = openai.DefaultAsyncHttpxClient(trust_env=False)
        self._shared = _OpenClient(api_key='none', http_client=http_client)

    def make(self, base_url: str, api_key: str) -> openai.AsyncOpenAI:
        return self._shared.copy(base_url=base_url, api_key=api_key)


class _OpenClient(openai.AsyncOpenAI):
    async def close(self) -> None:
        """Leaves the connections open, because other episodes use them too."""
