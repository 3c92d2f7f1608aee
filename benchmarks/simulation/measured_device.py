"""The roofline prices of a simulation against one H200: python -m benchmarks.simulation.measured_device --json=FILE.

The measured seconds are those of `python -m benchmarks.gpu` (docs/gpu.md), which benchmarks/results/gpu_h200.json
holds, so that this command needs no GPU. Predictions take the shares of the peaks that roofline.Reached has from
others' published engines; nothing is fitted to the device.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from areal_jax.simulation.prices import H200, Reached, Roofline, shape_of, step_overhead_s
from benchmarks.gpu_parts.shapes import SHAPES, decode_case, mean_positions

MEASURED = pathlib.Path(__file__).parents[1] / 'results' / 'gpu_h200.json'


def predict(parts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """{'what', 'measured_s', 'predicted_s', 'error'} of each work; error = predicted / measured - 1."""
    shape, reached = shape_of('Qwen2.5-1.5B', SHAPES['1.5b']), Reached()
    roofline = Roofline(H200, shape, reached, step_overhead_s=step_overhead_s(H200, shape, reached))
    numbers = {name: parts['later'][name]['numbers'] for name in ('train_1.5b', 'decode_64', 'decode_16k')}
    train, rebuild = numbers['train_1.5b'], numbers['decode_64']['swap']
    segments, case = train['case']['segments'], decode_case(64, 2048, tiny=False)
    row = case.prompt_tokens + case.new_tokens - 1
    rows = {
        'decode step, 64 rows of 1,024 positions': (
            numbers['decode_64']['decode']['step_ms'] / 1e3,
            roofline.step_s(case.slots, case.slots * mean_positions(case)),
        ),
        'decode step, 64 rows of 16,240 positions': (
            numbers['decode_16k']['decode']['step_ms'] / 1e3,
            roofline.step_s(64, 64 * mean_positions(decode_case(64, 16384, tiny=False))),
        ),
        'rebuild of 64 rows of 1,535 tokens': (
            rebuild['rebuild_s'],
            roofline.prefill_s(rebuild['rebuilt_tokens'], case.slots * _positions([row])),
        ),
        'update of 16,308 tokens': (
            train['update']['median_s'],
            roofline.train_s(sum(segments), _positions(segments), passes=3) + roofline.optimizer_s(),
        ),
    }
    return [
        {'what': what, 'measured_s': measured, 'predicted_s': predicted, 'error': predicted / measured - 1}
        for what, (measured, predicted) in rows.items()
    ]


def _positions(lengths: list[int]) -> float:
    """Summed over the tokens of sequences of these lengths: how many positions each of them sees."""
    return sum(length * (length + 1) / 2 for length in lengths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--json', type=pathlib.Path)
    options = parser.parse_args()
    rows = predict(json.loads(MEASURED.read_text()))
    for row in rows:
        print(f'{row["what"]:42} {1e3 * row["measured_s"]:9.2f} ms, predicted {1e3 * row["predicted_s"]:9.2f} ms, '
              f'{row["error"]:+.0%}')  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + '\n')


if __name__ == '__main__':
    main()
