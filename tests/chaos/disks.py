"""Disks that fill up, refuse or break while a run writes; then --resume on a disk that is well."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import shlex
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator

from tests.chaos import logs
from tests.chaos.outcomes import Outcome
from tests.chaos.processes import Ending, RunningCommand, python
from tests.chaos.runs import PROCESS_VERIFIER, SUPERVISED, VIRTUAL, Case, Ground, Variant, seconds_since

KIND = 'disk'
_STEPS = 9
_LOOP, _SUPERVISED = (dataclasses.replace(variant, steps=_STEPS) for variant in (VIRTUAL, SUPERVISED))


@dataclasses.dataclass(frozen=True)
class FailingCallCase:
    """Python's calls that write below the workdir fail from a moment on."""

    variant: Variant
    error: str  # name of an errno
    share: float  # of the calls of an undisturbed run that succeed

    @property
    def name(self) -> str:
        return f'{self.variant.name}: {self.error} after {self.share:.0%} of all writes'

    def run(self, ground: Ground) -> Iterator[Outcome]:
        with ground.lock:
            after = int(self.share * _count_calls(ground, self.variant))
        directory, began = ground.fresh(self.name), time.monotonic()
        with _start_on_failing_disk(ground, self.variant, directory, after, self.error) as run:
            ending = run.wait()
            wrong = ending.violations((2,)) + run.orphans()
        yield _go_on(ground, self.variant, self.name, directory, ending, wrong, began)


@dataclasses.dataclass(frozen=True)
class FullDiskCase:
    """A real disk of so many bytes, in a mount namespace of its own; nothing runs where the system forbids that."""

    variant: Variant
    size: int

    @property
    def name(self) -> str:
        return f'{self.variant.name}: a disk of {self.size} bytes'

    def run(self, ground: Ground) -> Iterator[Outcome]:
        directory, began = ground.fresh(self.name), time.monotonic()
        (directory / 'disk').mkdir()
        arguments = self.variant.arguments(directory / 'disk' / 'run', cache=ground.cache)
        disk, saved = shlex.quote(str(directory / 'disk')), shlex.quote(str(directory / 'run'))
        script = (
            f'mount -t tmpfs -o size={self.size} tmpfs {disk} && {{ "$@"; code=$?; '
            f'[ -d {disk}/run ] && cp -a {disk}/run {saved}; exit $code; }}'
        )
        command = ['unshare', '-rm', 'sh', '-c', script, 'sh', *python('-m', 'areal_jax.main_train', *arguments)]
        with RunningCommand(command, directory) as run:
            ending = run.wait()
            wrong = ending.violations((2,)) + run.orphans()
        yield _go_on(ground, self.variant, self.name, directory, ending, wrong, began)


@dataclasses.dataclass(frozen=True)
class FileSizeCase:
    """No file may grow beyond a limit, as under `ulimit -f`."""

    variant: Variant
    size: int

    @property
    def name(self) -> str:
        return f'{self.variant.name}: files of at most {self.size} bytes'

    def run(self, ground: Ground) -> Iterator[Outcome]:
        directory, began = ground.fresh(self.name), time.monotonic()
        arguments = self.variant.arguments(directory / 'run', cache=ground.cache)
        command = ['prlimit', f'--fsize={self.size}', *python('-m', 'areal_jax.main_train', *arguments)]
        with RunningCommand(command, directory) as run:
            ending = run.wait()
            wrong = ending.violations((2,)) + run.orphans()
        yield _go_on(ground, self.variant, self.name, directory, ending, wrong, began)


@dataclasses.dataclass(frozen=True)
class FullFileCase:
    """One log of the run is /dev/full: every write to it fails, and reading it never ends."""

    variant: Variant
    file: str
    memory_bytes: int = 16 * 2**30  # address space: who reads the device to its end is stopped here

    @property
    def name(self) -> str:
        return f'{self.variant.name}: {self.file} is /dev/full'

    def run(self, ground: Ground) -> Iterator[Outcome]:
        directory, began = ground.fresh(self.name), time.monotonic()
        (directory / 'run').mkdir()
        (directory / 'run' / self.file).symlink_to('/dev/full')
        arguments = self.variant.arguments(directory / 'run', cache=ground.cache)
        limited = ['prlimit', f'--data={self.memory_bytes // 4}', f'--as={self.memory_bytes}']
        with RunningCommand([*limited, *python('-m', 'areal_jax.main_train', *arguments)], directory) as run:
            ending = run.wait()
            wrong = ending.violations((2,)) + run.orphans()
        with contextlib.suppress(FileNotFoundError):
            (directory / 'run' / self.file).unlink()
        yield _go_on(ground, self.variant, self.name, directory, ending, wrong, began)


@dataclasses.dataclass(frozen=True)
class ReadOnlyCase:
    """The workdir, or its parent, may be read and not written; root may write anyway and gets EROFS from every call."""

    variant: Variant
    parent: bool

    @property
    def name(self) -> str:
        return f'{self.variant.name}: a read-only {"parent of the workdir" if self.parent else "workdir"}'

    def run(self, ground: Ground) -> Iterator[Outcome]:
        directory, began = ground.fresh(self.name), time.monotonic()
        workdir = directory / 'locked' / 'run' if self.parent else directory / 'run'
        locked = directory / 'locked' if self.parent else workdir
        locked.mkdir()
        arguments = self.variant.arguments(workdir, cache=ground.cache)
        command = ['-m', 'areal_jax.main_train', *arguments]
        if os.geteuid() == 0:
            settings = {'below': str(locked), 'after': 0, 'error': 'EROFS', 'report': str(directory / 'calls')}
            command = ['-m', 'tests.chaos.full_disk', json.dumps(settings), *command[1:]]
        else:
            locked.chmod(stat.S_IRUSR | stat.S_IXUSR)
        with RunningCommand(python(*command), directory) as run:
            ending = run.wait()
            wrong = ending.violations((2,)) + run.orphans()
        locked.chmod(stat.S_IRWXU)
        yield _go_on(ground, self.variant, self.name, directory, ending, wrong, began)


def disk_cases() -> list[Case]:
    """Moments over the whole run, sizes from nothing to nearly enough."""
    shares = (0.0, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99)
    cases: list[Case] = [FailingCallCase(_LOOP, 'ENOSPC', share) for share in shares]
    cases += [FailingCallCase(_SUPERVISED, 'ENOSPC', share) for share in (0.0, 0.3, 0.8)]
    cases += [FailingCallCase(_LOOP, error, share) for error in ('EROFS', 'EIO', 'EDQUOT') for share in (0.2, 0.6)]
    cases += [FileSizeCase(_LOOP, size) for size in (100, 20_000, 200_000)]
    cases += [FullFileCase(_LOOP, name) for name in ('events.jsonl', 'metrics.jsonl')]
    cases += [ReadOnlyCase(_LOOP, parent) for parent in (False, True)]
    if can_mount():
        process_verifier = dataclasses.replace(PROCESS_VERIFIER, steps=_STEPS)
        cases += [FullDiskCase(_LOOP, size) for size in (16_384, 131_072, 524_288, 1_500_000)]
        cases += [FullDiskCase(process_verifier, 900_000), FullDiskCase(_SUPERVISED, 400_000)]
    return cases


def _go_on(
    ground: Ground, variant: Variant, name: str, directory: pathlib.Path, ending: Ending, wrong: list[str], began: float
) -> Outcome:
    """The outcome, after a run that goes on where there is room."""
    newest, trouble, code = logs.newest_update(directory / 'run'), ending.trouble, ending.exit_code
    with ground.start(variant, directory, resume=True) as run:
        resumed = run.wait()
        wrong += [f'--resume: {violation}' for violation in resumed.violations((0,)) + run.orphans()]
    if resumed.exit_code == 0:
        if newest != variant.steps:
            wrong += logs.check_resumed(resumed.stdout, newest)
        wrong += ground.check_finished(variant, directory / 'run')
    return Outcome(KIND, name, seconds_since(began), code, '; '.join(wrong), trouble or resumed.trouble, str(directory))


def _start_on_failing_disk(
    ground: Ground, variant: Variant, directory: pathlib.Path, after: int, error: str
) -> RunningCommand:
    settings = {'below': str(directory / 'run'), 'after': after, 'error': error, 'report': str(directory / 'calls')}
    arguments = variant.arguments(directory / 'run', cache=ground.cache)
    command = python('-m', 'tests.chaos.full_disk', json.dumps(settings), 'areal_jax.main_train', *arguments)
    return RunningCommand(command, directory)


def _count_calls(ground: Ground, variant: Variant) -> int:
    """Calls that write below the workdir in a run on a disk that is well; counted once."""
    directory = ground.directory / f'calls_{variant.name.replace(" ", "_")}'
    if not (directory / 'calls').exists():
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        with _start_on_failing_disk(ground, variant, directory, -1, 'ENOSPC') as run:
            ending = run.wait()
        if ending.exit_code != 0:
            raise RuntimeError(f'the run whose writes are counted failed: {ending.violations((0,))}')
    return int((directory / 'calls').read_text())


def can_mount() -> bool:
    """Whether a disk can be mounted in a namespace of our own; not everywhere without root."""
    script = 'd=$(mktemp -d) && mount -t tmpfs -o size=4096 tmpfs "$d"; code=$?; umount "$d"; rmdir "$d"; exit $code'
    try:
        return subprocess.run(['unshare', '-rm', 'sh', '-c', script], capture_output=True, timeout=30).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
