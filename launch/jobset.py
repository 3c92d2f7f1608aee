"""Starts a run on GKE as a JobSet.

One replicated job for each role; a learner's pods are the hosts of one TPU slice, or nodes with GPUs. --dry_run prints
the YAML, without it `kubectl apply` gets it. FILE is read here and in the image, under the same path.
"""

from __future__ import annotations

import pathlib
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence

from absl import flags

from areal_jax.app.command_line import define_path, parse_command
from areal_jax.app.process.ending import end_command
from areal_jax.commands.command import EXITS, FIELDS_OF_ROLES, ROLES_OF_TINY, Command, answer
from areal_jax.config.cluster import ENGINES, LEARNER, RoleCount
from areal_jax.errors import ExitCode, UserError

from .accelerators import CPU, GENERATIONS, Slice, define_accelerators, find_accelerator, require_fit
from .cluster_run import build_run, define_flags
from .jobset_manifest import Hardware, Image, Manifest, build_jobset, render_yaml

_NAME = re.compile(r'[a-z]([a-z0-9-]{0,30}[a-z0-9])?')  # with suffixes at most 63 characters, as a host name


def main(argv: Sequence[str]) -> int:
    """Parse, render, apply; returns the exit code."""
    answer(COMMAND, argv[1:])
    values = _define()
    command = parse_command(argv, values)
    _require_names(values)
    run = build_run(command, values.workdir, 'python')
    cluster = run.config.cluster
    learner = _find_hardware(values, '', run.learner, run.learner.count, f'{LEARNER}={cluster.learner!r}')
    engine = None
    if run.engine.count:
        engine = _find_hardware(values, 'engine_', run.engine, 1, f'an engine of {ENGINES}={cluster.engines!r}')
    image = Image(values.image, values.engine_image or values.image, values.claim, values.mount)
    manifest = Manifest(
        values.name, image, learner, engine, values.restarts, values.grace_s,
        {'cpu': values.controller_cpu, 'memory': values.controller_memory},
    )  # fmt: skip
    text = render_yaml(build_jobset(run, manifest))
    if values.dry_run:
        print(text, end='')
        return ExitCode.FINISHED
    if shutil.which('kubectl') is None:
        raise UserError(
            'there is no kubectl on the PATH: install it, or print the YAML with --dry_run and apply it elsewhere'
        )
    done = subprocess.run(['kubectl', 'apply', '-f', '-'], input=text, text=True, check=False)
    if done.returncode:
        raise UserError(f'kubectl apply ended with code {done.returncode}: its own words are above')
    return ExitCode.FINISHED


def _require_names(values: flags.FlagValues) -> None:
    """Raises UserError for what Kubernetes would refuse, and for a workdir that the pods do not share."""
    if not _NAME.fullmatch(values.name):
        raise UserError(
            f'--name={values.name!r} cannot name a JobSet: use at most 32 lower-case letters, digits and -, a letter '
            'first'
        )
    for name in ('workdir', 'claim', 'image'):
        if not values[name].value:
            raise UserError(f'--{name} is missing: {values[name].help}')
    workdir, mount = (pathlib.PurePosixPath(posixpath.normpath(path)) for path in (values.workdir, values.mount))
    if not workdir.is_relative_to(mount) or workdir == mount:
        raise UserError(
            f'--workdir={workdir} is not below --mount={mount}, where all pods share the volume of --claim='
            f'{values.claim}: use for example --workdir={mount / "a"}'
        )


def _find_hardware(values: flags.FlagValues, prefix: str, role: RoleCount, hosts: int, field: str) -> Hardware:
    """What the pods of a role run on; an engine flag that is not given defaults to the learner's.

    Args:
      hosts: processes that share one slice of TPUs.
      field: what asks for them, for errors.
    """

    found = find_accelerator(values, prefix)
    selector = dict(_split(pair) for pair in values[f'{prefix}node_selector'].value or ())
    if found == CPU:
        return Hardware({}, selector, {'XLA_FLAGS': f'--xla_force_host_platform_device_count={role.devices}'})
    if not isinstance(found, Slice):
        if not selector:
            raise UserError(
                f'--{prefix}accelerator={found} needs --{prefix}node_selector, which names the node pool: '
                'cloud.google.com/gke-accelerator=NAME'
            )
        return Hardware({'nvidia.com/gpu': role.devices}, selector, {}, has_shared_memory=True)
    require_fit(role, hosts, found, field)
    names = {
        'cloud.google.com/gke-tpu-accelerator': GENERATIONS[found.generation].node_selector,
        'cloud.google.com/gke-tpu-topology': found.topology,
    }
    return Hardware({'google.com/tpu': found.chips_per_host}, names | selector, {}, is_slice=found.hosts > 1)


def _split(pair: str) -> tuple[str, str]:
    key, equals, value = pair.partition('=')
    if not equals or not value:
        raise UserError(
            f'a node selector {pair!r} has no KEY=VALUE: use for example cloud.google.com/gke-nodepool=NAME'
        )
    return key, value


def _define() -> flags.FlagValues:
    values = flags.FlagValues()
    define_flags(values, 'Directory of the run as the pods see it, below --mount.')
    flags.DEFINE_string(
        'name', 'areal-jax', 'Of the JobSet, and first part of the names of its pods.', flag_values=values
    )
    flags.DEFINE_string('image', None, 'Container image, made from launch/Dockerfile.', flag_values=values)
    flags.DEFINE_string('engine_image', None, 'Another image for engines, with vLLM.', flag_values=values)
    flags.DEFINE_string(
        'claim', None, 'PersistentVolumeClaim that all pods may write (ReadWriteMany).', flag_values=values
    )
    define_path(values, 'mount', 'Where the pods see that volume.', '/mnt/runs')
    define_accelerators(values)
    flags.DEFINE_multi_string('node_selector', [], "KEY=VALUE of the learner's nodes.", flag_values=values)
    flags.DEFINE_multi_string('engine_node_selector', [], "KEY=VALUE of the engines' nodes.", flag_values=values)
    flags.DEFINE_string('controller_cpu', '4', 'Cores that controller and exporter ask for.', flag_values=values)
    flags.DEFINE_string('controller_memory', '16Gi', 'Memory that controller and exporter ask for.', flag_values=values)
    flags.DEFINE_integer('restarts', 20, 'Most restarts of jobs, of all roles together.', 0, flag_values=values)
    flags.DEFINE_integer('grace_s', 120, 'Seconds to save the state after SIGTERM.', 10, flag_values=values)
    return values


COMMAND = Command(
    program='python -m launch.jobset',
    purpose='Applies a run in roles to a Kubernetes cluster as a JobSet, or prints its YAML.',
    usage=(
        '--config=FILE[:ARGUMENT] --workdir=DIR --claim=NAME --image=IMAGE [--accelerator=KIND] [--dry_run] [FLAGS] '
        '[--config.SECTION.FIELD=VALUE ...]',
    ),
    flags=_define,
    examples=f"""
    # the YAML of a run on CPUs, which is not applied
    python -m launch.jobset {ROLES_OF_TINY} --workdir=/mnt/runs/a --claim=runs --image=IMAGE --accelerator=cpu \
        --dry_run
    # the same with one GPU for the learner and one for the engine
    python -m launch.jobset {ROLES_OF_TINY} --workdir=/mnt/runs/a --claim=runs --image=IMAGE --accelerator=gpu \
        --node_selector=cloud.google.com/gke-accelerator=nvidia-h100-80gb --engine_accelerator=gpu \
        --engine_node_selector=cloud.google.com/gke-accelerator=nvidia-h100-80gb
    """,
    fields=FIELDS_OF_ROLES,
    exits={**EXITS, ExitCode.FINISHED: 'applied, or printed'},
)


def run() -> None:
    """Entry point of `python -m launch.jobset`."""
    sys.exit(end_command(lambda: main(sys.argv), doing='writing the YAML'))


if __name__ == '__main__':
    run()
