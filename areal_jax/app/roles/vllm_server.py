"""Runs one vLLM server of a run: python -m areal_jax.app.roles.vllm_server --workdir=RUN --name=NAME
--publication=DIR [...].

It starts from the newest published version, waiting for the first one, and is in the registry of the run while it
answers. AREAL_JAX_VLLM_PYTHON names the interpreter that has vLLM; without it a clone takes the interpreter of
.venv-vllm, which launch/vllm_environment.sh makes.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import urllib.request
from collections.abc import Mapping, Sequence

from absl import flags
from ml_collections import config_dict

from areal_jax.addresses import find_free_port, join_address
from areal_jax.app.process.ending import code_of_stopped_server, end_command
from areal_jax.app.process.interrupt import Interrupts, Wakeups
from areal_jax.app.roles.roles import RoleProcess, await_controller
from areal_jax.code_version import read_code_version
from areal_jax.config.cluster import parse_engines
from areal_jax.config.kinds import VLLM_CLIENT
from areal_jax.errors import UserError
from areal_jax.installation import find_clone
from areal_jax.publication.versions import keep_while_read, list_versions
from areal_jax.registry.entries import Registration
from areal_jax.rollout.servers.server_entries import describe_server

PYTHON = 'AREAL_JAX_VLLM_PYTHON'  # environment variable
_MADE = '.venv-vllm/bin/python'  # in a clone, by launch/vllm_environment.sh
_LOOK_S = 1.0
_ANSWER_S = 5.0  # for its health
_END_S = 8.0  # after SIGTERM
_ENVIRONMENT = {
    'VLLM_SERVER_DEV_MODE': '1',  # the routes that control it
    'VLLM_CPU_KVCACHE_SPACE': '1',  # GiB
    'HF_HUB_OFFLINE': '1',
    'VLLM_NO_USAGE_STATS': '1',  # it sends nothing anywhere
}


def main(argv: Sequence[str]) -> int:
    """Returns 1 when the server has ended, else, when it was told to stop, 0 or what STOPPED_CODE says."""
    values = parse_flags(argv)
    python = find_python()
    with Wakeups() as wakeups:
        directory = await_version(pathlib.Path(values.publication), wakeups)
        if directory is None:
            return code_of_stopped_server()
        port = find_free_port(values.host)
        with keep_while_read(directory):
            server = subprocess.Popen(
                build_command(python, directory, port, values), env=dict(build_environment(os.environ))
            )
            try:
                url = f'http://{join_address(values.host, port)}'
                if (code := _await_answer(server, url, wakeups)) is not None:
                    return code
            except BaseException:
                server.kill()
                raise
        return _serve(server, url, values, wakeups)


def describe_command(
    config: config_dict.ConfigDict,
    workdir: pathlib.Path,
    name: str,
    *,
    index: int | None = None,
    host: str = '127.0.0.1',
) -> list[str]:
    """The command of one server of a run; it starts from a version that the learner has published."""
    publication, rollout, tensor = config.publication, config.rollout, parse_engines(config.cluster.engines).tensor
    directory = publication.directory or workdir / 'publication'
    return [
        *(
            sys.executable,
            '-m',
            'areal_jax.app.roles.vllm_server',
            f'--workdir={workdir}',
            f'--publication={directory}',
        ),
        *(f'--dtype={publication.dtype}', f'--context_tokens={rollout.context_tokens}', f'--slots={rollout.slots}'),
        *([f'--tensor={tensor}'] if tensor > 1 else []),
        *(f'--name={name}', *([] if index is None else [f'--index={index}']), f'--host={host}'),
    ]


def serve_engine(config: config_dict.ConfigDict, process: RoleProcess, interrupts: Interrupts) -> int:
    """This process becomes an engine of a run in roles: the program of this module takes its place."""
    await_controller(process, config, config.distributed.command_deadline_s)
    program = describe_command(config, process.workdir, process.name, index=process.index, host=process.host)
    os.execv(program[0], program)


def plan_server(config: config_dict.ConfigDict, workdir: pathlib.Path) -> list[str]:
    """The words after `python -m` of a server beside a trainer; it starts from a version that was published."""
    return [word for word in describe_command(config, workdir, '')[2:] if word != '--name=']


def find_python() -> str:
    """The interpreter that has vLLM; raises UserError where there is none."""
    clone, named = find_clone(), os.environ.get(PYTHON)
    python = named or (None if clone is None else str(clone / _MADE))
    if python is not None and pathlib.Path(python).is_file():
        return python
    found = '' if python is None else f', and {python} is none'
    if clone is None:
        fix = f'install vLLM into an environment of its own, and name its interpreter in {PYTHON}'
    else:
        fix = f'make one with `bash launch/vllm_environment.sh`, or name one in {PYTHON}'
    raise UserError(f"rollout.server='vllm' needs an interpreter that has vLLM{found}: {fix}")


def build_command(python: str, directory: pathlib.Path, port: int, values: flags.FlagValues) -> list[str]:
    """Log-probs are taken after the temperature; requests and replies are token ids."""
    return [
        *(python, '-m', 'vllm.entrypoints.openai.api_server', '--model', str(directory), '--served-model-name', 'm'),
        *('--dtype', values.dtype, '--max-model-len', str(values.context_tokens)),
        *('--max-num-seqs', str(values.slots), '--enforce-eager', '--enable-scale-out'),
        *('--tensor-parallel-size', str(values.tensor)),
        *('--logprobs-mode', 'processed_logprobs', '--skip-tokenizer-init'),
        *('--host', values.host, '--port', str(port)),
    ]


def build_environment(given: Mapping[str, str]) -> Mapping[str, str]:
    """Values that are set already win; vLLM must not import modules of this project."""
    kept = {name: value for name, value in given.items() if name not in ('PYTHONPATH', 'XLA_FLAGS')}
    return _ENVIRONMENT | kept


def parse_flags(argv: Sequence[str]) -> flags.FlagValues:
    """Of the command line, without the interpreter's words; raises UserError for what they cannot be."""
    values = flags.FlagValues()
    flags.DEFINE_string('workdir', None, 'Of the run.', required=True, flag_values=values)
    flags.DEFINE_string('name', None, 'In the registry.', required=True, flag_values=values)
    flags.DEFINE_integer('index', None, 'Of the engine, in a run in roles.', flag_values=values)
    flags.DEFINE_string('host', '127.0.0.1', 'Address to listen on.', flag_values=values)
    flags.DEFINE_string('publication', None, 'Where versions are written.', required=True, flag_values=values)
    flags.DEFINE_string('dtype', 'float32', 'Of the weights.', flag_values=values)
    flags.DEFINE_integer('context_tokens', 2048, 'Most tokens of a sequence.', flag_values=values)
    flags.DEFINE_integer('tensor', 1, 'Devices over which the server cuts its weights.', flag_values=values)
    flags.DEFINE_integer('slots', 8, 'Answers that are decoded at once.', flag_values=values)
    try:
        values(list(argv))
    except flags.Error as error:
        raise UserError(str(error)) from error
    return values


def await_version(publication: pathlib.Path, wakeups: Wakeups) -> pathlib.Path | None:
    """The newest version; None where a stop came first."""
    while not (versions := list_versions(publication)):
        numbers, _ = wakeups.wait(_LOOK_S)
        if numbers:
            return None
    return versions[max(versions)]


def _await_answer(server: subprocess.Popen[bytes], url: str, wakeups: Wakeups) -> int | None:
    """None when it answers; else the exit code of this process."""
    while not _answers(url):
        numbers, _ = wakeups.wait(_LOOK_S)
        if numbers:
            _end(server)
            return code_of_stopped_server()
        if server.poll() is not None:
            return 1
    return None


def _serve(server: subprocess.Popen[bytes], url: str, values: flags.FlagValues, wakeups: Wakeups) -> int:
    """Registered: a heartbeat for each answer, until it ends or a stop comes."""
    entry = describe_server(values.name, url, VLLM_CLIENT.name, index=values.index, code=read_code_version())
    registration = Registration(pathlib.Path(values.workdir), entry)
    print(f'vLLM serves on {url}', flush=True)
    try:
        while server.poll() is None:
            numbers, _ = wakeups.wait(_LOOK_S)
            if numbers:
                return code_of_stopped_server()
            if _answers(url):
                registration.beat()
        return 1
    finally:
        registration.close()
        _end(server)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f'{url}/health', timeout=_ANSWER_S) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def _end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(_END_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def run() -> None:
    """Entry point of `python -m areal_jax.app.roles.vllm_server`."""
    sys.exit(end_command(lambda: main(sys.argv), doing='writing to the registry'))


if __name__ == '__main__':
    run()
