"""What it costs to record routes and to follow them (11), and what a dense model pays for any of it (12)."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from areal_jax.errors import UserError
from areal_jax.formats.gguf import find_package_file, load_gguf
from areal_jax.models.decoder import Decoder
from areal_jax.publication.export import export_hf
from benchmarks.against_torch import GGUF, GROUP_SIZE, GROUPS, MEAN_TOKENS, PROMPT_TOKENS, ROW_LOSS_TOKENS, ROW_TOKENS
from benchmarks.case import make_work, save_work
from benchmarks.generation_cells import Program, draw_requests, our_answers
from benchmarks.moe_parts.generation import MODEL
from benchmarks.moe_parts.train import ask_warm, compare_clock, make_case, make_config, our_step, spread_cpu
from benchmarks.ratios import Bar, Run
from benchmarks.sides import Side
from benchmarks.workload import SIGMA, Workload

MOST_WITH_ROUTES, MOST_OF_DENSE = Bar(1.05, at_least=False), Bar(1.03, at_least=False)


def measure_routes(options: Any) -> dict[str, Any]:
    """Row 11: a train step and generation with routes over without; bytes of a token."""
    config = make_config(options.small)
    with make_case(options) as case:
        sides = {
            'off': Side(sys.executable, 'benchmarks.side_ours', case | our_step()),
            'on': Side(
                sys.executable, 'benchmarks.side_ours', case | our_step(records_routes=True, routes='replay')
            ),
        }  # fmt: skip
        found = {'train_step': ask_warm(sides, options.turns)[0]}
    with tempfile.TemporaryDirectory() as directory:
        model = f'{directory}/model'
        export_hf(model, Decoder(MODEL).init(options.seed), MODEL, dtype='float32')
        requests, _ = draw_requests(options, pathlib.Path(directory), 'lognormal', MODEL.vocab_size)
        programs = {
            'off': our_answers(options, model, requests),
            'on': our_answers(options, model, requests, records_routes=True),
        }
        found['generation'] = ask_warm({name: _start(one) for name, one in programs.items()}, options.turns)[0]
    column, experts = config.routes, config.experts
    assert column.shape is not None
    assert experts is not None
    size = column.blank(1).nbytes
    row = _judge(found, 'on', 'off', MOST_WITH_ROUTES, options.turns)
    row['value']['bytes_a_token'] = size
    return row | {'met': row['met'] and size == config.n_expert_layers * experts.per_token}


def measure_dense(options: Any) -> dict[str, Any]:
    """Row 12: SmolLM2-135M, a train step and generation over those of the checkout `options.before`."""
    if not options.before:
        raise UserError('--before is not set: a checkout of the version to compare with is needed')
    with tempfile.TemporaryDirectory() as directory:
        config, params, _ = load_gguf(find_package_file(GGUF))
        model = f'{directory}/model'
        export_hf(model, params, config, dtype='float32')
        work = Workload(GROUPS, GROUP_SIZE, PROMPT_TOKENS, MEAN_TOKENS, SIGMA, config.vocab_size, options.seed)
        path = save_work(directory, make_work(Decoder(config), params, work))
        rows = {'row_tokens': ROW_TOKENS, 'row_loss_tokens': ROW_LOSS_TOKENS, 'packing': 'shared_prompt'}
        training = {
            'model': model, 'work': path, 'task': 'train', 'decoder': {'layers': 'list', 'remat': 'dots'},
            'settings': rows | {'accumulate': 'scan'}, 'core': max(os.sched_getaffinity(0)),
        }  # fmt: skip
        requests, _ = draw_requests(options, pathlib.Path(directory), 'lognormal', config.vocab_size)
        programs = {
            'train_step': Program(sys.executable, 'benchmarks.side_ours', training),
            'generation': our_answers(options, model, requests),
        }
        found = {
            name: ask_warm({'now': _start(one), 'before': _start(one, options.before)}, options.turns)[0]
            for name, one in programs.items()
        }
    return _judge(found, 'now', 'before', MOST_OF_DENSE, options.turns)


def _start(program: Program, checkout: pathlib.Path | None = None) -> Side:
    return Side(program.python, program.module, program.arguments, checkout)


def _judge(
    found: Mapping[str, Mapping[str, list[Run]]], above: str, below: str, bar: Bar, turns: int
) -> dict[str, Any]:
    ratios = {name: compare_clock(calls, above, below, 'cpu_s') for name, calls in found.items()}
    return {
        'value': {name: ratio.median for name, ratio in ratios.items()},
        'quartile': {name: ratio.quartile for name, ratio in ratios.items()},
        'turns': turns,
        'met': all(map(bar.holds, ratios.values())),
        'wall': {name: compare_clock(calls, above, below, 'wall_s').median for name, calls in found.items()},
        'cpu_s': {name: spread_cpu(calls) for name, calls in found.items()},
        'equal': {name: dataclasses.astuple(_Same.of(calls[above], calls[below])) for name, calls in found.items()},
    }


@dataclasses.dataclass(frozen=True)
class _Same:
    """Of the last calls, what both sides say of their result."""

    above: Any
    below: Any

    @classmethod
    def of(cls, above: list[Run], below: list[Run]) -> _Same:
        kept = lambda runs: {name: value for name, value in runs[-1]['checks'].items() if not name.startswith('part_')}
        return cls(kept(above), kept(below))
