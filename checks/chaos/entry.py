"""The entry point as a user starts it: what it takes, refuses and leaves, beside another run and without a terminal."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator

from checks import logs
from checks.chaos.cases import (
    LOCK_STEP,
    PROCESS_VERIFIER,
    SUPERVISED,
    VIRTUAL,
    Ground,
    Outcome,
    Variant,
    conclude,
)
from checks.chaos.kills import is_updating
from checks.processes import Ending, RunningCommand, python

KIND = 'entry point'
_SMALL, _SUPERVISED, _PROCESS = (dataclasses.replace(v, steps=6) for v in (VIRTUAL, SUPERVISED, PROCESS_VERIFIER))
_LOCK_STEP = dataclasses.replace(LOCK_STEP, steps=6)

Check = Callable[[Ground, pathlib.Path], tuple[Ending, list[str]]]


@dataclasses.dataclass(frozen=True)
class EntryCase:
    """A few commands and what they must do."""

    name: str
    check: Check  # (ground, directory) -> how the last command ended, violations

    def run(self, ground: Ground) -> Iterator[Outcome]:
        began, directory = time.monotonic(), ground.fresh(self.name)
        ending, wrong = self.check(ground, directory)
        yield conclude(KIND, self.name, directory, began, ending, wrong)


def entry_cases() -> list[EntryCase]:
    variants = (_SMALL, _PROCESS, _LOCK_STEP, _SUPERVISED)
    cases = [EntryCase(f'{v.name}: from start to end, then --resume', _finish_twice(v)) for v in variants]
    cases += [EntryCase(f'{v.name}: --resume in an empty workdir', _resume_nothing(v)) for v in (_SMALL, _SUPERVISED)]
    cases += [
        EntryCase('a second run beside the first', _second_beside_first(resume=False)),
        EntryCase('--resume beside the first', _second_beside_first(resume=True)),
        EntryCase('a finished workdir without --resume', _start_over),
        EntryCase('--resume with another config', _resume_otherwise),
        EntryCase('no optimizer step is applied', _train_nothing),
        EntryCase('stdout is /dev/full', _lose_output('>/dev/full', (0, 2))),
        EntryCase('stdout is closed', _lose_output('>&-', (0, 2))),
        EntryCase('nobody reads stdout', _lose_output('| true', (0, 2, 75, -signal.SIGPIPE, 128 + signal.SIGPIPE))),
    ]
    refused = {
        'no arguments': lambda config, workdir: [],
        'no workdir': lambda config, workdir: [config],
        'a stray argument': lambda config, workdir: [config, f'--workdir={workdir}', 'stray'],
        'an unknown flag': lambda config, workdir: [config, f'--workdir={workdir}', '--unknown=1'],
        'an unknown field': lambda config, workdir: [config, f'--workdir={workdir}', '--config.run.unknown=1'],
        'a config that is not there': lambda config, workdir: ['--config=configs/absent.py', f'--workdir={workdir}'],
        'a workdir that is a file': lambda config, workdir: [config, f'--workdir={_touch(workdir)}'],
        'a workdir below a file': lambda config, workdir: [config, f'--workdir={_touch(workdir)}/run'],
        'a workdir with a name too long': lambda config, workdir: [config, f'--workdir={workdir}/{"n" * 300}'],
        'an empty workdir name': lambda config, workdir: [config, '--workdir='],
    }
    return cases + [EntryCase(f'refused: {name}', _refuse(arguments)) for name, arguments in refused.items()]


def _finish_twice(variant: Variant) -> Check:
    """The second time there is nothing left to do, and nothing changes."""

    def check(ground: Ground, directory: pathlib.Path) -> tuple[Ending, list[str]]:
        wrong: list[str] = []
        for resume in (False, True):
            ending, found = ground.finish(variant, directory, (0,), resume=resume)
            wrong += found
            if ending.exit_code == 0:
                wrong += ground.check_finished(variant, directory / 'run')
        return ending, wrong

    return check


def _resume_nothing(variant: Variant) -> Check:
    def check(ground: Ground, directory: pathlib.Path) -> tuple[Ending, list[str]]:
        ending, wrong = ground.finish(variant, directory, (0,), resume=True)
        return ending, wrong or ground.check_finished(variant, directory / 'run')

    return check


def _second_beside_first(resume: bool) -> Check:
    def check(ground: Ground, directory: pathlib.Path) -> tuple[Ending, list[str]]:
        variant = dataclasses.replace(_PROCESS, steps=40)
        with ground.start(variant, directory) as first:
            if not first.wait_for(lambda: is_updating(first, directory / 'run')):
                return (ended := first.wait()), [f'the first run did not begin: {ended.violations((0,))}']
            first.send(signal.SIGSTOP)  # it shall be alive as long as the second wants to look
            try:
                with ground.start(variant, directory, resume=resume) as second:
                    ending = second.wait()
            finally:
                first.send(signal.SIGCONT)
            wrong, host = ending.violations((2,)), socket.gethostname()
            if not re.search(rf'\b{first.pid}\b', ending.error) or host not in ending.error:
                wrong.append(f'the sentence names not both pid {first.pid} and host {host}: {ending.error}')
            wrong += [f'the first: {violation}' for violation in first.wait().violations((0,))]
        return ending, wrong or ground.check_finished(variant, directory / 'run')

    return check


def _start_over(ground: Ground, directory: pathlib.Path) -> tuple[Ending, list[str]]:
    _, wrong = ground.finish(_SMALL, directory, (0,))
    before = logs.weights_digest(directory / 'run')
    ending, found = ground.finish(_SMALL, directory, (2,))
    wrong += found + ground.check_finished(_SMALL, directory / 'run')
    return ending, wrong + (
        ['the finished run was changed'] if logs.weights_digest(directory / 'run') != before else []
    )


def _resume_otherwise(ground: Ground, directory: pathlib.Path) -> tuple[Ending, list[str]]:
    _, wrong = ground.finish(_SMALL, directory, (0,))
    ending, found = ground.finish(_SMALL, directory, (2,), 'rollout.temperature=0.5', resume=True)
    wrong += found
    return ending, wrong + ([] if 'rollout.temperature' in ending.error else ['the sentence does not name the field'])


def _train_nothing(ground: Ground, directory: pathlib.Path) -> tuple[Ending, list[str]]:
    """Every answer gets the same reward, so every group is filtered; a resume does not make more of it."""
    wrong = []
    for resume in (False, True):
        arguments = _PROCESS.arguments(directory / 'run', resume=resume, cache=ground.cache)
        command = python('-m', 'checks.chaos.scoring', 'checks.chaos.scoring:score_equally', *arguments)
        with RunningCommand(command, directory) as run:
            ending, found = run.finish((3,))
            wrong += found
    return ending, wrong


def _lose_output(redirection: str, allowed: tuple[int, ...]) -> Check:
    def check(ground: Ground, directory: pathlib.Path) -> tuple[Ending, list[str]]:
        arguments = _SMALL.arguments(directory / 'run', cache=ground.cache)
        script = f'set -o pipefail; "$@" {redirection}'
        command = ['bash', '-c', script, 'bash', *python('-m', 'areal_jax.main_train', *arguments)]
        with RunningCommand(command, directory) as run:
            ending, wrong = run.finish(allowed)
        _, again = ground.finish(_SMALL, directory, (0,), resume=True)
        wrong += [f'--resume: {violation}' for violation in again]
        return ending, wrong or ground.check_finished(_SMALL, directory / 'run')

    return check


def _refuse(arguments: Callable[[str, pathlib.Path], list[str]]) -> Check:
    def check(ground: Ground, directory: pathlib.Path) -> tuple[Ending, list[str]]:
        given = arguments('--config=configs/tiny_cpu.py', directory / 'run')
        with RunningCommand(python('-m', 'areal_jax.main_train', *given), directory) as run:
            return run.finish((2,))

    return check


def _touch(path: pathlib.Path) -> pathlib.Path:
    path.write_text('a file\n')
    return path
