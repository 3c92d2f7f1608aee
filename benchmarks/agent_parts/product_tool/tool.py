"""The MCP server of the tool, which serves all episodes."""

from __future__ import annotations

import verifiers.v1 as vf


class CalculatorToolset(vf.Toolset[vf.SharedToolsetConfig]):
    """Multiplies."""

    TOOL_PREFIX = 'calc'

    @vf.tool
    def multiply(self, a: int, b: int) -> int:
        """Multiplies two integers."""
        return a * b


if __name__ == '__main__':
    CalculatorToolset.run()
