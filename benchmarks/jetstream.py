"""Our engine behind JetStream's orchestrator and gRPC server, against the same engine behind our HTTP server.

    bash launch/jetstream_environment.sh
    .venv-jetstream/bin/python -m benchmarks.jetstream --out=benchmarks/results/jetstream.json

SmolLM2-135M in float32, 32 slots, 32 clients that send their next request when the last one ended: 64 requests, equal
and lognormal lengths as in generation.py. What is compared is tokens a CPU second of the server's processes; the
clients are not counted. JetStream streams every answer, so our server is asked for whole answers and for streams, and
the better one counts. Log-probs and versions of all tokens come with the answers of both.

Prompts are never found in a prefix cache: it is flushed before every call. Both servers run in the environment of this
command. Sides are processes that have compiled and warmed up; they are asked in turns, and a ratio is taken within
each turn. `ratio_*` are medians, `quartile_*` the quartile on the side on which the bar would be missed.
"""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import sys
import tempfile
from collections.abc import Sequence

from areal_jax.config.kinds import JETSTREAM
from areal_jax.errors import UserError
from benchmarks.generation import run_cell
from benchmarks.generation_cells import GGUF, LENGTHS, SMOLLM2, SMOLLM2_TOKENS, Cell, Program, draw_requests
from benchmarks.options import Row, add_engine, make_parser, report, run, show, split_choices
from benchmarks.ratios import Bar
from benchmarks.serving import CLIENTS, http_side, our_server, our_sizes
from benchmarks.side_http import PORT

BAR = Bar(0.8, True)


def jetstream_server(options: argparse.Namespace, requests: str) -> Program:
    sizes = our_sizes(options)
    flags = sizes | {'prefill_buckets': f'({options.prefill_buckets})', 'server': JETSTREAM.name}
    command = [
        sys.executable, '-m', 'areal_jax.main_serve', '--config=configs/default.py', f'--model={GGUF}',
        f'--port={PORT}', *(f'--config.rollout.{name}={value}' for name, value in flags.items()),
    ]  # fmt: skip
    about = {'clients_module': 'benchmarks.grpc_clients', 'engine': sizes}
    return http_side(command, {}, requests, CLIENTS, flush='/FlushCache', **about)


def streaming_server(options: argparse.Namespace, requests: str) -> Program:
    whole = our_server(options, requests, CLIENTS)
    return Program(whole.python, whole.module, {**whole.arguments, 'client_options': {'stream': True}})


HTTP = {'whole': lambda options, requests: our_server(options, requests, CLIENTS), 'streams': streaming_server}


def measure(options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        for lengths in options.lengths:
            requests, about = draw_requests(options, pathlib.Path(directory), lengths, SMOLLM2_TOKENS)
            about['judged'] = ('cpu_s',)
            http = {name: HTTP[name](options, requests) for name in options.http}
            cell = Cell(1, lengths, jetstream_server(options, requests), http, BAR, model=SMOLLM2, **about)
            for entry in run_cell(cell, options.turns):
                rows.append(entry)
                show(entry)
    return rows


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, turns=5)
    add_engine(parser, prefill_buckets='80,160,320,1024')
    parser.add_argument('--lengths', default='equal,lognormal')
    parser.add_argument(
        '--http', default='whole,streams', help='what is asked of our HTTP server; the better one counts'
    )
    options = parser.parse_args(arguments)
    options.http = split_choices('http', options.http, tuple(HTTP))
    options.lengths = split_choices('lengths', options.lengths, tuple(LENGTHS))
    return options


def main(arguments: Sequence[str] | None = None) -> Row:
    options = read_options(arguments)
    if importlib.util.find_spec('jetstream') is None:
        raise UserError(
            f'{sys.executable} has no JetStream: run this with the interpreter of the environment that '
            '`bash launch/jetstream_environment.sh` makes'
        )
    return report('jetstream', arguments, options, lambda: measure(options))


if __name__ == '__main__':
    run('jetstream', main)
