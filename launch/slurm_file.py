"""The sbatch files of launch.slurm: a job for a run (slurm.sbatch.j2), an array for a sweep (slurm_sweep.sbatch.j2)."""

from __future__ import annotations

import pathlib
import re
import shlex
from collections.abc import Sequence

import jinja2
from absl import flags

from areal_jax.app.command_line import CommandLine, find_config_file
from areal_jax.app.sweep.arms import read_arms, read_state, require_same_sweep, select_arms
from areal_jax.errors import UserError

from .cluster_run import STEADY_S, ClusterRun, render_overrides, require_shared
from .slurm_layout import Component, Layout, NodeKind

FOLDER = 'slurm'  # in the workdir: the sbatch file, and a folder with logs for each start of the job
SWEEP_FOLDER = '.slurm'  # inside a sweep's workdir, which may hold no visible entries but its arms
SWEEP = 'areal_jax.main_sweep'
UNSAFE = re.compile(r'[\s\\"\'$#]')  # what the value of an option may not have in an #SBATCH line, which # ends
_REQUEUE_S = 15  # of --grace_s: to kill the roles that do not save in time, and to have the job queued again


def render_run(run: ClusterRun, layout: Layout, learner: NodeKind, engine: NodeKind, values: flags.FlagValues) -> str:
    """The file of a run; `values` are the flags of launch.slurm."""
    het = [f'--het-group={group} ' if layout.is_heterogeneous else '' for group in (0, 1)]
    return _template('slurm.sbatch.j2').render(
        components=[
            [*_common_options(values, f'{run.workdir}/{FOLDER}/%j.out'), *_node_options(component)]
            for component in layout.components
        ],
        folder=shlex.quote(f'{run.workdir}/{FOLDER}'),
        setup=values.setup,
        command=shlex.join(run.command),
        learner=run.learner,
        exporter=run.exporter,
        learner_environment=_environment(run.learner.devices, learner, layout.learner_gpus),
        engines=[
            {
                'index': engine_at.index,
                'node': engine_at.node,
                'environment': _environment(run.engine.devices, engine, engine_at.gpus),
            }
            for engine_at in layout.engines
        ],
        engines_begin=layout.engines_begin,
        het_learner=het[0],
        het_engine=het[1],
        host=shlex.quote(values.host) if values.host else '',
        restarts=values.restarts,
        steady_s=STEADY_S,
        patience_s=max(values.grace_s - _REQUEUE_S, values.grace_s // 2),
        directory=_unsafe_directory(),
    )


def render_sweep(command: CommandLine, workdir: pathlib.Path, values: flags.FlagValues) -> str:
    """The sbatch file of an array with one job for each arm that has not finished.

    Raises UserError for arms that cannot run, and where none is left.
    """
    arms = read_arms(command, workdir)
    require_same_sweep(workdir, command.source, arms)
    pending = [arm for arm in select_arms(arms, values.only) if not read_state(arm).is_finished]
    if not pending:
        raise UserError(
            f'all arms have finished: python -m {SWEEP} with the same --config and --workdir makes the table'
        )
    require_shared(str(workdir), 2 if len(pending) > 1 and not values.local_nodes else 1)
    source = find_config_file(command.source).absolute_source
    words = [values.python, '-m', SWEEP, f'--config={source}', f'--workdir={workdir}', *render_overrides(command)]
    most = f'%{values.jobs}' if values.jobs else ''
    component = Component(NodeKind(values.partition, values.constraint, values.gpus_per_node), 1)
    return _template('slurm_sweep.sbatch.j2').render(
        options=[
            f'--array=0-{len(pending) - 1}{most}',
            *_common_options(values, f'{workdir}/{SWEEP_FOLDER}/%A_%a.out'),
            *_node_options(component),
        ],
        arms=[arm.name for arm in pending],
        setup=values.setup,
        command=shlex.join(words),
        folder=shlex.quote(f'{workdir}/{SWEEP_FOLDER}'),
        directory=_unsafe_directory(),
    )


def _common_options(values: flags.FlagValues, output: str) -> list[str]:
    named = [('account', values.account), ('qos', values.qos), ('time', values.time)]
    return [
        f'--job-name={values.job_name}',
        *(f'--{name}={value}' for name, value in named if value),
        *('--requeue', '--open-mode=append', f'--signal=B:TERM@{values.grace_s}'),
        *([] if _unsafe_directory() else [f'--chdir={pathlib.Path.cwd()}']),
        *(f'--output={output}', *values.sbatch_option),
    ]


def _unsafe_directory() -> str:
    """The current directory, quoted for bash, where an option of sbatch cannot name it; else ''."""
    directory = str(pathlib.Path.cwd())
    return shlex.quote(directory) if UNSAFE.search(directory) else ''


def _node_options(component: Component) -> list[str]:
    kind = component.kind
    options = [f'--nodes={component.nodes}', '--ntasks-per-node=1', '--exclusive']
    options += [f'--partition={kind.partition}'] if kind.partition else []
    options += [f'--constraint={kind.constraint}'] if kind.constraint else []
    return options + ([f'--gpus-per-node={kind.gpus}'] if kind.gpus else [])


def _environment(devices: int, kind: NodeKind, gpus: Sequence[int]) -> str:
    """'env NAME=VALUE ' before the command of a process, '' where it needs nothing."""
    if gpus:
        return f'env CUDA_VISIBLE_DEVICES={",".join(map(str, gpus))} '
    if not kind.gpus and devices > 1:
        return f'env XLA_FLAGS=--xla_force_host_platform_device_count={devices} '
    return ''


def _template(name: str) -> jinja2.Template:
    folder = pathlib.Path(__file__).parent
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder), trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    return environment.get_template(name)
