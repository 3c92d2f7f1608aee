"""Runs that are ended around their checkpoints, with a living server: python -m checks.chaos_roles.pauses.

--minutes=30 --seed=0 --json=FILE. A run has one server of its own, which is left alone. Again and again the run is
ended by SIGTERM or kill -9 while it has paused the server, while a checkpoint is written, or between the two; it then
goes on with --resume, and at last to its end. A run in one process is ended itself, a run in roles loses its
controller, which the launcher starts again. Each time another client asks the server for an answer: it must come within
10 s of the end of the process, or of the lease of its pause. The run must then train on, and end with code 0. Exit code
0 only if every check held and each place met both signals.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

from areal_jax import files
from areal_jax.rollout.servers.server_entries import read_registry
from checks import logs
from checks.chaos.kills import is_saving
from checks.chaos_roles.runs import KEEPER
from checks.command import describe_command, leave_directory, make_directory, make_parser, restore_signals
from checks.processes import RunningCommand, find_marked, marked, python

ALONE, IN_ROLES = 'alone', 'in roles'
SIGNALS = (signal.SIGTERM, signal.SIGKILL)
MOMENTS = ('paused', 'saving', 'between')
SERVES_S = 10.0  # from the end of the process, or of its lease, to the answer of another client
LEASE_S = 4.0  # shorter than by default, so that a kill costs less
STOPPED = 75
_START_S = 300.0  # until a run that was started again has trained an update: it must not wait for a probe
_STEPS = 24  # by which each start prolongs a run: none is to be at its end when a signal comes
_IN_A_ROW = 4  # controllers of one run in roles that are ended: its launcher gives up after five restarts in a row
_SHARE_ALONE = 0.55  # of the minutes
_NEVER_S = 1e9
_KEY = 'pauses'
_FIELDS = {
    'rollout.server': 'own', 'publication.channel': 'files', 'rollout.pause_lease_s': LEASE_S, 'checkpoint.every': 1,
    'checkpoint.keep': 2, 'evaluation.problems': 0, 'telemetry.tensorboard': False, 'telemetry.plots': False,
    'cluster.engines': '1 x tensor=1',
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Strike:
    """One end of a process, and what followed."""

    place: str
    signal: str
    moment: str
    was_paused: bool  # the server, just before the signal
    lease_left_s: float  # at the end of the process; 0 where it had ended its pause, or had none
    served_s: float  # from the end of process and lease to the answer of another client
    trained_s: float  # from the next start to its first update
    violations: Sequence[str]


@dataclasses.dataclass
class Found:
    """What all runs have shown."""

    strikes: list[Strike] = dataclasses.field(default_factory=list)
    ends: list[str] = dataclasses.field(default_factory=list)  # violations of the runs at their end
    finished: int = 0  # runs

    @property
    def violations(self) -> list[str]:
        return [*(text for strike in self.strikes for text in strike.violations), *self.ends]

    def missing(self, places: Sequence[str]) -> list[str]:
        met = {(strike.place, strike.signal) for strike in self.strikes}
        kinds = [(place, number.name) for place in places for number in SIGNALS]
        return [' '.join(kind) for kind in kinds if kind not in met]


class StrangersClient:
    """Another client of the one server of a run."""

    def __init__(self, workdir: pathlib.Path, key: str = _KEY):
        self._workdir, self._key = workdir, key

    @property
    def url(self) -> str:
        """'' before the server has registered."""
        return next((entry.url for entry in read_registry(self._workdir)), '')

    def look(self) -> list[dict[str, Any]]:
        """Who has paused the server."""
        with contextlib.suppress(OSError):
            return json.loads(self._ask('/health', None, 5.0) or '{}').get('pauses', [])
        return []

    def generate(self, timeout_s: float) -> float:
        """Asks for one token; returns the time.monotonic() of the answer, _NEVER_S without one."""
        body = {'input_ids': [1, 2], 'sampling_params': {'max_new_tokens': 1, 'ignore_eos': True}}
        end_s = time.monotonic() + timeout_s
        while (left_s := end_s - time.monotonic()) > 0:
            try:
                answer = json.loads(self._ask('/generate', body, left_s))
            except urllib.error.HTTPError as error:
                raise RuntimeError(f'{error.code}: {error.read()[:300]!r}') from error
            except OSError:
                continue
            if answer['meta_info']['finish_reason']['type'] == 'length':  # else the run's own pause has ended it
                return time.monotonic()
        return _NEVER_S

    def _ask(self, path: str, body: dict[str, Any] | None, timeout_s: float) -> str:
        data = None if body is None else json.dumps(body).encode()
        headers = {'Authorization': f'Bearer {self._key}', 'Content-Type': 'application/json'}
        asked = urllib.request.Request(self.url + path, data, headers)
        with urllib.request.urlopen(asked, timeout=timeout_s) as reply:
            return str(reply.read().decode())


class Chain:
    """A run with its server, ended again and again."""

    def __init__(self, place: str, directory: pathlib.Path, cache: pathlib.Path, rng: random.Random):
        self.place, self._directory, self._rng = place, directory, rng
        self.workdir = directory / 'run'
        self.workdir.mkdir(parents=True)
        self._cache, self._steps = cache, _STEPS
        self._stranger = StrangersClient(self.workdir)
        self._environment = {'AREAL_JAX_API_KEY': _KEY, 'JAX_PLATFORMS': 'cpu'}

    def strike(self, signals: Sequence[signal.Signals], until_s: float, found: Found) -> None:
        """Fills `found` with a strike for each signal, and with what the run ends with."""
        with contextlib.ExitStack() as parts:
            if self.place == ALONE:
                parts.enter_context(self._start_server())
            run = parts.enter_context(self._start(resume=False))
            self._await_update(run, time.monotonic())
            for number in signals:
                if time.monotonic() > until_s:
                    break
                run = self._strike_once(run, number, parts, found)
            ending, wrong = run.finish((0,), _START_S)
            found.ends += [f'{self.place}: {text}' for text in wrong]
            found.finished += ending.exit_code == 0

    def _strike_once(
        self, run: RunningCommand, number: signal.Signals, parts: contextlib.ExitStack, found: Found
    ) -> RunningCommand:
        """The run as it goes on."""
        moment = self._rng.choice(MOMENTS)
        self._await_moment(run, moment)
        pid = run.pid if self.place == ALONE else self._find_controller(run)
        was_paused = bool(self._stranger.look())
        os.kill(pid, number)
        wrong: list[str] = []
        if self.place == ALONE:
            ending = run.wait()
            wrong += ending.violations((STOPPED,) if number == signal.SIGTERM else (-signal.SIGKILL,))
        else:
            run.wait_for(lambda: pid not in marked(run.mark))
        ended_s, pauses = time.monotonic(), self._stranger.look()
        left_s = max([float(pause['lease_seconds'] or 0.0) for pause in pauses], default=0.0)
        if pauses and number == signal.SIGTERM and self.place == ALONE:
            wrong.append(f'SIGTERM left the server paused: {pauses}')
        served_s = self._stranger.generate(left_s + 3 * SERVES_S) - ended_s - left_s
        if served_s > SERVES_S:
            wrong.append(f'another client had its answer {served_s:.1f} s after the end of process and lease')
        if self.place == ALONE:  # the launcher of a run in roles goes on by itself
            self._steps = max(self._steps, (logs.newest_update(self.workdir) or 0) + _STEPS)
            run = parts.enter_context(self._start(resume=True))
        trained_s = self._await_update(run, ended_s)
        if trained_s == _NEVER_S:
            wrong.append(f'no update within {_START_S:.0f} s of the next start')
        strike = Strike(
            self.place, number.name, moment, was_paused, round(left_s, 2), round(max(0.0, served_s), 2),
            round(trained_s, 1), [f'{self.place}, {number.name} {moment}: {text}' for text in wrong],
        )  # fmt: skip
        found.strikes.append(strike)
        print(f'{"failed" if wrong else "held":6}  {len(found.strikes)}: {strike}', flush=True)
        return run

    def _start(self, *, resume: bool) -> RunningCommand:
        fields = _FIELDS | {'run.steps': self._steps, 'run.compilation_cache': self._cache}
        program = (
            ['areal_jax.main_train', *(['--resume'] if resume else [])] if self.place == ALONE else ['launch.local']
        )
        fields |= {} if self.place == ALONE else {'cluster.learner': 'hosts=1 x data=1'}
        flags = [f'--config.{name}={value}' for name, value in fields.items()]
        command = python('-m', *program, '--config=configs/tiny_cpu.py', f'--workdir={self.workdir}', *flags)
        return RunningCommand(command, self._directory, self._environment)

    def _start_server(self) -> RunningCommand:
        names = ('rollout.server', 'publication.channel', 'cluster.engines')
        flags = [f'--config.{name}={_FIELDS[name]}' for name in names]
        flags.append(f'--config.run.compilation_cache={self._cache}')
        command = python('-m', 'areal_jax.main_serve', '--config=configs/tiny_cpu.py', '--port=0', *flags)
        server = RunningCommand([*command, f'--workdir={self.workdir}'], self._directory, self._environment)
        if not server.wait_for(lambda: bool(self._stranger.url), _START_S):
            raise RuntimeError(f'the server did not start: {server.wait(0.0)}')
        return server

    def _await_moment(self, run: RunningCommand, moment: str) -> None:
        sights: dict[str, Callable[[], bool]] = {
            'paused': lambda: bool(self._stranger.look()),
            'saving': lambda: is_saving(run, self.workdir),
            'between': lambda: True,
        }
        if not run.wait_for(sights[moment], _START_S):
            raise RuntimeError(f'the moment {moment!r} did not come: {run.wait(0.0).violations((0,))}')
        run.sleep(self._rng.uniform(0.0, 1.0 if moment == 'between' else 0.02))

    def _await_update(self, run: RunningCommand, began_s: float) -> float:
        """Seconds to the first update after those that are saved; _NEVER_S where none comes."""
        before = logs.newest_update(self.workdir)
        newer = lambda: (logs.newest_update(self.workdir) or -1) > (-1 if before is None else before)
        came = run.wait_for(newer, _START_S)
        return time.monotonic() - began_s if came else _NEVER_S

    def _find_controller(self, run: RunningCommand) -> int:
        words = {b'areal_jax.main_role', b'--role=controller'}
        find = lambda: find_marked(run.mark, words, without={KEEPER})
        run.wait_for(lambda: bool(find()), _START_S)
        return find()[0]


def main(arguments: Sequence[str]) -> int:
    parser = make_parser('chaos_roles.pauses', __doc__, seed_of='of the moments')
    parser.add_argument('--minutes', type=float, default=30.0, help='after which it begins nothing new')
    parser.add_argument('--moments', type=int, default=30, help='strikes; a third of them on runs in roles')
    parser.add_argument('--places', nargs='+', choices=(ALONE, IN_ROLES), default=[ALONE, IN_ROLES])
    flags = parser.parse_args(arguments)
    restore_signals()
    directory, began_s, found = make_directory('chaos_pauses'), time.monotonic(), Found()
    shares = {ALONE: flags.moments - flags.moments // 3, IN_ROLES: flags.moments // 3}
    for place in flags.places:
        count = shares[place] if len(flags.places) > 1 else flags.moments
        signals = [SIGNALS[index % 2] for index in range(count)]
        each = count if place == ALONE else _IN_A_ROW
        batches = [signals[first : first + each] for first in range(0, count, each)]
        until_s = began_s + 60 * flags.minutes * (_SHARE_ALONE if place == ALONE and len(flags.places) > 1 else 1)
        for number, batch in enumerate(batches):
            if time.monotonic() > until_s:
                break
            rng, folder = random.Random(f'{flags.seed} {place} {number}'), directory / f'{place} {number}'
            try:
                Chain(place, folder, directory / 'cache', rng).strike(batch, until_s, found)
            except (OSError, RuntimeError, IndexError) as error:
                found.ends.append(f'{place}: {type(error).__name__}: {error}')
    passed = _report(found, flags, describe_command(parser, arguments), began_s)
    leave_directory(directory, failed=bool(found.violations))
    return 0 if passed else 1


def _report(found: Found, flags: argparse.Namespace, command: dict[str, Any], began_s: float) -> bool:
    """Whether everything held."""
    missing = found.missing(flags.places)
    moments = collections.Counter(f'{one.place}, {one.signal}, {one.moment}' for one in found.strikes)
    passed = not found.violations and not missing
    facts = {
        **command, 'seed': flags.seed, 'passed': passed, 'minutes': round((time.monotonic() - began_s) / 60, 2),
        'strikes': len(found.strikes), 'held': sum(not one.violations for one in found.strikes),
        'while_paused': sum(one.was_paused for one in found.strikes), 'runs_finished': found.finished,
        'slowest_served_s': max((one.served_s for one in found.strikes), default=None),
        'slowest_trained_s': max((one.trained_s for one in found.strikes), default=None),
        'lease_s': LEASE_S, 'kinds': dict(moments), 'missing': missing, 'violations': found.violations,
    }  # fmt: skip
    if flags.json:
        files.write_json(flags.json, facts | {'each': [dataclasses.asdict(one) for one in found.strikes]})
    for name, value in facts.items():
        print(f'{name}: {value}')
    return passed


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
