"""A worker process that scores answers.

    python -m areal_jax.tasks.scoring.worker SCORER [MEMORY_MB [SANDBOX [FILE...]]]

Started by workers/worker_process.py, with which it exchanges lines of JSON over stdin and stdout. A worker is two
processes. This one runs no code of the scorer: it relays the lines, limits what the scorer prints, and at its end kills
every process that the scorer started. Its child runs the scorer in a new session, see `serve`. First line out:
{"ready": true}. Then for each line in, {"id": ..., "problem": ..., "text": ..., "finish_reason": ...}, one line out:
{"id": ..., "reward": 0.5}, {"id": ..., "error": "..."}, or {"id": ..., "fault": "..."} for an answer that could not be
judged. A reward comes with "label" unless it is 'ok', and with "reason", "cpu_s", "wall_s" if known. A scorer with a
parameter `episode` gets "episode" of the line, {"messages": ...}. If SCORER names the scorers of a mixture, as JSON
by source, "source" of the line says which one is asked. This process adds {"crash": "reason"} when the child
has ended.

When stdin closes, the worker finishes the requests that it has received. When stdout closes too, or the parent dies, it
ends at once.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from areal_jax.files import JsonObject
from areal_jax.plugins import load_function, load_module
from areal_jax.tasks.scoring.score_call import MEASURED, MachineFaultError, ScoringError, describe_error, score_answer
from areal_jax.workers.descendants import adopt_orphans, die_with_parent, end_descendants
from areal_jax.workers.sandbox.confinement import CONFINING, choose_confinement, confine
from areal_jax.workers.sandbox.landlock import list_installed
from areal_jax.workers.worker_process import ENDED, LEFT_BEHIND, SCORER_DIED, USAGE, name_signal

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
      scorer: 'module:function', '/path/to/file.py:function', or several of these, see `join_scorers`.
      memory_mb: see `limit_memory`.
      requests, replies: file descriptors, inherited by no child process.
      level: of the sandbox in which it scores, but is not loaded; 'none' = it has the rights of the user. If the
        module of a scorer has `start_sandbox`, that gets level and `readable`; the scorer confines the code that it
        runs, and neither it nor another scorer of this process is confined itself.
      readable: files and folders of packages that answers to such a scorer can import; any other scorer can read all
        that is installed except problems with solutions.
    """
    limit_memory(memory_mb)
    own_pid = os.getpid()
    # A forked child that returns from the scorer must not answer a second time, nor take the next request.
    os.register_at_fork(after_in_child=lambda: _close_quietly(requests, replies))
    # Line buffering shows the output of a scorer that hangs. backslashreplace lets it print lone surrogates.
    sys.stdout = io.TextIOWrapper(io.FileIO(1, 'w', closefd=False), errors='backslashreplace', line_buffering=True)
    specs = split_scorers(scorer)
    scorers = {source: load_scorer(spec) for source, spec in specs.items()}
    _end_fork(own_pid)
    starts = [getattr(load_module(spec, 'scorer'), 'start_sandbox', None) for spec in dict.fromkeys(specs.values())]
    if any(starts):
        for start_sandbox in filter(None, starts):
            start_sandbox(level, readable)
    elif level in CONFINING:
        confine(choose_confinement(0, level, list_installed()))  # limit_memory bounds the heap
    write_whole(replies, b'{"ready": true}\n')
    with os.fdopen(requests, 'rb', closefd=False) as lines:
        for line in lines:
            reply = reply_to(_choose_scorer(scorers, line), line)
            _end_fork(own_pid)
            for stream in (sys.stdout, sys.stderr):  # a scorer may have closed or replaced them
                with contextlib.suppress(Exception, SystemExit):
                    stream.flush()
            write_whole(replies, json.dumps(reply).encode() + b'\n')


def join_scorers(scorers: Mapping[str, str]) -> str:
    """The argument SCORER of a worker from the scorers by source; that of the only task, under '', is as it is."""
    return scorers[''] if '' in scorers else json.dumps(scorers)


def split_scorers(text: str) -> dict[str, str]:
    """Inverts `join_scorers`."""
    return json.loads(text) if text.startswith('{') else {'': text}


def _choose_scorer(scorers: Mapping[str, Scorer], line: bytes) -> Scorer:
    if '' in scorers:
        return scorers['']
    return scorers[json.loads(line)['source']]


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


def _close_quietly(*descriptors: int) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


_GRACE_S = 30.0  # for the requests already received once stdin has closed, while stdout is open
_EXIT_S = 0.2  # between the closing of a process's pipes and its end
_KILL_S = 3.0  # a process that is alive this long after SIGKILL is stuck in the kernel
_CHUNK_BYTES = 2**16  # read at once
_SHOWN_BYTES = 2000  # of what a scorer prints during one answer
_SHOWN_WHILE_LOADING_BYTES = 20_000  # room for the traceback of an import
_DRAIN_READS = 64  # per reply: a process of the scorer may print without end


def main(arguments: list[str]) -> int:
    """Relays requests and replies until stdin closes or the scorer's process ends."""
    if not arguments or not {*arguments[2:3]} <= {'none', *CONFINING}:
        print('usage: python -m areal_jax.tasks.scoring.worker SCORER [MEMORY_MB [SANDBOX [FILE...]]]', file=sys.stderr)
        return USAGE
    adopt_orphans()
    memory_mb, level = int(arguments[1]) if len(arguments) > 1 else 0, (arguments[2:] or ['none'])[0]
    return _Worker(arguments[0], memory_mb, level, arguments[3:]).run()


class _Output:
    """The output of the scorer: its beginning is shown on stderr under a heading, the rest is only counted."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self.is_open = True
        self.begin('while loading', _SHOWN_WHILE_LOADING_BYTES)

    def begin(self, label: str, room: int = _SHOWN_BYTES) -> None:
        self._label, self._room = label, room
        self._head, self._n_bytes = b'', 0

    def read(self) -> bool:
        """Reads one chunk; False if no chunk is ready."""
        try:
            chunk = os.read(self._descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        self._head += chunk[: self._room - len(self._head)]
        self._n_bytes += len(chunk)
        self.is_open = bool(chunk)
        return self.is_open

    def end(self, next_label: str) -> None:
        """Shows the output so far; later output gets another heading."""
        for _ in range(_DRAIN_READS):
            if not self.read():
                break
        if self._n_bytes:
            text = f'the scorer printed {self._label}:\n{self._head.decode(errors="replace").rstrip()}\n'
            if more := self._n_bytes - len(self._head):
                text += f'[{more} bytes more are not shown]\n'
            with contextlib.suppress(OSError):
                os.write(2, text.encode())
        self.begin(next_label)


class _Worker:
    """The relay between the parent (stdin, stdout) and the scorer's process."""

    def __init__(self, scorer: str, memory_mb: int, level: str, readable: Sequence[str]):
        self._child_ended = _notice_ended_children()
        self._pid, self._requests, self._replies, output = _start_scorer(
            scorer, memory_mb, level, readable, self._child_ended
        )
        self._output = _Output(output)
        self._output_descriptor = output
        for descriptor in (0, 1, self._requests, self._replies, output):
            os.set_blocking(descriptor, False)
        self._incoming = bytearray()  # the line that stdin has not ended yet
        self._to_scorer, self._to_parent = bytearray(), bytearray()
        self._grace_end_s: float | None = None  # set once stdin has closed
        self._parent_is_gone = False
        self._death = ''  # of the scorer's process, in words
        self._exit_code: int | None = None  # of the scorer's process

    def run(self) -> int:
        """Relays until one side ends, then kills remaining processes; returns the exit code."""
        while not (self._parent_is_gone or self._death or self._time_left_s() == 0):
            self._relay()
        if self._death and self._grace_end_s is None:
            self._to_parent += json.dumps({'crash': self._death}).encode() + b'\n'
        self._write(1, self._to_parent)
        with contextlib.suppress(OSError):
            os.killpg(self._pid, signal.SIGKILL)
        all_ended = end_descendants(self._reap, _KILL_S)
        self._output.end('')
        if not all_ended:
            return LEFT_BEHIND
        return ENDED if self._parent_is_gone or self._exit_code == 0 else SCORER_DIED

    def _relay(self) -> None:
        poll = select.poll()
        if self._grace_end_s is None and not self._to_scorer:
            poll.register(0, select.POLLIN)
        poll.register(1, select.POLLOUT if self._to_parent else 0)  # POLLERR, POLLHUP are always reported
        if self._to_scorer:
            poll.register(self._requests, select.POLLOUT)
        if not self._to_parent:
            poll.register(self._replies, select.POLLIN)
        if self._output.is_open:
            poll.register(self._output_descriptor, select.POLLIN)
        poll.register(self._child_ended, select.POLLIN)
        left_s = self._time_left_s()
        ready = dict(poll.poll(None if left_s is None else left_s * 1000))
        if ready.get(1, 0) & (select.POLLERR | select.POLLHUP | select.POLLNVAL):
            self._parent_is_gone = True
            return
        if self._output_descriptor in ready:
            self._output.read()
        if 0 in ready:
            self._read_requests()
        if self._to_scorer:
            self._write(self._requests, self._to_scorer)
        if self._replies in ready:
            self._read_replies()
        if self._to_parent:
            self._write(1, self._to_parent)
        if self._child_ended in ready:
            os.read(self._child_ended, _CHUNK_BYTES)
            self._reap()
        if self._grace_end_s is not None and not self._to_scorer and self._requests >= 0:
            os.close(self._requests)
            self._requests = -1

    def _read_requests(self) -> None:
        chunk = os.read(0, _CHUNK_BYTES)
        if not chunk:
            self._grace_end_s = time.monotonic() + _GRACE_S
            return
        self._incoming += chunk
        if b'\n' in chunk:
            whole, _, rest = bytes(self._incoming).rpartition(b'\n')
            self._incoming = bytearray(rest)
            self._to_scorer += whole + b'\n'
            self._output.end(_label(whole))

    def _read_replies(self) -> None:
        with contextlib.suppress(BlockingIOError):
            chunk = os.read(self._replies, _CHUNK_BYTES)
            if chunk:
                self._output.end('between two answers')
                self._to_parent += chunk
            else:
                end_s = time.monotonic() + _EXIT_S
                while not self._death and time.monotonic() < end_s:
                    self._reap()
                    time.sleep(0.002)
                self._death = self._death or 'the scorer closed the pipe on which its worker answers'

    def _reap(self) -> bool:
        """Reaps every child that has ended, the scorer's process and adopted orphans; False if no child is left."""
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._pid:
                    self._exit_code = os.waitstatus_to_exitcode(ended[1])
                    self._death = self._death or _describe_end(self._exit_code)
                    with contextlib.suppress(BlockingIOError):
                        self._to_parent += os.read(self._replies, _CHUNK_BYTES)
        except ChildProcessError:
            return False
        return True

    def _write(self, descriptor: int, data: bytearray) -> None:
        try:
            del data[: os.write(descriptor, data)]
        except BlockingIOError:
            pass
        except OSError:  # the reader is gone
            data.clear()
            self._parent_is_gone = self._parent_is_gone or descriptor == 1

    def _time_left_s(self) -> float | None:
        return None if self._grace_end_s is None else max(0.0, self._grace_end_s - time.monotonic())


def _start_scorer(
    scorer: str, memory_mb: int, level: str, readable: Sequence[str], noticed: int
) -> tuple[int, int, int, int]:
    """Forks the scorer's process; returns (pid, pipe of requests, pipe of replies, pipe of its output).

    `noticed` is the descriptor of `_notice_ended_children`, which only the parent keeps.
    """
    own_pid = os.getpid()
    requests, to_scorer = os.pipe()
    from_scorer, replies = os.pipe()
    from_output, output = os.pipe()
    pid = os.fork()
    if pid:
        for descriptor in (requests, replies, output):
            os.close(descriptor)
        return pid, to_scorer, from_scorer, from_output
    status = 1
    try:
        notices = (noticed, signal.set_wakeup_fd(-1))
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        die_with_parent()
        os.setsid()
        # The socket to the parent is stdin and stdout so far; neither the scorer nor its children may hold it.
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        for descriptor in (null, output, to_scorer, from_scorer, from_output, *notices):
            os.close(descriptor)
        if os.getppid() == own_pid:
            serve(scorer, memory_mb, requests, replies, level, readable)
            status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        os._exit(status)  # skips the clean-up of the interpreter, which would wait for threads of the scorer


def _notice_ended_children() -> int:
    noticed, wake_up = os.pipe()
    for descriptor in (noticed, wake_up):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_up, warn_on_full_buffer=False)
    return noticed


def _label(requests: bytes) -> str:
    with contextlib.suppress(ValueError, LookupError, TypeError):
        request = json.loads(requests.rpartition(b'\n')[2])
        return f'for draw {request["draw"]}'
    return 'for an answer'


def _describe_end(exit_code: int) -> str:
    if exit_code >= 0:
        return f"the scorer's process ended with exit code {exit_code}"
    by_kernel = ' (by the kernel, where memory ran out)' if exit_code == -signal.SIGKILL else ''
    return f"the scorer's process was killed by {name_signal(-exit_code)}{by_kernel}"


if __name__ == '__main__':
    os._exit(main(sys.argv[1:]))
