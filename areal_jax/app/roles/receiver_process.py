"""The receiver of one server of others (receiver.py), as server_program.py keeps it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile

from absl import flags

from areal_jax.app.parts.api_key import API_KEY, find_key
from areal_jax.config.addresses import find_free_port, join_address
from areal_jax.publication.versions import list_versions

_END_S = 5.0  # after SIGTERM


class ReceiverProcess:
    """A context manager: the process runs in the block; `url` is where it answers.

    Args:
      values: the flags of server_program.py.
    """

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
        """Starts the process unless it runs: it holds nothing that it cannot read again."""
        if self.is_alive:
            return
        versions = list_versions(self._publication)
        if not versions:
            return  # the learner is replacing them
        # the device of this machine is the server's
        variables = {**os.environ, 'JAX_PLATFORMS': 'cpu', API_KEY: self._api_key}
        self._process = subprocess.Popen([*self._words, f'--template={versions[max(versions)]}'], env=variables)


def find_directory(workdir: pathlib.Path, name: str) -> pathlib.Path:
    """Where the versions of a server are made: on the disk of its machine (TMPDIR), the same after a restart."""
    run = hashlib.sha256(str(workdir.absolute()).encode()).hexdigest()[:12]
    return pathlib.Path(tempfile.gettempdir()) / f'areal_jax-{run}-{name}'
