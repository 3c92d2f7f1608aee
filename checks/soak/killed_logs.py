"""Logs of killed runs, and faults in them: python -m checks.soak.killed_logs --seed=0 --json=FILE [--only=TEXT].

Runs of a tiny model, real processes, are disturbed in twelve ways: workers of the verifier die, one after another too,
or hang; runs are stopped, killed around checkpoints and resumed, or meet a full disk; engines and servers come and go
in simulations. areal-check-log reads every log as it was left at each death, and as it is at the end. Then it reads
copies of sound logs, each with one planted fault, numbers and check sums made anew.

Exit code 0 only if it called no sound log damaged, each fault of every kind was found, every disturbance met its run,
and each of the kinds ran. About ten minutes on two cores.
"""

from __future__ import annotations

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
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from areal_jax import files
from areal_jax.events.schema import FILE
from areal_jax.report.event_log import load_events
from checks.chaos.cases import Ground, Variant
from checks.chaos.full_disk import on_failing_disk
from checks.chaos.kills import is_saving, is_updating
from checks.command import describe_command, leave_directory, make_directory, make_parser
from checks.logs import check_with_commands, newest_update
from checks.processes import RunningCommand, find_marked, python
from tests.report.planted_faults import plant
from tests.report.rules import part_faults

_WORKER = b'areal_jax.tasks.scoring.worker'
_FINISHED, _STOPPED = 0, 75
_SEEDS = 1  # places of each fault in each log
_PROCESS = ('task.verifier=process', 'task.max_failed_groups=1000', 'run.export=False')
_RUN = Variant('process verifier', _PROCESS, steps=12, evaluation=('evaluation.problems=0',))
_MOVED = dataclasses.replace(_RUN, overrides=(*_RUN.overrides, 'staleness.schedule=fixed(2)'))
_AGED = ('staleness.max_token_age=0', 'staleness.over_age=drop', 'run.clock=virtual', 'task.verifier=inline')
_OLD = dataclasses.replace(_RUN, overrides=_AGED)
_DISTURBED = ('friction.actor_share=0.3', 'friction.actor=logprobs', 'friction.reward_share=0.3')
_FRICTION = dataclasses.replace(_RUN, overrides=(*_RUN.overrides, *_DISTURBED))
_FULL = dataclasses.replace(_RUN, overrides=('run.clock=virtual',))
_SERVERS = (
    'rollout.server=own',
    'publication.channel=files',
    'simulation.failures=exponential(300)',
    'simulation.restart=uniform(20, 60)',
    'run.steps=3',
)


@dataclasses.dataclass
class Kind:
    """What one kind of disturbance came to."""

    logs: int = 0
    events: int = 0
    met: int = 0  # disturbances that met the run
    wrong: list[str] = dataclasses.field(default_factory=list)  # what the checker said of sound logs, and bad ends


class Disturbed:
    """One run, its deaths, and what areal-check-log says of its log."""

    def __init__(self, ground: Ground, kind: Kind, name: str, variant: Variant):
        self.ground, self.kind, self.variant = ground, kind, variant
        self.directory, self.rng = ground.fresh(name), ground.random(name)
        self.workdir = self.directory / 'run'

    @contextlib.contextmanager
    def start(self, *more: str, resume: bool = False) -> Iterator[RunningCommand]:
        with self.ground.start(self.variant, self.directory, *more, resume=resume) as run:
            yield run

    def end(self, run: RunningCommand, *allowed: int) -> None:
        """Waits for the end, and checks the log as it is."""
        ending = run.wait()
        if ending.exit_code not in allowed:
            self.kind.wrong.append(f'exit code {ending.exit_code}: {ending.stderr[-300:]}')
        self.check()

    def check(self) -> None:
        if (self.workdir / FILE).exists():
            self.kind.logs += 1
            self.kind.events += len(load_events(self.workdir / FILE))
            self.kind.wrong += check_with_commands(self.workdir)

    def kill_at(self, sight: Callable[[RunningCommand, pathlib.Path], bool], *, resume: bool = False) -> None:
        """kill -9 once it has been seen, a moment later."""
        with self.start(resume=resume) as run:
            if run.wait_for(lambda: sight(run, self.workdir)):
                run.sleep(self.rng.uniform(0.0, 0.1))
                self.kind.met += 1
            run.send(signal.SIGKILL)
            run.wait()
        self.check()

    def finish(self) -> None:
        with self.start(resume=True) as run:
            self.end(run, _FINISHED)


def workers_of(run: RunningCommand) -> list[int]:
    return find_marked(run.mark, {_WORKER})


def send(pids: list[int], number: signal.Signals) -> int:
    sent = 0
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            sent += 1
    return sent


def _disturb_workers(disturbed: Disturbed, act: Callable[[RunningCommand], int]) -> None:
    with disturbed.start('task.verifier_workers=2', 'task.verifier_deadline_s=3.0') as run:
        if run.wait_for(lambda: is_updating(run, disturbed.workdir)):
            disturbed.kind.met += act(run)
        disturbed.end(run, _FINISHED)


def kill_workers_once(disturbed: Disturbed) -> None:
    _disturb_workers(disturbed, lambda run: send(workers_of(run)[:1], signal.SIGKILL))


def kill_workers_in_a_row(disturbed: Disturbed) -> None:
    """Every worker that is there, for some seconds: successors die while they start."""

    def act(run: RunningCommand) -> int:
        end, sent = time.monotonic() + 3.0, 0
        while time.monotonic() < end and run.sleep(0.02):
            sent += send(workers_of(run), signal.SIGKILL)
        return sent

    _disturb_workers(disturbed, act)
    labels = [event for event in load_events(disturbed.workdir / FILE) if event['kind'] == 'run_done']
    starts = {e['run'] for e in load_events(disturbed.workdir / FILE) if e['kind'] == 'run_start' and 'worker' in e}
    if not any(event['run'] in starts and 'failure' in event for event in labels):
        disturbed.kind.wrong.append('no successor died while it started')


def stop_workers(disturbed: Disturbed) -> None:
    """SIGSTOP: calls hit their deadline."""
    _disturb_workers(disturbed, lambda run: send(workers_of(run), signal.SIGSTOP))


def ask_to_stop(disturbed: Disturbed) -> None:
    with disturbed.start() as run:
        disturbed.kind.met += run.wait_for(lambda: is_updating(run, disturbed.workdir))
        run.send(signal.SIGTERM)
        disturbed.end(run, _STOPPED, _FINISHED)
    disturbed.finish()


def kill_before_a_checkpoint(disturbed: Disturbed) -> None:
    disturbed.kill_at(is_updating)
    disturbed.finish()


def kill_in_a_save(disturbed: Disturbed) -> None:
    disturbed.kill_at(is_saving)
    disturbed.finish()


def kill_after_a_checkpoint(disturbed: Disturbed) -> None:
    disturbed.kill_at(lambda run, workdir: newest_update(workdir) is not None)
    disturbed.finish()


def kill_three_times(disturbed: Disturbed) -> None:
    """The second start dies before a checkpoint of its own, the third after one."""
    disturbed.kill_at(lambda run, workdir: newest_update(workdir) is not None)
    disturbed.kill_at(is_updating, resume=True)
    newest = newest_update(disturbed.workdir)
    disturbed.kill_at(lambda run, workdir: newest_update(workdir) != newest, resume=True)
    disturbed.finish()


def fill_the_disk(disturbed: Disturbed) -> None:
    """Calls of Python that write below the workdir fail from one on."""
    directory, after = disturbed.directory, disturbed.rng.randrange(150, 400)
    train = ['areal_jax.main_train', *disturbed.variant.arguments(disturbed.workdir, cache=disturbed.ground.cache)]
    with RunningCommand(on_failing_disk(disturbed.workdir, after, 'ENOSPC', directory, train), directory) as run:
        ending = run.wait()
    disturbed.kind.met += ending.exit_code == 2
    disturbed.check()
    disturbed.finish()


def simulate(disturbed: Disturbed) -> None:
    """Servers of a modelled cluster die and come back; the virtual clock."""
    arguments = [
        '--config=configs/simulate/sixteen.py',
        f'--workdir={disturbed.workdir}',
        *(f'--config.{one}' for one in _SERVERS),
    ]
    with RunningCommand(python('-m', 'areal_jax.main_simulate', *arguments), disturbed.directory) as run:
        disturbed.end(run, _FINISHED)
    events = load_events(disturbed.workdir / FILE)
    disturbed.kind.met += sum(event['kind'] == 'engine_state' and event['state'] == 'unknown' for event in events)


KINDS: Mapping[str, tuple[Variant, Callable[[Disturbed], None]]] = {
    'a worker is killed': (_RUN, kill_workers_once),
    'workers are killed in a row': (_RUN, kill_workers_in_a_row),
    'workers hang': (_RUN, stop_workers),
    'SIGTERM': (_RUN, ask_to_stop),
    'killed before a checkpoint': (_RUN, kill_before_a_checkpoint),
    'killed in a save': (_RUN, kill_in_a_save),
    'killed three times': (_RUN, kill_three_times),
    'lock-step, killed': (_MOVED, kill_after_a_checkpoint),
    'groups over their age, killed': (_OLD, kill_after_a_checkpoint),
    'frictions, killed': (_FRICTION, kill_after_a_checkpoint),
    'a full disk': (_FULL, fill_the_disk),
    'servers die and return': (_RUN, simulate),
}


def run_kinds(ground: Ground, only: str) -> dict[str, Kind]:
    found = {}
    for name, (variant, disturb) in KINDS.items():
        if only in name:
            kind, began = found.setdefault(name, Kind()), time.monotonic()
            disturb(Disturbed(ground, kind, name, variant))
            said = 'sound' if not kind.wrong else '; '.join(kind.wrong)
            print(f'{name}: {kind.logs} logs, met {kind.met} ({time.monotonic() - began:.0f} s): {said}', flush=True)
    return found


def plant_all(directory: pathlib.Path, seed: int, only: str) -> dict[str, tuple[int, int]]:
    """(found, planted) by kind of fault, by the command on files."""
    from areal_jax import main_check_log
    from tests.report.rules.sound_logs import SOUND
    from tests.report.rules.test_log_rules import PLANTED  # which logs have a place for which fault

    made: dict[str, Any] = {}
    found: dict[str, tuple[int, int]] = {}
    for name, logs in ((name, logs) for name, logs in PLANTED.items() if only in name):
        seen = collections.Counter[bool]()
        for log in logs:
            events = made.setdefault(log, SOUND[log][0]())
            for place in range(_SEEDS):
                wrong = plant(events, part_faults.ALL[name], random.Random(f'{seed} {place}').randrange(2**31))
                if wrong is None:
                    continue
                write_workdir(directory, wrong, SOUND[log][1])
                with contextlib.redirect_stderr(None), contextlib.redirect_stdout(None):
                    seen[main_check_log.main([str(directory)]) == 2] += 1
        found[name] = seen[True], sum(seen.values())
        print(f'{name}: found {seen[True]} of {sum(seen.values())}', flush=True)
    return found


def write_workdir(directory: pathlib.Path, events: list[dict[str, Any]], limits: Any) -> None:
    """events.jsonl, and a config.json that promises what `limits` says."""
    directory.mkdir(exist_ok=True)
    (directory / FILE).write_text(''.join(json.dumps(event) + '\n' for event in events))
    age = limits.max_token_age
    config = {
        'staleness': {
            'schedule': 'natural' if limits.in_order else 'fixed(2)', 'eta': limits.eta, 'max_token_age': age,
            'over_age': 'off' if age is None else 'drop',
        },
        'learner': {'groups_per_update': limits.groups_per_update}, 'buffer': {'capacity': limits.buffer_capacity},
        'run': {'steps': limits.max_admitted // limits.groups_per_update}, 'task': {'verifier': 'process'},
        'rollout': {
            'max_running_groups': limits.max_running, 'server': 'in_process' if limits.in_process else 'own',
            'group_size': limits.group_size, 'max_new_tokens': limits.max_new_tokens, 'workflow': 'single_turn',
            'kv_policy': 'keep' if limits.keeps_cache else 'recompute',
        },
    }  # fmt: skip
    files.write_json(directory / 'config.json', config)


def main(arguments: list[str]) -> int:
    parser = make_parser('soak.killed_logs', __doc__, seed_of='of the faults and of the moments')
    parser.add_argument('--only', default='', help='kinds of faults and of disturbances whose name has this text')
    flags = parser.parse_args(arguments)
    began, directory = time.monotonic(), make_directory('killed_logs')
    planted = plant_all(directory / 'planted', flags.seed, flags.only)
    kinds = run_kinds(Ground(directory, flags.seed), flags.only)
    missed = [name for name, (found, tried) in planted.items() if found < tried or not tried]
    wrong = [name for name, kind in kinds.items() if kind.wrong or not kind.met or not kind.logs]
    passes = not missed and not wrong and len(kinds) == len(KINDS) and bool(planted)
    if flags.json:
        record = {
            **describe_command(parser, arguments), 'passes': passes, 'seconds': round(time.monotonic() - began),
            'kinds': {n: dataclasses.asdict(k) for n, k in kinds.items()},
            'planted': {name: {'found': found, 'of': tried} for name, (found, tried) in planted.items()},
        }  # fmt: skip
        files.write_json(flags.json, record)
    logs = sum(kind.logs for kind in kinds.values())
    print(
        f'{len(planted) - len(missed)} of {len(planted)} kinds of faults found; {logs} sound logs of {len(kinds)} kinds'
    )
    print(f'missed: {missed or "none"}; accused, or not disturbed: {wrong or "none"}')
    leave_directory(directory, failed=not passes)
    return 0 if passes else 1


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
