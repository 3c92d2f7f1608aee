"""Becomes the server of others that a run would start, on a checkpoint of checkpoints.py.

    python -m tests.rollout.http.clients.serve_checkpoint vllm|sglang INTERPRETER DIR PORT

launch/test_external.sh starts servers with it, so that the contract is put to the commands that launch.local uses.
"""

from __future__ import annotations

import os
import pathlib
import sys

from areal_jax.app.roles import sglang_server, vllm_server
from areal_jax.app.roles.server_program import keep_environment, parse_flags

PROGRAMS = {module.PROGRAM.client.name: module.PROGRAM for module in (vllm_server, sglang_server)}


def serve(kind: str, python: str, directory: str, port: str) -> None:
    values = parse_flags(['', '--workdir=', '--name=', '--publication=', '--context_tokens=2048', '--slots=8'])
    command = PROGRAMS[kind].build_command(python, pathlib.Path(directory), int(port), values)
    os.execve(command.words[0], command.words, {**command.variables, **keep_environment(os.environ)})


if __name__ == '__main__':
    serve(*sys.argv[1:])
