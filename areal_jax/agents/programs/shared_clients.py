"""Clients of openai that share the connections of a process. Imports openai."""

from __future__ import annotations

import openai


class SharedClients:
    """Makes a client for each episode; the connections and their TLS context, which costs most of a client, are one."""

    def __init__(self) -> None:
        self._first: openai.AsyncOpenAI | None = None

    def make(self, base_url: str, api_key: str) -> openai.AsyncOpenAI:
        """Another one of the same connections; where a function has closed them, the first of new ones."""
        if self._first is None or self._first.is_closed():
            self._first = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        return self._first.with_options(base_url=base_url, api_key=api_key)
