"""Runs one SGLang server of a run: python -m areal_jax.app.roles.sglang_server --workdir=RUN --name=NAME
--publication=DIR [...].

AREAL_JAX_SGLANG_PYTHON names the interpreter that has SGLang; without it a clone takes the interpreter of .venv-sglang,
which launch/sglang_environment.sh makes. SGLang serves on the GPU that its torch sees, else on the CPU.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

from absl import flags

from areal_jax.app.process.ending import end_command
from areal_jax.app.roles.server_program import ServerCommand, ServerProgram, keep_environment, name_route_flag
from areal_jax.config.kinds import SGLANG_CLIENT
from areal_jax.errors import UserError
from areal_jax.workers.descendants import Interpreter

# SGLang refuses prompts longer than its context - 6 tokens, and cuts answers off 2 tokens below its context
_SPARE_TOKENS = 8
_VARIABLES = {
    'SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN': '1',  # the spare tokens may exceed the model's own context
    'HF_HUB_OFFLINE': '1',
}
_OF_CPU = {'SGLANG_USE_CPU_ENGINE': '1'}  # forces the CPU even if there is a GPU
_HAS_GPU = 'import sys, torch; sys.exit(not torch.cuda.is_available())'
_TORCH_S = 120.0


def build_command(python: str, directory: pathlib.Path, port: int, values: flags.FlagValues) -> ServerCommand:
    """Builds the command; requests and replies are token ids. Raises UserError for an interpreter without torch."""
    context, on_gpu = values.context_tokens + _SPARE_TOKENS, has_gpu(python)
    running = values.slots + 1  # + 1 for the health check's token, next to the answers
    words = [
        *(python, '-m', 'sglang.launch_server', '--model-path', str(directory), '--served-model-name', 'm'),
        *('--dtype', values.dtype, '--context-length', str(context), '--max-running-requests', str(running)),
        *('--tp-size', str(values.tensor), '--skip-tokenizer-init', '--skip-server-warmup', '--disable-radix-cache'),
        *([] if on_gpu else name_cpu_flags(running * context)),
        *name_route_flag(values),
        *('--host', values.host, '--port', str(port)),
    ]
    return ServerCommand(words, _VARIABLES if on_gpu else _VARIABLES | _OF_CPU)


def name_cpu_flags(cache_tokens: int) -> list[str]:
    """Returns the flags for a CPU without SGLang's kernels: attention and sampling run in torch."""
    return [
        *('--device', 'cpu', '--attention-backend', 'torch_native', '--sampling-backend', 'pytorch'),
        *('--grammar-backend', 'none', '--disable-overlap-schedule', '--disable-cuda-graph', '--sleep-on-idle'),
        *('--mem-fraction-static', '0.1', '--max-total-tokens', str(cache_tokens)),
    ]


def has_gpu(python: str) -> bool:
    """Whether the torch of an interpreter sees a GPU; raises UserError if it has no torch."""
    done = subprocess.run(
        [python, '-c', _HAS_GPU], env=dict(keep_environment(os.environ)), stderr=subprocess.PIPE, text=True,
        timeout=_TORCH_S, check=False,
    )  # fmt: skip
    if done.returncode and done.stderr:
        raise UserError(
            f'{python} cannot import torch ({done.stderr.strip().splitlines()[-1]}): name an interpreter with SGLang '
            f'in {PROGRAM.interpreter.variable}'
        )
    return not done.returncode


PROGRAM = ServerProgram(
    module='areal_jax.app.roles.sglang_server',
    client=SGLANG_CLIENT,
    interpreter=Interpreter(
        f'rollout.server={SGLANG_CLIENT.name!r}',
        'SGLang',
        'AREAL_JAX_SGLANG_PYTHON',
        '.venv-sglang/bin/python',
        'launch/sglang_environment.sh',
    ),
    build_command=build_command,
    packages=('sglang',),
    version='0.5.23',
)
main, find_python, require_version = PROGRAM.run, PROGRAM.find_python, PROGRAM.require_version
serve_engine, plan_server = PROGRAM.serve_engine, PROGRAM.plan_server  # config/kinds.py names them


def run() -> None:
    """Entry point of `python -m areal_jax.app.roles.sglang_server`."""
    sys.exit(end_command(lambda: main(sys.argv), doing='writing to the registry'))


if __name__ == '__main__':
    run()
