"""Builds the workflow of a run: one turn, a user's workflow, or agents, and the frictions that disturb it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

from areal_jax import lanes, protocols
from areal_jax.agents.agent_workflow import Agent, AgentWorkflow, OfferedTools, ProgramAgent
from areal_jax.agents.dialogue import Budgets, Dialogue, NotationParser, TokenizerFormat
from areal_jax.agents.programs.function_worker import check_function
from areal_jax.agents.programs.program_host import CommandHost, FunctionHost, ProgramHost
from areal_jax.agents.python_tool import PythonTool
from areal_jax.app.model.text_model import describe_text_model
from areal_jax.config import TrackedConfig
from areal_jax.config.agent_fields import PROGRAM, PYTHON, resolve_tool_sandbox
from areal_jax.config.drawn_lengths import AnswerLimits
from areal_jax.config.fields import ConfigError
from areal_jax.control.episode import Episode
from areal_jax.control.frictions import LOGPROBS, TEMPERATURE, Frictions
from areal_jax.errors import UserError
from areal_jax.plugins import is_environment, is_own, load_function, raising_user_error
from areal_jax.protocols import Clock, Generator, Workflow
from areal_jax.rollout.http.server.limits import BodyBound
from areal_jax.rollout.http.wire.answer_reader import NOTATIONS, AnswerParser
from areal_jax.rollout.workflow import SingleTurn
from areal_jax.tasks.code.judge import ProgramLimits
from areal_jax.tasks.environments import verifiers_task
from areal_jax.text.chat_template import describe_untold
from areal_jax.text.tokenizer import CharacterTokenizer, Tokenizer
from areal_jax.types import Prompt, SamplingParams
from areal_jax.workers.sandbox.packages import find_packages


def require_notation(name: str, field: str) -> None:
    """Raises UserError for a notation unknown to this project and to the package; `field` is the config field."""
    if name not in NOTATIONS:
        from areal_jax.rollout.http.wire.renderers_parser import require_renderer

        require_renderer(name, field)


def build_parser(name: str, field: str, tokenizer: Tokenizer) -> AnswerParser | None:
    """Builds a parser; None for one of NOTATIONS. Raises like `require_notation`, and if the tokenizer does not fit."""
    if name in NOTATIONS:
        return None
    from areal_jax.rollout.http.wire.renderers_parser import RenderersParser

    return RenderersParser(tokenizer, name, field)


# Builds the workflow of agents: rollout.workflow='FILE.py:FUNCTION' with an `async def`, or 'program'.
#
# The function may declare any of these parameters: chat, call_tool, tools, mcp, problem, prompt, tokenizer, encode,
# decode.


_MOST_TOLD = 3  # errors of agents that are printed; the report counts all


def load_agent(
    config: TrackedConfig, tokenizer: Tokenizer, function: Callable[..., Any], spec: str
) -> Callable[[Clock], Callable[[Generator, SamplingParams, int], Workflow]]:
    """Returns a function clock -> (pool, sampling, seed) -> the workflow of an agent.

    Raises UserError for a parameter that is not offered.
    """
    fixed = {'tokenizer': tokenizer, 'encode': tokenizer.encode, 'decode': tokenizer.decode}
    offered = ('chat', 'call_tool', 'tools', 'mcp', 'problem', 'prompt', *fixed)
    named = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    if unknown := [name for name in named if name not in offered]:
        raise UserError(
            f'rollout.workflow={spec} has a parameter {unknown[0]!r}, which nobody gives an agent; known: '
            f'{", ".join(offered)}'
        )
    chat_format, told = _build_format(config, tokenizer), _Told(spec)

    open_mcp = _load_mcp(config, spec, asked='mcp' in named)
    tools = _load_tools(config, spec, named)
    _require_shown(config, tokenizer, named)
    definitions = tuple(tool.definition for tool in tools.values())
    runs = {name: tool.run for name, tool in tools.items()}

    async def agent(prompt: Prompt, dialogue: Dialogue) -> None:
        values = {
            'chat': dialogue.chat, 'call_tool': OfferedTools(dialogue, runs).call_tool, 'tools': definitions,
            'prompt': prompt, 'problem': dict(prompt.problem), **fixed,
        }  # fmt: skip
        with open_mcp(dialogue) as mcp:
            values['mcp'] = mcp
            await function(**{name: values[name] for name in named})

    def make(clock: Clock, pool: Generator, sampling: SamplingParams, seed: int) -> Workflow:
        return _make_workflow(config, agent, chat_format, told, clock, pool, sampling, seed)

    return lambda clock: functools.partial(make, clock)


def require_tools_shown(config: TrackedConfig) -> None:
    """Raises UserError, before weights are loaded, for tools of an own agent that no prompt would show."""
    spec = config.rollout.workflow
    if is_own(spec) and (config.agent.mcp_servers or config.agent.tools):
        named = inspect.signature(load_function(spec, 'rollout.workflow')).parameters
        _require_shown(config, describe_text_model(config).tokenizer, tuple(named))


def load_programs(
    config: TrackedConfig, tokenizer: Tokenizer
) -> Callable[[Clock], Callable[[Generator, SamplingParams, int], Workflow]]:
    """Returns clock -> (pool, sampling, seed) -> workflow, where each episode is a program that talks to a gateway.

    Raises UserError for agent.function that cannot be called.
    """
    from areal_jax.agents.gateway import Gateway, GatewaySettings  # needs aiohttp, which other runs do not need

    settings, chat_format = config.agent, _build_format(config, tokenizer)
    gateway = Gateway(
        _build_host(config),
        GatewaySettings(
            config.rollout.context_tokens, settings.programs, settings.required, chat_format.render,
            lambda token: '' if token in tokenizer.end_ids else tokenizer.token_bytes.text_of(token),
            BodyBound.of(config.rollout.context_tokens, tokenizer.vocabulary()), reads=tokenizer.reads,
        ),
    )  # fmt: skip
    told, deadline_s = _Told(PROGRAM), config.rollout.episode_deadline_s

    def make(clock: Clock, pool: Generator, sampling: SamplingParams, seed: int) -> Workflow:
        agent = ProgramAgent(clock, functools.partial(gateway.open, sampling), lanes.PROGRAM, deadline_s)
        return _make_workflow(config, agent, chat_format, told, clock, pool, sampling, seed)

    return lambda clock: functools.partial(make, clock)


def _build_format(config: TrackedConfig, tokenizer: Tokenizer) -> TokenizerFormat:
    name = config.agent.notation
    parser = build_parser(name, 'agent.notation', tokenizer) or NotationParser(tokenizer, NOTATIONS[name])
    return TokenizerFormat(tokenizer, parser)


def _build_host(config: TrackedConfig) -> ProgramHost:
    settings, task = config.agent, config.task
    if is_environment(task.name):
        from areal_jax.agents.environment_host import EnvironmentHost  # needs pyzmq, as above

        setup = verifiers_task.describe_environment(
            task.name, task.path, dict(task.options), max_turns=settings.max_turns, workers=settings.workers
        )
        return EnvironmentHost(verifiers_task.find_python(task.name), verifiers_task.PROGRAM_FILE, setup)
    if settings.function:
        check_function(settings.function)
        return FunctionHost(settings.function, settings.workers)
    return CommandHost(shlex.split(settings.command), settings.preload)


def _make_workflow(
    config: TrackedConfig, agent: Agent, chat_format: TokenizerFormat, told: _Told, clock: Clock, pool: Generator,
    sampling: SamplingParams, seed: int,
) -> Workflow:  # fmt: skip
    budgets = read_budgets(config)

    def make_dialogue(prompt: Prompt, episode: Episode) -> Dialogue:
        return Dialogue(
            pool, clock, prompt, episode, sampling=sampling, seed=seed, chat_format=chat_format, budgets=budgets,
            lane=lanes.TOOL,
        )  # fmt: skip

    return cast(Workflow, AgentWorkflow(agent, make_dialogue, told, clock, config.rollout.episode_deadline_s))


def _load_mcp(
    config: TrackedConfig, spec: str, *, asked: bool
) -> Callable[[Dialogue], contextlib.AbstractContextManager[object]]:
    """Returns a function that opens the MCP servers of an episode and ends them on exit; None = no servers.

    Raises UserError if the agent asks for servers and the config names none, or the other way round.
    """
    servers, deadline_s = config.agent.mcp_servers, config.agent.tool_deadline_s
    if asked != bool(servers):
        raise UserError(
            f'rollout.workflow={spec} has a parameter mcp: name the servers in agent.mcp_servers'
            if asked
            else f'agent.mcp_servers={servers!r}: the agent rollout.workflow={spec} has no parameter mcp to get them'
        )
    if not servers:
        return lambda dialogue: contextlib.nullcontext()
    for server in servers:
        with contextlib.suppress(ValueError):  # a quotation that is not closed
            if shlex.split(server):
                continue
        raise UserError(f'agent.mcp_servers={servers!r}: {server!r} is neither a command nor an address')
    from areal_jax.agents.mcp_tools import McpTools  # imports the package mcp, which other runs need not have

    return lambda dialogue: contextlib.closing(McpTools(servers, dialogue, deadline_s))


def _load_tools(config: TrackedConfig, spec: str, named: Sequence[str]) -> dict[str, PythonTool]:
    """Returns the tools of agent.tools by name; they start nothing before they are called.

    Raises UserError if the agent asks for tools and agent.tools is empty, or if it cannot call them.
    """
    names, settings = config.agent.tools, config.agent
    if 'tools' in named and not names:
        raise UserError(f"rollout.workflow={spec} has a parameter tools: name them in agent.tools, ('python',)")
    if names and 'call_tool' not in named:
        raise UserError(f'agent.tools={names!r}: the agent rollout.workflow={spec} has no parameter call_tool')
    if not names:
        return {}
    limits = ProgramLimits(config.task.time_limit_s, config.task.memory_limit_mb, settings.tool_bytes)
    readable = find_packages(config.task.packages)
    return {PYTHON: PythonTool(resolve_tool_sandbox(config.task), limits, settings.tool_deadline_s, readable)}


def _require_shown(config: TrackedConfig, tokenizer: Tokenizer, named: Sequence[str]) -> None:
    """Raises UserError for tools whose definitions the agent asks for but no prompt can show.

    A model of single characters has no chat form: its agent may call tools, but prompts never contain definitions.
    """
    if tokenizer.takes_tools or isinstance(tokenizer, CharacterTokenizer):
        return
    fields = {'agent.mcp_servers': config.agent.mcp_servers}
    if 'tools' in named:  # without this parameter, the agent itself describes the tools to the model
        fields['agent.tools'] = config.agent.tools
    if sentence := describe_untold(fields):
        raise UserError(sentence)


def read_budgets(config: TrackedConfig) -> Budgets:
    agent = config.agent
    return Budgets(
        max_turns=agent.max_turns,
        max_turn_tokens=agent.max_turn_tokens,
        context_tokens=config.rollout.context_tokens,
        tool_deadline_s=agent.tool_deadline_s,
        tool_bytes=agent.tool_bytes,
    )


class _Told:
    """Prints the first errors of agents, with file and line: they end an episode, not the run."""

    def __init__(self, spec: str):
        self._spec, self._counts = spec, collections.Counter[str]()

    def __call__(self, prompt: Prompt, error: Exception) -> None:
        self._counts[type(error).__name__] += 1
        if self._counts.total() <= _MOST_TOLD:
            frames = traceback.extract_tb(error.__traceback__)
            where = f' ({frames[-1].filename}:{frames[-1].lineno})' if frames else ''
            print(
                f'warning: rollout.workflow={self._spec}: draw {prompt.draw}: {type(error).__name__}: {error}{where}; '
                'the episode has no reward',
                file=sys.stderr,
                flush=True,
            )


# One turn, or an own workflow, rollout.workflow='FILE.py:FUNCTION'. A function that returns a workflow may declare any
# of these parameters: pool, sampling, seed, context_tokens, tokenizer, encode, decode. An `async def` is an agent.


WorkflowFactory: TypeAlias = Callable[[Generator, SamplingParams, int], Workflow]  # the last argument is the seed

_FIELD = 'rollout.workflow'


class OwnWorkflow:
    """A user's workflow; its exceptions become errors with file and line. Implements protocols.Workflow."""

    def __init__(self, workflow: Workflow, spec: str):
        self._workflow, self._spec = workflow, spec

    async def run(self, prompt: Prompt, episode: protocols.Episode) -> None:
        with raising_user_error(self._spec, _FIELD):
            await self._workflow.run(prompt, episode)


def load_workflow(config: TrackedConfig, tokenizer: Tokenizer) -> Callable[[Clock], WorkflowFactory]:
    """Returns a function from a clock to a factory, which makes workflows for training and for evaluation.

    Raises UserError for an own function that cannot be loaded or called; the factory raises it if the function raises
    or returns no workflow.
    """
    spec = config.rollout.workflow
    build = load_function(spec, _FIELD) if is_own(spec) else SingleTurn
    if inspect.iscoroutinefunction(build):
        return load_agent(config, tokenizer, build, spec)
    for field, names in (('mcp_servers', config.agent.mcp_servers), ('tools', config.agent.tools)):
        if names:
            raise UserError(
                f'agent.{field}={names!r}: {_FIELD}={spec!r} is no agent, which could call tools; name an `async def`, '
                'FILE.py:FUNCTION'
            )
    if spec == PROGRAM:
        return load_programs(config, tokenizer)
    if not is_own(spec):
        return lambda clock: SingleTurn
    if deadline_s := config.rollout.episode_deadline_s:
        raise UserError(
            f'rollout.episode_deadline_s={deadline_s}: {_FIELD}={spec!r} is no agent, whose episodes it could end; set '
            'it to 0, or name an `async def`'
        )
    make = _make_own(build, spec, tokenizer, config.rollout.context_tokens)
    return lambda clock: make


def _make_own(build: Callable[..., object], spec: str, tokenizer: Tokenizer, context_tokens: int) -> WorkflowFactory:
    fixed = {
        'context_tokens': context_tokens, 'tokenizer': tokenizer, 'encode': tokenizer.encode,
        'decode': tokenizer.decode,
    }  # fmt: skip
    offered = ('pool', 'sampling', 'seed', *fixed)
    parameters = inspect.signature(build).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if unknown := [p.name for p in named if p.name not in offered and p.default is p.empty]:
        raise UserError(
            f'{_FIELD}={spec} has a parameter {unknown[0]!r}, which nobody gives; known: {", ".join(offered)}'
        )

    def make(pool: Generator, sampling: SamplingParams, seed: int) -> Workflow:
        values = {'pool': pool, 'sampling': sampling, 'seed': seed, **fixed}
        with raising_user_error(spec, _FIELD):
            workflow = build(**{p.name: values[p.name] for p in named if p.name in values})
        if not inspect.iscoroutinefunction(getattr(workflow, 'run', None)):
            raise UserError(
                f'{_FIELD}={spec}: it returned a {type(workflow).__name__}, which is no workflow; return an object '
                'with `async def run(self, prompt, episode)`'
            )
        return OwnWorkflow(cast(Workflow, workflow), spec)

    return make


# Frictions, the workflow that draws some answers at another temperature, and the one that ends them at drawn lengths.


class TwoTemperatures:
    """A workflow that leaves some answers to another workflow. Implements protocols.Workflow."""

    def __init__(self, usual: Workflow, other: Workflow, is_other: Callable[[int, int], bool]):
        self._usual, self._other, self._is_other = usual, other, is_other

    async def run(self, prompt: Prompt, episode: protocols.Episode) -> None:
        chosen = self._other if self._is_other(prompt.draw, episode.sample) else self._usual
        await chosen.run(prompt, episode)


class DrawnLimits:
    """A workflow of one turn that gives each answer a limit of its own. Implements protocols.Workflow.

    Nothing else about the request changes, so any engine or server can answer it.
    """

    def __init__(self, limits: AnswerLimits, pool: Generator, sampling: SamplingParams, seed: int):
        self._limits, self._pool, self._sampling, self._seed = limits, pool, sampling, seed

    async def run(self, prompt: Prompt, episode: protocols.Episode) -> None:
        most = self._limits.of(prompt.draw, episode.sample)
        sampling = dataclasses.replace(self._sampling, max_new_tokens=most)
        await SingleTurn(self._pool, sampling, self._seed).run(prompt, episode)


def build_frictions(config: TrackedConfig, vocab_size: int) -> Frictions | None:
    """Builds the frictions, reading only the fields of those that are on; None if all are off.

    Raises ConfigError for a token that the model does not have.
    """
    friction, rewards = config.friction, {}
    for name in ('reward_share', 'unrewarded_share'):
        rewards[name] = getattr(friction, name)
    share = friction.actor_share
    if not share and not any(rewards.values()):
        return None
    frictions = Frictions(seed=config.run.seed, actor_share=share, **rewards)
    if not share:
        return frictions
    frictions = dataclasses.replace(frictions, actor=friction.actor)
    if friction.actor == LOGPROBS:
        return dataclasses.replace(frictions, actor_nats=friction.actor_nats)
    if friction.actor == TEMPERATURE:
        own = friction.actor_temperature
        return dataclasses.replace(frictions, actor_temperature=own, temperature=config.rollout.temperature)
    if friction.actor_token >= vocab_size:
        raise ConfigError(
            f'friction.actor_token={friction.actor_token} is no token of the model, which has {vocab_size}: use a '
            'smaller id'
        )
    return dataclasses.replace(frictions, actor_token=friction.actor_token)


def build_training_workflow(
    make: WorkflowFactory,
    frictions: Frictions | None,
    pool: Generator,
    sampling: SamplingParams,
    seed: int,
    limits: AnswerLimits,
) -> Workflow:
    """Builds the workflow of training; evaluations build theirs without frictions and drawn lengths."""
    if limits.lengths:
        make = functools.partial(DrawnLimits, limits)
    usual = make(pool, sampling, seed)
    if frictions is None or not draws_otherwise(frictions):
        return usual
    scaled = dataclasses.replace(sampling, logit_scale=frictions.logit_scale)
    return TwoTemperatures(usual, make(pool, scaled, seed), frictions.is_hit)


def draws_otherwise(frictions: Frictions) -> bool:
    """Whether engines draw some tokens at another temperature than the recorded log-probs assume."""
    return bool(frictions.actor_share) and frictions.actor == TEMPERATURE


def announce(frictions: Frictions) -> None:
    """Prints the frictions to stderr, before anything is generated."""
    print(f'friction is on: {frictions.describe()}', file=sys.stderr, flush=True)


def warn_of_lengths(text: str) -> None:
    """Prints what drawn lengths do to a model that is not random, before anything is generated."""
    print(
        f'warning: rollout.answer_lengths={text!r} ends answers at random lengths, for measurements with random '
        "weights; set it to '' to train this model",
        file=sys.stderr,
        flush=True,
    )
