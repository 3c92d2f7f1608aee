"""The task `reasoning_gym`: questions from the data sets of the package reasoning-gym, and the scorer of their answers.

Three data sets of arithmetic, named without options, are listed in full with one-digit numbers, and the last integer of
an answer is scored as right or wrong. gym_datasets.py has all others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from areal_jax.tasks import gym_datasets
from areal_jax.tasks.answers import number_reader
from areal_jax.tasks.gym_datasets import import_package
from areal_jax.tasks.scoring.score_call import UNPARSED
from areal_jax.tasks.task import ListedTask, Problem, Split, TaskError, hash_fraction
from areal_jax.text.tokenizer import Tokenizer, chat_messages
from areal_jax.types import FinishReason

_ONE_DIGIT: dict[str, object] = {
    'min_terms': 2,
    'max_terms': 2,
    'min_digits': 1,
    'max_digits': 1,
    'allow_negation': False,
}
DATASETS: dict[str, dict[str, object]] = {
    'basic_arithmetic': {**_ONE_DIGIT, 'operators': ['+', '-'], 'allow_parentheses': False},
    'chain_sum': _ONE_DIGIT,
    'products': _ONE_DIGIT,
}
# A data set of n questions counts as exhausted after 20 n items in a row without a new question. Questions are equally
# likely, so the probability to miss one is about n * exp(-20) < 1e-6.
_PATIENCE = 20


def build(
    tokenizer: Tokenizer, datasets: Sequence[str], dataset_size: int, system_prompt: str, held_out_fraction: float
) -> ListedTask:
    """The questions of the data sets, split by their expression or text. Raises TaskError for an unknown data set.

    Args:
      dataset_size: questions drawn from each data set except the three of arithmetic; equal questions count once.
    """
    if not datasets:
        raise TaskError(f'task.datasets=() names none: choose one or more of {gym_datasets.known_names()}')
    sides: dict[Split, list[Problem]] = {'train': [], 'held_out': []}
    for problem in _list_all(sorted(set(datasets)), dataset_size):
        key = problem['expression'] if 'expression' in problem else problem['question']
        sides['held_out' if is_held_out(key, held_out_fraction) else 'train'].append(problem)
    return ListedTask(
        'reasoning_gym',
        score,
        sides,
        lambda problem: chat_messages(problem['question'], system_prompt),
        tokenizer,
        number_reader.integer_or_text if set(datasets) <= set(DATASETS) else gym_datasets.extract_answer,
    )


def is_held_out(expression: str, held_out_fraction: float) -> bool:
    """Whether an expression is held out; this depends neither on its sentence nor on the other data sets.

    The question takes the place of the expression in data sets without expressions.
    """
    return hash_fraction(expression) < held_out_fraction


def list_problems(dataset: str) -> list[dict[str, str]]:
    """Lists every distinct question of a data set, sorted: dataset, question, answer, expression.

    Item i of seed s is item i + 1 of seed s - 1, so one seed and a growing index reach all items.
    """
    items = import_package().create_dataset(dataset, seed=0, **DATASETS[dataset])
    found: dict[str, dict[str, str]] = {}
    index = last_new = 0
    while index - last_new <= _PATIENCE * max(len(found), 1):
        item = items[index]  # an index beyond the data set's nominal size is fine for these three
        if item['question'] not in found:
            last_new = index
            found[item['question']] = {
                'dataset': dataset,
                'question': item['question'],
                'answer': item['answer'],
                'expression': normalize_expression(item['metadata']['expression']),
            }
        index += 1
    return [found[question] for question in sorted(found)]


def normalize_expression(expression: str) -> str:
    """Puts single blanks around operators: '7+8' and ' 7 +  8' become '7 + 8'."""
    for operator in '+-*':
        expression = expression.replace(operator, f' {operator} ')
    return ' '.join(expression.split())


def score(problem: Problem, answer_text: str, finish_reason: FinishReason) -> float:
    """For arithmetic, 1 if the answer ended by itself and the data set's own scorer accepts its last integer, else 0.

    The last integer is extracted first, because the scorers give partial credit for text around it. Answers of other
    data sets are scored by gym_datasets.score.
    """
    if 'options' in problem:
        return gym_datasets.score(problem, answer_text, finish_reason)
    number = number_reader.read_integer(answer_text)
    if finish_reason != 'stop' or number is None:
        return UNPARSED if finish_reason == 'stop' and number_reader.is_no_integer(answer_text) else 0.0
    return float(_load_scorer(problem['dataset'])(number, problem) == 1.0)


def warm_up() -> None:
    """Loads the scorers, so that the first answer does not wait for them."""
    for dataset in DATASETS:
        _load_scorer(dataset)


@functools.cache
def _load_scorer(dataset: str) -> Callable[[str, Problem], float]:
    return import_package().get_score_answer_fn(dataset)


def _list_all(entries: Sequence[str], size: int) -> list[Problem]:
    arithmetic = [problem for entry in entries if entry in DATASETS for problem in list_problems(entry)]
    others = [gym_datasets.parse_name(entry) for entry in entries if entry not in DATASETS]
    return [*arithmetic, *(gym_datasets.list_problems(others, size) if others else [])]
