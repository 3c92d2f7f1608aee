"""Servers of this project as the engines of a run: an engine of a run in roles, or a server next to a trainer.

The servers behind JetStream (rollout.server='jetstream') need an interpreter that has JetStream:
AREAL_JAX_JETSTREAM_PYTHON names it; without it a clone takes the interpreter of .venv-jetstream, which
launch/jetstream_environment.sh makes.
"""

from __future__ import annotations

import os
import pathlib
import sys

from ml_collections import config_dict

from areal_jax import files
from areal_jax.app.process.accelerator import use_xla_flags
from areal_jax.app.process.ending import Interrupts, code_of_stopped_server
from areal_jax.app.process.setup import find_key, require_serving
from areal_jax.app.roles.roles import RoleProcess, await_controller, keep_name
from areal_jax.app.roles.server_front import HTTP, Front, FrontKind, FrontParts
from areal_jax.config import default_config, flatten
from areal_jax.config.cluster import ENGINES, parse_engines
from areal_jax.config.kinds import JETSTREAM_CLIENT
from areal_jax.workers.descendants import Interpreter

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
    use_xla_flags(config)
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


JETSTREAM = Interpreter(
    f'rollout.server={JETSTREAM_CLIENT.name!r}',
    'JetStream',
    'AREAL_JAX_JETSTREAM_PYTHON',
    '.venv-jetstream/bin/python',
    'launch/jetstream_environment.sh',
)


def serve_jetstream(config: config_dict.ConfigDict, process: RoleProcess, interrupts: Interrupts) -> int:
    """Makes this process an engine of a run in roles; returns its exit code."""
    enter_jetstream()
    return serve_engine(config, process, interrupts, describe_jetstream())


def describe_jetstream() -> FrontKind:
    """Describes the gRPC front: JetStream's service, and a service that controls the engine."""
    return FrontKind(JETSTREAM_CLIENT, _build_jetstream, survives=True)


def enter_jetstream() -> None:
    """Replaces this process by the interpreter that has JetStream, unless this interpreter has it."""
    if not _has_jetstream():
        python = find_jetstream()
        os.execv(python, [python, *sys.orig_argv[1:]])


def find_jetstream() -> str:
    """Returns the interpreter that has JetStream; raises UserError if there is no such interpreter."""
    if _has_jetstream():
        return sys.executable
    return JETSTREAM.find(beside=pathlib.Path(sys.executable).parent)  # other names of this one lack it too


def _has_jetstream() -> bool:
    import importlib.util

    return importlib.util.find_spec('jetstream') is not None


def _build_jetstream(parts: FrontParts) -> Front:
    from areal_jax.rollout.jetstream.server.compatibility import import_jetstream

    import_jetstream()  # before anything that imports it
    from areal_jax.rollout.jetstream.server.front import JetstreamFront

    return JetstreamFront(
        parts.inbox, parts.model, parts.listener,
        limits=parts.limits, decode_steps=parts.decode_steps, api_key=parts.callers.api_key,
        on_death=parts.on_death,
    )  # fmt: skip
