"""Mixtures of experts against other ways in JAX, against torch and against transformers.

    python -m benchmarks.moe --torch-python=PYTHON --out=FILE

Parts (--parts=NAME,NAME), by the rows of the table:

  parity   1  tiny Qwen3-MoE, Mixtral and OLMoE against transformers 5.23.0: logits, live routes, gradients
  exact    2  log-probs of an engine against a learner's pass, same weights, recorded experts followed, float32
  rounded  3  the same with an engine in bfloat16, without and with following
  foreign  4  the same with an engine whose experts are drawn, float32
  product  5  CPU of a layer, forward and gradient, at B: a scan over all experts and `ragged_dot` over ours; memory
  torch    6  the same in torch 2.13.0 (`grouped_mm` of transformers 5.23.0) over ours, at A and B
  train    7  a train step of 4 layers of A: torch, padded rows sorted by length, over ours
  decode   8  the experts of a decode step, A, one thread: CPU of 1 row over 32 rows, and of other ways over ours
  generation  9  64 requests in 32 slots, 4 layers of A: speed of our engine over transformers' generate
  mesh    10  a learner of two layers of A over eight virtual devices against one: loss, gradient of each leaf
  routes  11  the same step, and generation, with routes recorded and followed over off; bytes of a token
  dense   12  SmolLM2-135M: a train step and generation over those of the checkout --before

A = 128 experts, 8 a token, width 256, of an expert 128; B = 32, 4, 512, 256; 512 tokens, float32, one thread a side.
PYTHON is the interpreter of an environment with torch and transformers.

Exit code 0: every part held; 1: one did not; 2: one cannot run here. The numbers are written in any case.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence

from benchmarks.moe_parts.decode import measure_decode
from benchmarks.moe_parts.generation import measure_generation
from benchmarks.moe_parts.mesh import measure_mesh
from benchmarks.moe_parts.parity import measure_parity
from benchmarks.moe_parts.product import measure_against_torch, measure_products
from benchmarks.moe_parts.replay import measure_exact, measure_foreign, measure_rounded
from benchmarks.moe_parts.routes import measure_dense, measure_routes
from benchmarks.moe_parts.train import measure_training
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
    'exact': Part(
        'log-probs of an engine against a learner pass with the recorded experts: 4 layers of (32, 4, 256, 128), '
        'float32, same weights, 6 groups of 4 answers of 64 tokens, packed, interrupted, preempted: largest difference',
        '1e-5', measure_exact,
    ),
    'rounded': Part(
        'the same with an engine in bfloat16: live sets that differ; p99 of the difference and k3, without over with '
        'following', '> 0; 4x; 8x', measure_rounded,
    ),
    'foreign': Part(
        'the same, float32, with an engine whose experts are drawn: largest difference with following; mean without',
        '1e-5; > 0.1', measure_foreign,
    ),
    'product': Part(
        'a layer, forward and gradient, 512 tokens, B: CPU of a scan over all experts and of ragged_dot over ours; '
        "ragged_dot's temporary memory over ours", '2x; 8x; 8x', measure_products,
    ),
    'torch': Part(
        'the same in torch 2.13.0 + transformers 5.23.0 (grouped_mm) over ours, A and B, forward and with the '
        'gradient', '1.0x', measure_against_torch,
    ),
    'train': Part(
        'a train step, 4 layers of A, 4 groups of 8 answers, prompts 32, lognormal answers of mean 64, cap 256: CPU of '
        'torch, padded, sorted by length, grouped_mm, over ours', '1.3x', measure_training,
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
    'mesh': Part(
        '8 virtual devices (expert 4 x fsdp 2; expert 2 x tensor 2 x data 2) against one, an update of two layers of '
        'A: difference of the loss over the loss; of the gradient of each leaf over its norm, the largest',
        '1e-5; 1e-4', measure_mesh,
    ),
    'routes': Part(
        'routes recorded and followed over off: bytes a token; CPU of generation (lognormal) and of the train step',
        'MoE layers x k; <= 1.05x; <= 1.05x', measure_routes,
    ),
    'dense': Part(
        'SmolLM2-135M, float32: CPU of a train step and of generation over those of a version before', '<= 1.03x',
        measure_dense,
    ),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> Row:
    parser = make_parser(__doc__, turns=7)
    parser.add_argument('--parts', default=','.join(PARTS))
    parser.add_argument('--before', type=pathlib.Path, help='checkout that dense models are compared with')
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
