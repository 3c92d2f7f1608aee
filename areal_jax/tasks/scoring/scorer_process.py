"""The process that runs a scorer: a line in, a line out, until the pipe closes. Its parent is tasks/scoring/worker.py.

First line out: {"ready": true}. Then for each line in, {"id": ..., "problem": ..., "text": ..., "finish_reason": ...},
one line out: {"id": ..., "reward": 0.5}, {"id": ..., "error": "..."}, or {"id": ..., "fault": "..."} for an answer that
could not be judged. A reward comes with "label" unless it is 'ok', and with "reason", "cpu_s", "wall_s" if known. A
scorer with a parameter `episode` gets "episode" of the line, {"messages": ...}.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from areal_jax.files import JsonObject
from areal_jax.plugins import load_function, load_module
from areal_jax.tasks.scoring.score_call import MEASURED, MachineFaultError, ScoringError, describe_error, score_answer
from areal_jax.workers.sandbox.confinement import CONFINING, choose_confinement, confine
from areal_jax.workers.sandbox.landlock import list_installed

if TYPE_CHECKING:
    from areal_jax.tasks.task import Scorer


DescribeEpisode = Callable[[], JsonObject]  # control/episode.py


def takes_episode(score: Callable[..., object]) -> bool:
    """Whether the scorer has a parameter `episode`."""
    try:
        parameter = inspect.signature(score).parameters.get('episode')
    except (TypeError, ValueError):  # a function of C without a signature
        return False
    return parameter is not None and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def complete_episode(
    found: JsonObject, problem: Mapping[str, object], read_prompt: Callable[[], str], text: str, finish_reason: str
) -> JsonObject:
    """Returns `found`; if no program has made calls, with a conversation of one question and the answer.

    Args:
      found: of control/episode.py; {} = one turn.
      read_prompt: returns the text of the prompt; called if the problem has no text `question`.
      text: of the answer.
    """
    if found.get('messages'):
        return found
    question = problem.get('question')
    asked = question if isinstance(question, str) else read_prompt()
    messages = [{'role': 'user', 'content': asked}, {'role': 'assistant', 'content': text}]
    one_turn = {'label': finish_reason, 'turns': 1, 'tools': []}
    return {**one_turn, **found, 'messages': messages, 'conversations': [messages]}


def serve(scorer: str, memory_mb: int, requests: int, replies: int, level: str, readable: Sequence[str] = ()) -> None:
    """Loads the scorer, then scores until `requests` is closed. Raises SandboxError and errors of loading the scorer.

    Args:
      scorer: 'module:function' or '/path/to/file.py:function'.
      memory_mb: see `limit_memory`.
      requests, replies: file descriptors, inherited by no child process.
      level: of the sandbox in which it scores, but is not loaded; 'none' = it has the rights of the user. If the
        scorer's module has `start_sandbox`, that gets level and `readable`; the scorer confines the code that it runs,
        and is not confined itself.
      readable: files and folders of packages that answers to such a scorer can import; any other scorer can read all
        that is installed except problems with solutions.
    """
    limit_memory(memory_mb)
    own_pid = os.getpid()
    # A forked child that returns from the scorer must not answer a second time, nor take the next request.
    os.register_at_fork(after_in_child=lambda: _close_quietly(requests, replies))
    # Line buffering shows the output of a scorer that hangs. backslashreplace lets it print lone surrogates.
    sys.stdout = io.TextIOWrapper(io.FileIO(1, 'w', closefd=False), errors='backslashreplace', line_buffering=True)
    score = load_scorer(scorer)
    _end_fork(own_pid)
    start_sandbox = getattr(load_module(scorer, 'scorer'), 'start_sandbox', None)
    if start_sandbox:
        start_sandbox(level, readable)
    elif level in CONFINING:
        confine(choose_confinement(0, level, list_installed()))  # limit_memory bounds the heap
    write_whole(replies, b'{"ready": true}\n')
    with os.fdopen(requests, 'rb', closefd=False) as lines:
        for line in lines:
            reply = reply_to(score, line)
            _end_fork(own_pid)
            _flush_output()
            write_whole(replies, json.dumps(reply).encode() + b'\n')


def load_scorer(spec: str) -> Scorer:
    """Loads the function by plugins.load_function, and warms it up if its module has a `warm_up`."""
    score = cast('Scorer', load_function(spec, 'scorer'))
    getattr(load_module(spec, 'scorer'), 'warm_up', lambda: None)()
    return score


def reply_to(score: Scorer, line: bytes) -> dict[str, object]:
    """Returns the reply to one request. An exception of the scorer becomes a reply with `error`."""
    reply: dict[str, object] = {}
    try:
        request = json.loads(line)
        reply['id'] = request.get('id')
        episode = request.get('episode') if takes_episode(score) else None
        scored = score_answer(score, request['problem'], request['text'], request['finish_reason'], episode)
        reply['reward'] = float(scored)
        if scored.label != 'ok':
            reply['label'] = scored.label
        reply |= {name: value for name in MEASURED if (value := getattr(scored, name))}
    except ScoringError as error:
        reply['error'] = str(error)
    except MachineFaultError as error:
        reply['fault'] = describe_error(error)
    except (Exception, KeyboardInterrupt) as error:
        reply['error'] = describe_error(error)
    return reply


def limit_memory(memory_mb: int) -> None:
    """Bounds the heap and the private mappings of this process and of each child (RLIMIT_DATA), in MiB; 0 = no bound.

    The address space (RLIMIT_AS) is not bounded: allocators and BLAS libraries reserve far more of it than they use.
    Memory shared between processes is not counted; the stack of a thread is, with its full 8 MiB.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dump of a crashed scorer: it takes seconds to write
    if memory_mb:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        bound = memory_mb * 2**20 if hard == resource.RLIM_INFINITY else min(memory_mb * 2**20, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))


def write_whole(descriptor: int, data: bytes) -> None:
    """Writes all of `data` to a blocking descriptor."""
    while data:
        data = data[os.write(descriptor, data) :]


def _end_fork(own_pid: int) -> None:
    if os.getpid() != own_pid:
        os._exit(0)


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):  # a scorer may have closed or replaced them
        with contextlib.suppress(Exception, SystemExit):
            stream.flush()


def _close_quietly(*descriptors: int) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
