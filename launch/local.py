"""Starts servers and trainer of a run on this machine: python -m launch.local --config=FILE --workdir=DIR [--resume].

Further flags, --config.section.field=value, are as those of main_train. A server that dies or hangs is started again.
Ctrl-C stops the run, whose trainer saves its state first. If this process is killed, all others end.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Sequence

from absl import flags
from ml_collections import config_dict

from areal_jax import files
from areal_jax.app.command_line import parse_train_command
from areal_jax.app.ending import end_command
from areal_jax.config import default_config, flatten, validate
from areal_jax.config.cluster import ENGINES, has_roles, parse_engines
from areal_jax.config.ranges import ConfigError
from launch.heartbeats import Heartbeats
from launch.programs import Server
from launch.supervisor import run_together
from launch.vllm_server import find_python

TRAINER, SERVER, VLLM = 'areal_jax.main_train', 'areal_jax.main_serve', 'launch.vllm_server'
_STARTED = ('own', 'vllm')
SERVERS = 'servers'  # in the workdir: config and output of the servers
_CONFIG_FILE = '''"""The config of the servers of this run, written by launch.local at every start."""

from areal_jax.config import default_config

inf = float('inf')


def get_config():
    config = default_config()
    config.update_from_flattened_dict({values!r})
    return config
'''


def main(argv: Sequence[str]) -> int:
    """Parse, start, wait; returns the exit code, that of the trainer."""
    values = flags.FlagValues()
    flags.DEFINE_string('workdir', None, 'Directory for everything the run leaves.', flag_values=values)
    flags.DEFINE_bool('resume', False, 'Go on from the newest checkpoint in the workdir.', flag_values=values)
    config = parse_train_command(argv, values).config
    require_startable(config)
    workdir = pathlib.Path(values.workdir)
    lock = files.DirectoryLock(workdir / SERVERS)
    try:
        trainer = [sys.executable, '-m', TRAINER, *argv[1:]]
        return run_together(trainer, plan_servers(config, workdir), Heartbeats(workdir))
    finally:
        lock.release()


def require_startable(config: config_dict.ConfigDict) -> None:
    """Raises ConfigError for a run that one trainer and servers of this machine cannot make."""
    if config.rollout.server not in _STARTED:
        raise ConfigError(
            f'rollout.server={config.rollout.server!r}: launch.local starts servers of this project or vLLM; use '
            "rollout.server='own' or 'vllm', or start the trainer alone with python -m areal_jax.main_train"
        )
    validate(config)
    if config.rollout.server == 'vllm':
        find_python()  # raises where there is none
    if has_roles(config):
        raise ConfigError(
            f'cluster.learner={config.cluster.learner!r}: launch.local starts one trainer; leave out hosts, or start '
            'trainers and servers one by one'
        )


def plan_servers(config: config_dict.ConfigDict, workdir: pathlib.Path) -> list[Server]:
    """One server for each of cluster.engines."""
    directory = workdir / SERVERS
    command = _plan_own(config, workdir) if config.rollout.server == 'own' else _plan_vllm(config, workdir)
    return [
        Server(str(number), [sys.executable, '-m', *command, f'--name={number}'], directory / f'{number}.log')
        for number in range(parse_engines(config.cluster.engines).count)
    ]


def _plan_own(config: config_dict.ConfigDict, workdir: pathlib.Path) -> list[str]:
    """Servers of this project start from the model of the config.

    They get a config file of their own and no overrides: they would refuse those that only a trainer reads.
    """
    layout, directory = parse_engines(config.cluster.engines), workdir / SERVERS
    default = dict(flatten(default_config()))
    values = {
        path: value
        for path, value in flatten(config.copy_and_resolve_references())
        if path not in default or value != default[path]
    }
    values[ENGINES] = str(dataclasses.replace(layout, count=1))
    files.write_text(directory / 'config.py', _CONFIG_FILE.format(values=values))
    return [SERVER, f'--config={directory / "config.py"}', '--port=0', f'--workdir={workdir}']


def _plan_vllm(config: config_dict.ConfigDict, workdir: pathlib.Path) -> list[str]:
    """vLLM starts from a version that the trainer has published."""
    publication, rollout = config.publication, config.rollout
    return [
        *(VLLM, f'--workdir={workdir}', f'--publication={publication.directory or workdir / "publication"}'),
        *(f'--dtype={publication.dtype}', f'--context_tokens={rollout.context_tokens}', f'--slots={rollout.slots}'),
    ]


def run() -> None:
    """Entry point of `python -m launch.local`."""
    sys.exit(end_command(lambda: main(sys.argv), doing='writing to the workdir'))


if __name__ == '__main__':
    run()
