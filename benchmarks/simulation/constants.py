"""Every constant with which published rows are simulated, with its source.

All of them were chosen before any row of published_rows.py was simulated with this program, on 2026-11-27. They are
peaks of chips, shares of peaks that others have published of their engines and trainers, and published lengths; where
nothing is published, an assumption that says so. No time or rate of a row was used to choose one, with one exception:
the mean length of the answers of arXiv 2505.24298 is not published, and follows from its times and rates together. A
prototype with the same shares of the peaks (0.6, 0.5, 0.40) had made a row of that paper about twice too fast before
they were written down here; that is no reason to change one. configs/simulate/sixteen.py, whose sizes are an eighth of
the first row of Table 1, had been run for 2 to 6 updates while the simulator was written, to see that it works; no
constant was changed after it.

A constant that is changed later is listed in CHANGES, with the date and the results before and after.

    python -m benchmarks.simulation.constants     prints the table
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Generic, TypeVar

from areal_jax.simulation.planner.advice import PUBLISHED
from areal_jax.simulation.prices import (
    ASSUMED_NIC_BYTES_S,
    BATCH_ONE,
    CHIPS,
    MEMORY_SHARE,
    OPTIMIZER_BYTES,
    SHAPES,
    WEIGHT_BYTES,
)

DATE = '2026-11-27'
_Value = TypeVar('_Value', int, float, str)


@dataclasses.dataclass(frozen=True)
class Constant(Generic[_Value]):
    """A number, or a distribution as `lengths.parse_lengths` reads it."""

    name: str
    value: _Value
    unit: str
    source: str  # a publication, or 'assumption: ...'
    low: float | None = None  # the range that is published, for intervals of predictions
    high: float | None = None

    @property
    def is_assumed(self) -> bool:
        return self.source.startswith('assumption')


@dataclasses.dataclass(frozen=True)
class Change:
    """A constant that was changed after a row had been simulated."""

    date: str
    name: str
    before: str
    after: str
    reason: str
    results: str  # of the rows that it changes, before and after
    digest: str  # of all constants, after it


CHANGES: tuple[Change, ...] = (
    Change(
        '2026-11-28', 'Snowball shape', 'none: the nine wall times of marin were not simulated', 'an assumption',
        'a published row without an error says nothing', 'no other row uses it', 'df33c0275d57',
    ),
    Change(
        '2026-12-01', 'shapes', 'no windows', 'window and bytes in layers with a window, 0 for every shape here',
        'layers with a window hold less of the cache', 'no row has such a model: equal', 'caa4845a7b42',
    ),
    Change(
        '2026-12-01', 'shapes', 'no states', 'bytes of states and arithmetic of their rule, 0 for every shape here',
        'delta nets have a state in place of keys and values', 'no row has such a model: equal', '85a00f471f6e',
    ),
    Change(
        '2026-12-02', 'shapes', 'no latents', 'width of heads over latents, 0 for every shape here',
        'engines attend over latents, the learner over keys and values', 'no row has such a model: equal',
        'b55e03a12871',
    ),
)  # fmt: skip

# What engines and trainers reach.

BANDWIDTH = Constant(
    'bandwidth',
    0.6,
    'of the peak, decoding',
    'low end of what served engines are said to reach, 0.60 to 0.85',
    *PUBLISHED['bandwidth'].bounds,
)
PREFILL = Constant(
    'prefill',
    0.5,
    'of the peak flops',
    'low end; MaxText: 0.50 in training on 8 H100; TPU ragged attention: 0.73',
    *PUBLISHED['prefill'].bounds,
)
MFU = Constant(
    'mfu',
    0.40,
    'of the peak flops, training',
    'arXiv 2505.24298, figure 6a: 0.39 to 0.46 on H800s, packed',
    *PUBLISHED['mfu'].bounds,
)
BATCH_ONE_SHARE = Constant(
    'batch one', BATCH_ONE, 'of the bandwidth, one row of a model of 8 billion', 'arXiv 2605.30571: 0.27 eager, '
    'times 1.26 with graphs; what a step takes beyond its bytes follows, by layers (roofline.step_overhead_s)',
)  # fmt: skip
PASSES = Constant(
    'passes', 4.0, 'forward passes of a trained token', '3 for forward and backward, 1 for proximal log-probs: 6 P rule'
)
OPTIMIZER = Constant(
    'optimizer',
    OPTIMIZER_BYTES,
    'bytes of a parameter, each step',
    'assumption: Adam in float32, state cut over devices',
)
UPDATE_S = Constant(
    'update_s', 0.0, 's an update beside flops and bytes', 'assumption: nothing is published; what real trainers take '
    'for data, saving and evaluation is missing from the simulation, which is too fast by it',
)  # fmt: skip

# Publication.

WEIGHTS = Constant('weights', WEIGHT_BYTES, 'bytes of a weight that is decoded with or sent', 'arXiv 2505.24298: fp16')
LOAD_S = Constant(
    'load_s', 2.0, 's of a publication beside its bytes', 'published of whole ones: 2 s (Qwen3-235B), 2.11 s (0.6B on '
    'TPU), a pause of 1.6 s (67B, marin)', *PUBLISHED['load_s'].bounds,
)  # fmt: skip
SWITCH_S = Constant(
    'switch_s', 0.0, 's to change between generating and training on the same devices', 'assumption: free, which '
    'favours the synchronous arms',
)  # fmt: skip
NIC = Constant(
    'nic', ASSUMED_NIC_BYTES_S, 'bytes/s of a chip whose network is not published', 'assumption: as the H800 nodes of '
    'arXiv 2505.24298',
)  # fmt: skip

# Engines.

MEMORY = Constant('memory', MEMORY_SHARE, 'of the memory, for weights and KV cache', 'assumption: default of vLLM')
MOST_SLOTS = Constant('slots', 256, 'answers an engine decodes at once, or as many as fit', 'assumption')
WEIGHTS_SHARE = Constant(
    'weights share', 0.25, 'of an engine\'s memory at most: sets its tensor parallelism, a power of two', 'assumption'
)  # fmt: skip
DECODE_STEPS = Constant(
    'decode_steps', 16, 'tokens between which weights can be swapped', 'assumption: a swap waits for 16 steps at most'
)
PREFILL_TOKENS = Constant('prefill_tokens', 16_384, 'tokens of a packed prefill at most', 'assumption')
ADMISSION = Constant('admission', 'by need', 'groups that run', 'assumption: as many as fill the slots under the gate')

# Lengths and rewards.

PROMPT = Constant('prompt', 'constant(512)', 'tokens', 'assumption: half of the limit of arXiv 2505.24298, 1,024')
R1_LENGTHS = Constant(
    'R1 lengths', 'lognormal(9000, 0.75)', 'tokens, before the cap', 'assumption: rates and times of arXiv 2505.24298 '
    'give 9.3 to 9.7 thousand a trained answer; sigma is a guess, 0.6 to 0.75; code and larger models as this one',
    *PUBLISHED['sigma'].bounds,
)  # fmt: skip
R1_LENGTHS_8K = Constant(
    'R1 lengths at 8k', 'lognormal(5750, 0.75)', 'tokens, before the cap of 7,168', 'DeepScaleR, 8k stage: 5.5 to 3.5 '
    'thousand; mean 4,500 after the cap is the middle',
)  # fmt: skip
SNOWBALL_LENGTHS = Constant(
    'Snowball lengths', 'lognormal(1185.05, 0.93)', 'tokens, before the cap', 'marin, issue 8936: 14.6% longer than '
    '2,048 and 3.6% longer than 4,096; median 769',
)  # fmt: skip
SNOWBALL_SHAPE = Constant(
    'Snowball shape', '40 layers of width 2048, 6 of 351 experts of width 768', 'a decoder of Qwen3-MoE\'s form',
    'assumption: the shape is not published; these counts give the 67 billion parameters and the 2 billion active ones '
    'that are, without a vocabulary',
)  # fmt: skip
SNOWBALL_FIELDS: dict[str, str | int] = {  # of the section model
    'model.family': 'qwen3_moe', 'model.n_layers': 40, 'model.d_model': 2048, 'model.n_heads': 32,
    'model.n_kv_heads': 4, 'model.head_dim': 128, 'model.experts': 351, 'model.experts_per_token': 6,
    'model.d_expert': 768,
}  # fmt: skip
GRPO_GROUP = Constant(
    'group of Qwen3-8B GRPO', 8, 'answers', 'assumption: not published; sigma is the one whose tail is the printed one'
)
GROUP_SHARE = Constant(
    'group_share', 0.0, 'of the variance of log L, common to a group', 'assumption: nothing is published', 0.0, 0.5
)
MATH_REWARD = Constant('math reward', 'constant(0.005)', 's', 'string match: milliseconds')
CODE_REWARD = Constant(
    'code reward', 'exponential(2)', 's, all in parallel, at most 10', 'assumption: running tests takes seconds, their '
    'distribution is unknown',
)  # fmt: skip

# How a run is simulated.

SCALE = Constant(
    'scale', 8, 'devices, groups and bounds of the row are divided by it', 'assumption: 4 is run once to compare'
)
WARM_UP = Constant(
    'warm-up',
    3.0,
    'times (open answers / answers of an update) updates, at least 5',
    'assumption: shorter is transient',
)
UPDATES = Constant('updates', 16, 'measured', 'assumption')
SEEDS = Constant('seeds', 3, 'runs a row', 'assumption')

ALL: tuple[Constant[int] | Constant[float] | Constant[str], ...] = (
    *(BANDWIDTH, PREFILL, MFU, BATCH_ONE_SHARE, PASSES, OPTIMIZER, UPDATE_S, WEIGHTS, LOAD_S, SWITCH_S, NIC),
    *(MEMORY, MOST_SLOTS, WEIGHTS_SHARE, DECODE_STEPS, PREFILL_TOKENS, ADMISSION, PROMPT, R1_LENGTHS, R1_LENGTHS_8K),
    *(SNOWBALL_LENGTHS, SNOWBALL_SHAPE, GRPO_GROUP, GROUP_SHARE, MATH_REWARD, CODE_REWARD),
    *(SCALE, WARM_UP, UPDATES, SEEDS),
)


def digest() -> str:
    """Of all values, and of the chips and models that simulations name: stands beside every result."""
    values = [(constant.name, constant.value) for constant in ALL]
    described = json.dumps([values, *(dataclasses.asdict(one) for one in (*CHIPS, *SHAPES))])
    return hashlib.sha256(described.encode()).hexdigest()[:12]


def table() -> str:
    """Markdown."""
    rows = ['| constant | value | unit | published range | source |', '|---|---|---|---|---|']
    for constant in ALL:
        interval = '' if constant.low is None else f'{constant.low:g} to {constant.high:g}'
        value = constant.value if isinstance(constant.value, str) else f'{constant.value:.4g}'
        rows.append(f'| {constant.name} | {value} | {constant.unit} | {interval} | {constant.source} |')
    return '\n'.join(rows)


if __name__ == '__main__':
    print(f'{table()}\n\n{DATE}, digest {digest()}')
