"""Sound logs of runs that were disturbed, each with the limits of its run: what the rules must never call damaged.

Toys in place of models and of processes: seconds in all. tests/killed_logs.py does the same to real runs.
"""

from __future__ import annotations

import collections
import dataclasses
import signal
from collections.abc import Callable
from typing import Any

from areal_jax.files import JsonObject
from areal_jax.report.rules.log_rules import Limits
from areal_jax.tasks.scoring.verifier import ProcessVerifier, TaskScoring
from areal_jax.workers.worker_process import WorkerDiedError, WorkerProcess
from tests.control.test_reallocation import toy_run
from tests.report.rules.toy_logs import LIMITS, Events, log_of, real_clock
from tests.rollout.servers.test_run import ServerRun
from tests.toys import ToyRun


class ScriptedWorker(WorkerProcess):
    """A worker without a process. `deaths`: what ends each of its starts and calls, over all workers of a run."""

    def __init__(self, deaths: ScriptedDeaths):
        self.is_ready = False
        self._deaths, self._is_killed = deaths, False

    @property
    def is_killed(self) -> bool:
        return self._is_killed

    def wait_until_ready(self, end_s: float) -> None:
        self.is_ready = True

    async def become_ready(self) -> None:
        self._deaths.meet('start')

    async def ask(self, request: JsonObject) -> JsonObject:
        return self._deaths.meet('call') or {'reward': float(len(request['text']) % 2)}

    def kill(self) -> None:
        self._is_killed = True

    def is_gone(self) -> bool:
        return self._is_killed

    def close(self, within_s: float = 0.0) -> None:
        self._is_killed = True


class ScriptedDeaths:
    """What meets the n-th start or call, counted from 1 over all workers: an exception, or a reply."""

    def __init__(self, **script: dict[int, JsonObject | Exception]):
        self._script, self._counts = script, collections.Counter[str]()

    def meet(self, what: str) -> JsonObject | None:
        self._counts[what] += 1
        found = self._script.get(what, {}).get(self._counts[what])
        if isinstance(found, Exception):
            raise found
        return found

    def make_verifier(self, clock: Any) -> ProcessVerifier:
        verifier = ProcessVerifier(
            clock, {'': TaskScoring('toys:score')}, lambda tokens: ''.join(map(chr, 65 + tokens)), workers=2,
            deadline_s=5.0, attempts=3, memory_mb=1, start_worker=lambda *_: ScriptedWorker(self),
        )  # fmt: skip
        verifier.start()
        return verifier


def judged(**script: dict[int, JsonObject | Exception]) -> Events:
    """The log of a run of the real clock whose workers die so."""
    return log_of(ToyRun(make_clock=real_clock, make_verifier=ScriptedDeaths(**script).make_verifier).run())


def died(*numbers: int) -> dict[int, JsonObject | Exception]:
    return {number: WorkerDiedError('signal 9') for number in numbers}


def resumed(times: int, **fields: Any) -> Events:
    """Killed after its first checkpoint and resumed, so many times: the log is cut off there each time."""
    log: Events = []
    saved = None
    for number in range(times + 1):
        run = ToyRun(resume=saved, **fields).run()
        kept, made = log, log_of(run)
        if number < times:
            saved = run.checkpoints[0]
            made = [event for event in made if event['seq'] < saved['run_state']['next_seq']]
        log = [*kept, *made]
    return log


def stopped() -> Events:
    """SIGTERM in the middle; then the run goes on."""
    first = ToyRun(engines=2)
    first.clock.post_signal(signal.SIGTERM, _Delayed(first))
    first.run()
    saved = first.checkpoints[-1]
    made = [event for event in log_of(first) if event['seq'] < saved['run_state']['next_seq']]
    return [*made, *log_of(ToyRun(engines=2, resume=saved).run())]


class _Delayed:
    """The event of a signal: it asks for a stop."""

    def __init__(self, run: ToyRun):
        self._run = run

    def set(self) -> None:
        self._run.controller.stop_requested.set()


def _servers(deaths: Any = (), **fields: Any) -> Events:
    return log_of(ServerRun(deaths, steps=6, checkpoint_every=3, **fields).run())


_BOTH = [(0.2, 0, True), (0.4, 1, True), (0.8, 0, False), (1.0, 1, False)]
_OF_SERVERS = dataclasses.replace(LIMITS, in_process=False)
_LOCK_STEP = dataclasses.replace(LIMITS, in_order=False)
_FAULT: JsonObject = {'fault': 'the sandbox did not start'}

# kind of disturbance -> how to make the log, and the limits of its run
SOUND: dict[str, tuple[Callable[[], Events], Limits]] = {
    'a worker dies': (lambda: judged(call=died(2)), LIMITS),
    'a worker and its successor die': (lambda: judged(call=died(2), start=died(1)), LIMITS),
    'a worker and two successors die': (lambda: judged(call=died(3), start=died(1, 2)), LIMITS),
    'a worker dies where the scorer fails': (
        lambda: judged(call={**died(2), 4: {'error': 'no number'}}, start=died(1)), LIMITS,
    ),
    'a worker hangs at its start': (lambda: judged(call=died(5), start={1: TimeoutError('late')}), LIMITS),
    'a call hits its deadline': (lambda: judged(call={number: TimeoutError('late') for number in (3, 5, 6)}), LIMITS),
    'the sandbox fails': (lambda: judged(call=dict.fromkeys((2, 3, 4, 5, 6), _FAULT)), LIMITS),
    'a stop': (stopped, LIMITS),
    'killed before the first checkpoint': (lambda: log_of(ToyRun().run())[:200], LIMITS),
    'killed after a checkpoint': (lambda: resumed(1, engines=2, checkpoint_every=2), LIMITS),
    'killed twice': (lambda: resumed(2, engines=2, checkpoint_every=1), LIMITS),
    'engines leave and join': (lambda: log_of(toy_run().run()), LIMITS),
    'a server dies': (lambda: _servers([(0.3, 0, True)]), _OF_SERVERS),
    'a server dies and returns': (lambda: _servers([(0.3, 0, True), (0.9, 0, False)]), _OF_SERVERS),
    'all servers die and return': (lambda: _servers(_BOTH), _OF_SERVERS),
    'a request is lost': (lambda: _servers(bad_draws=(4,)), _OF_SERVERS),
    'groups over their age': (
        lambda: log_of(ToyRun(engines=2, max_token_age=0, over_age='drop', decode_steps=1).run()),
        dataclasses.replace(LIMITS, max_token_age=0),
    ),
    'lock-step, killed': (lambda: resumed(1, schedule='fixed(2)', checkpoint_every=2), _LOCK_STEP),
    'evaluations, killed': (lambda: resumed(1, evaluation_every=2, engines=2, checkpoint_every=3), LIMITS),
    'a full cache': (
        lambda: log_of(ToyRun(slots=8, cache_blocks=8, decode_steps=1, group_size=4).run()),
        dataclasses.replace(LIMITS, group_size=4),
    ),
}  # fmt: skip
