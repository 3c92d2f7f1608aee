"""A package that a config needs and that is missing is named before anything is built."""

import importlib.util
import pathlib

import pytest

from areal_jax.app.parts.extras import EXTRAS, require_extras, require_serving
from areal_jax.config import default_config
from areal_jax.config.ranges import ConfigError

NEEDED = {
    'tensorboardX': ({}, r"telemetry\.tensorboard=True .*\[tensorboard\]', or --config\.telemetry\.tensorboard=False"),
    'matplotlib': ({}, r"telemetry\.plots=True .*\[plots\]', or --config\.telemetry\.plots=False"),
    'reasoning_gym': ({'task.name': 'reasoning_gym'}, r"task\.name='reasoning_gym' .*\[tasks\]'$"),
    'math_verify': (
        {'task.name': 'jsonl', 'task.path': 'x', 'task.answer': 'math'}, r"task\.answer='math' .*\[tasks\]'$"
    ),
    'gguf': ({'model.source': 'gguf'}, r"model\.source='gguf' .*\[gguf\]'$"),
    'aiohttp': (
        {'rollout.server': 'own'}, r"rollout\.server='own' .*\[serve\]', or --config\.rollout\.server='in_process'"
    ),
    'wandb': ({'telemetry.tracker': 'wandb'}, r"telemetry\.tracker='wandb' .*\[wandb\]', or .*tracker=none"),
    'mlflow': ({'telemetry.tracker': 'mlflow'}, r"telemetry\.tracker='mlflow' .*\[mlflow\]'"),
    'mcp': ({'agent.mcp_servers': ('server',)}, r"agent\.mcp_servers=\('server',\) .*\[agents\]'$"),
    'trackio': ({'telemetry.tracker': 'trackio'}, r"telemetry\.tracker='trackio' .*\[trackio\]'"),
}  # fmt: skip


@pytest.mark.parametrize('missing', NEEDED)
def test_a_missing_package_is_named_with_the_command(monkeypatch, missing):
    fields, message = NEEDED[missing]
    config = default_config()
    require_extras(config)
    config.update_from_flattened_dict(fields)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None if name == missing else find(name))
    with pytest.raises(ConfigError, match=rf'{message}'):
        require_extras(config)


def test_a_server_needs_the_package_of_its_notation(monkeypatch):
    config, find = default_config(), importlib.util.find_spec
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None if name == 'renderers' else find(name))
    require_serving(config)
    config.server.notation = 'qwen3'
    with pytest.raises(ConfigError, match=r"server\.notation='qwen3' needs the package renderers, .*\[agents\]'$"):
        require_serving(config)
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(ConfigError, match=r"a server needs the package aiohttp, .*\[serve\]'$"):
        require_serving(config)


def test_a_bare_installation_runs_what_needs_no_extra(monkeypatch):
    config = default_config()
    config.update_from_flattened_dict({'telemetry.tensorboard': False, 'telemetry.plots': False})
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    require_extras(config)


def test_every_extra_that_is_named_can_be_installed():
    setup = pathlib.Path('setup.py').read_text()
    for package, extra in EXTRAS.items():
        assert f"'{extra}': " in setup, package
