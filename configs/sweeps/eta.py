"""What eta does: eta 0, 1, 2, 4, 8 and inf, three seeds, on a modelled cluster whose learner is the slower side.

    areal-sweep --config=configs/sweeps/eta.py --workdir=runs/eta --jobs=2

Engine and learner are real, their seconds are modelled (run.clock=virtual), so every arm repeats bit for bit on one
machine. docs/staleness.md shows the result, next to Figure 5 of arXiv 2505.24298.
"""

import math
import random
import statistics

from ml_collections import config_dict

from areal_jax import config as schema
from areal_jax.tasks import token_reversal
from areal_jax.tasks.task import ListedTask, Problem
from areal_jax.text.tokenizer import Tokenizer

ETAS = (0.0, 1.0, 2.0, 4.0, 8.0, math.inf)
SEEDS = (0, 1, 2)
LETTERS = 'ab'
PROBLEMS = 256
MEDIAN, SIGMA, LONGEST = 4, 0.7, 20  # of the lognormal lengths, in letters


def build(tokenizer: Tokenizer) -> ListedTask:
    """Strings to reverse, 'abb=' with the answer 'bba'. Nothing is held out; short strings occur several times."""
    rng = random.Random(0)  # the problems are the same in every run; the stream orders them
    strings = [''.join(rng.choices(LETTERS, k=length)) for length in list_lengths()]
    problems: list[Problem] = [{'question': string + token_reversal.MARK, 'answer': string[::-1]} for string in strings]
    return ListedTask(
        'mixed_lengths',
        token_reversal.score,
        {'train': problems, 'held_out': []},
        lambda problem: [{'role': 'user', 'content': problem['question']}],
        tokenizer,
    )


def list_lengths() -> list[int]:
    """The lengths of the strings: quantiles of a lognormal distribution, whose tail is long."""
    normal = statistics.NormalDist()
    numbers = [normal.inv_cdf((index + 0.5) / PROBLEMS) for index in range(PROBLEMS)]
    return [max(1, min(LONGEST, round(MEDIAN * math.exp(SIGMA * number)))) for number in numbers]


def get_config() -> config_dict.ConfigDict:
    config = schema.default_config()
    config.run.steps = 250
    config.run.clock = 'virtual'
    config.run.export = False
    config.task.name = 'package:configs/sweeps/eta.py:build'
    config.task.verifier = 'inline'
    config.rollout.slots = 32
    config.rollout.decode_steps = 4
    config.rollout.context_tokens = 48
    config.rollout.block_tokens = 48
    config.rollout.prefill_buckets = (32, 256)
    config.rollout.max_new_tokens = 24
    config.buffer.capacity = 256  # 32 batches: the bound of eta=inf
    config.learner.n_minibatches = 4  # the paper's
    config.learner.row_tokens = 256
    config.learner.row_loss_tokens = 192
    config.learner.filter_equal_rewards = False
    config.loss.entropy_coefficient = 0.03
    config.optimizer.learning_rate = 2e-4  # chosen at eta 0 with one seed, in trials that differed in more than it
    config.evaluation.problems = 0
    config.telemetry.tensorboard = False
    config.telemetry.plots = False
    # 32 slots at 6 ms a step: 5300 tokens a second at most; the learner reads 2000. Without a gate the buffer fills.
    config.virtual.decode_step_s = 0.006
    config.virtual.prefill_token_s = 0.00005
    config.virtual.train_token_s = 0.0005
    return config


def get_sweep() -> dict[str, dict[str, float]]:
    return {f'eta{eta:g}_seed{seed}': {'staleness.eta': eta, 'run.seed': seed} for eta in ETAS for seed in SEEDS}
