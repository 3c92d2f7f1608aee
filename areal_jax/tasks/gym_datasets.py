"""Any data set of the package reasoning-gym by name: its questions, and its own scorer.

A data set is named 'countdown', or with options, 'countdown:min_numbers=3:max_numbers=4'. A problem holds all that the
data set's scorer needs: the options, and the item's metadata as gym_items.py writes it.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import json
import re
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from areal_jax.files import JsonObject
from areal_jax.installation import describe_install
from areal_jax.tasks import gym_items
from areal_jax.tasks.scoring.score_call import UNPARSED
from areal_jax.tasks.task import Problem, TaskError

if TYPE_CHECKING:
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


def list_problems(datasets: Sequence[DatasetName], size: int) -> list[Problem]:
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


def score(problem: Problem, answer_text: str, finish_reason: FinishReason) -> float:
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
