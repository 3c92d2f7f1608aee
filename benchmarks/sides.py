"""Programs compared call by call: every side is a process of its own, and the parent asks them in turn.

A side prepares (imports, weights, data; not measured), then answers each line of its standard input with one call's
seconds and memory as a JSON line. Its first call also builds and compiles what a trainer needs. CPU seconds
cover the side's process and all processes that it started. Standard library only: the sides run in different
environments.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
ARITHMETIC = 'configs/arithmetic.py'  # SmolLM2-135M-Instruct, one-digit arithmetic
QUICKSTART = 'configs/quickstart.py'  # which arithmetic was once

Run = dict[str, Any]
Call = Callable[[], Mapping[str, float]]  # does the work to its end; returns numbers to check it by
Start = Callable[[], tuple[Call, Callable[[], Mapping[str, Any]]]]  # (call, facts about what was built)


def serve(prepare: Callable[[dict[str, Any]], Start]) -> None:
    """The side's main: argv[1] is a JSON object, which `prepare` turns into what the first call starts."""
    answers = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)  # what libraries print is no answer
    start = prepare(json.loads(sys.argv[1]))
    before = _memory('VmRSS')
    started: tuple[Call, Callable[[], Mapping[str, Any]]] | None = None
    for line in sys.stdin:
        wall, cpu = time.monotonic(), cpu_seconds()
        call, facts = started = started or start()
        if line.strip() == 'facts':
            answer: Run = dict(facts())
        else:
            checks = call()
            answer = {'wall_s': time.monotonic() - wall, 'cpu_s': cpu_seconds() - cpu, 'checks': dict(checks)}
            answer |= {'peak_bytes': _memory('VmHWM'), 'bytes_before': before}
        print(json.dumps(answer), file=answers, flush=True)


class Stopwatch:
    """CPU and wall seconds of a part of a call; it may be started and stopped several times."""

    def __init__(self) -> None:
        self._cpu_s, self._wall_s = 0.0, 0.0
        self._started: tuple[float, float] | None = None

    def start(self) -> None:
        if self._started is None:
            self._started = cpu_seconds(), time.monotonic()

    def stop(self) -> None:
        if self._started is not None:
            self._cpu_s += cpu_seconds() - self._started[0]
            self._wall_s += time.monotonic() - self._started[1]
            self._started = None

    def parts(self) -> dict[str, float]:
        """As a call's checks have them (ratios.py)."""
        return {'part_cpu_s': self._cpu_s, 'part_wall_s': self._wall_s}


class Side:
    """A running side; use as a context.

    Args:
      checkout: of another version, whose packages the file of `module` in this one imports; None = this version.
    """

    def __init__(self, python: str, module: str, arguments: Mapping[str, Any], checkout: pathlib.Path | None = None):
        self._errors = tempfile.TemporaryFile('w+')  # noqa: SIM115 as long as the process
        # nothing compiled by an earlier run may help
        environment = {k: v for k, v in os.environ.items() if k != 'JAX_COMPILATION_CACHE_DIR'}
        self._name = f'{python} -m {module}'
        started = ['-m', module] if checkout is None else [str(ROOT / f'{module.replace(".", "/")}.py')]
        path = {} if checkout is None else {'PYTHONPATH': str(checkout)}
        self._process = subprocess.Popen(
            [python, *started, json.dumps(arguments)],
            cwd=checkout or ROOT,
            env=environment | path | {'JAX_ENABLE_COMPILATION_CACHE': 'false'},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        if self._process.stdin:
            self._process.stdin.close()
        self._process.wait()
        self._errors.close()

    def call(self) -> Run:
        return self._ask('call')

    def facts(self) -> Run:
        return self._ask('facts')

    def _ask(self, what: str) -> Run:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(what, file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ''
        if not answer:
            self._errors.seek(0)
            raise RuntimeError(f'{self._name} ended:\n{self._errors.read()[-4000:]}')
        return json.loads(answer)


def take_turns(sides: Mapping[str, Side], repetitions: int, uncounted: int = 0) -> dict[str, dict[str, Any]]:
    """One first call of each side, then `repetitions` calls of each in turn; what `summarize` says of them.

    Before each of those a side makes `uncounted` calls: memory that it freed may have gone back to the host of a
    virtual machine while the others had their turn, and a trainer whose steps follow each other does not wait for it.
    """
    calls: dict[str, list[Run]] = {name: [] for name in sides}
    for turn in range(1 + repetitions):
        for name, side in sides.items():
            for _ in range(uncounted if turn else 0):
                side.call()
            calls[name].append(side.call())
            print(name, calls[name][-1], file=sys.stderr, flush=True)
    return {name: summarize(*calls[name]) | {'facts': side.facts()} for name, side in sides.items()}


def ask_in_turns(sides: Mapping[str, Side], turns: int) -> dict[str, list[Run]]:
    """`turns` calls of each side, A B A B, after each was built and warmed up by its `start`."""
    for side in sides.values():
        side.facts()
    calls: dict[str, list[Run]] = {name: [] for name in sides}
    for _ in range(turns):
        for name, side in sides.items():
            calls[name].append(side.call())
            print(name, calls[name][-1], file=sys.stderr, flush=True)
    return calls


def summarize(first: Run, *calls: Run) -> dict[str, Any]:
    """Medians over the calls after the first; what the first took beyond them is building and compiling."""
    middle = {key: statistics.median(call[key] for call in calls) for key in ('wall_s', 'cpu_s')}
    last = calls[-1]
    return {
        **middle,
        'least_cpu_s': min(call['cpu_s'] for call in calls),
        'first_wall_s': first['wall_s'],
        'first_cpu_s': first['cpu_s'],
        'start_wall_s': first['wall_s'] - middle['wall_s'],
        'start_cpu_s': first['cpu_s'] - middle['cpu_s'],
        'peak_bytes': last['peak_bytes'],
        'added_bytes': last['peak_bytes'] - last['bytes_before'],
        'checks': last['checks'],
        'calls': [{key: call[key] for key in ('wall_s', 'cpu_s')} for call in calls],
    }


class Compilations:
    """Programs that JAX traces and compiles from now on, with their wall seconds."""

    def __init__(self) -> None:
        import jax.monitoring

        self._seconds: dict[str, list[float]] = {}
        jax.monitoring.register_event_duration_secs_listener(self._note)

    def report(self) -> dict[str, Any]:
        compiled = self._seconds.get('backend_compile_duration', [])
        stages = ('jaxpr_trace_duration', 'jaxpr_to_mlir_module_duration', 'backend_compile_duration')
        return {
            'programs': len(compiled),
            'trace_lower_compile_s': sum(sum(self._seconds.get(stage, ())) for stage in stages),
        }

    def _note(self, event: str, seconds: float, **_: Any) -> None:
        self._seconds.setdefault(event.rsplit('/', 1)[-1], []).append(seconds)


def cpu_seconds() -> float:
    """CPU seconds of this process and of all that it started, directly or not, those that ended included.

    Children are counted in clock ticks, of 10 ms as a rule. A process whose parent ended before it is not found.
    """
    ended = os.times()
    own = time.process_time() + ended.children_user + ended.children_system
    return own + _descendants_ticks(os.getpid()) / os.sysconf('SC_CLK_TCK')


def children_cpu_seconds() -> float:
    """CPU seconds of the live processes that this one started, directly or not: `cpu_seconds` without its own."""
    return _descendants_ticks(os.getpid()) / os.sysconf('SC_CLK_TCK')


def _descendants_ticks(pid: int) -> int:
    """CPU time of the live descendants of a process and of the children they waited for, from Linux."""
    children: dict[int, list[tuple[int, int]]] = {}  # (process, ticks) by parent
    for stat in pathlib.Path('/proc').glob('[0-9]*/stat'):
        try:
            fields = stat.read_text().rpartition(')')[2].split()
        except OSError:  # the process ended in between
            continue
        ticks = sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime of proc(5)
        children.setdefault(int(fields[1]), []).append((int(stat.parent.name), ticks))
    total, open_parents = 0, [pid]
    while open_parents:
        for child, ticks in children.get(open_parents.pop(), ()):
            total += ticks
            open_parents.append(child)
    return total


def _memory(field: str) -> int:
    """Bytes of this process, from Linux: unlike ru_maxrss they are not inherited from the process that started it."""
    for line in pathlib.Path('/proc/self/status').read_text().splitlines():
        if line.startswith(f'{field}:'):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f'/proc/self/status has no {field}')
