"""A template: a task of your own and the run that trains it, in one file. Copy it and change what is marked.

    python -m areal_jax.main_train --config=my_task.py --workdir=runs/mine

A tiny model learns from random weights to sort letters: 'cab=' -> 'abc'. docs/your_task.md explains each part.
"""

import itertools

from areal_jax.config import default_config
from areal_jax.tasks.questions import question_task

# The task.


# The parameters are options of the task: --config.task.options.length=4
def build(tokenizer, letters=4, length=3, held_out_fraction=0.25):
    words = itertools.product('abcdefgh'[:letters], repeat=length)
    problems = [{'question': ''.join(word) + '=', 'answer': ''.join(sorted(word))} for word in words]  # your problems
    return question_task(tokenizer, problems, score, held_out_fraction=held_out_fraction)


def score(problem, answer_text, finish_reason):  # your reward, a number; finish_reason is 'stop' or 'length'
    right = sum(a == b for a, b in zip(problem['answer'], answer_text, strict=False))
    ended = finish_reason == 'stop' and len(answer_text) == len(problem['answer'])
    return (right + ended) / (max(len(problem['answer']), len(answer_text)) + 1)


# The run.


def get_config():
    config = default_config()
    config.task.name = f'{__file__}:build'
    config.model.characters = 'abcdefgh='  # a model with its own tokenizer does not need them: model.source, model.path
    config.run.steps = 200
    config.rollout.slots = 16
    config.rollout.context_tokens = 16
    config.rollout.block_tokens = 16
    config.rollout.prefill_buckets = (32, 256)
    config.rollout.max_new_tokens = 8
    config.learner.row_tokens, config.learner.row_loss_tokens = 128, 96
    config.loss.entropy_coefficient = 0.03
    config.optimizer.learning_rate = 1e-3
    config.evaluation.problems, config.evaluation.samples = 8, 4
    return config
