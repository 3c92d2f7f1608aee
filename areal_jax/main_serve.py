"""areal-serve: serves a model over HTTP, or in the protocol of the kind in rollout.server."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from areal_jax.app.process.ending import Interrupts
from areal_jax.commands.command import EXITS, Command, answer, run_command
from areal_jax.errors import ExitCode

if TYPE_CHECKING:
    import socket

    from absl import flags

    from areal_jax.registry import Heartbeat


def main(argv: Sequence[str], interrupts: Interrupts) -> int:
    """Binds the port, builds the model and serves; returns the exit code."""
    answer(COMMAND, argv[1:])

    from areal_jax.app.command_line import CommandLineError, parse_command, require_workdir
    from areal_jax.app.process.accelerator import use_xla_flags
    from areal_jax.app.process.setup import find_key, require_key, require_serving, set_up_process, silence_libraries
    from areal_jax.app.roles.server_front import enter_interpreter, find_front

    silence_libraries()
    values = _define_flags()
    command = parse_command(argv, values)
    require_serving(command.config)
    server = command.config.rollout.server
    enter_interpreter(server)
    if values.workdir is not None:
        require_workdir(values.workdir)
    if values.port is None:
        raise CommandLineError('--port is missing: give a number, e.g. --port=8000, or 0 for a free one')

    from areal_jax.rollout.http.server.thread import bind

    workdir = None if values.workdir is None else pathlib.Path(values.workdir)
    api_key = find_key(workdir)
    listener = bind(values.host, values.port)
    require_key(listener, api_key, is_insecure=values.insecure)

    set_up_process()
    use_xla_flags(command.config)

    if command.config.telemetry.progress:
        print('starting', flush=True)  # importing jax takes seconds

    with contextlib.ExitStack() as parts:
        heartbeat = None if workdir is None else parts.enter_context(_register(workdir, values.name, listener))

        from areal_jax.app.roles.serve import serve_model
        from areal_jax.native.compiled_library import keep_blocks

        keep_blocks()
        serve_model(
            command.config,
            listener,
            model=values.model,
            api_key=api_key,
            host=values.host,
            overrides=command.overrides,
            interrupts=interrupts,
            heartbeat=heartbeat,
            front=find_front(server),
        )
    return ExitCode.FINISHED


def _register(workdir: pathlib.Path, name: str | None, listener: socket.socket) -> Heartbeat:
    """Registers with the run, at first without an address, so that the server counts as alive while it is built."""
    from areal_jax.app.roles.roles import end_fenced
    from areal_jax.config.kinds import OWN_CLIENT
    from areal_jax.installation import read_code_version
    from areal_jax.registry import Heartbeat
    from areal_jax.rollout.http.server.thread import describe_url, name_server
    from areal_jax.rollout.servers.server_entries import describe_server

    entry = describe_server(name or name_server(describe_url(listener)), '', OWN_CLIENT.name, code=read_code_version())
    return Heartbeat(workdir, entry, end_fenced)


def _define_flags() -> flags.FlagValues:
    """Defines the flags of this command except --config."""
    from absl import flags

    from areal_jax.app.command_line import define_model, define_path

    values = flags.FlagValues()
    define_model(values)
    flags.DEFINE_string('host', '127.0.0.1', 'Address to listen on; 0.0.0.0 = all.', flag_values=values)
    flags.DEFINE_integer(
        'port', None, 'Port to listen on; 0 = a free one.', lower_bound=0, upper_bound=65535, flag_values=values
    )
    flags.DEFINE_bool(
        'insecure',
        False,
        'Listen for other machines without a key: any of them controls it.',
        flag_values=values,
    )
    define_path(values, 'workdir', 'The run that this server registers with.')
    flags.DEFINE_string(
        'name', None, 'Of the server in the registry of its run; without it HOST-PORT.', flag_values=values
    )
    return values


COMMAND = Command(
    program='areal-serve',
    purpose='Serves a model over HTTP, with the interfaces of OpenAI and Anthropic, or behind JetStream.',
    usage=(
        '--config=FILE[:ARGUMENT] --port=N [--model=RUN|CHECKPOINT|HF_DIR|GGUF] [--host=ADDRESS] '
        '[--insecure] [--workdir=RUN [--name=NAME]] [--config.SECTION.FIELD=VALUE ...]',
    ),
    flags=_define_flags,
    examples="""
    # the newest weights of a run, at port 8000 of this machine
    areal-serve --config=configs/tiny_cpu.py --model=runs/tiny --port=8000
    # the same for clients of other machines that send the key in the environment variable AREAL_JAX_API_KEY
    AREAL_JAX_API_KEY=secret areal-serve --config=configs/tiny_cpu.py --model=runs/tiny --port=8000 --host=0.0.0.0
    # behind JetStream's orchestrator and gRPC server, in the environment of launch/jetstream_environment.sh
    areal-serve --config=configs/tiny_cpu.py --model=runs/tiny --port=9000 --config.rollout.server=jetstream
    """,
    fields=(
        'rollout.slots', 'rollout.decode_steps', 'rollout.context_tokens', 'rollout.cache_tokens',
        'rollout.prefill_buckets', 'rollout.attention', 'publication.dtype', 'cluster.engines', 'server.max_requests',
        'server.max_streams', 'server.request_timeout_s', 'server.drain_timeout_s', 'server.required',
        'server.notation', 'server.hosts',
    ),
    exits={**EXITS, ExitCode.FINISHED: 'told to stop by a signal, after the answers under way'},
    notes='Where the environment variable AREAL_JAX_API_KEY is set, clients must send its value as their key. A '
    'server of a run (--workdir) asks for the key in RUN/registry/api_key where it is not set.',
)  # fmt: skip


def run() -> None:
    """Entry point of the console script."""
    run_command(main, 'serving', 'the same command serves again')


if __name__ == '__main__':
    run()
