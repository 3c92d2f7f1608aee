"""Makes items of data sets of reasoning-gym in separate processes, and writes them as JSON and back.

`python -m areal_jax.tasks.gym_items` reads lines [number, name, options, indices] and writes a line [number, item] for
each item. Some data sets depend on the order of a set or the global generator of `random`. A separate process fixes
both: an item is a function of its options and index alone.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from areal_jax.files import JsonObject
from areal_jax.workers.descendants import die_with_parent
from areal_jax.workers.worker_process import count_processes, run_processes

_PER_PROCESS = 100  # items that justify another process, which imports for about a second


class Order(NamedTuple):
    """The items of one data set to be made: 0 to size - 1."""

    name: str
    options: Mapping[str, object]
    size: int


def make_items(orders: Sequence[Order]) -> list[list[JsonObject]]:
    """The items of each order: {index, question, answer, metadata}, or {index, error}; `encode` made the metadata."""
    n = count_processes(sum(order.size for order in orders), _PER_PROCESS)
    parts = [
        [json.dumps([number, *order[:2], list(range(k, order.size, n))]) for number, order in enumerate(orders)]
        for k in range(n)
    ]
    finished = run_processes(__name__, parts)
    made: list[dict[int, JsonObject]] = [{} for _ in orders]  # by index
    for process in finished:
        for number, item in map(json.loads, process.lines):
            made[number][item['index']] = item
    exit_code = next((process.exit_code for process in finished if process.exit_code), 0)
    lost = {'error': f'the process that makes it ended with exit code {exit_code}'}
    return [
        [items.get(index, {'index': index, **lost}) for index in range(order.size)]
        for order, items in zip(orders, made, strict=True)
    ]


def encode(value: Any) -> Any:
    """Writes a value of an item's metadata as JSON for `decode`; raises TypeError for a type without a JSON form."""
    if isinstance(value, str):
        return str(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, list):
        return [encode(element) for element in value]
    if isinstance(value, tuple):
        return {'__tuple__': [encode(element) for element in value]}
    if isinstance(value, set | frozenset):
        return {'__set__': [encode(element) for element in sorted(value, key=repr)]}
    if isinstance(value, Fraction):
        return {'__fraction__': str(value)}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith('__') for key in value):
            return {str(key): encode(element) for key, element in value.items()}
        return {'__items__': [[encode(key), encode(element)] for key, element in value.items()]}
    raise TypeError(f'{type(value).__name__} has no JSON form')


def decode(value: Any) -> Any:
    """Returns the value that `encode` was given."""
    if isinstance(value, list):
        return [decode(element) for element in value]
    if not isinstance(value, dict):
        return value
    match list(value):
        case ['__tuple__']:
            return tuple(decode(value['__tuple__']))
        case ['__set__']:
            return set(decode(value['__set__']))
        case ['__fraction__']:
            return Fraction(value['__fraction__'])
        case ['__items__']:
            return {decode(key): decode(element) for key, element in value['__items__']}
    return {key: decode(element) for key, element in value.items()}


def describe(error: BaseException) -> str:
    """Type and text of an exception on one line."""
    return ' '.join(f'{type(error).__name__}: {error}'.split())


def main(lines: Sequence[str]) -> None:
    """Writes a line for each item that the lines ask for."""
    import numpy as np
    import reasoning_gym

    die_with_parent()
    replies = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)  # some data sets print
    for line in lines:
        number, name, options, indices = json.loads(line)
        dataset = reasoning_gym.create_dataset(name, **options)
        for index in indices:
            random.seed(index)
            np.random.seed(index)
            print(json.dumps([number, {'index': index, **_make_item(dataset, index)}]), file=replies, flush=True)


def _make_item(dataset: Any, index: int) -> JsonObject:
    try:
        item = dataset[index]
        return {name: encode(item[name]) for name in ('question', 'answer', 'metadata')}
    except Exception as error:
        return {'error': describe(error)}


if __name__ == '__main__':
    main(list(sys.stdin))
