"""Runs one vLLM server of a run: python -m areal_jax.app.roles.vllm_server --workdir=RUN --name=NAME
--publication=DIR [...].

AREAL_JAX_VLLM_PYTHON names the interpreter that has vLLM; without it a clone takes the interpreter of .venv-vllm, which
launch/vllm_environment.sh makes.
"""

from __future__ import annotations

import pathlib
import sys

from absl import flags

from areal_jax.app.process.ending import end_command
from areal_jax.app.roles.server_program import ServerCommand, ServerProgram, name_route_flag
from areal_jax.config.kinds import VLLM_CLIENT
from areal_jax.workers.descendants import Interpreter

_VARIABLES = {
    'VLLM_SERVER_DEV_MODE': '1',  # enables the routes that control it
    'VLLM_CPU_KVCACHE_SPACE': '1',  # GiB
    'HF_HUB_OFFLINE': '1',
    'VLLM_NO_USAGE_STATS': '1',  # it sends nothing anywhere
}


def build_command(python: str, directory: pathlib.Path, port: int, values: flags.FlagValues) -> ServerCommand:
    """Builds the command; log-probs are taken after the temperature, requests and replies are token ids."""
    words = [
        *(python, '-m', 'vllm.entrypoints.openai.api_server', '--model', str(directory), '--served-model-name', 'm'),
        *('--dtype', values.dtype, '--max-model-len', str(values.context_tokens)),
        *('--max-num-seqs', str(values.slots), '--enforce-eager', '--enable-scale-out'),
        *('--tensor-parallel-size', str(values.tensor)),
        *('--logprobs-mode', 'processed_logprobs', '--skip-tokenizer-init'),
        *name_route_flag(values),
        *('--host', values.host, '--port', str(port)),
    ]
    return ServerCommand(words, _VARIABLES)


PROGRAM = ServerProgram(
    module='areal_jax.app.roles.vllm_server',
    client=VLLM_CLIENT,
    interpreter=Interpreter(
        f'rollout.server={VLLM_CLIENT.name!r}',
        'vLLM',
        'AREAL_JAX_VLLM_PYTHON',
        '.venv-vllm/bin/python',
        'launch/vllm_environment.sh',
    ),
    build_command=build_command,
    packages=('vllm', 'vllm-cpu'),
    version='0.32.0',
)
main, find_python, require_version = PROGRAM.run, PROGRAM.find_python, PROGRAM.require_version
serve_engine, plan_server = PROGRAM.serve_engine, PROGRAM.plan_server  # config/kinds.py names them


def run() -> None:
    """Entry point of `python -m areal_jax.app.roles.vllm_server`."""
    sys.exit(end_command(lambda: main(sys.argv), doing='writing to the registry'))


if __name__ == '__main__':
    run()
