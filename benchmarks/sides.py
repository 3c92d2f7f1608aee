"""Programs compared call by call: every side is a process of its own, and the parent asks them in turn.

A side prepares (imports, weights, data; not measured), then answers each line of its standard input with one call's
seconds and memory as a JSON line. Its first call also builds and compiles what a trainer needs. Standard library only:
the sides run in different environments.
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
        wall, cpu = time.monotonic(), time.process_time()
        call, facts = started = started or start()
        if line.strip() == 'facts':
            answer: Run = dict(facts())
        else:
            checks = call()
            answer = {'wall_s': time.monotonic() - wall, 'cpu_s': time.process_time() - cpu, 'checks': dict(checks)}
            answer |= {'peak_bytes': _memory('VmHWM'), 'bytes_before': before}
        print(json.dumps(answer), file=answers, flush=True)


class Side:
    """A running side; use as a context."""

    def __init__(self, python: str, module: str, arguments: Mapping[str, Any]):
        self._errors = tempfile.TemporaryFile('w+')  # noqa: SIM115 as long as the process
        # nothing compiled by an earlier run may help
        environment = {k: v for k, v in os.environ.items() if k != 'JAX_COMPILATION_CACHE_DIR'}
        self._name = f'{python} -m {module}'
        self._process = subprocess.Popen(
            [python, '-m', module, json.dumps(arguments)],
            cwd=ROOT,
            env=environment | {'JAX_ENABLE_COMPILATION_CACHE': 'false'},
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


def _memory(field: str) -> int:
    """Bytes of this process, from Linux: unlike ru_maxrss they are not inherited from the process that started it."""
    for line in pathlib.Path('/proc/self/status').read_text().splitlines():
        if line.startswith(f'{field}:'):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f'/proc/self/status has no {field}')
