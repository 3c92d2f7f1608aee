"""Servers of this project as the engines of a run: an engine of a run in roles, or one beside a trainer."""

from __future__ import annotations

import dataclasses
import os
import pathlib

from ml_collections import config_dict

from areal_jax import files
from areal_jax.app.parts.extras import API_KEY, require_serving
from areal_jax.app.process.ending import code_of_stopped_server
from areal_jax.app.process.interrupt import Interrupts
from areal_jax.app.roles.roles import RoleProcess, await_controller, keep_name
from areal_jax.app.roles.server_front import HTTP, FrontKind
from areal_jax.config import default_config, flatten
from areal_jax.config.cluster import ENGINES, parse_engines

SERVERS = 'servers'  # in the workdir: config and output of the servers
PROGRAM = 'areal_jax.main_serve'
_CONFIG = 'config.py'
_CONFIG_FILE = '''"""The config of the servers of this run, written by launch.local at every start."""

from areal_jax.config import default_config

inf = float('inf')


def get_config():
    config = default_config()
    config.update_from_flattened_dict({values!r})
    return config
'''


def serve_engine(
    config: config_dict.ConfigDict, process: RoleProcess, interrupts: Interrupts, front: FrontKind = HTTP
) -> int:
    """This process becomes an engine of a run in roles; returns its exit code."""
    require_serving(config)
    with keep_name(process, config) as heartbeat:  # shows the launcher that this process is alive
        await_controller(process, config, config.distributed.command_deadline_s)

        from areal_jax.app.roles.serve import serve_model  # here: jax and aiohttp take seconds
        from areal_jax.native.kept_blocks import keep_blocks
        from areal_jax.rollout.http.server.thread import bind

        keep_blocks()
        serve_model(
            config,
            bind(process.host, 0),
            api_key=os.environ.get(API_KEY, ''),
            interrupts=interrupts,
            heartbeat=heartbeat,
            front=front,
        )
    return code_of_stopped_server()


def plan_server(config: config_dict.ConfigDict, workdir: pathlib.Path) -> list[str]:
    """The words after `python -m` of a server beside a trainer, which starts from the model of the config.

    It gets a config file of its own and no overrides: it would refuse those that only a trainer reads.
    """
    return [PROGRAM, f'--config={workdir / SERVERS / _CONFIG}', '--port=0', f'--workdir={workdir}']


def write_config(config: config_dict.ConfigDict, workdir: pathlib.Path) -> None:
    """The config file of the servers, each of which is one engine."""
    default = dict(flatten(default_config()))
    values = {
        path: value
        for path, value in flatten(config.copy_and_resolve_references())
        if path not in default or value != default[path]
    }
    values[ENGINES] = str(dataclasses.replace(parse_engines(config.cluster.engines), count=1))
    path = workdir / SERVERS / _CONFIG
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(path, _CONFIG_FILE.format(values=values))
