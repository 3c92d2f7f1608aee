"""Builds the workflow of a run: one turn, or an own one, rollout.workflow='FILE.py:FUNCTION'.

A function that returns a workflow gets what it has parameters for: pool, sampling, seed, context_tokens, tokenizer,
encode, decode. An `async def` is an agent (agent_builder.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeAlias, cast

from areal_jax import protocols
from areal_jax.app.parts.agent_builder import load_agent, load_programs
from areal_jax.config import TrackedConfig
from areal_jax.config.agent_fields import PROGRAM
from areal_jax.errors import UserError
from areal_jax.plugins import is_own, load_function, raising_user_error
from areal_jax.protocols import Clock, Generator, Workflow
from areal_jax.rollout.workflow import SingleTurn
from areal_jax.text.tokenizer import Tokenizer
from areal_jax.types import Prompt, SamplingParams

WorkflowFactory: TypeAlias = Callable[[Generator, SamplingParams, int], Workflow]  # the last argument is the seed

_FIELD = 'rollout.workflow'


class OwnWorkflow:
    """A workflow of the user's own; what it raises is an error with file and line. Implements protocols.Workflow."""

    def __init__(self, workflow: Workflow, spec: str):
        self._workflow, self._spec = workflow, spec

    async def run(self, prompt: Prompt, episode: protocols.Episode) -> None:
        with raising_user_error(self._spec, _FIELD):
            await self._workflow.run(prompt, episode)


def load_workflow(config: TrackedConfig, tokenizer: Tokenizer) -> Callable[[Clock], WorkflowFactory]:
    """Makes workflows for training and for evaluation, which differ in sampling and seed, once there is a clock.

    Raises UserError for an own function that cannot be loaded or called; the factory does so for one that raises or
    returns no workflow.
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
