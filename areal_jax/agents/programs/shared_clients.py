"""Clients of openai that share the connections of a process. Imports openai."""

from __future__ import annotations

import httpx
import openai


class SharedClients:
    """Makes a client for each episode without a TLS context of its own; one that is closed leaves the others open."""

    def __init__(self) -> None:
        self._transport = _SharedTransport()

    def make(self, base_url: str, api_key: str) -> openai.AsyncOpenAI:
        """Takes no proxy from the environment: the address is one of this machine."""
        http_client = openai.DefaultAsyncHttpxClient(transport=self._transport)
        return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)


class _SharedTransport(httpx.AsyncBaseTransport):
    def __init__(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._transport = httpx.AsyncHTTPTransport(limits=limits, trust_env=False)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await self._transport.handle_async_request(request)
