"""CPU seconds of a train step of a model with experts: ours against torch (7), and what routes.py asks for.

Sides are processes on one core each, asked in turns; the first call of each, which compiles, is not counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from areal_jax.errors import UserError
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.models.layer_parts import Experts
from areal_jax.publication.export import export_hf
from benchmarks.case import make_work, save_work
from benchmarks.moe_parts.layer_case import SIZES
from benchmarks.ratios import Bar, Ratio, spread
from benchmarks.sides import Run, Side, ask_in_turns
from benchmarks.workload import SIGMA, Workload

OVER_TORCH = Bar(1.3, at_least=True)
GROUPS, GROUP_SIZE, PROMPT, MEAN, CAP = 4, 8, 32, 64, 256
ROW_TOKENS, ROW_LOSS_TOKENS, ROWS_OF_TORCH = 1280, 1152, 8  # a micro-batch has about as many tokens on either side
_SAME_NORM = 1.01


@dataclasses.dataclass(frozen=True)
class CappedWorkload(Workload):
    """Lengths up to CAP."""

    @property
    def limit_tokens(self) -> int:
        return CAP


def make_config(small: bool) -> ModelConfig:
    """4 layers of A, and a vocabulary of 2,048."""
    sizes = SIZES['small' if small else 'A']
    return ModelConfig(
        vocab_size=2048, d_model=sizes['d'], n_layers=4, n_heads=4, n_kv_heads=2, head_dim=64, d_ff=256,
        rope_theta=1e4, family='qwen3_moe', qk_norm=True, tie_embeddings=False,
        experts=Experts(sizes['experts'], sizes['choices'], sizes['width']),
    )  # fmt: skip


def measure_training(options: Any) -> dict[str, Any]:
    """Row 7: padded rows sorted by length in torch, with grouped_mm of transformers, over packed rows of ours."""
    if not options.torch_python:
        raise UserError('--torch-python is not set: an interpreter with torch and transformers is needed')
    with make_case(options) as case:
        ours = Side(sys.executable, 'benchmarks.side_ours', case | our_step())
        order = {'order': 'by length', 'rows_per_microbatch': ROWS_OF_TORCH, 'experts': 'grouped_mm'}
        theirs = Side(options.torch_python, 'benchmarks.side_torch', case | order)
        calls, facts = ask_warm({'ours': ours, 'torch': theirs}, options.turns)
    norms = {name: of[-1]['checks']['update/grad_norm'] for name, of in calls.items()}
    if max(norms.values()) > _SAME_NORM * min(norms.values()):
        raise RuntimeError(f'the sides differ in their gradient norms, so they did different work: {norms}')
    found = compare_clock(calls, 'torch', 'ours', 'cpu_s')
    return {
        'value': found.median, 'quartile': found.quartile, 'turns': options.turns, 'met': OVER_TORCH.holds(found),
        'wall': compare_clock(calls, 'torch', 'ours', 'wall_s').median, 'cpu_s': spread_cpu(calls),
        'versions': facts['torch'].get('versions'),
    }  # fmt: skip


def our_step(**settings: Any) -> dict[str, Any]:
    """Arguments of our side beside the case."""
    rows = {'row_tokens': ROW_TOKENS, 'row_loss_tokens': ROW_LOSS_TOKENS, 'packing': 'shared_prompt'}
    return {
        'decoder': {'layers': 'list', 'remat': 'dots'},
        'settings': rows | {'accumulate': 'dispatch', 'max_microbatches': 4} | settings,
    }


@contextlib.contextmanager
def make_case(options: Any) -> Iterator[dict[str, Any]]:
    """What both sides load."""
    config = make_config(options.small)
    params = Decoder(config).init(options.seed)
    work = CappedWorkload(GROUPS, GROUP_SIZE, PROMPT, 16 if options.small else MEAN, SIGMA, config.vocab_size)
    with tempfile.TemporaryDirectory() as directory:
        export_hf(f'{directory}/model', params, config, dtype='float32')
        path = save_work(directory, make_work(Decoder(config), params, work))
        core = max(os.sched_getaffinity(0))
        yield {'model': f'{directory}/model', 'work': path, 'task': 'train', 'core': core}


def ask_warm(sides: Mapping[str, Side], turns: int) -> tuple[dict[str, list[Run]], dict[str, Run]]:
    """(calls in turns, facts) of sides that have compiled."""
    with contextlib.ExitStack() as stack:
        running = {name: stack.enter_context(side) for name, side in sides.items()}
        for side in running.values():
            side.call()  # compiles
        return ask_in_turns(running, turns), {name: side.facts() for name, side in running.items()}


def compare_clock(calls: Mapping[str, list[Run]], above: str, below: str, clock: str) -> Ratio:
    """One side over another, with the quartile on the side on which the bar would be missed."""
    found = spread([a[clock] / b[clock] for a, b in zip(calls[above], calls[below], strict=True)])
    return Ratio(found['median'], found.get('lower' if above == 'torch' else 'upper', found['median']))


def spread_cpu(calls: Mapping[str, list[Run]]) -> dict[str, dict[str, float]]:
    """CPU seconds of a call of each side."""
    return {name: spread([call['cpu_s'] for call in of]) for name, of in calls.items()}
