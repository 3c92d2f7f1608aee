"""What eta does to one-digit arithmetic: eta 0, 4, 16 and inf, plain and decoupled PPO, three seeds, from an SFT model.

python -m areal_jax.main_train --config=configs/sft_arithmetic.py --workdir=runs/sft_arithmetic
python -m areal_jax.main_sweep --config=configs/sweeps/arithmetic.py --workdir=runs/arithmetic --jobs=2
"""

from collections.abc import Mapping

from ml_collections import config_dict

from areal_jax import config as schema
from areal_jax.tasks.questions import question_task
from areal_jax.tasks.task import ListedTask
from areal_jax.text.tokenizer import Tokenizer
from areal_jax.types import FinishReason

METHODS = {'plain': 'behavior', 'decoupled': 'recompute'}  # loss.proximal


def build(tokenizer: Tokenizer, held_out_fraction: float = 0.25) -> ListedTask:
    """Sums, differences and products of two digits: '7*8=' with the answer '56'."""
    results = {f'{a}{sign}{b}': value for a in range(10) for b in range(10) for sign, value in compute(a, b).items()}
    problems = [{'question': f'{term}=', 'answer': str(value)} for term, value in results.items()]
    return question_task(tokenizer, problems, score, held_out_fraction=held_out_fraction)


def compute(a: int, b: int) -> dict[str, int]:
    """By operator."""
    return {'+': a + b, '-': a - b, '*': a * b}


def score(problem: Mapping[str, str], answer_text: str, finish_reason: FinishReason) -> float:
    """1 for the whole answer that ends by itself, else 0."""
    return float(finish_reason == 'stop' and answer_text == problem['answer'])


def get_config() -> config_dict.ConfigDict:
    config = schema.default_config()
    config.run.steps = 200
    config.run.clock = 'virtual'
    config.run.export = False
    config.model.source = 'run'
    config.model.path = 'runs/sft_arithmetic'
    config.task.name = 'package:configs/sweeps/arithmetic.py:build'
    config.task.verifier = 'inline'
    config.rollout.slots = 16
    config.rollout.decode_steps = 2
    config.rollout.context_tokens = 16
    config.rollout.block_tokens = 16
    config.rollout.prefill_buckets = (32, 256)
    config.rollout.max_new_tokens = 4
    config.rollout.max_running_groups = 16  # stored results were made with so many
    config.buffer.capacity = 512
    config.learner.n_minibatches = 4
    config.learner.row_tokens = 128
    config.learner.row_loss_tokens = 96
    config.learner.filter_equal_rewards = False
    config.optimizer.learning_rate = 1e-4
    config.evaluation.problems = 64
    config.evaluation.samples = 8
    config.telemetry.tensorboard = False
    config.telemetry.plots = False
    # as in configs/sweeps/staleness.py: generation is faster than training, so that eta binds
    config.virtual.decode_step_s = 0.004
    config.virtual.prefill_token_s = 0.00005
    return config


def get_sweep() -> dict[str, dict[str, float | str]]:
    return {
        f'eta{eta:g}_{method}_seed{seed}': {'staleness.eta': eta, 'loss.proximal': proximal, 'run.seed': seed}
        for eta in (0.0, 4.0, 16.0, float('inf'))
        for method, proximal in METHODS.items()
        for seed in range(3)
    }
