"""GRPO train step of small Qwen3 models, float32: our learner against Tunix 0.1.7, same weights and tokens.

    python -m benchmarks.against_tunix --tunix_python=OTHER_VENV/bin/python --out=benchmarks/results/against_tunix.json

The other environment needs google-tunix 0.1.7, jax 0.10.2 and flax 0.12.8. A cell is a model with equal or lognormal
lengths; in each, every side is a fresh process on all cores, without a persistent compilation cache, and they are asked
in turn. The first call of each builds the trainer and compiles; the medians are of the calls after it. Both sides take
one optimizer step (AdamW, clipping, learning rate 0) on all answers at once; the gradient norms must agree.

Tokens are the answers' own: trained by both, counted alike. Tunix pads every answer to the longest that may be
generated (its sequence packing is off, see side_tunix.py) and repeats the prompt beside every answer; it computes
logits of prompts and answers and, always, their entropy. It has no reference or old log-probs to compute here (beta 0,
one iteration) and no rollout engine, and its arrays are padded beforehand. Ours packs inside the timed call:
'shared_prompt' has each prompt once in a row, 'ordinary' beside each answer, in a row that holds them all as Tunix's
micro-batch does; or in four micro-batches, whose gradient is the same (the norm is compared). Its decoder is a loop
over layers ('stacked') or a straight program ('list'), as Tunix's is; for the gradient it keeps matrix products and
attention ('dots') or attention alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.publication.export import export_hf
from benchmarks.case import make_work, save_work
from benchmarks.report import write_report
from benchmarks.sides import Side, take_turns
from benchmarks.workload import SIGMA, Workload

ROW_MULTIPLE = 128  # row shapes are multiples of it: what is trained never fills them exactly
MODELS = {'4 layers': (4, 128, 512), '8 layers': (8, 256, 2048)}  # layers, width, vocabulary
GROUPS, GROUP_SIZE, PROMPT_TOKENS, MEAN_TOKENS = 4, 4, 32, 64
LENGTHS = {'equal': 0.0, 'lognormal': SIGMA}
OURS = (
    *('shared_prompt/list/dots/1', 'shared_prompt/stacked/dots/1', 'shared_prompt/stacked/attention/1'),
    *('shared_prompt/stacked/dots/4', 'ordinary/list/dots/1'),
)


def model_config(layers: int, width: int, vocabulary: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocabulary, d_model=width, n_layers=layers, n_heads=width // 32, n_kv_heads=width // 64, head_dim=32,
        d_ff=4 * width, rope_theta=1e6, rms_eps=1e-6, tie_embeddings=False, family='qwen3', qk_norm=True,
    )  # fmt: skip


def tunix_model(c: ModelConfig) -> dict[str, Any]:
    return {
        'num_layers': c.n_layers, 'vocab_size': c.vocab_size, 'embed_dim': c.d_model, 'hidden_dim': c.d_ff,
        'num_heads': c.n_heads, 'head_dim': c.head_dim, 'num_kv_heads': c.n_kv_heads, 'rope_theta': int(c.rope_theta),
        'norm_eps': c.rms_eps, 'use_tied_embedding': c.tie_embeddings,
    }  # fmt: skip


def our_settings(work: Workload, packing: str, microbatches: int) -> dict[str, Any]:
    """Rows that hold a micro-batch's share of the tokens."""
    prompts = work.groups * (1 if packing == 'shared_prompt' else work.group_size)
    tokens = (prompts * work.prompt_tokens + work.answer_tokens) / microbatches
    longest = max(tokens, work.prompt_tokens + work.limit_tokens)
    up = lambda x: math.ceil(x / ROW_MULTIPLE) * ROW_MULTIPLE
    loss_tokens = up(max(work.answer_tokens / microbatches, work.limit_tokens))
    return {'row_tokens': up(longest), 'row_loss_tokens': loss_tokens, 'packing': packing}


def run_cell(options: argparse.Namespace, directory: str, config: ModelConfig, work: Workload) -> dict[str, Any]:
    decoder = Decoder(config)
    params = decoder.init(seed=0)
    export_hf(f'{directory}/model', params, config, dtype='float32')
    case = {'model': f'{directory}/model', 'work': save_work(directory, make_work(decoder, params, work))}
    sides = {
        'tunix': Side(
            options.tunix_python,
            'benchmarks.side_tunix',
            case | {'tunix_model': tunix_model(config), 'microbatches': options.microbatches},
        )
    }
    for name in options.ours.split(','):
        packing, layers, remat, split = name.split('/')
        settings = our_settings(work, packing, int(split) * options.microbatches) | {'accumulate': options.accumulate}
        arguments = case | {'task': 'train', 'decoder': {'layers': layers, 'remat': remat}, 'settings': settings}
        sides[f'ours, {name}'] = Side(sys.executable, 'benchmarks.side_ours', arguments)
    try:
        results = take_turns(sides, options.repetitions)
    finally:
        for side in sides.values():
            side.close()
    require_same_work(results, options.microbatches)
    for result in results.values():
        for clock in ('wall_s', 'cpu_s'):
            result[f'tokens_per_{clock}'] = work.answer_tokens / result[clock]
    padded = work.groups * work.group_size * (work.prompt_tokens + work.limit_tokens)
    return {
        'ratios': {name: compare(results['tunix'], ours) for name, ours in results.items() if name != 'tunix'},
        'sides': results,
        'trained_tokens': work.answer_tokens,
        'tokens_of_tunix_with_padding': padded,
        'work': dataclasses.asdict(work),
    }


def compare(tunix: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, float]:
    """Above 1, ours is better in speed; below 1, ours is better in time to start and in memory."""
    speed = {f'ours_over_tunix_{k}': ours[k] / tunix[k] for k in ('tokens_per_cpu_s', 'tokens_per_wall_s')}
    costs = ('start_cpu_s', 'start_wall_s', 'peak_bytes', 'added_bytes')
    return speed | {f'ours_over_tunix_{key}': ours[key] / tunix[key] for key in costs}


def require_same_work(results: Mapping[str, Mapping[str, Any]], microbatches: int) -> None:
    """Tunix reports a norm per micro-batch, so with several there is nothing to compare."""
    norms = {name: result['checks']['update/grad_norm'] for name, result in results.items()}
    if microbatches == 1 and max(norms.values()) > 1.001 * min(norms.values()):
        raise RuntimeError(f'the sides differ in their gradient norms, so they did different work: {norms}')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--tunix_python', required=True)
    parser.add_argument('--out', type=pathlib.Path)
    parser.add_argument('--models', default=','.join(MODELS))
    parser.add_argument('--lengths', default=','.join(LENGTHS))
    parser.add_argument(
        '--ours', default=','.join(OURS), help='packing / layers / remat / our micro-batches to one of theirs'
    )
    parser.add_argument('--accumulate', default='scan', help='scan or dispatch: how our learner runs micro-batches')
    parser.add_argument('--microbatches', type=int, default=1, help='of the update, on both sides')
    parser.add_argument('--repetitions', type=int, default=7, help='timed calls of each side')
    options = parser.parse_args()
    cells = {}
    for name in options.models.split(','):
        for lengths in options.lengths.split(','):
            config = model_config(*MODELS[name])
            work = Workload(GROUPS, GROUP_SIZE, PROMPT_TOKENS, MEAN_TOKENS, LENGTHS[lengths], config.vocab_size)
            with tempfile.TemporaryDirectory() as directory:
                cells[f'{name}, {lengths}'] = run_cell(options, directory, config, work)
            print(f'{name}, {lengths}', json.dumps(cells[f'{name}, {lengths}']['ratios']), file=sys.stderr, flush=True)
    numbers = {
        'ours_over_tunix': {name: cell['ratios'] for name, cell in cells.items()},
        'cells': cells,
        'models': {name: dataclasses.asdict(model_config(*MODELS[name])) for name in options.models.split(',')},
        'options': {k: v for k, v in vars(options).items() if k not in ('out', 'tunix_python')},
    }  # fmt: skip
    write_report(numbers, options.out)


if __name__ == '__main__':
    main()
