"""Runs a third-party server program as an engine of a run, and a receiver that makes directories of versions for it.

vllm_server.py and sglang_server.py each describe one program. This process waits for the first published version,
starts the program on the newest one, keeps it in the registry of the run while it answers, and ends it when it is told
to stop. If the run publishes deltas, a receiver (receiver.py) is started next to the program and makes the directories
that the program loads; a receiver that dies is restarted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Mapping, Sequence

from absl import flags
from ml_collections import config_dict

from areal_jax.app.process.ending import Interrupts, Wakeups, code_of_stopped_server
from areal_jax.app.process.setup import API_KEY, find_key
from areal_jax.app.roles.roles import RoleProcess, await_controller
from areal_jax.app.workdir.environment import read_versions
from areal_jax.config.addresses import find_free_port, join_address
from areal_jax.config.cluster import parse_engines
from areal_jax.config.kinds import ClientKind
from areal_jax.errors import UserError
from areal_jax.installation import read_code_version
from areal_jax.publication.versions import keep_while_read, list_versions
from areal_jax.registry import Registration
from areal_jax.rollout.servers.keeper import ServerFacts
from areal_jax.rollout.servers.server_entries import describe_server
from areal_jax.workers.descendants import Interpreter

_END_S = 5.0  # after SIGTERM


class ReceiverProcess:
    """A context manager: the process runs in the block and serves at `url`."""

    def __init__(self, values: flags.FlagValues):
        port = find_free_port(values.host)
        self.url = f'http://{join_address(values.host, port)}'
        self._publication = pathlib.Path(values.publication)
        self._api_key = find_key(pathlib.Path(values.workdir))
        self._words = [
            *(sys.executable, '-m', 'areal_jax.app.roles.receiver', f'--publication={values.publication}'),
            f'--directory={find_directory(pathlib.Path(values.workdir), values.name)}',
            *(f'--host={values.host}', f'--port={port}', f'--name={values.name}'),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ReceiverProcess:
        self.ensure()
        return self

    def __exit__(self, *error: object) -> None:
        if (process := self._process) is None:
            return
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        process.kill()
        process.wait()

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None, 'the process was not started'
        return self._process.pid

    def ensure(self) -> None:
        """Starts the process unless it runs; a restart loses nothing, because it can read everything again."""
        if self.is_alive:
            return
        versions = list_versions(self._publication)
        if not versions:
            return  # the learner is replacing them
        # the server uses this machine's device
        variables = {**os.environ, 'JAX_PLATFORMS': 'cpu', API_KEY: self._api_key}
        self._process = subprocess.Popen([*self._words, f'--template={versions[max(versions)]}'], env=variables)


def find_directory(workdir: pathlib.Path, name: str) -> pathlib.Path:
    """Returns the directory for a server's versions, on its machine's disk (TMPDIR), the same after a restart."""
    run = hashlib.sha256(str(workdir.absolute()).encode()).hexdigest()[:12]
    return pathlib.Path(tempfile.gettempdir()) / f'areal_jax-{run}-{name}'


_LOOK_S = 1.0
_ANSWER_S = 5.0  # for the reply to a health request
_SERVER_PROGRAM_END_S = 8.0  # after SIGTERM


@dataclasses.dataclass(frozen=True)
class ServerCommand:
    """The command of a server, and environment variables that apply unless they are already set."""

    words: list[str]
    variables: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class ServerProgram:
    """Describes how to start a third-party server.

    Args:
      module: the module of this project whose program runs it.
      client: the protocol that it speaks; its name is also the value of rollout.server.
      interpreter: the interpreter that has the server.
      build_command: (interpreter, directory of weights, port, flags) -> the command of the server.
      packages: names of its package, for GPUs first; the same version has the same routes.
      version: the one whose replies are recorded in third_party/.
    """

    module: str
    client: ClientKind
    interpreter: Interpreter
    build_command: Callable[[str, pathlib.Path, int, flags.FlagValues], ServerCommand]
    packages: tuple[str, ...]
    version: str

    def require_version(self, on_gpus: bool, settings: Sequence[str] = ()) -> None:
        """Raises UserError for an interpreter with another version, or with one for CPUs where the nodes have GPUs.

        Args:
          settings: shell lines or NAME=VALUE of the nodes; an interpreter that they name is not looked for here.
        """
        wanted, options = self.interpreter, ' --gpu' if on_gpus else ''
        if any(wanted.variable in line for line in settings):
            return
        python = wanted.find(options=options)
        versions = read_versions(python, (*self.packages, 'torch'))
        name, found = next(((name, versions[name]) for name in self.packages if name in versions), ('', 'no version'))
        if found.partition('+')[0] != self.version:
            raise UserError(
                f'{wanted.needed_by}: {python} has {found} of {wanted.title}, and {self.version} is what this project '
                f'was tested with: {wanted.describe_fix(options)}'
            )
        torch = versions.get('torch', '')
        if on_gpus and (torch.endswith('+cpu') or name != self.packages[0]):
            raise UserError(
                f'{wanted.needed_by}: {python} has {wanted.title} for CPUs (torch {torch}), and the nodes have GPUs: '
                f'{wanted.describe_fix(f"{options} FOLDER")}'
            )

    def find_python(self) -> str:
        """See Interpreter.find."""
        return self.interpreter.find()

    def describe_command(
        self,
        config: config_dict.ConfigDict,
        workdir: pathlib.Path,
        name: str,
        *,
        number: int = 0,
        index: int | None = None,
        host: str = '127.0.0.1',
    ) -> list[str]:
        """Returns the command of one server of a run; it starts from a version that the learner has published.

        Args:
          number: which engine of cluster.engines it is.
          index: the same number in a run in roles, for its entry in the registry.
        """
        publication, rollout = config.publication, config.rollout
        tensor = parse_engines(config.cluster.engines).select(number).only_group.tensor
        directory = publication.directory or workdir / 'publication'
        return [
            *(sys.executable, '-m', self.module, f'--workdir={workdir}', f'--publication={directory}'),
            *(f'--dtype={publication.dtype}', f'--context_tokens={rollout.context_tokens}'),
            *(['--receiver'] if publication.delta else []),
            *(['--routes'] if rollout.record_routes else []),
            *(f'--slots={rollout.slots}', *([f'--tensor={tensor}'] if tensor > 1 else [])),
            *(f'--name={name}', *([] if index is None else [f'--index={index}']), f'--host={host}'),
        ]

    def serve_engine(self, config: config_dict.ConfigDict, process: RoleProcess, interrupts: Interrupts) -> int:
        """Makes this process an engine of a run in roles: replaces it by the program of `module`."""
        await_controller(process, config, config.distributed.command_deadline_s)
        command = self.describe_command(
            config, process.workdir, process.name, number=process.index, index=process.index, host=process.host
        )
        os.execv(command[0], command)

    def plan_server(self, config: config_dict.ConfigDict, workdir: pathlib.Path, number: int) -> list[str]:
        """Returns the words after `python -m` of a server next to a trainer; it starts from a published version."""
        words = self.describe_command(config, workdir, '', number=number)
        return [word for word in words[2:] if word != '--name=']

    def run(self, argv: Sequence[str]) -> int:
        """Runs the server; returns 1 when it has ended by itself, or 0 or STOPPED_CODE's value after a stop."""
        values = parse_flags(argv)
        python = self.find_python()
        with Wakeups() as wakeups, contextlib.ExitStack() as parts:
            directory = await_version(pathlib.Path(values.publication), wakeups)
            if directory is None:
                return code_of_stopped_server()
            port = find_free_port(values.host)
            receiver = parts.enter_context(ReceiverProcess(values)) if values.receiver else None
            with keep_while_read(directory):
                command = self.build_command(python, directory, port, values)
                environment = {**command.variables, **keep_environment(os.environ)}
                server = subprocess.Popen(command.words, env=environment)
                try:
                    url = f'http://{join_address(values.host, port)}'
                    if (code := _await_answer(server, url, wakeups)) is not None:
                        return code
                except BaseException:
                    server.kill()
                    raise
            return self._serve(server, url, receiver, values, wakeups)

    def _serve(
        self,
        server: subprocess.Popen[bytes],
        url: str,
        receiver: ReceiverProcess | None,
        values: flags.FlagValues,
        wakeups: Wakeups,
    ) -> int:
        """Keeps the server registered, with a heartbeat for each answer, until it ends or a stop comes."""
        entry = describe_server(
            values.name, url, self.client.name, ServerFacts(hardware=f'{values.tensor} x device'),
            index=values.index, code=read_code_version(),
            receiver='' if receiver is None else receiver.url,
        )  # fmt: skip
        registration = Registration(pathlib.Path(values.workdir), entry)
        print(f'{self.interpreter.title} serves on {url}', flush=True)
        try:
            while server.poll() is None:
                numbers, _ = wakeups.wait(_LOOK_S)
                if numbers:
                    return code_of_stopped_server()
                if receiver is not None:
                    receiver.ensure()
                if _answers(url):
                    registration.beat()
            return 1
        finally:
            registration.close()
            _end(server)


def name_route_flag(values: flags.FlagValues) -> list[str]:
    """Returns the flag for routed experts, which has one name in both servers."""
    return ['--enable-return-routed-experts'] if values.routes else []


def keep_environment(given: Mapping[str, str]) -> Mapping[str, str]:
    """Returns the environment for a server, which must not import modules of this project."""
    return {name: value for name, value in given.items() if name not in ('PYTHONPATH', 'XLA_FLAGS')}


def parse_flags(argv: Sequence[str]) -> flags.FlagValues:
    """Parses the command line, without the interpreter's words; raises UserError for invalid values."""
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
    flags.DEFINE_bool('routes', False, 'Replies have the experts of each token.', flag_values=values)
    flags.DEFINE_bool('receiver', False, 'Start one beside it, for deltas.', flag_values=values)
    try:
        values(list(argv))
    except flags.Error as error:
        raise UserError(str(error)) from error
    return values


def await_version(publication: pathlib.Path, wakeups: Wakeups) -> pathlib.Path | None:
    """Waits for a version and returns the newest one; None if a stop comes first."""
    while not (versions := list_versions(publication)):
        numbers, _ = wakeups.wait(_LOOK_S)
        if numbers:
            return None
    return versions[max(versions)]


def _await_answer(server: subprocess.Popen[bytes], url: str, wakeups: Wakeups) -> int | None:
    """Returns None when the server answers, or the exit code of this process if it ends first."""
    while not _answers(url):
        numbers, _ = wakeups.wait(_LOOK_S)
        if numbers:
            _end(server)
            return code_of_stopped_server()
        if server.poll() is not None:
            return 1
    return None


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f'{url}/health', timeout=_ANSWER_S) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def _end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(_SERVER_PROGRAM_END_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
