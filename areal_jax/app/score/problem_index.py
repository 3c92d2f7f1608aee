"""Which problem of a task an answers line names: by the text of its question, or by fields that identify it."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from typing import cast

import numpy as np

from areal_jax.files import FileError, JsonObject
from areal_jax.tasks.task import ListedTask, Problem, Split, Task
from areal_jax.types import Prompt

_QUESTION = 'question'
_TEXTS = (_QUESTION, 'prompt', 'problem')  # names of the question in an answers line
_IDS = ('task_id', 'id')
_SHOWN = 80  # characters of a value in a message


class ProblemIndex:
    """All problems of a task, those of both sides, with the fields that may name them."""

    def __init__(self, task: Task, seed: int):
        self.task = task.name
        self.prompts = list_prompts(task, seed)
        self._places: dict[str, dict[str, list[int]]] = {field: {} for field in (*_TEXTS, *_IDS)}  # by value
        for place, prompt in enumerate(self.prompts):
            for field, places in self._places.items():
                if field in prompt.problem:
                    places.setdefault(_spell(prompt.problem[field]), []).append(place)

    def find(self, record: JsonObject, where: str) -> tuple[int, JsonObject]:
        """(place of the problem in `prompts`, the fields that name it).

        A record names it by its question, by its ids where the problems have such, or by the whole `problem`. All that
        it gives must fit; of a whole problem, other fields count only where several problems have its question.

        Raises FileError, naming `where`, where no problem fits, or more than one.
        """
        whole = record.get('problem')
        given = self._names_in(whole if isinstance(whole, dict) else record)
        if isinstance(whole, dict) and not given:
            given = {'problem': whole}
            found = self._wholes.get(_spell(whole), [])
        elif not given:
            ids = ''.join(f', or its {field}' for field in _IDS if self._places[field])
            raise FileError(f'{where} names no problem: give its question as the task has it, as a text{ids}')
        else:
            found = self._intersect(given)
        if len(found) > 1 and isinstance(whole, dict):
            equal = [place for place in found if place in self._wholes.get(_spell(whole), [])]
            found = equal[:1] or found
        if len(found) != 1:
            raise FileError(f'{where} {self._describe(given, len(found))}')
        return found[0], given

    def digest(self) -> str:
        """SHA-256 of all problems, whatever their order."""
        own = sorted(hashlib.sha256(_spell(dict(prompt.problem)).encode()).digest() for prompt in self.prompts)
        return hashlib.sha256(b''.join(own)).hexdigest()

    @functools.cached_property
    def _wholes(self) -> dict[str, list[int]]:
        """Places by the whole problem."""
        found: dict[str, list[int]] = {}
        for place, prompt in enumerate(self.prompts):
            found.setdefault(_spell(dict(prompt.problem)), []).append(place)
        return found

    def _names_in(self, record: Mapping[str, object]) -> JsonObject:
        texts = {field: record[field] for field in _TEXTS if isinstance(record.get(field), str)}
        ids = {field: record[field] for field in _IDS if field in record and self._places[field]}
        return {**texts, **ids}

    def _intersect(self, given: JsonObject) -> list[int]:
        found: list[int] | None = None
        for field, value in given.items():
            known = self._places[field] or self._places[_QUESTION]
            places = known.get(_spell(value), [])
            found = places if found is None else [place for place in found if place in places]
        return found or []

    def _describe(self, given: JsonObject, count: int) -> str:
        named = ' and '.join(f'{field}={_shorten(value)}' for field, value in given.items())
        if count:
            return (
                f'names {count} problems of task {self.task!r} by {named}: add a field that tells them apart, or the '
                'whole problem as an object'
            )
        return (
            f'names no problem of task {self.task!r} by {named}: write it exactly as the task has it, or give the '
            '--config of the task that was answered'
        )


def list_prompts(task: Task, seed: int) -> list[Prompt]:
    """Every problem once; prompts are tokenized only where a scorer may ask for their text."""
    if isinstance(task, ListedTask):
        listed: list[Problem] = [problem for side in task.problems.values() for problem in side]
        if all(isinstance(problem.get(_QUESTION), str) for problem in listed):
            return [Prompt(place, np.zeros(0, np.int32), task.name, problem) for place, problem in enumerate(listed)]
    sizes = task.sizes()
    prompts = []
    for side in cast(tuple[Split, ...], ('train', 'held_out')):
        if sizes[side]:
            stream = task.prompts(side, seed)
            prompts += [stream.draw() for _ in range(sizes[side])]  # the first epoch repeats nothing
    return prompts


def _spell(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f'{text[:_SHOWN]}...'
