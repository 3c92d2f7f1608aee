"""The fields of the section `agent`. docs/agents.md is their page."""

from __future__ import annotations

from collections.abc import Mapping

from areal_jax.config.fields import Field, Integer, Real, Texts
from areal_jax.config.ranges import COUNT, COUNT_OR_OFF, POSITIVE

AGENT_FIELDS: Mapping[str, Field] = {
    'max_turns': Integer(32, COUNT_OR_OFF, 'turns of an episode, those of sub-agents included; 0 = no bound'),
    'max_turn_tokens': Integer(
        0, COUNT_OR_OFF, 'tokens sampled in a turn; 0 = bounded by rollout.max_new_tokens alone'
    ),
    'tool_calls': Integer(8, COUNT, 'tools that are called at once; others wait'),
    'tool_deadline_s': Real(30.0, POSITIVE, 'of a call; then its result is an error that the model reads'),
    'tool_bytes': Integer(65536, COUNT, 'of the result of a tool, in UTF-8; the rest is cut off'),
    'mcp_servers': Texts((), "MCP servers of an agent: 'python server.py' or 'http://host:port/mcp'"),
}
