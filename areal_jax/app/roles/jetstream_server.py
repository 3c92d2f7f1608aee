"""Servers of this project behind JetStream (rollout.server='jetstream').

They need an interpreter that has JetStream: AREAL_JAX_JETSTREAM_PYTHON names it; without it a clone takes the
interpreter of .venv-jetstream, which launch/jetstream_environment.sh makes.
"""

from __future__ import annotations

import os
import pathlib
import sys

from ml_collections import config_dict

from areal_jax.app.process.ending import Interrupts
from areal_jax.app.roles import own_server
from areal_jax.app.roles.roles import RoleProcess
from areal_jax.app.roles.server_front import Front, FrontKind, FrontParts
from areal_jax.config.kinds import JETSTREAM_CLIENT
from areal_jax.workers.descendants import Interpreter

INTERPRETER = Interpreter(
    f'rollout.server={JETSTREAM_CLIENT.name!r}',
    'JetStream',
    'AREAL_JAX_JETSTREAM_PYTHON',
    '.venv-jetstream/bin/python',
    'launch/jetstream_environment.sh',
)


def serve_engine(config: config_dict.ConfigDict, process: RoleProcess, interrupts: Interrupts) -> int:
    """Makes this process an engine of a run in roles; returns its exit code."""
    enter_interpreter()
    return own_server.serve_engine(config, process, interrupts, describe_front())


def describe_front() -> FrontKind:
    """Describes the gRPC front: JetStream's service, and a service that controls the engine."""
    return FrontKind(JETSTREAM_CLIENT, _build, survives=True)


def enter_interpreter() -> None:
    """Replaces this process by the interpreter that has JetStream, unless this interpreter has it."""
    if not _has_jetstream():
        python = find_python()
        os.execv(python, [python, *sys.orig_argv[1:]])


def find_python() -> str:
    """Returns the interpreter that has JetStream; raises UserError if there is no such interpreter."""
    if _has_jetstream():
        return sys.executable
    return INTERPRETER.find(beside=pathlib.Path(sys.executable).parent)  # other names of this one lack it too


def _has_jetstream() -> bool:
    import importlib.util

    return importlib.util.find_spec('jetstream') is not None


def _build(parts: FrontParts) -> Front:
    from areal_jax.rollout.jetstream.server.compatibility import import_jetstream

    import_jetstream()  # before anything that imports it
    from areal_jax.rollout.jetstream.server.front import JetstreamFront

    return JetstreamFront(
        parts.inbox, parts.model, parts.listener,
        limits=parts.limits, decode_steps=parts.decode_steps, api_key=parts.callers.api_key,
        on_death=parts.on_death,
    )  # fmt: skip
