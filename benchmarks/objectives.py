"""What the objectives cost: a train step of each method of loss.objective over one of the default.

    python -m benchmarks.objectives --out=benchmarks/results/objectives.json

A model of 4 layers of width 256 over 32,000 tokens, float32, AdamW: one update of 8,192 packed tokens, one optimizer
step. For each method a learner with its objective and one with the default take turns in this process, a call each;
ratios are method over default in the same turn, in CPU and wall seconds, advantages and gates on the host included. The
bar, 1.05 in CPU seconds, holds for methods that need no further pass than the default. The others are reported with
their passes of the model before the step (log-probs of the reference, or of the weights for a gate over the minibatch),
or with what they compute over the whole vocabulary.
The method with a critic, a value head on the trunk, is compared in updates of four minibatches: its pass gives values
and proximal log-probs, which the default computes for three of them. Its bar is 1.15.

For each method it is checked that no array of the compiled program of a micro-batch has an element for each pair of a
loss token and an entry of the vocabulary, and that nothing is compiled in the turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import sys
import time
from collections.abc import Iterator, Sequence

from areal_jax.app.parts.compilations import CompilationCounter
from areal_jax.app.parts.learner_builder import build_objective
from areal_jax.config import TrackedConfig, default_config
from areal_jax.config.loss import CriticSection
from areal_jax.config.objectives import DECOUPLED_PPO, OBJECTIVES, is_policy
from areal_jax.errors import UserError
from areal_jax.learning.learner import SpmdLearner
from areal_jax.learning.objective.objective import CLAMPED_ENTROPY, COLLISION, POLICY, REFERENCE, VALUES, Objective
from areal_jax.learning.optimizer import add_critic_optimizer
from areal_jax.learning.weights import VALUE_HEAD, make_value_head
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.sharding.rules import make_mesh
from areal_jax.types import TrajectoryGroup, Tree
from benchmarks.case import default_optimizer, learner_settings, make_groups, make_work
from benchmarks.options import Row, make_parser, report, run, show, split_choices
from benchmarks.ratios import CLOCKS, Bar, Run, ratio, spread
from benchmarks.workload import Workload

BAR, CRITIC_BAR = Bar(1.05, at_least=False), Bar(1.15, at_least=False)
MINIBATCHES = 4  # with a critic
DEFAULT = DECOUPLED_PPO.name
METHODS = tuple(name for name, kind in OBJECTIVES.items() if is_policy(name) and kind is not DECOUPLED_PPO)
PASSES = {
    REFERENCE: 'log-probs of the reference',
    POLICY: 'log-probs of the weights',
    COLLISION: 'log-probs and collisions of the weights',
    VALUES: 'log-probs of the weights, and values',
    CLAMPED_ENTROPY: 'no pass, but a statistic over the vocabulary: the entropy of the likeliest tokens',
}
_ARRAY = re.compile(r'\b(?:f|bf|s|u|pred)\d*\[([\d,]+)\]')


@dataclasses.dataclass(frozen=True)
class Size:
    """Of the model and of an update. Groups fill their rows: none of the tokens is padding."""

    model: ModelConfig
    work: Workload
    row_tokens: int

    @property
    def tokens(self) -> int:
        work = self.work
        return work.groups * work.prompt_tokens + work.answer_tokens

    @property
    def rows(self) -> int:
        return self.tokens // self.row_tokens

    @property
    def row_loss_tokens(self) -> int:
        return self.work.answer_tokens // self.rows


def make_size(seed: int, *, small: bool) -> Size:
    """8,192 tokens in 8 rows of two groups with 4 answers of 112 tokens to a prompt of 64; small: half, narrow."""
    vocabulary, width, groups = (8192, 32, 8) if small else (32_000, 256, 16)
    model = ModelConfig(
        vocab_size=vocabulary, d_model=width, n_layers=2 if small else 4, n_heads=4, n_kv_heads=2, head_dim=width // 4,
        d_ff=3 * width, rope_theta=1e6, family='qwen2', qkv_bias=True,
    )  # fmt: skip
    return Size(model, Workload(groups, 4, 64, 112, 0.0, vocabulary, seed), row_tokens=1024)


def make_objective(method: str) -> Objective:
    """As a run with the default config and loss.objective=`method` has it."""
    config = default_config()
    config.loss.objective = method
    return build_objective(TrackedConfig(config))


def make_learner(size: Size, decoder: Decoder, params: Tree, objective: Objective, minibatches: int = 1) -> SpmdLearner:
    """Compiled; a micro-batch is a minibatch."""
    critic = CriticSection(trunk_gradient=0.1) if objective.trains_values else None
    settings = learner_settings(
        objective=objective, row_tokens=size.row_tokens, row_loss_tokens=size.row_loss_tokens, critic=critic,
        rows_per_microbatch=size.rows // minibatches, n_minibatches=minibatches, accumulate='dispatch',
    )  # fmt: skip
    optimizer = default_optimizer()
    learner = SpmdLearner(
        decoder, params, make_mesh(), learning_rate=1e-6, settings=settings,
        optimizer=optimizer if critic is None else add_critic_optimizer(optimizer, 1e-6),
        critic=None if critic is None else {VALUE_HEAD: make_value_head(decoder.config.d_model)},
    )  # fmt: skip
    learner.warm_up()
    return learner


def largest_array(program: str, vocabulary: int) -> int:
    """Elements of the largest array in the text of a compiled program that has the vocabulary as a dimension."""
    shapes = ([int(n) for n in found.split(',')] for found in _ARRAY.findall(program))
    return max((math.prod(shape) for shape in shapes if vocabulary in shape), default=0)


def timed(learner: SpmdLearner, groups: Sequence[TrajectoryGroup], tokens: int) -> Run:
    """Seconds of one update."""
    cpu, wall = time.process_time(), time.monotonic()
    metrics = learner.update(groups, 0)
    seconds = {'cpu_s': time.process_time() - cpu, 'wall_s': time.monotonic() - wall}
    if not metrics['update/optimizer_steps']:
        raise UserError('an update changed nothing: its gradient was not finite')
    return seconds | {'checks': {'tokens': tokens}}


def check_program(learner: SpmdLearner, size: Size) -> int:
    """The largest array over the vocabulary in the program of a micro-batch; raises UserError for one of all tokens."""
    [program] = [p for (name, _), p in learner.programs.compiled.items() if name == 'accumulate']
    largest = largest_array(program.as_text(), size.model.vocab_size)
    if largest >= size.work.answer_tokens * size.model.vocab_size:
        raise UserError(f'the program of a micro-batch has an array of {largest:,} elements, all tokens x vocabulary')
    return largest


def measure_methods(options: argparse.Namespace) -> Iterator[Row]:
    methods = split_choices('methods', options.methods, METHODS)
    size = make_size(options.seed, small=options.small)
    decoder = Decoder(size.model)
    params = decoder.init(seed=0)
    groups = make_groups(make_work(decoder, params, size.work))
    defaults = {n: make_learner(size, decoder, params, make_objective(DEFAULT), n) for n in (1, MINIBATCHES)}
    for method in methods:
        objective = make_objective(method)
        minibatches = MINIBATCHES if objective.trains_values else 1
        learner = make_learner(size, decoder, params, objective, minibatches)
        learners = {DEFAULT: defaults[minibatches], method: learner}
        for one in learners.values():
            timed(one, groups, size.tokens)
        calls: dict[str, list[Run]] = {name: [] for name in learners}
        with CompilationCounter() as compilations:
            for _ in range(options.turns):
                for name, one in learners.items():
                    calls[name].append(timed(one, groups, size.tokens))
        if compilations.count:
            raise UserError(f'{method}: {compilations.count} programs were compiled after warm-up')
        yield row_of(method, objective, calls) | {'largest_array': check_program(learner, size)}
        del learners, learner


def row_of(method: str, objective: Objective, calls: dict[str, list[Run]]) -> Row:
    """The passes of a method, and its ratios; the bar holds where it needs no pass, and with a critic."""
    passes = [told for name, told in PASSES.items() if name in objective.reads]
    bar = CRITIC_BAR if objective.trains_values else BAR
    row: Row = {'method': method, 'combination': objective.describe(), 'passes': passes}
    for clock in CLOCKS:
        found = ratio(calls[method], calls[DEFAULT], clock, bar)
        row |= {f'ratio_{clock[:-2]}': found.median, f'quartile_{clock[:-2]}': found.quartile}
        row |= {f'{side}_{clock}': spread([call[clock] for call in calls[name]])['median']
                for side, name in (('method', method), ('default', DEFAULT))}  # fmt: skip
    if not passes or objective.trains_values:
        row |= {'bar': bar.value, 'met': bar.holds(ratio(calls[method], calls[DEFAULT], 'cpu_s', bar))}
    return row | {'calls': calls}


def measure(options: argparse.Namespace) -> list[Row]:
    rows = []
    for row in measure_methods(options):
        rows.append(row)
        show(row)
    return rows


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, turns=5)
    parser.add_argument('--methods', default=','.join(METHODS), help='names of loss.objective, separated by commas')
    options = parser.parse_args(arguments)
    if options.small:
        options.turns = 1
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where every bar is met, 2 where one is missed."""
    options = read_options(arguments)
    rows = report('objectives', arguments, options, lambda: measure(options))['rows']
    return 0 if all(row.get('met', True) for row in rows) else 2


if __name__ == '__main__':
    run('objectives', lambda: sys.exit(main()))
