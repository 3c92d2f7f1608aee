"""A two-layer model learns from scratch to reverse strings and to add digits, from a mixture of two tasks.

    areal-train --config=configs/mixture.py --workdir=runs/mixture

Two thirds of the draws are strings to reverse ('abbb=' -> 'bbba'), one third sums ('3+4=' -> '7'). Lines of your own
become a third source: --config=configs/mixture.py:my_lines.jsonl reads a JSON object {question, answer} a line, as
those of GSM8K, and compares the last integer. docs/mixtures.md explains each field.
"""

import itertools
import string

from ml_collections import config_dict

from areal_jax import config as schema
from areal_jax.tasks.questions import question_task
from areal_jax.tasks.task import ListedTask, Problem
from areal_jax.text.tokenizer import Tokenizer
from areal_jax.types import FinishReason

_SYMBOLS = 'ab=+' + string.digits
_OF_LINES = ''.join(sorted({*_SYMBOLS, *string.ascii_letters, *' .,?!\'"-*/()$%#:\n'}))


def build_sums(tokenizer: Tokenizer, held_out_fraction: float, largest: int = 4) -> ListedTask:
    """Sums of two numbers from 0 to `largest`, at most 4, so that the answer is one digit."""
    problems = (
        {'question': f'{a}+{b}=', 'answer': str(a + b)} for a, b in itertools.product(range(largest + 1), repeat=2)
    )
    return question_task(tokenizer, problems, score, name='sums', held_out_fraction=held_out_fraction)


def score(problem: Problem, answer_text: str, finish_reason: FinishReason) -> float:
    """1 for the sum alone, a half if more follows."""
    if not answer_text.startswith(problem['answer']):
        return 0.0
    return 1.0 if answer_text == problem['answer'] and finish_reason == 'stop' else 0.5


def get_config(lines: str = '') -> config_dict.ConfigDict:
    config = schema.default_config()
    config.run.steps = 200
    config.model.characters = _OF_LINES if lines else _SYMBOLS
    config.task.sources.reversal = {'weight': 2.0, 'name': 'token_reversal', 'symbols': 2, 'length': 4}
    config.task.sources.sums = {
        'weight': 1.0,
        'name': 'package:configs/mixture.py:build_sums',
        'options': {'largest': 4},
    }
    if lines:
        config.task.sources.lines = {'weight': 1.0, 'name': 'jsonl', 'path': lines, 'over_length': 'drop'}
    config.task.verifier = 'inline'
    config.rollout.slots = 16
    config.rollout.decode_steps = 2
    config.rollout.context_tokens = 256 if lines else 16
    config.rollout.block_tokens = 16
    config.rollout.prefill_buckets = (32, 256)
    config.rollout.max_new_tokens = 8
    config.rollout.max_running_groups = 16
    config.learner.row_tokens = 512 if lines else 128
    config.learner.row_loss_tokens = 96
    config.loss.entropy_coefficient = 0.03  # without it the policy settles on one answer for all prompts
    config.optimizer.learning_rate = 1e-3
    config.evaluation.problems = 12  # 8 of reversal would be its share, and it has 4
    config.evaluation.samples = 16
    return config
