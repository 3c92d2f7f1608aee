"""main_train whose task is scored by another function: python -m tests.chaos.scored_run MODULE:FUNCTION [FLAG ...]."""

from __future__ import annotations

import functools
import runpy
import sys
from typing import Any

from areal_jax.tasks import token_reversal


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
