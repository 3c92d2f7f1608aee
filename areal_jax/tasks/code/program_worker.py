"""Runs programs that a model wrote, one after the other, for a process that must not wait: a line in, a line out.

    python -P -m areal_jax.tasks.code.program_worker LEVEL READABLE...

First line out: {"ready": true}, or {"fault": "..."} and the end. Then for each line in, {"code": ..., "time_s": ...,
"memory_mb": ..., "output_bytes": ...}, one line out: {"output": ..., "label": ..., "reason": ...}, or {"fault": "..."}
and the end, which says nothing about the program. The process ends when its input is closed. It is between the run and
the server of the children because it must see the children's pids, which bubblewrap numbers anew.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from areal_jax.files import JsonObject
from areal_jax.tasks.code.judge import PRELOADED, PROGRAM, ProgramLimits, run_program
from areal_jax.workers.descendants import die_with_parent
from areal_jax.workers.sandbox.confined_children import ConfinedChildren, ServerLostError

MODULE = 'areal_jax.tasks.code.program_worker'


def main(arguments: Sequence[str]) -> int:
    """Serves until stdin is closed, and returns the exit code."""
    level, *readable = arguments
    die_with_parent()
    try:
        children = ConfinedChildren(level, (*PRELOADED, PROGRAM), readable)
    except ServerLostError as error:
        _tell({'fault': str(error)})
        return 1
    try:
        _tell({'ready': True})
        for line in sys.stdin.buffer:
            _tell(_run(children, json.loads(line)))
    except ServerLostError as error:
        _tell({'fault': str(error)})
        return 1
    finally:
        children.close()
    return 0


def _run(children: ConfinedChildren, request: JsonObject) -> JsonObject:
    limits = ProgramLimits(request['time_s'], request['memory_mb'], request['output_bytes'])
    end = run_program(children, request['code'], b'', limits)
    # a byte beyond the limit tells the other side that the output was longer
    text = end.output[: limits.output_bytes + 1].decode(errors='replace')
    return {'output': text, 'label': end.label, 'reason': end.reason}


def _tell(reply: JsonObject) -> None:
    data = json.dumps(reply).encode() + b'\n'
    while data:
        data = data[os.write(1, data) :]


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
