"""Servers of this project as the engines of a run: an engine of a run in roles, or a server next to a trainer."""

from __future__ import annotations

import pathlib

from ml_collections import config_dict

from areal_jax import files
from areal_jax.app.process.ending import Interrupts, code_of_stopped_server
from areal_jax.app.process.setup import find_key, require_serving
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
    """Makes this process an engine of a run in roles; returns its exit code."""
    require_serving(config)
    with keep_name(process, config) as heartbeat:  # shows the launcher that this process is alive
        await_controller(process, config, config.distributed.command_deadline_s)

        from areal_jax.app.roles.serve import serve_model  # here: jax and aiohttp take seconds
        from areal_jax.native.compiled_library import keep_blocks
        from areal_jax.rollout.http.server.thread import bind

        keep_blocks()
        serve_model(
            select_engine(config, process.index),
            bind(process.host, 0),
            api_key=find_key(process.workdir),
            interrupts=interrupts,
            heartbeat=heartbeat,
            front=front,
        )
    return code_of_stopped_server()


def select_engine(config: config_dict.ConfigDict, number: int) -> config_dict.ConfigDict:
    """Returns the config of the server that is only this engine of cluster.engines."""
    selected = config.copy_and_resolve_references()
    selected.cluster.engines = str(parse_engines(config.cluster.engines).select(number))
    return selected


def plan_server(config: config_dict.ConfigDict, workdir: pathlib.Path, number: int) -> list[str]:
    """Returns the words after `python -m` of a server next to a trainer; it starts from the config's model.

    It gets a separate config file and, if engines differ in size, its size as the only override: a server would refuse
    overrides that only a trainer reads.
    """
    engines = parse_engines(config.cluster.engines)
    own = [] if engines.has_equal_engines else [f'--config.{ENGINES}={engines.select(number)}']
    return [PROGRAM, f'--config={workdir / SERVERS / _CONFIG}', '--port=0', f'--workdir={workdir}', *own]


def write_config(config: config_dict.ConfigDict, workdir: pathlib.Path) -> None:
    """Writes the config file of the servers, each of which is one engine."""
    default = dict(flatten(default_config()))
    values = {
        path: value
        for path, value in flatten(config.copy_and_resolve_references())
        if path not in default or value != default[path]
    }
    values[ENGINES] = str(parse_engines(config.cluster.engines).select(0))
    path = workdir / SERVERS / _CONFIG
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(path, _CONFIG_FILE.format(values=values))
