"""A run whose task another function scores: python -m checks.chaos.scoring MODULE:FUNCTION [FLAG ...] of main_train.

`score` calls each hostile scorer of a batch twice, and else scores token_reversal as always.
The environment names the batch, AREAL_JAX_CHAOS_SCORERS='a,b', and a directory for notes, AREAL_JAX_CHAOS_NOTES: the
file `calls` gets the name of each hostile scorer that is called, `pids` the processes that it leaves behind.
"""

from __future__ import annotations

import fcntl
import functools
import importlib
import os
import pathlib
import runpy
import sys
import zlib
from typing import Any

from areal_jax.tasks import token_reversal
from areal_jax.types import FinishReason

SCORERS, NOTES = 'AREAL_JAX_CHAOS_SCORERS', 'AREAL_JAX_CHAOS_NOTES'
CALLS_EACH = 2
_ONE_OF = 4  # answers, so that hostile and ordinary ones alternate
_NAMES = os.environ.get(SCORERS, '').split(',')
_NOTES = pathlib.Path(os.environ.get(NOTES, '.'))


def score(problem: Any, answer_text: str, finish_reason: FinishReason) -> Any:
    """A reward, or what the hostile scorer whose turn it is makes of the request."""
    if zlib.crc32(f'{problem["question"]}{answer_text}'.encode()) % _ONE_OF == 0 and (name := _take_turn()):
        hostile_scorers = importlib.import_module('tests.tasks.hostile_scorers')
        return getattr(hostile_scorers, name)({'pids': str(_NOTES / 'pids')}, answer_text, finish_reason)
    return token_reversal.score(problem, answer_text, finish_reason)


def score_equally(problem: Any, answer_text: str, finish_reason: FinishReason) -> float:
    """No answer is better than another."""
    return 0.5


def _take_turn() -> str:
    """The next of the batch; '' when all have had their calls."""
    with (_NOTES / 'calls').open('a+') as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        calls = len(file.readlines())
        if calls >= CALLS_EACH * len(_NAMES):
            return ''
        name = _NAMES[calls % len(_NAMES)]
        file.write(f'{name}\n')
    return name


def main(arguments: list[str]) -> None:
    build = token_reversal.build

    @functools.wraps(build)
    def build_with_scorer(*positional: Any, **named: Any) -> Any:
        task = build(*positional, **named)
        task.scorer = arguments[0]
        return task

    token_reversal.build = build_with_scorer
    sys.argv = ['areal_jax.main_train', *arguments[1:]]
    runpy.run_module('areal_jax.main_train', run_name='__main__', alter_sys=True)


if __name__ == '__main__':
    main(sys.argv[1:])
