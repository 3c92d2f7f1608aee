"""Where answers are scored: `python -m areal_jax.tasks.worker MODULE:FUNCTION`, JSON lines over stdin and stdout.

First line out: {"ready": true}. Then for each line in, {"problem": ..., "text": ..., "finish_reason": ...}, one line
out: {"reward": 0.5} or {"error": "..."}. Whatever the function prints goes to stderr. The worker ends when its stdin
closes, also in the middle of a function that hangs; if it leads its own session it takes its children along.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import IO, Any

from areal_jax.tasks.task import Scorer

_GRACE_S = 1.0  # time for the answer at hand once stdin has closed


def main(arguments: list[str]) -> int:
    """Score until stdin closes. Raises what loading the scorer raises, before the ready line."""
    if len(arguments) != 1:
        print('usage: python -m areal_jax.tasks.worker MODULE:FUNCTION', file=sys.stderr)
        return 2
    requests, replies = _take_pipes()
    score = load_scorer(arguments[0])
    _write(replies, {'ready': True})
    with contextlib.suppress(BrokenPipeError):  # the parent has died: nobody reads
        for line in _read_until_closed(requests):
            _write(replies, reply_to(score, line))
    _end_session()
    return 0


def load_scorer(spec: str) -> Scorer:
    """The function 'module:function', warmed up if its module has a `warm_up`."""
    module_name, _, function_name = spec.partition(':')
    module = importlib.import_module(module_name)
    score = getattr(module, function_name)
    getattr(module, 'warm_up', lambda: None)()
    return score


def reply_to(score: Scorer, line: bytes) -> dict[str, Any]:
    """The reply to one request; an exception of the scorer and a reward that is no number are replies too."""
    try:
        request = json.loads(line)
        reward = float(score(request['problem'], request['text'], request['finish_reason']))
        if not math.isfinite(reward):
            raise ValueError(f'the scorer returned {reward}')
    except (Exception, SystemExit) as error:
        return {'error': f'{type(error).__name__}: {error}'}
    return {'reward': reward}


def _take_pipes() -> tuple[IO[bytes], IO[bytes]]:
    # Children of a scorer must hold neither pipe: an inherited stdout would hide the worker's death from the parent,
    # and a print would be taken for a reply. Duplicates are not inherited; 0 and 1 then point elsewhere.
    requests, replies = os.fdopen(os.dup(0), 'rb'), os.fdopen(os.dup(1), 'wb')
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return requests, replies


def _read_until_closed(requests: IO[bytes]) -> Iterator[bytes]:
    lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_read_lines, args=(requests, lines), daemon=True).start()
    while (line := lines.get()) is not None:
        yield line


def _read_lines(requests: IO[bytes], lines: queue.SimpleQueue[bytes | None]) -> None:
    for line in requests:
        lines.put(line)
    lines.put(None)
    time.sleep(_GRACE_S)
    _end_session()  # the main thread hangs in a scorer, and nobody is left to kill it
    os._exit(1)


def _end_session() -> None:
    if os.getsid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)


def _write(replies: IO[bytes], reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply).encode() + b'\n')
    replies.flush()


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
