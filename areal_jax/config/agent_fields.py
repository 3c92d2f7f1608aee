"""The fields of the section `agent`. docs/agents.md is their page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ml_collections import config_dict

from areal_jax.config.fields import Choice, Field, Integer, Path, Real, Text, Texts
from areal_jax.config.objectives import find_objective
from areal_jax.config.ranges import COUNT, COUNT_OR_OFF, POSITIVE
from areal_jax.errors import suggest
from areal_jax.plugins import is_environment

HERMES = 'hermes'
PROGRAM = 'program'  # rollout.workflow: programs that talk to a gateway
PYTHON = 'python'  # agent.tools: runs code of the model
TOOLS = (PYTHON,)

AGENT_FIELDS: Mapping[str, Field] = {
    'max_turns': Integer(32, COUNT_OR_OFF, 'turns of an episode, those of sub-agents included; 0 = no bound'),
    'max_turn_tokens': Integer(
        0, COUNT_OR_OFF, 'tokens sampled in a turn; 0 = bounded by rollout.max_new_tokens alone'
    ),
    'tool_calls': Integer(8, COUNT, 'tools that are called at once; others wait'),
    'tool_deadline_s': Real(30.0, POSITIVE, 'of a call; then its result is an error that the model reads'),
    'tool_bytes': Integer(65536, COUNT, 'of the result of a tool, in UTF-8; the rest is cut off'),
    'mcp_servers': Texts((), "MCP servers of an agent: 'python server.py' or 'http://host:port/mcp'"),
    'tools': Texts((), "tools of this package for an own agent: 'python' runs code that the model wrote"),
    'command': Text('', "rollout.workflow='program': the command line of an episode, e.g. 'python agent.py'"),
    'function': Path('', "or an `async def` that long-lived workers run: 'FILE.py:FUNCTION'"),
    'workers': Integer(1, COUNT, 'processes that run agent.function or an environment, each for several episodes'),
    'preload': Texts((), 'modules that Python programs of agent.command find imported: they start from a fork'),
    'programs': Integer(64, COUNT, 'programs at once; other episodes wait'),
    'notation': Text(HERMES, "of calls in answers: hermes, or a renderer of the package renderers: 'qwen3', 'llama-3'"),
    'required': Choice(
        'wish', ('wish', 'refuse'), 'calls and JSON that a program requires: shown to the model and counted, or refused'
    ),
}


def find_agent_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """A sentence for each rule that a config breaks: the fields, their values and the fix."""
    agent, deadline_s = c.agent, c.rollout.episode_deadline_s
    if unknown := [name for name in agent.tools if name not in TOOLS]:
        yield (
            f'agent.tools={agent.tools!r}: {unknown[0]!r} is no tool of this package{suggest(unknown[0], TOOLS)}; use '
            f'some of {", ".join(TOOLS)}, or ()'
        )
    if c.rollout.workflow != PROGRAM:
        if is_environment(c.task.name) and find_objective(c.loss.objective).generates:
            yield f'task.name={c.task.name!r} needs rollout.workflow={PROGRAM!r}: its environment runs the episodes'
        for name in ('command', 'function'):
            if agent[name]:
                yield (
                    f'agent.{name}={agent[name]!r} needs rollout.workflow={PROGRAM!r}, and it is {c.rollout.workflow!r}'
                )
        if deadline_s and ':' not in c.rollout.workflow and not c.simulation.prices:
            yield f'rollout.episode_deadline_s={deadline_s} is for agents, and rollout.workflow={c.rollout.workflow!r}'
        return
    if is_environment(c.task.name):
        for name in ('command', 'function'):
            if agent[name]:
                yield f'agent.{name}={agent[name]!r}: task.name={c.task.name!r} brings its own program; leave it out'
    elif bool(agent.command) == bool(agent.function):
        yield (
            f'rollout.workflow={PROGRAM!r} needs agent.command or agent.function, one of them; they are '
            f'{agent.command!r} and {agent.function!r}'
        )
    if c.simulation.prices:
        return  # no program runs
    if c.run.clock != 'real':
        yield f"rollout.workflow={PROGRAM!r} needs run.clock='real': programs take time of their own"
    if not 0 < deadline_s < c.run.stall_timeout_s:
        yield (
            f'rollout.workflow={PROGRAM!r} needs a rollout.episode_deadline_s above 0 and below run.stall_timeout_s='
            f'{c.run.stall_timeout_s}, and it is {deadline_s}: a program may wait for ever'
        )
