"""Generation of a model with experts by our engine against the generate of transformers, with its `grouped_mm` (9)."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

from areal_jax.errors import UserError
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.models.layer_parts import Experts
from areal_jax.publication.export import export_hf
from benchmarks.generation import run_cell
from benchmarks.generation_cells import Cell, Program, draw_requests, our_answers
from benchmarks.moe_parts.layer_case import SIZES
from benchmarks.ratios import Bar

_A = SIZES['A']
MODEL = ModelConfig(
    vocab_size=512, d_model=_A['d'], n_layers=4, n_heads=4, n_kv_heads=2, head_dim=64, d_ff=_A['width'], rope_theta=1e4,
    rms_eps=1e-6, tie_embeddings=False, family='qwen3_moe', qk_norm=True,
    experts=Experts(_A['experts'], _A['choices'], _A['width']),
)  # fmt: skip
BARS = {'equal': Bar(1.2, at_least=True), 'lognormal': Bar(2.5, at_least=True)}


def measure_generation(options: Any) -> dict[str, Any]:
    """Row 9: speed of ours over theirs in CPU seconds; UserError without `options.torch_python`."""
    if not options.torch_python:
        raise UserError('--torch-python is not set: an interpreter with torch and transformers is needed')
    with tempfile.TemporaryDirectory() as directory:
        cells = {cell.cell: run_cell(cell, options.turns)[0] for cell in _make_cells(options, pathlib.Path(directory))}
    return {
        'value': {name: cell['ratio_cpu'] for name, cell in cells.items()},
        'quartile': {name: cell['quartile_cpu'] for name, cell in cells.items()},
        'wall': {name: cell['ratio_wall'] for name, cell in cells.items()},
        'against': {name: cell['against_cpu'] for name, cell in cells.items()},
        'turns': options.turns,
        'met': all(cell['met'] for cell in cells.values()),
        'calls': {name: cell['calls'] for name, cell in cells.items()},
        'facts': {name: cell['facts'] for name, cell in cells.items()},
    }


def _make_cells(options: Any, directory: pathlib.Path) -> Iterator[Cell]:
    model = str(directory / 'model')
    export_hf(model, Decoder(MODEL).init(options.seed), MODEL, dtype='float32')
    for lengths, bar in BARS.items():
        requests, about = draw_requests(options, directory, lengths, MODEL.vocab_size)
        theirs = {'model': model, 'requests': requests, 'slots': about['slots'], 'attention': 'sdpa'}
        # threads that wait for each other between the products of few rows cost them more than they gain
        ways = [(cache, int(n)) for cache in options.torch_caches.split(',') for n in options.torch_threads.split(',')]
        peers = {
            f'{cache}, threads: {threads}': Program(
                options.torch_python,
                'benchmarks.side_transformers',
                {**theirs, 'cache': cache, 'threads': threads},
            )
            for cache, threads in ways
        }
        about |= {'judged': ('cpu_s',)}
        yield Cell(9, lengths, our_answers(options, model, requests), peers, bar, model='qwen3_moe, 4 of A', **about)
