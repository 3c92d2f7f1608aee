"""The task `reasoning_gym`: one-digit arithmetic from the package reasoning-gym, and the scorer of its answers."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence

from areal_jax.tasks.integers import last_integer
from areal_jax.tasks.task import ListedTask, Problem, Split, TaskError, hash_fraction
from areal_jax.tasks.tokenizer import Tokenizer, chat_messages
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


def build(tokenizer: Tokenizer, datasets: Sequence[str], system_prompt: str, held_out_fraction: float) -> ListedTask:
    """All distinct questions of the data sets, split by their expression. Raises TaskError for an unknown data set."""
    unknown = [name for name in datasets if name not in DATASETS]
    if unknown or not datasets:
        raise TaskError(f'task.datasets={tuple(datasets)!r}: choose one or more of {sorted(DATASETS)}')
    problems = [problem for name in sorted(set(datasets)) for problem in list_problems(name)]
    sides: dict[Split, list[Problem]] = {'train': [], 'held_out': []}
    for problem in problems:
        side: Split = 'held_out' if is_held_out(problem['expression'], held_out_fraction) else 'train'
        sides[side].append(problem)
    return ListedTask(
        'reasoning_gym', score, sides, lambda problem: chat_messages(problem['question'], system_prompt), tokenizer
    )


def is_held_out(expression: str, held_out_fraction: float) -> bool:
    """Whether an expression is held out; this depends neither on its sentence nor on the other data sets."""
    return hash_fraction(expression) < held_out_fraction


def list_problems(dataset: str) -> list[dict[str, str]]:
    """Every distinct question of a data set, sorted: dataset, question, answer, expression.

    Item i of seed s is item i + 1 of seed s - 1, so one seed and a growing index see all there is.
    """
    items = _import_reasoning_gym().create_dataset(dataset, seed=0, **DATASETS[dataset])
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
    """'7+8' and ' 7 +  8' as '7 + 8': operators between single blanks."""
    for operator in '+-*':
        expression = expression.replace(operator, f' {operator} ')
    return ' '.join(expression.split())


def score(problem: Problem, answer_text: str, finish_reason: FinishReason) -> float:
    """1 if the answer ended by itself and the data set's own scorer takes its last integer as exactly right, else 0.

    The last integer is taken out first, because the scorers give partial credit for text around it.
    """
    number = last_integer(answer_text)
    if finish_reason != 'stop' or number is None:
        return 0.0
    return float(_load_scorer(problem['dataset'])(number, problem) == 1.0)


def warm_up() -> None:
    """Import and construct what the first answer would otherwise wait for."""
    for dataset in DATASETS:
        _load_scorer(dataset)


@functools.cache
def _load_scorer(dataset: str) -> Callable[[str, Problem], float]:
    return _import_reasoning_gym().get_score_answer_fn(dataset)


def _import_reasoning_gym() -> types.ModuleType:
    try:
        import reasoning_gym
    except ImportError as error:
        raise TaskError(f"task.name='reasoning_gym' needs a package: pip install reasoning-gym ({error})") from error
    return reasoning_gym
