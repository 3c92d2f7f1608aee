"""Prepares a process and checks its requirements: memory, logs, optional packages, the key of its servers."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import pathlib
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping

import absl.logging
from ml_collections import config_dict

from areal_jax.config.addresses import is_loopback
from areal_jax.config.agent_fields import HERMES, HUMAN_EVAL, NAME, PROGRAM
from areal_jax.config.fields import ConfigError
from areal_jax.config.kinds import IN_PROCESS, SERVING, find_server
from areal_jax.config.objectives import find_objective
from areal_jax.config.sources import list_tasks
from areal_jax.errors import UserError
from areal_jax.files import find_package
from areal_jax.installation import describe_install
from areal_jax.plugins import is_environment

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # names of mallopt(3) options, from malloc.h
_MMAP_BYTES = 1 << 20  # larger blocks are mapped, and returned to the system when they are freed
_TRIM_BYTES = 1 << 26  # free memory that a heap keeps at its end: compilers free and allocate in turns
SHARE = 0.01  # of the time, at most, for full collections
_FULL = 2  # the generation that holds every object
_NEVER = 2**31 - 1


def set_up_process() -> None:
    """Sets how memory is freed and how often all objects are searched for garbage. Call it before importing jax."""
    return_freed_memory()
    space_full_collections()


def silence_libraries() -> None:
    """Hides every message of XLA's C++ code and of matplotlib except errors, and every message logged through absl.

    Call it before jax is imported. Orbax logs every exception that it raises through absl, with a traceback.
    """
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')  # read once, when jaxlib is loaded
    absl.logging.set_verbosity(absl.logging.FATAL)
    logging.getLogger('matplotlib').setLevel(logging.ERROR)  # it warns while it builds its cache of fonts
    _drop_late_futures()


def _drop_late_futures() -> None:
    """Drops the message 'Event loop is closed'.

    If reading one array of a damaged checkpoint fails, orbax closes its event loop, to which other reads still report.
    """
    hook = sys.unraisablehook

    def print_others(unraisable: sys.UnraisableHookArgs) -> None:
        if str(unraisable.exc_value) != 'Event loop is closed':
            hook(unraisable)

    sys.unraisablehook = print_others


def return_freed_memory() -> bool:
    """Makes freed memory return to the system; returns True if the C library is glibc and took the settings.

    Call it before jax is imported. By default, glibc raises its mmap threshold (up to 32 MB) each time that a larger
    block is freed. Weights, gradients and checkpoint copies of a few MB are then allocated on heaps that never shrink.
    A fixed threshold of 1 MB returns them to the system. Measured on SmolLM2-135M: peak memory 8.6 -> 6.8 GB.
    """
    import ctypes  # here, as the next one: --help and a refused command line need neither
    import platform

    if platform.libc_ver()[0] != 'glibc':
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = ((_MMAP_THRESHOLD, _MMAP_BYTES), (_TRIM_THRESHOLD, _TRIM_BYTES), (_ARENA_MAX, 2))
    taken = [mallopt(option, value) for option, value in settings]
    return all(taken)


class FullCollections:
    """Delays each full collection until the last one's duration is at most SHARE of the time since it ended.

    A full collection stops every thread for a time that grows with all objects of the process: 1.6 s with 102,400
    open requests. Python starts one whenever a quarter of the objects is new. In a run most new objects are open
    requests, which come and go without reference cycles, so with 4,096 engines the collections took a third of the
    loop's CPU time (docs/log/). Cyclic garbage is found later than before, but within 100 durations of a collection:
    6 s in a process with jax. Collections of new objects, which take milliseconds, are unchanged.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._thresholds = gc.get_threshold()
        self._began_s = self._due_s = now()
        self._waiting = False

    def note(self, phase: str, info: Mapping[str, int]) -> None:
        """For gc.callbacks: `phase` is 'start' or 'stop' of a collection."""
        if phase == 'start':
            self._began_s = self._now()
        elif info['generation'] == _FULL:
            ended_s = self._now()
            self._due_s = ended_s + (ended_s - self._began_s) / SHARE
            self._set(waiting=True)
        elif self._waiting and self._now() >= self._due_s:
            self._set(waiting=False)

    def _set(self, waiting: bool) -> None:
        self._waiting = waiting
        new, middle, full = self._thresholds
        gc.set_threshold(new, middle, _NEVER if waiting else full)


def space_full_collections() -> None:
    """Spaces full collections for the rest of this process."""
    gc.callbacks.append(FullCollections().note)


# Optional packages: refuses a config that needs a missing one, before anything is built.


EXTRAS = {
    'tensorboardX': 'tensorboard',
    'matplotlib': 'plots',
    'reasoning_gym': 'tasks',
    'human_eval': 'tasks',
    'math_verify': 'tasks',
    'gguf': 'gguf',
    'aiohttp': 'serve',
    'pydantic': 'serve',
    'grpc': 'jetstream',
    'google.protobuf': 'jetstream',
    'wandb': 'wandb',
    'mlflow': 'mlflow',
    's3fs': 'mirror',
    'gcsfs': 'mirror',
    'trackio': 'trackio',
    'mcp': 'agents',
    'renderers': 'agents',
    'zmq': 'agents',
    'msgpack': 'agents',
}


def require_extras(config: config_dict.ConfigDict) -> None:
    """Raises ConfigError for the first package that this config needs and that is not installed; imports nothing."""
    for module, reason, instead in _needed(config):
        if importlib.util.find_spec(module) is None:
            raise ConfigError(_describe_missing(module, reason, instead))


def _needed(c: config_dict.ConfigDict) -> Iterator[tuple[str, str, str]]:
    """Yields (module, field that needs it, an alternative for the user)."""
    generates = find_objective(c.loss.objective).generates
    if c.telemetry.tensorboard:
        yield 'tensorboardX', 'telemetry.tensorboard=True', ', or --config.telemetry.tensorboard=False'
    if c.telemetry.plots and generates:  # supervised training makes no plots
        yield 'matplotlib', 'telemetry.plots=True', ', or --config.telemetry.plots=False'
    if (tracker := c.telemetry.tracker) != 'none':
        yield tracker, f'telemetry.tracker={tracker!r}', ', or --config.telemetry.tracker=none'
    for field, address in (('run.mirror', c.run.mirror), ('model.path', c.model.path)):
        if module := find_package(address):
            yield module, f'{field}={address!r}', ''
    for task in list_tasks(c).values():
        if task.name == NAME and task.path == HUMAN_EVAL:
            yield 'human_eval', f'task.path={HUMAN_EVAL!r}', ''
        if task.name == 'reasoning_gym':
            yield 'reasoning_gym', "task.name='reasoning_gym'", ''
        if task.name == 'jsonl' and task.answer == 'math' and generates:
            yield 'math_verify', "task.answer='math'", ''
    if c.model.source == 'gguf':
        yield 'gguf', "model.source='gguf'", ''
    if c.simulation.prices:
        return  # no server, program or tool runs
    if generates:
        for module in find_server(c.rollout.server).modules:
            yield module, f'rollout.server={c.rollout.server!r}', f', or --config.rollout.server={IN_PROCESS.name!r}'
    if c.rollout.workflow == PROGRAM:
        for module in SERVING:
            yield module, f'rollout.workflow={PROGRAM!r}', ''
    if is_environment(c.task.name):
        yield 'zmq', f'task.name={c.task.name!r}', ''
        yield 'msgpack', f'task.name={c.task.name!r}', ''
    if c.agent.notation != HERMES and generates:
        yield 'renderers', f'agent.notation={c.agent.notation!r}', ''
    if c.agent.mcp_servers and generates:
        yield 'mcp', f'agent.mcp_servers={c.agent.mcp_servers!r}', ''


def require_serving(config: config_dict.ConfigDict) -> None:
    """Raises ConfigError if a package of a server is not installed."""
    needed = dict.fromkeys(SERVING, 'a server')
    if config.server.notation != HERMES:
        needed['renderers'] = f'server.notation={config.server.notation!r}'
    for module, reason in needed.items():
        if importlib.util.find_spec(module) is None:
            raise ConfigError(_describe_missing(module, reason))


def _describe_missing(module: str, reason: str, instead: str = '') -> str:
    command = describe_install(EXTRAS[module])
    return f'{reason} needs the package {module}, which is not installed: {command}{instead}'


# The key that clients send to servers: the user's key, else the run's key, which its processes share.


API_KEY = 'AREAL_JAX_API_KEY'  # environment variable: a flag could be read by every user of the machine
_FILE = 'registry/api_key'  # in the workdir, readable by its owner alone


def find_key(workdir: pathlib.Path | None = None) -> str:
    """Returns the value of the variable; without one, the key of the run, which its first process creates.

    Returns '' if there is neither. Raises KeyFileError for a file that others could read.
    """
    if given := os.environ.get(API_KEY, ''):
        return given
    from areal_jax.distributed.handshake import load_key  # here: it imports numpy, which --help does not need

    return '' if workdir is None else load_key(workdir.absolute() / _FILE).hex()


def require_key(listener: socket.socket, api_key: str, *, is_insecure: bool) -> None:
    """Raises UserError for a server without a key that other machines can reach, unless `is_insecure`."""
    host = listener.getsockname()[0]
    if not api_key and not is_insecure and not is_loopback(host):
        raise UserError(
            f'--host={host} lets other machines reach this server, and without a key any of them controls it: set '
            f'{API_KEY}, or add --insecure'
        )
