"""Mixtures of experts against other ways in JAX, against torch and against transformers.

    python -m benchmarks.moe --torch-python=PYTHON --out=FILE

Parts (--parts=parity,product,torch,decode,generation), by the rows of the table:

  parity   1  tiny Qwen3-MoE, Mixtral and OLMoE against transformers 5.23.0: logits, live routes, gradients
  product  5  CPU of a layer, forward and gradient, at B: a scan over all experts and `ragged_dot` over ours; memory
  torch    6  the same in torch 2.13.0 (`grouped_mm` of transformers 5.23.0) over ours, at A and B
  decode   8  the experts of a decode step, A, one thread: CPU of 1 row over 32 rows, and of other ways over ours
  generation  9  64 requests in 32 slots, 4 layers of A: speed of our engine over transformers' generate

A = 128 experts, 8 a token, width 256, of an expert 128; B = 32, 4, 512, 256; 512 tokens, float32, one thread a side.
PYTHON is the interpreter of an environment with torch and transformers.

Exit code 0: every part held; 1: one did not; 2: one cannot run here. The numbers are written in any case.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.moe_parts.decode import measure_decode
from benchmarks.moe_parts.generation import measure_generation
from benchmarks.moe_parts.parity import measure_parity
from benchmarks.moe_parts.product import measure_against_torch, measure_products
from benchmarks.options import Row, add_engine, make_parser, report, run, split_choices
from benchmarks.parts import Part, judge, measure_part

PARTS = {
    'parity': Part(
        'tiny Qwen3-MoE (all layers, and one of two), Mixtral, OLMoE against transformers 5.23.0, routers drawn: '
        'largest difference of logits over their range; of gradients along forced routes, over their norms; live '
        'routes that differ though the k-th and next score do not lie within 1e-6',
        '1e-5; 1e-4; 0',
        measure_parity,
    ),
    'product': Part(
        'a layer, forward and gradient, 512 tokens, B: CPU of a scan over all experts and of ragged_dot over ours; '
        "ragged_dot's temporary memory over ours", '2x; 8x; 8x', measure_products,
    ),
    'torch': Part(
        'the same in torch 2.13.0 + transformers 5.23.0 (grouped_mm) over ours, A and B, forward and with the '
        'gradient', '1.0x', measure_against_torch,
    ),
    'decode': Part(
        'experts of a decode step, A, one thread a side: CPU of 1 row over that of 32; at 32 rows of a scan over all '
        'experts over ours; of torch 2.13.0 + transformers 5.23.0 over ours, 1 and 32 rows', '0.15; 1.5x; 2x; 1.0x',
        measure_decode,
    ),
    'generation': Part(
        'generation, 4 layers of A, 64 requests in 32 slots, lengths of benchmarks.generation (equal / lognormal), '
        "over transformers' generate", '1.2x; 2.5x', measure_generation,
    ),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> Row:
    parser = make_parser(__doc__, turns=7)
    parser.add_argument('--parts', default=','.join(PARTS))
    parser.add_argument('--torch-python', default='', help='interpreter of an environment with torch and transformers')
    parser.add_argument('--torch-caches', default='dynamic,static', help="of transformers' generate; the better counts")
    parser.add_argument('--torch-threads', default='1,2', help="of transformers' generate; the better counts")
    add_engine(parser, prefill_buckets='80,160,320,1024')
    options = parser.parse_args(arguments)
    names = split_choices('parts', options.parts, PARTS)
    return report('moe', arguments, options, lambda: [measure_part(name, PARTS[name], options) for name in names])


def measure_and_exit() -> None:
    sys.exit(judge(main()['rows']))


if __name__ == '__main__':
    run('moe', measure_and_exit)
