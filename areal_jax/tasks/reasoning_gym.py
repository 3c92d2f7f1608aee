"""The task `reasoning_gym`: questions from the data sets of the package reasoning-gym, and the scorer of their answers.

Three data sets of arithmetic, named without options, are listed in full with one-digit numbers, and the last integer of
an answer is scored as right or wrong. Of any other data set, named 'countdown', or with options,
'countdown:min_numbers=3:max_numbers=4', a problem holds all that the data set's own scorer needs: the options, and the
item's metadata as gym_items.py writes it.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import json
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from areal_jax.files import JsonObject
from areal_jax.installation import describe_install
from areal_jax.tasks import gym_items
from areal_jax.tasks.answers import number_reader
from areal_jax.tasks.scoring.score_call import UNPARSED
from areal_jax.tasks.task import ListedTask, Problem, Split, TaskError, hash_fraction
from areal_jax.text.tokenizer import Tokenizer, chat_messages
from areal_jax.types import FinishReason

_TAGGED = re.compile(r'<answer>(.*?)</answer>', re.DOTALL)


@dataclasses.dataclass(frozen=True)
class DatasetName:
    """An entry of task.datasets."""

    entry: str  # as it is written
    name: str
    options: Mapping[str, object]


def parse_name(entry: str) -> DatasetName:
    """'name' or 'name:option=value:...', values as Python writes them or text. Raises TaskError for other text."""
    name, *settings = entry.split(':')
    options = {}
    for setting in settings:
        key, equals, value = setting.partition('=')
        if not (equals and key.isidentifier() and value):
            raise TaskError(f'task.datasets: {setting!r} in {entry!r} must be option=value')
        options[key] = _read_value(value)
    try:
        options = json.loads(json.dumps(options))  # as a worker gets them: lists for tuples
    except (TypeError, ValueError) as error:
        raise TaskError(f'task.datasets: an option in {entry!r} is no JSON value ({error})') from error
    return DatasetName(entry, name, options)


def draw_problems(datasets: Sequence[DatasetName], size: int) -> list[Problem]:
    """Lists distinct questions among the first `size` items of each: dataset, options, question, answer, metadata.

    An option `size` overrides the argument. An item without a single gold has no answer. Raises TaskError for a name or
    an option that the package does not know, and if it cannot make an item.
    """
    orders = []
    for dataset in datasets:
        options = {'seed': 0, 'size': size, **dataset.options}
        orders.append(gym_items.Order(dataset.name, options, len(_create(dataset, options))))
    problems = []
    for dataset, order, items in zip(datasets, orders, gym_items.make_items(orders), strict=True):
        problems += _distinct(dataset, order, items)
    return problems


def extract_answer(text: str) -> str:
    """The text between the last <answer> and </answer>, or the whole text; without blanks around it."""
    tagged = _TAGGED.findall(text)
    return (tagged[-1] if tagged else text).strip()


def score_by_dataset(problem: Problem, answer_text: str, finish_reason: FinishReason) -> float:
    """Returns the score by the data set's own scorer if the answer ended by itself; else 0.

    A blank answer (unless the gold is blank), and one that makes the scorer raise, count as unparsed: the scorers raise
    for answers that they cannot read.
    """
    if finish_reason != 'stop':
        return 0.0
    answer = extract_answer(answer_text)
    dataset = _load_dataset(problem['dataset'], json.dumps(problem['options'], sort_keys=True))
    item = {name: gym_items.decode(problem.get(name)) for name in ('question', 'answer', 'metadata')}
    if not answer and item['answer']:
        return UNPARSED
    try:
        return float(dataset.score_answer(answer, item))
    except Exception:
        return UNPARSED


def known_names() -> list[str]:
    """All names of the package's registry, sorted."""
    import_package()
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS)


def import_package() -> types.ModuleType:
    """Imports the package; raises TaskError if it is missing."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise TaskError(f"task.name='reasoning_gym' needs a package: {describe_install('tasks')} ({error})") from error
    return reasoning_gym


def require_known(dataset: DatasetName) -> None:
    """Raises TaskError, with similar names, for a data set that the package does not have."""
    names = known_names()
    if dataset.name in names:
        return
    near = difflib.get_close_matches(dataset.name, names, n=3)
    hint = f'did you mean {" or ".join(map(repr, near))}?' if near else f'choose from {names}'
    raise TaskError(f'task.datasets: reasoning-gym has no data set {dataset.name!r}; {hint}')


def _distinct(dataset: DatasetName, order: gym_items.Order, items: Sequence[JsonObject]) -> list[Problem]:
    found: dict[str, Problem] = {}
    for item in items:
        if 'error' in item:
            raise TaskError(f'{_describe(dataset)} cannot make item {item["index"]}: {item["error"]}')
        gold = {} if item['answer'] is None else {'answer': item['answer']}
        problem = {'dataset': dataset.name, 'options': order.options, 'question': item['question'], **gold}
        found.setdefault(item['question'], {**problem, 'metadata': item['metadata']})
    return list(found.values())


def _create(dataset: DatasetName, options: Mapping[str, object]) -> Any:
    require_known(dataset)
    from reasoning_gym.factory import DATASETS

    config = DATASETS[dataset.name][1]
    known = [field.name for field in dataclasses.fields(config)]
    if unknown := sorted(set(options) - set(known)):
        raise TaskError(f'{_describe(dataset)} has no option {unknown[0]!r}; its options: {", ".join(known)}')
    try:
        return import_package().create_dataset(dataset.name, **options)
    except Exception as error:  # each data set checks its options by assertions
        raise TaskError(f'{_describe(dataset)} cannot be made: {gym_items.describe(error)}') from error


@functools.cache
def _load_dataset(name: str, options: str) -> Any:
    return import_package().create_dataset(name, **json.loads(options))


def _read_value(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _describe(dataset: DatasetName) -> str:
    return f'task.datasets: {dataset.entry!r}'


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
        raise TaskError(f'task.datasets=() names none: choose one or more of {known_names()}')
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
        number_reader.integer_or_text if set(datasets) <= set(DATASETS) else extract_answer,
    )


def is_held_out(expression: str, held_out_fraction: float) -> bool:
    """Whether an expression is held out; this depends neither on its sentence nor on the other data sets.

    The question takes the place of the expression in data sets without expressions.
    """
    return hash_fraction(expression) < held_out_fraction


def list_arithmetic(dataset: str) -> list[dict[str, str]]:
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
    data sets are scored by `score_by_dataset`.
    """
    if 'options' in problem:
        return score_by_dataset(problem, answer_text, finish_reason)
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
    arithmetic = [problem for entry in entries if entry in DATASETS for problem in list_arithmetic(entry)]
    others = [parse_name(entry) for entry in entries if entry not in DATASETS]
    return [*arithmetic, *(draw_problems(others, size) if others else [])]
