"""Runs one vLLM server of a run: python -m areal_jax.app.roles.vllm_server --workdir=RUN --name=NAME
--publication=DIR [...].

AREAL_JAX_VLLM_PYTHON names the interpreter that has vLLM; without it a clone takes the interpreter of .venv-vllm, which
launch/vllm_environment.sh makes.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence

from absl import flags
from ml_collections import config_dict

from areal_jax.app.process.ending import end_command
from areal_jax.app.process.interrupt import Interrupts
from areal_jax.app.roles.roles import RoleProcess
from areal_jax.app.roles.server_program import ServerCommand, ServerProgram
from areal_jax.config.kinds import VLLM_CLIENT

_VARIABLES = {
    'VLLM_SERVER_DEV_MODE': '1',  # the routes that control it
    'VLLM_CPU_KVCACHE_SPACE': '1',  # GiB
    'HF_HUB_OFFLINE': '1',
    'VLLM_NO_USAGE_STATS': '1',  # it sends nothing anywhere
}


def build_command(python: str, directory: pathlib.Path, port: int, values: flags.FlagValues) -> ServerCommand:
    """Log-probs are taken after the temperature; requests and replies are token ids."""
    words = [
        *(python, '-m', 'vllm.entrypoints.openai.api_server', '--model', str(directory), '--served-model-name', 'm'),
        *('--dtype', values.dtype, '--max-model-len', str(values.context_tokens)),
        *('--max-num-seqs', str(values.slots), '--enforce-eager', '--enable-scale-out'),
        *('--tensor-parallel-size', str(values.tensor)),
        *('--logprobs-mode', 'processed_logprobs', '--skip-tokenizer-init'),
        *('--host', values.host, '--port', str(port)),
    ]
    return ServerCommand(words, _VARIABLES)


PROGRAM = ServerProgram(
    title='vLLM',
    module='areal_jax.app.roles.vllm_server',
    client=VLLM_CLIENT,
    variable='AREAL_JAX_VLLM_PYTHON',
    made='.venv-vllm/bin/python',
    script='launch/vllm_environment.sh',
    build_command=build_command,
)


def main(argv: Sequence[str]) -> int:
    """See ServerProgram.run."""
    return PROGRAM.run(argv)


def serve_engine(config: config_dict.ConfigDict, process: RoleProcess, interrupts: Interrupts) -> int:
    """See ServerProgram.serve_engine."""
    return PROGRAM.serve_engine(config, process)


def plan_server(config: config_dict.ConfigDict, workdir: pathlib.Path) -> list[str]:
    """See ServerProgram.plan_server."""
    return PROGRAM.plan_server(config, workdir)


def find_python() -> str:
    """See ServerProgram.find_python."""
    return PROGRAM.find_python()


def run() -> None:
    """Entry point of `python -m areal_jax.app.roles.vllm_server`."""
    sys.exit(end_command(lambda: main(sys.argv), doing='writing to the registry'))


if __name__ == '__main__':
    run()
