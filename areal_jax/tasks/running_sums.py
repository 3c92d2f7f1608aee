"""The task `running_sums`: add one-digit numbers one at a time, a line for each step.

The prompt shows one example as an earlier turn of the chat. '7 + 5 + 8' is answered by

    7 + 5 = 12
    12 + 8 = 20

Each step needs the result of the one before it, so that a right answer is as long as its steps are.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence

from areal_jax.tasks.task import ListedTask, Problem, Split, TaskError, hash_fraction
from areal_jax.text.chat_template import Messages
from areal_jax.text.tokenizer import Tokenizer, chat_messages
from areal_jax.types import FinishReason

EXAMPLE = (7, 5, 8, 2, 9, 4, 3, 8, 1, 6, 5, 9, 2, 7, 4, 8)  # as many of these as a question has numbers
MAX_NUMBERS = len(EXAMPLE)
_STEP = re.compile(r'(\d{1,9}) *\+ *(\d{1,9}) *= *(\d{1,9})')


def build(
    tokenizer: Tokenizer, length: int, dataset_size: int, system_prompt: str, held_out_fraction: float
) -> ListedTask:
    """`dataset_size` distinct lists of `length` numbers from 1 to 9, or all if there are fewer.

    About `held_out_fraction` of them are held out by a hash of the question. Raises TaskError for less than two
    numbers, or more than MAX_NUMBERS.
    """
    if not 2 <= length <= MAX_NUMBERS:
        raise TaskError(f'task.length={length}: running_sums adds 2 to {MAX_NUMBERS} numbers')
    sides: dict[Split, list[Problem]] = {'train': [], 'held_out': []}
    for numbers in _draw_lists(length, min(dataset_size, 9**length)):
        problem = {'question': ' + '.join(map(str, numbers)), 'answer': write_steps(numbers)}
        sides['held_out' if hash_fraction(problem['question']) < held_out_fraction else 'train'].append(problem)
    example = EXAMPLE[:length]
    shown = [
        {'role': 'user', 'content': ' + '.join(map(str, example))},
        {'role': 'assistant', 'content': write_steps(example)},
    ]

    def messages(problem: Problem) -> Messages:
        *system, question = chat_messages(problem['question'], system_prompt)
        return [*system, *shown, question]

    return ListedTask('running_sums', score, sides, messages, tokenizer)


def write_steps(numbers: Sequence[int]) -> str:
    sums = list(itertools.accumulate(numbers))
    return '\n'.join(f'{total} + {number} = {total + number}' for total, number in zip(sums, numbers[1:], strict=False))


def score(problem: Problem, answer_text: str, finish_reason: FinishReason) -> float:
    """The share of right steps before the first wrong one, the end being the last step; 0 without all steps.

    An answer that ends after a few right steps would otherwise be worth more than one that continues and errs. The
    denominator counts the steps of the longer of answer and truth. Text between the steps does not count.
    """
    truth, answer = _STEP.findall(problem['answer']), _STEP.findall(answer_text)
    if len(answer) < len(truth):
        return 0.0
    right = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(truth, answer, strict=False)))
    ended = finish_reason == 'stop' and len(answer) == len(truth)
    return (right + ended) / (len(answer) + 1)


def _draw_lists(length: int, count: int) -> list[tuple[int, ...]]:
    rng = random.Random(0)  # the problems are the same in every run; the stream orders them
    found: dict[tuple[int, ...], None] = {}
    while len(found) < count:
        found[tuple(rng.randint(1, 9) for _ in range(length))] = None
    return list(found)
