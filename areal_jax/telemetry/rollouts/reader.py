"""Reads the answers of a workdir: of a run that has finished, is under way or was killed, and of an evaluation."""

from __future__ import annotations

import pathlib

from areal_jax import files
from areal_jax.telemetry.metrics import read_json_lines, require_fields
from areal_jax.telemetry.rollouts.writer import DIRECTORY, list_files, read_records

EVALUATED = 'answers.jsonl'  # evaluation/results.py


def read_rollouts(workdir: pathlib.Path) -> list[files.JsonObject]:
    """The groups, in the order of updates and draws; those of an evaluation have update 0. [] where none are kept.

    Raises FileError for a file that is not as its writer leaves it.
    """
    records: list[files.JsonObject] = []
    for path in list_files(workdir / DIRECTORY):
        try:
            records += read_records(path)
        except FileNotFoundError:  # the run has just dropped it
            continue
    return records or _read_evaluated(workdir / EVALUATED)


def _read_evaluated(path: pathlib.Path) -> list[files.JsonObject]:
    records: list[files.JsonObject] = []
    for number, line in enumerate(read_json_lines(path), start=1):
        require_fields(path, number, line, {'draw': int, 'prompt': str, 'answers': list})
        problem: files.JsonObject = line
        records.append(
            {
                'update': 0,
                'draw': problem['draw'],
                'task': '',
                'trained': False,
                'prompt': {'text': problem['prompt'], 'tokens': problem.get('prompt_tokens', [])},
                'problem': problem.get('problem', {}),
                'answers': [_convert(path, number, answer) for answer in problem['answers']],
            }
        )
    return records


def _convert(path: pathlib.Path, number: int, answer: files.JsonObject) -> files.JsonObject:
    fields: dict[str, type | tuple[type, ...]] = {
        'text': str,
        'reward': (int, float),
        'label': str,
        'finish_reason': str,
        'tokens': list,
    }
    require_fields(path, number, answer, fields)
    return {
        **{name: answer[name] for name in ('reward', 'label', 'text', 'tokens')},
        'sample': answer.get('sample', 0),
        'finish': answer['finish_reason'],
        'final': answer.get('final', ''),
    }
