"""The tools of agent.tools in one episode, beside those that an agent brings itself."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping

from areal_jax.agents.dialogue import Dialogue
from areal_jax.text.chat_template import read_arguments

RunTool = Callable[[object], Awaitable[str]]  # of the arguments; on the I/O loop, as Dialogue.call_tool has it


class OfferedTools:
    """What an agent gets as `call_tool`.

    Args:
      tools: by name.
    """

    def __init__(self, dialogue: Dialogue, tools: Mapping[str, RunTool]):
        self._dialogue, self._tools = dialogue, tools

    async def call_tool(
        self, name: str, arguments: object, tool: Callable[[], Awaitable[str]] | None = None, **options: int
    ) -> str:
        """See Dialogue.call_tool; without a `tool` it is that of agent.tools with this name.

        `arguments` of such a tool: the text that the model wrote, or a dict. A name that no tool has is a result that
        the model reads. Raises TypeError where agent.tools is empty.
        """
        if tool is None and not self._tools:
            raise TypeError(
                f'call_tool({name!r}, ...) has no third argument, and agent.tools=() names no tool: give an `async '
                "def` without parameters, or set agent.tools=('python',)"
            )
        run = tool or functools.partial(self._run, name, read_arguments(arguments))
        return await self._dialogue.call_tool(name, arguments, run, **options)

    async def _run(self, name: str, arguments: object) -> str:
        if name not in self._tools:
            return f'error: there is no tool {name!r}; tools: {", ".join(self._tools)}'
        return await self._tools[name](arguments)
