"""areal-aot: compiles the programs of a run for a TPU slice or GPU nodes, on a machine that has none of them."""

from __future__ import annotations

import os
import pathlib
import resource
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from areal_jax.app.process.ending import Interrupts
from areal_jax.commands.command import EXITS, Command, answer, run_command
from areal_jax.errors import ExitCode, UserError

if TYPE_CHECKING:
    from absl import flags
    from ml_collections import config_dict

    from areal_jax.aot.comparison import Side
    from areal_jax.aot.topology import Topology
    from areal_jax.models.families import ModelConfig


def main(argv: Sequence[str], interrupts: Interrupts) -> int:
    """Compiles the programs one after the other and prints each; returns the exit code."""
    answer(COMMAND, argv[1:])

    _set_up_compilers()

    from areal_jax.app.command_line import parse_command
    from areal_jax.app.process.setup import silence_libraries
    from areal_jax.config import validate
    from areal_jax.files import require_local

    silence_libraries()
    values = _define_flags()
    command = parse_command(argv, values)
    validate(command.config)
    for change in values.compare:
        require_local('--compare', change)
    if values.topology is None:
        raise UserError("--topology is missing: name the devices, as 'v5p:2x4x4' or '8 x H100'")
    configs = [command.config, *([_parse_other(argv, values.compare)] if values.compare else [])]

    from areal_jax.aot.topology import describe_topology

    topology = describe_topology(values.topology)
    names = ('as given', ' '.join(values.compare))
    return _compile([_plan(*side, topology, values) for side in zip(names, configs, strict=False)], topology, values)


def _parse_other(argv: Sequence[str], changes: Sequence[str]) -> config_dict.ConfigDict:
    """The config of the other side of --compare, validated."""
    from areal_jax.aot.comparison import change_words
    from areal_jax.app.command_line import parse_command
    from areal_jax.config import validate

    try:
        config = parse_command(change_words(argv, changes), _define_flags()).config
        validate(config)
    except UserError as error:
        raise UserError(f'--compare={" ".join(changes)}: {error}') from error
    return config


def _set_up_compilers() -> None:
    """Sets what compilers without devices read from the environment; call it before jax is imported.

    Programs run on the CPU, and the TPU compiler asks neither the cloud for a machine nor a device for its lock.
    """
    os.environ['JAX_PLATFORMS'] = 'cpu'
    os.environ['ALLOW_MULTIPLE_LIBTPU_LOAD'] = '1'
    for name, value in {
        'TPU_SKIP_MDS_QUERY': '1', 'TPU_STDERR_LOG_LEVEL': '3', 'TPU_MIN_LOG_LEVEL': '3', 'TF_CPP_MIN_LOG_LEVEL': '3',
        'TPU_WORKER_HOSTNAMES': 'localhost', 'TPU_ACCELERATOR_TYPE': 'v5p-8',
    }.items():  # fmt: skip
        os.environ.setdefault(name, value)


def _plan(name: str, config: config_dict.ConfigDict, topology: Topology, values: flags.FlagValues) -> Side:
    """Lists the programs of a config, and prints what was chosen for it."""
    from areal_jax.aot.comparison import Side
    from areal_jax.aot.programs import plan_programs
    from areal_jax.app.model.text_model import read_shape
    from areal_jax.config import TrackedConfig
    from areal_jax.config.xla_flags import FIELD, choose_flags, describe_flags, read_variable

    shape = _cut_layers(read_shape(TrackedConfig(config)), values.layers)
    planned = plan_programs(config, shape, topology.devices)
    programs = [one for one in planned.programs if values.programs in f'{one.part}: {one.name}']
    if not programs:
        raise UserError(
            f'--programs={values.programs!r} is in the name of no program; this run has '
            + ', '.join(f'{one.part}: {one.name}' for one in planned.programs)
        )
    added, choices = choose_flags(config, topology.hardware, os.environ), dict(planned.choices)
    if topology.hardware:
        choices[FIELD] = describe_flags(config, added, read_variable(topology.hardware, os.environ))
    layers = f', {shape.n_layers} layers only' if values.layers else ''
    print(f'{len(programs)} programs for {topology.name}{layers}' + (f', {name}' if values.compare else ''), flush=True)
    for field, choice in choices.items():
        print(f'{field}: {choice}')
    for reason in planned.passed_over:
        print(f'passed over: {reason}')
    return Side(name, shape.n_layers, shape.vocab_size, choices, added, programs)


def _compile(sides: Sequence[Side], topology: Topology, values: flags.FlagValues) -> int:
    from areal_jax.aot.comparison import render_comparison
    from areal_jax.aot.findings import compile_program, render
    from areal_jax.aot.topology import take_turn
    from areal_jax.telemetry.progress import Bar

    print('self-checks of kernels: not run, they need the devices', flush=True)
    work = [(side, one) for side in sides for one in side.programs]
    bar = Bar(sys.stderr)
    with take_turn(lambda: print('waiting for another areal-aot on this machine', file=sys.stderr, flush=True)):
        bar.begin('compiling')
        try:
            for number, (side, one) in enumerate(work):
                bar.count(number, len(work), 'programs')
                side.found.append(compile_program(one, topology, side.flags))
                print(render(side.found[-1]), flush=True)
                _write(values.json, topology, sides)
        finally:
            bar.end()
    if values.compare:
        print(render_comparison(sides))
    fit = sum(side.fitting for side in sides)
    print(f'{fit} of {len(work)} programs fit')
    return ExitCode.FINISHED if fit == len(work) else ExitCode.USER_ERROR


def _cut_layers(shape: ModelConfig, layers: int | None) -> ModelConfig:
    """The model with its first layers only."""
    if not layers:
        return shape
    if not 1 <= layers <= shape.n_layers:
        raise UserError(f'--layers={layers}: the model has {shape.n_layers} layers; use 1 to {shape.n_layers}')
    return shape.cut(layers)


def _write(path: str | None, topology: Topology, sides: Sequence[Side]) -> None:
    """Writes what is known so far: a compilation that is stopped leaves the programs before it."""
    if path is None:
        return
    import jax

    from areal_jax.aot.comparison import compare
    from areal_jax.files import write_json

    told = {
        'topology': topology.name, 'chip': topology.chip.name, 'devices': len(topology.devices), 'jax': jax.__version__,
        'host_peak_bytes': 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        'self_checks': 'not run', **_tell(sides[0]),
    }  # fmt: skip
    if len(sides) > 1:
        told |= {'other': {'side': sides[1].name, **_tell(sides[1])}, 'compared': compare(sides)}
    write_json(pathlib.Path(path), told)


def _tell(side: Side) -> dict[str, object]:
    return {
        'layers': side.layers, 'vocabulary': side.vocabulary,
        'choices': dict(side.choices), 'xla_flags': dict(side.flags),
        'complete': len(side.found) == len(side.programs), 'programs': [one.as_json() for one in side.found],
    }  # fmt: skip


def _define_flags() -> flags.FlagValues:
    """Defines the flags of this command except --config."""
    from absl import flags

    from areal_jax.app.command_line import define_path

    values = flags.FlagValues()
    flags.DEFINE_string('topology', None, "Devices: 'v5p:2x4x4', '8 x H100'.", flag_values=values)
    flags.DEFINE_string('programs', '', "Only programs with this in their name: 'generate'.", flag_values=values)
    flags.DEFINE_integer('layers', None, 'Only the first N layers of the model.', flag_values=values)
    flags.DEFINE_multi_string(
        'compare',
        [],
        'Another value, SECTION.FIELD=VALUE, or config file: both sides, side by side.',
        flag_values=values,
    )
    define_path(values, 'json', 'File for the numbers, written after every program.')
    return values


COMMAND = Command(
    program='areal-aot',
    purpose='Compiles the programs of a run for TPUs or GPUs that are not there: memory, exchanges, kernels, copies.',
    usage=(
        '--config=FILE[:ARGUMENT] --topology=DEVICES [--compare=SECTION.FIELD=VALUE|FILE ...] [--programs=TEXT] '
        '[--layers=N] [--json=FILE.json]',
    ),
    flags=_define_flags,
    examples="""
    # the update of a small model on eight chips of TPU v5e
    areal-aot --config=configs/tiny_cpu.py --topology=v5e:2x4 --config.cluster.learner=fsdp=8 --programs=learner \
        --config.learner.rows_per_microbatch=8
    # what the engines of a recipe compile for one GPU node, with four layers only
    areal-aot --config=configs/clusters/qwen3_8b_h100.py --topology='8 x H100' --programs=generate --layers=4
    # what the flags of XLA for this hardware change in a micro-batch of the update
    areal-aot --config=configs/tiny_cpu.py --topology='8 x H100' --config.cluster.learner=fsdp=8 \
        --config.learner.rows_per_microbatch=8 --programs='learner: gradients' --compare=cluster.xla_flags=off
    """,
    fields=(
        'cluster.learner',
        'cluster.engines',
        'cluster.strategy',
        'cluster.xla_flags',
        'model.source',
        'model.path',
        'rollout.server',
        'rollout.slots',
        'rollout.cache_tokens',
        'rollout.prefill_buckets',
        'rollout.attention',
        'learner.row_tokens',
        'learner.rows_per_microbatch',
        'learner.attention',
        'learner.remat',
    ),
    exits={
        **EXITS,
        ExitCode.USER_ERROR: 'an error that you can mend, in one sentence; also a program that does not fit',
    },
    notes='What compiles is not what ran: kernels are not checked, and those of GPUs are candidates (no autotuning).',
)


def run() -> None:
    """Entry point of the console script."""
    run_command(main, 'writing the file of --json')


if __name__ == '__main__':
    run()
