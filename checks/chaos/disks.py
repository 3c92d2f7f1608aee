"""Disks that fill up, refuse or break while a run writes; then --resume on a disk that is well."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shlex
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator

from checks import logs
from checks.chaos.cases import PROCESS_VERIFIER, SUPERVISED, VIRTUAL, Case, Ground, Outcome, Variant, conclude
from checks.chaos.full_disk import CALLS, on_failing_disk
from checks.processes import RunningCommand, python

KIND = 'disk'
_STEPS = 9
_LOOP, _SUPERVISED = (dataclasses.replace(variant, steps=_STEPS) for variant in (VIRTUAL, SUPERVISED))


class DiskCase:
    """A run that ends with exit code 2, and goes on where there is room."""

    variant: Variant

    @property
    def name(self) -> str:
        raise NotImplementedError

    def make_command(self, ground: Ground, directory: pathlib.Path) -> list[str]:
        """Prepares the disk, and returns the command of a run that meets it."""
        raise NotImplementedError

    def repair(self, directory: pathlib.Path) -> None:
        """Makes room after the run."""

    def run(self, ground: Ground) -> Iterator[Outcome]:
        directory, began = ground.fresh(self.name), time.monotonic()
        with RunningCommand(self.make_command(ground, directory), directory) as run:
            ending, wrong = run.finish((2,))
        self.repair(directory)
        newest = logs.newest_update(directory / 'run')
        resumed, again = ground.finish(self.variant, directory, (0,), resume=True)
        wrong += [f'--resume: {violation}' for violation in again]
        if resumed.exit_code == 0:
            if newest != self.variant.steps:
                wrong += logs.check_resumed(resumed.stdout, newest)
            wrong += ground.check_finished(self.variant, directory / 'run')
        outcome = conclude(KIND, self.name, directory, began, ending, wrong)
        yield dataclasses.replace(outcome, trouble=ending.trouble or resumed.trouble)

    def _train(self, ground: Ground, workdir: pathlib.Path) -> list[str]:
        """The module and its arguments."""
        return ['areal_jax.main_train', *self.variant.arguments(workdir, cache=ground.cache)]


@dataclasses.dataclass(frozen=True)
class FailingCallCase(DiskCase):
    """Python's calls that write below the workdir fail from a moment on."""

    variant: Variant
    error: str  # name of an errno
    share: float  # of the calls of an undisturbed run that succeed

    @property
    def name(self) -> str:
        return f'{self.variant.name}: {self.error} after {self.share:.0%} of all writes'

    def make_command(self, ground: Ground, directory: pathlib.Path) -> list[str]:
        with ground.lock:
            after = int(self.share * self._count_calls(ground))
        return on_failing_disk(directory / 'run', after, self.error, directory, self._train(ground, directory / 'run'))

    def _count_calls(self, ground: Ground) -> int:
        """Calls that write below the workdir in a run on a disk that is well; counted once."""
        directory = ground.directory / f'calls_{self.variant.name.replace(" ", "_")}'
        if not (directory / CALLS).exists():
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
            train = self._train(ground, directory / 'run')
            with RunningCommand(on_failing_disk(directory / 'run', -1, 'ENOSPC', directory, train), directory) as run:
                ending = run.wait()
            if ending.exit_code != 0:
                raise RuntimeError(f'the run whose writes are counted failed: {ending.violations((0,))}')
        return int((directory / CALLS).read_text())


@dataclasses.dataclass(frozen=True)
class FullDiskCase(DiskCase):
    """A real disk of so many bytes, in a mount namespace of its own; nothing runs where the system forbids that."""

    variant: Variant
    size: int

    @property
    def name(self) -> str:
        return f'{self.variant.name}: a disk of {self.size} bytes'

    def make_command(self, ground: Ground, directory: pathlib.Path) -> list[str]:
        (directory / 'disk').mkdir()
        disk, saved = shlex.quote(str(directory / 'disk')), shlex.quote(str(directory / 'run'))
        script = (
            f'mount -t tmpfs -o size={self.size} tmpfs {disk} && {{ "$@"; code=$?; '
            f'[ -d {disk}/run ] && cp -a {disk}/run {saved}; exit $code; }}'
        )
        train = self._train(ground, directory / 'disk' / 'run')
        return ['unshare', '-rm', 'sh', '-c', script, 'sh', *python('-m', *train)]


@dataclasses.dataclass(frozen=True)
class FileSizeCase(DiskCase):
    """No file may grow beyond a limit, as under `ulimit -f`."""

    variant: Variant
    size: int

    @property
    def name(self) -> str:
        return f'{self.variant.name}: files of at most {self.size} bytes'

    def make_command(self, ground: Ground, directory: pathlib.Path) -> list[str]:
        return ['prlimit', f'--fsize={self.size}', *python('-m', *self._train(ground, directory / 'run'))]


@dataclasses.dataclass(frozen=True)
class FullFileCase(DiskCase):
    """One log of the run is /dev/full: every write to it fails, and reading it never ends."""

    variant: Variant
    file: str
    memory_bytes: int = 16 * 2**30  # address space: who reads the device to its end is stopped here

    @property
    def name(self) -> str:
        return f'{self.variant.name}: {self.file} is /dev/full'

    def make_command(self, ground: Ground, directory: pathlib.Path) -> list[str]:
        (directory / 'run').mkdir()
        (directory / 'run' / self.file).symlink_to('/dev/full')
        limited = ['prlimit', f'--data={self.memory_bytes // 4}', f'--as={self.memory_bytes}']
        return [*limited, *python('-m', *self._train(ground, directory / 'run'))]

    def repair(self, directory: pathlib.Path) -> None:
        (directory / 'run' / self.file).unlink(missing_ok=True)


@dataclasses.dataclass(frozen=True)
class ReadOnlyCase(DiskCase):
    """The workdir, or its parent, may be read and not written; root may write anyway and gets EROFS from every call."""

    variant: Variant
    parent: bool

    @property
    def name(self) -> str:
        return f'{self.variant.name}: a read-only {"parent of the workdir" if self.parent else "workdir"}'

    def make_command(self, ground: Ground, directory: pathlib.Path) -> list[str]:
        locked = self._locked(directory)
        locked.mkdir()
        train = self._train(ground, locked / 'run' if self.parent else locked)
        if os.geteuid() == 0:
            return on_failing_disk(locked, 0, 'EROFS', directory, train)
        locked.chmod(stat.S_IRUSR | stat.S_IXUSR)
        return python('-m', *train)

    def repair(self, directory: pathlib.Path) -> None:
        self._locked(directory).chmod(stat.S_IRWXU)

    def _locked(self, directory: pathlib.Path) -> pathlib.Path:
        return directory / 'locked' if self.parent else directory / 'run'


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


def can_mount() -> bool:
    """Whether a disk can be mounted in a namespace of our own; not everywhere without root."""
    script = 'd=$(mktemp -d) && mount -t tmpfs -o size=4096 tmpfs "$d"; code=$?; umount "$d"; rmdir "$d"; exit $code'
    try:
        return subprocess.run(['unshare', '-rm', 'sh', '-c', script], capture_output=True, timeout=30).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
