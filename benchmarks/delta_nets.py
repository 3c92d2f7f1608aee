"""What gated delta nets cost the learner: a train step over a dense model of as many operations, and of many answers.

    python -m benchmarks.delta_nets --out=benchmarks/results/delta_nets.json

A model of Qwen3.5-0.8B's widths, 4 layers (3 of delta nets, 1 of attention), a vocabulary of 4,096, float32, AdamW.

- step: one update of one packed row of 2,048 tokens (a prompt of 1,024 and 16 answers of 64), over the same update of a
  dense model of 4 layers, whose MLP is as wide as it takes for the same number of operations. Bar: at most 1.5.
- answers: the gradient of that row, over the gradient of a row with the same prompt and one answer of 1,024. Bar: 1.1.

The sides take turns in this process, a call each; ratios are of the same turn, in CPU and wall seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.learning.forward import forward
from areal_jax.learning.packed_rows import decoder_cost, visible_pairs
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig, default_kinds
from areal_jax.models.layer_parts import DeltaNet
from benchmarks.case import make_groups, make_work
from benchmarks.objectives import DEFAULT, Size, make_learner, make_objective, timed
from benchmarks.options import Row, make_parser, report, run, show
from benchmarks.ratios import CLOCKS, Bar, Run, ratio
from benchmarks.workload import Workload

STEP, ANSWERS = Bar(1.5, at_least=False), Bar(1.1, at_least=False)
HYBRID = 'qwen3_5_text'


def make_hybrid(*, small: bool) -> ModelConfig:
    width, head = (64, 16) if small else (1024, 256)
    return ModelConfig(
        vocab_size=4096, d_model=width, n_layers=4, n_heads=8, n_kv_heads=2, head_dim=head, d_ff=7 * width // 2,
        rope_theta=1e7, family=HYBRID, kinds=default_kinds(HYBRID, 4, 0), delta=DeltaNet(16, 16, head // 2, head // 2),
        gated_attention=True, qk_norm=True, centred_norms=True, rotary_dim=head // 4,
    )  # fmt: skip


def make_dense(hybrid: ModelConfig, tokens: int) -> ModelConfig:
    """Qwen3 of the same width, heads and layers, with an MLP that makes up for what it lacks."""
    dense = ModelConfig(
        vocab_size=hybrid.vocab_size, d_model=hybrid.d_model, n_layers=hybrid.n_layers, n_heads=hybrid.n_heads,
        n_kv_heads=hybrid.n_kv_heads, head_dim=hybrid.head_dim, d_ff=hybrid.d_ff, rope_theta=hybrid.rope_theta,
        family='qwen3', qk_norm=True,
    )  # fmt: skip
    missing = operations(hybrid, tokens) - operations(dense, tokens)
    wider = missing / tokens / (6 * 3 * dense.d_model * dense.n_layers)
    return dataclasses.replace(dense, d_ff=dense.d_ff + round(wider / 8) * 8)


def operations(config: ModelConfig, tokens: int) -> float:
    """Of a step on a row that is one sequence."""
    cost = decoder_cost(config)
    return cost.per_token * tokens + cost.per_pair * visible_pairs(tokens)


def measure_step(options: argparse.Namespace) -> Row:
    prompt, answer = (64, 4) if options.small else (1024, 64)
    work = Workload(1, 16, prompt, answer, 0.0, 4096, options.seed)
    tokens = work.groups * work.prompt_tokens + work.answer_tokens
    hybrid = make_hybrid(small=options.small)
    sides: dict[str, Callable[[], Run]] = {}
    for name, config in (('hybrid', hybrid), ('dense', make_dense(hybrid, tokens))):
        size, decoder = Size(config, work, row_tokens=tokens), Decoder(config)
        params = decoder.init(seed=0)
        groups = make_groups(make_work(decoder, params, work))
        learner = make_learner(size, decoder, params, make_objective(DEFAULT))
        sides[name] = lambda learner=learner, groups=groups: timed(learner, groups, tokens)  # type: ignore[misc]
    facts = {'d_ff of the dense model': config.d_ff, 'operations': operations(hybrid, tokens)}
    return compare('step', sides, STEP, options.turns) | facts


def measure_answers(options: argparse.Namespace) -> Row:
    prompt, answers = (64, 4) if options.small else (1024, 16)
    config = make_hybrid(small=options.small)
    decoder = Decoder(config)
    params = decoder.init(seed=0)
    gradient = jax.jit(jax.grad(lambda params, rows: jnp.sum(forward(decoder, params, rows, 1.0)[0])))
    sides: dict[str, Callable[[], Run]] = {}
    for name, count in ((f'{answers} answers', answers), ('one answer', 1)):
        rows = make_rows(prompt, count, options.seed)
        sides[name] = lambda rows=rows: timed_gradient(lambda: gradient(params, rows), 2 * prompt)  # type: ignore[misc]
    return compare('answers', sides, ANSWERS, options.turns)


def make_rows(prompt: int, answers: int, seed: int) -> dict[str, jax.Array]:
    """A row with a prompt and answers that have as many tokens in all; every token is a target."""
    rng = np.random.default_rng(seed)
    lengths = [prompt, *[prompt // answers] * answers]
    starts = [0, *[prompt] * answers]
    of_segment = lambda values: np.repeat(values, lengths)
    rows = {
        'tokens': rng.integers(0, 4096, 2 * prompt),
        'positions': np.concatenate([np.arange(n) + first for n, first in zip(lengths, starts, strict=True)]),
        'segment_ids': of_segment(np.arange(1, answers + 2)),
        'parent_ids': of_segment(np.ones(answers + 1, int)),
        'sources': np.arange(2 * prompt),
        'targets': rng.integers(0, 4096, 2 * prompt),
    }
    return {name: jnp.asarray(values, jnp.int32)[None] for name, values in rows.items()}


def timed_gradient(call: Callable[[], object], tokens: int) -> Run:
    cpu, wall = time.process_time(), time.monotonic()
    jax.block_until_ready(call())
    return {
        'cpu_s': time.process_time() - cpu,
        'wall_s': time.monotonic() - wall,
        'checks': {'tokens': tokens},
    }


def compare(name: str, sides: dict[str, Callable[[], Run]], bar: Bar, turns: int) -> Row:
    """The first side's cost over the second's."""
    for call in sides.values():
        call()  # compiles
    calls: dict[str, list[Run]] = {side: [] for side in sides}
    for _ in range(turns):
        for side, call in sides.items():
            calls[side].append(call())
    row: Row = {'row': name, 'bar': bar.value, 'turns': turns}
    ours, theirs = calls.values()
    for clock in CLOCKS:
        found = ratio(ours, theirs, clock, bar)
        row |= {f'ratio_{clock[:-2]}': found.median, f'quartile_{clock[:-2]}': found.quartile}
    return row | {'met': bar.holds(ratio(ours, theirs, 'cpu_s', bar)), 'calls': calls}


def measure(options: argparse.Namespace) -> list[Row]:
    def rows() -> Iterator[Row]:
        yield measure_step(options)
        yield measure_answers(options)

    found = []
    for row in rows():
        found.append(row)
        show(row)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where every bar is met, 2 where one is missed."""
    options = make_parser(__doc__, turns=5).parse_args(arguments)
    if options.small:
        options.turns = 1
    rows = report('delta_nets', arguments, options, lambda: measure(options))['rows']
    return 0 if all(row['met'] for row in rows) else 2


if __name__ == '__main__':
    run('delta_nets', lambda: sys.exit(main()))
