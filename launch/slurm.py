"""Starts a run, or a sweep, as a SLURM job.

Submits one sbatch file (slurm_file.py) with an srun for each role; --dry_run prints it. The job is heterogeneous where
engines get other nodes than the learner. With --sweep it is an array with a job for each arm that has not finished.
"""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
from collections.abc import Sequence

from absl import flags

from areal_jax import files
from areal_jax.app.command_line import CommandLine, parse_command, require_workdir
from areal_jax.app.process.ending import RESUME, end_command
from areal_jax.commands.command import EXITS, FIELDS_OF_ROLES, ROLES_OF_TINY, Command, answer
from areal_jax.errors import ExitCode, UserError

from .cluster_run import (
    define_flags,
    define_shared,
    locate_run,
    require_environments,
    require_own_addresses,
    require_shared,
    require_unused,
)
from .slurm_file import FOLDER, SWEEP_FOLDER, UNSAFE, render_run, render_sweep
from .slurm_layout import NodeKind, plan_layout, require_nodes

_FILE = 'job.sbatch'
_CHECKED = ('job_name', 'account', 'qos', 'time', 'partition', 'constraint', 'engine_partition', 'engine_constraint')
_SINFO_S = 30.0


def main(argv: Sequence[str]) -> int:
    """Parse, render, submit; returns the exit code."""
    answer(COMMAND, argv[1:])
    values = _define()
    command = parse_command(argv, values)
    require_workdir(values.workdir)
    workdir = pathlib.Path(values.workdir).absolute()
    _require_safe(workdir, values)
    if not values.dry_run and shutil.which('sbatch') is None:
        raise UserError(
            'there is no sbatch on the PATH: start this command where jobs are submitted, or print the file with '
            '--dry_run'
        )
    text = render_sweep(command, workdir, values) if values.sweep else _plan_run(command, values)
    if values.dry_run:
        print(text, end='')
        return ExitCode.FINISHED
    path = workdir / (SWEEP_FOLDER if values.sweep else FOLDER) / _FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(path, text)
    done = subprocess.run(['sbatch', '--parsable', str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f'sbatch refuses {path}: {" ".join(done.stderr.split())}')
    print(f'job {done.stdout.strip()} of {path}; its logs are beside that file')
    return ExitCode.FINISHED


def _require_safe(workdir: pathlib.Path, values: flags.FlagValues) -> None:
    """Raises UserError for a value that would break its #SBATCH line, or add one."""
    if '%' in str(workdir):  # begins a pattern in --output
        raise UserError(f"--workdir={workdir} has '%' in it, which an sbatch file cannot say: rename it")
    given = [(name, values[name].value or '') for name in _CHECKED]
    for name, value in [('workdir', str(workdir)), *given]:
        if unsafe := UNSAFE.search(value):
            fix = 'rename it' if name == 'workdir' else 'use a value without it'
            raise UserError(f'--{name}={value!r} has {unsafe[0]!r} in it, which an sbatch file cannot say: {fix}')
    for option in values.sbatch_option:
        if len(option.splitlines()) > 1:
            raise UserError(f'--sbatch_option={option!r} has more than one line: give the flag once for each option')


def _plan_run(command: CommandLine, values: flags.FlagValues) -> str:
    """The sbatch file of a run; raises UserError for one that cannot be placed or would overwrite another."""
    run = locate_run(command, values)
    learner = NodeKind(values.partition, values.constraint, values.gpus_per_node)
    engine = NodeKind(
        learner.partition if values.engine_partition is None else values.engine_partition,
        learner.constraint if values.engine_constraint is None else values.engine_constraint,
        learner.gpus if values.engine_gpus_per_node is None else values.engine_gpus_per_node,
    )
    layout = plan_layout(run, learner, engine, values.share_nodes)
    if not values.local_nodes:
        require_shared(run.workdir, layout.nodes)
        require_own_addresses(values.host, layout.nodes)
    if not values.dry_run:
        require_unused(run, values.resume)
        require_environments(run, bool(learner.gpus or engine.gpus), values.setup)
        require_nodes(layout, [_count_nodes(component.kind.partition) for component in layout.components])
    return render_run(run, layout, learner, engine, values)


def _count_nodes(partition: str) -> tuple[str, int]:
    """(name of the partition, its nodes); '' is the default partition, marked with a star by sinfo."""
    command = ['sinfo', '--noheader', '--format=%P %D', *([f'--partition={partition}'] if partition else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SINFO_S, check=False)
    found: dict[str, int] = {}
    for line in done.stdout.splitlines():
        name, _, count = line.partition(' ')
        found[name] = found.get(name, 0) + int(count)
    if partition:
        return partition, sum(found.values())
    return next(
        ((name[:-1], count) for name, count in found.items() if name.endswith('*')), ('default', sum(found.values()))
    )


def _define() -> flags.FlagValues:
    values = flags.FlagValues()
    define_flags(values)
    define_shared(values)
    for name, text in (
        ('account', 'Account that pays.'),
        ('qos', 'Quality of service.'),
        ('time', 'Time limit, 12:00:00; the run saves before it, and is queued again.'),
        ('partition', 'Partition of the nodes.'),
        ('constraint', 'Features of the nodes.'),
        ('host', "Address under which the roles are reached; by default the name of each one's node."),
        ('only', 'Of a sweep: arms to run, by name or pattern.'),
    ):
        flags.DEFINE_string(name, '', text, flag_values=values)
    flags.DEFINE_string('job_name', 'areal_jax', 'Name of the job.', flag_values=values)
    flags.DEFINE_integer('gpus_per_node', 0, 'GPUs of a node; 0: the run computes on CPUs.', 0, flag_values=values)
    flags.DEFINE_string('engine_partition', None, 'Where engines get other nodes.', flag_values=values)
    flags.DEFINE_string('engine_constraint', None, 'Where engines get other nodes.', flag_values=values)
    flags.DEFINE_integer('engine_gpus_per_node', None, 'Where engines get other nodes.', 0, flag_values=values)
    flags.DEFINE_bool('share_nodes', False, "Engines run on the learner's nodes, on other GPUs.", flag_values=values)
    flags.DEFINE_bool('local_nodes', False, 'All nodes are on this machine, and share its /tmp.', flag_values=values)
    flags.DEFINE_integer('restarts', 10, 'Most restarts of a role in a row.', 0, flag_values=values)
    flags.DEFINE_integer('grace_s', 120, 'Seconds to save the state before the time limit.', 10, flag_values=values)
    flags.DEFINE_multi_string('setup', [], 'Line of bash to run first: module load cuda.', flag_values=values)
    flags.DEFINE_multi_string('sbatch_option', [], 'Further option of sbatch: --mem=0.', flag_values=values)
    flags.DEFINE_bool('sweep', False, 'The config is a sweep: an array with a job for each arm.', flag_values=values)
    flags.DEFINE_integer('jobs', 0, 'Of a sweep: how many arms run at a time; 0: all.', 0, flag_values=values)
    return values


COMMAND = Command(
    program='python -m launch.slurm',
    purpose='Submits a run in roles, or a sweep, as a SLURM job that is queued again until it has finished.',
    usage=(
        '--config=FILE[:ARGUMENT] --workdir=DIR [--partition=NAME] [--gpus_per_node=N] [--time=TIME] [--resume] '
        '[--dry_run] [FLAGS] [--config.SECTION.FIELD=VALUE ...]',
    ),
    flags=_define,
    examples=f"""
    # the sbatch file of a run, which is not submitted
    python -m launch.slurm {ROLES_OF_TINY} --workdir=runs/roles --local_nodes --dry_run
    # a sweep as an array of jobs, at most four at a time
    python -m launch.slurm --config=configs/sweeps/tiny.py --workdir=runs/sweep --sweep --jobs=4
    """,
    fields=FIELDS_OF_ROLES,
    exits={**EXITS, ExitCode.FINISHED: 'submitted'},
)


def run() -> None:
    """Entry point of `python -m launch.slurm`."""
    sys.exit(end_command(lambda: main(sys.argv), doing='writing to the workdir', again=RESUME))


if __name__ == '__main__':
    run()
