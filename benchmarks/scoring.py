"""Scoring calls of our server against a prefill of the same tokens, SmolLM2-135M in float32.

    python -m benchmarks.scoring --out=benchmarks/results/scoring.json [--cells=answers,engine]

A side sends 64 prompts of 200 random tokens at once. `ours` asks /v1/completions for the log-probs of the prompts
(echo, max_tokens=0, logprobs=1), which is what lm_eval reads. It is compared with

  answers  the same server asked for one greedy token of each prompt: prefill, one step of decoding, the same HTTP
  engine   the engine's prefill alone, in process: no HTTP, no step, no reply. The more demanding of the two

Prompts are never found in a prefix cache: the server's is flushed before every call. CPU seconds cover a side's
whole process tree, including its clients. A scoring call needs all that a prefill does and the head for every token:
for this model 135 million multiplications a token against 106 million, 1.26 times as many with attention.

Sides are processes that have compiled and warmed up; they are asked in turns, and a ratio is taken within each turn.
`ratio_*` are medians, `quartile_*` the upper quartile; `met` as in generation.py, by CPU seconds alone.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.generation import run_cell
from benchmarks.generation_cells import GGUF, SMOLLM2, SMOLLM2_TOKENS, Cell, Program, engine_sizes, save_smollm2
from benchmarks.options import Row, add_engine, make_parser, read_buckets, report, run, show, split_choices
from benchmarks.ratios import Bar
from benchmarks.side_http import PORT
from benchmarks.workload import RequestWorkload

PROMPTS, PROMPT_TOKENS, SLOTS, CONTEXT_TOKENS = 64, 200, 32, 512
BAR = Bar(1.3, False)
CELLS = ('answers', 'engine')


def draw_prompts(options: argparse.Namespace, directory: pathlib.Path) -> tuple[str, int]:
    """(file of the prompts, their tokens)."""
    prompts = 8 if options.small else PROMPTS
    lengths = (PROMPT_TOKENS, PROMPT_TOKENS)
    requests = RequestWorkload(prompts, lengths, 1, 1, 0.0, SMOLLM2_TOKENS, options.seed).draw()
    path = directory / 'prompts.json'
    requests.save(path)
    return str(path), prompts * PROMPT_TOKENS


def our_server(options: argparse.Namespace, requests: str, asks: str) -> Program:
    sizes = engine_sizes(options, SLOTS, CONTEXT_TOKENS, prefill_buckets=read_buckets(options))
    flags: Mapping[str, Any] = sizes | {'prefill_buckets': f'({options.prefill_buckets})'}
    command = [
        sys.executable, '-m', 'areal_jax.main_serve', '--config=configs/default.py', f'--model={GGUF}',
        f'--port={PORT}', *(f'--config.rollout.{name}={value}' for name, value in flags.items()),
    ]  # fmt: skip
    return Program(
        sys.executable, 'benchmarks.side_scoring',
        {'asks': asks, 'command': command, 'requests': requests, 'engine': sizes},
    )  # fmt: skip


def measure(options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        requests, tokens = draw_prompts(options, directory)
        ours = our_server(options, requests, 'scores')
        prefill = dict(ours.arguments) | {'asks': 'prefill', 'model': save_smollm2(directory)}
        others = {
            'answers': our_server(options, requests, 'answers'),
            'engine': Program(sys.executable, 'benchmarks.side_scoring', prefill),
        }
        for cell in options.cells:
            compared = Cell(
                CELLS.index(cell) + 1, cell, ours, {cell: others[cell]}, BAR, model=SMOLLM2, slots=SLOTS,
                lengths=f'{PROMPT_TOKENS} tokens', expect_tokens=tokens,
            )  # fmt: skip
            for entry in run_cell(compared, options.turns):
                rows.append(entry)
                show(entry)
    return rows


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, turns=5)
    add_engine(parser, prefill_buckets='80,160,320,1024')
    parser.add_argument('--cells', default=','.join(CELLS), help='what ours is compared with')
    options = parser.parse_args(arguments)
    options.cells = split_choices('cells', options.cells, CELLS)
    return options


def main(arguments: Sequence[str] | None = None) -> Row:
    options = read_options(arguments)
    return report('scoring', arguments, options, lambda: measure(options))


if __name__ == '__main__':
    run('scoring', main)
