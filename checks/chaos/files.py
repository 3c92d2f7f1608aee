"""Every file of a stopped run torn, edited, replaced or removed; then --resume."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator

from checks import logs
from checks.chaos.cases import SUPERVISED, VIRTUAL, Ground, Outcome, Variant, conclude

KIND = 'file'
_STEPS, _NEWEST, _BEFORE = 12, 9, 6  # updates of the run, of its newest checkpoint and of the one before
_BASES = tuple(dataclasses.replace(variant, steps=_STEPS) for variant in (VIRTUAL, SUPERVISED))

Damage = Callable[[pathlib.Path], None]


def _remove(path: pathlib.Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _tear(path: pathlib.Path) -> None:
    """Half of it is left."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def _tear_end(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def _zero_end(path: pathlib.Path) -> None:
    """As after a loss of power: the size is right, the last blocks were never written."""
    data = path.read_bytes()
    n = min(64, len(data))
    path.write_bytes(data[: len(data) - n] + bytes(n))


def _flip(path: pathlib.Path) -> None:
    """One bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def _turn_into_directory(path: pathlib.Path) -> None:
    _remove(path)
    path.mkdir()


def _turn_into_file(path: pathlib.Path) -> None:
    _remove(path)
    path.write_text('not a directory\n')


def _write(content: bytes) -> Damage:
    def damage(path: pathlib.Path) -> None:
        path.write_bytes(content)

    return damage


def _edit_lines(edit: Callable[[list[bytes], int], object]) -> Damage:
    def damage(path: pathlib.Path) -> None:
        lines = path.read_bytes().splitlines(keepends=True)
        edit(lines, len(lines) // 2)
        path.write_bytes(b''.join(lines))

    return damage


_ANY: dict[str, Damage] = {
    'removed': _remove,
    'empty': _write(b''),
    'torn in the middle': _tear,
    'torn at the end': _tear_end,
    'zeros at the end': _zero_end,
}
_JSON = _ANY | {
    'of another kind': _write(b'{"a": 1}\n'),
    'a list': _write(b'[1, 2]\n'),
    'null': _write(b'null\n'),
    'binary': _write(bytes(range(128, 256)) * 4),
    'a directory': _turn_into_directory,
}
_LINES = _JSON | {
    'a line garbled': _edit_lines(lambda lines, middle: lines.__setitem__(middle, b'\x00\xff{' + lines[middle][3:])),
    'a line missing': _edit_lines(lambda lines, middle: lines.pop(middle)),
    'a line twice': _edit_lines(lambda lines, middle: lines.insert(middle, lines[middle])),
    'lines exchanged': _edit_lines(lambda lines, middle: lines.insert(middle, lines.pop(middle + 1))),
}
_BINARY = _ANY | {'one bit flipped': _flip}


@dataclasses.dataclass(frozen=True)
class FileCase:
    """One damage to a copy of a stopped run.

    Args:
      pattern: of the file below the workdir; where several match, the largest.
      allowed: exit codes of --resume.
      newest: update of the newest checkpoint that is undamaged.
      named: what the sentence of an exit code 2 must contain; '' = the name of the file.
    """

    variant: Variant
    pattern: str
    damage_name: str
    damage: Damage
    allowed: tuple[int, ...] = (0, 2)
    newest: int | None = _NEWEST
    named: str = ''

    @property
    def name(self) -> str:
        return f'{self.variant.name}: {self.pattern} {self.damage_name}'

    def run(self, ground: Ground) -> Iterator[Outcome]:
        began, directory = time.monotonic(), ground.fresh(self.name)
        workdir = directory / 'run'
        with ground.lock:
            stopped = _stopped_run(ground, self.variant)
        shutil.copytree(stopped, workdir)
        path = max(
            (p for p in workdir.glob(self.pattern)), key=lambda p: p.stat().st_size, default=workdir / self.pattern
        )
        self.damage(path)
        ending, wrong = ground.finish(self.variant, directory, self.allowed, resume=True)
        if ending.exit_code == 0:
            wrong += self._check_start(ending.stdout, ending.stdout + ending.stderr)
            wrong += ground.check_finished(self.variant, workdir)
        elif ending.exit_code == 2 and not any(name in ending.error for name in self._names(path)):
            wrong.append(f'the sentence does not name {path.name}: {ending.error}')
        yield conclude(KIND, self.name, directory, began, ending, wrong)

    def _names(self, path: pathlib.Path) -> list[str]:
        return [self.named] if self.named else [path.name, f'step_{_NEWEST:08d}', f'step_{_BEFORE:08d}']

    def _check_start(self, stdout: str, output: str) -> list[str]:
        said = re.search(r'^resumed after update (\d+)', stdout, re.MULTILINE)
        update = int(said[1]) if said else None
        if update not in (self.newest, _NEWEST):
            return [f'it went on after update {update}, the newest undamaged checkpoint is of {self.newest}']
        if update == _BEFORE and f'step_{_NEWEST:08d}' not in output:
            return [f'it passed over step_{_NEWEST:08d} without a word']
        return []


def file_cases() -> list[FileCase]:
    """Every file of a run of the asynchronous loop, and those that supervised training reads in its own way."""
    virtual, supervised = _BASES
    cases = [
        FileCase(virtual, name, damage_name, damage)
        for names, damages in (
            (('config.json', 'evaluations.json'), _JSON),
            (('events.jsonl', 'metrics.jsonl'), _LINES),
        )
        for name in names
        for damage_name, damage in damages.items()
    ]
    cases += [
        FileCase(supervised, name, damage_name, damage, newest=newest)
        for name, newest in (('metrics.jsonl', _NEWEST), (f'checkpoints/step_{_NEWEST:08d}/run_state.json', _BEFORE))
        for damage_name, damage in _ANY.items()
    ]
    return cases + _checkpoint_cases(virtual)


def _checkpoint_cases(variant: Variant) -> list[FileCase]:
    newest, all_checkpoints = f'checkpoints/step_{_NEWEST:08d}', 'checkpoints'
    arrays = f'{newest}/arrays/**'
    falls_back = [
        FileCase(variant, f'{newest}/{name}', damage_name, damage, (0,), _BEFORE)
        for name in ('run_state.json', 'contents.json')
        for damage_name, damage in (_JSON | {'one bit flipped': _flip}).items()
    ]
    falls_back += [
        FileCase(variant, f'{arrays}/{name}', damage_name, damage, (0,), _BEFORE)
        for name in ('manifest.ocdbt', '_METADATA', 'd/*')
        for damage_name, damage in _BINARY.items()
    ]
    falls_back += [
        FileCase(variant, newest, 'removed', _remove, (0,), _BEFORE),
        FileCase(variant, newest, 'emptied', _turn_into_directory, (0,), _BEFORE),
        FileCase(variant, newest, 'a file', _turn_into_file, (0,), _BEFORE),
    ]
    others = [
        FileCase(variant, f'checkpoints/step_{_BEFORE:08d}/run_state.json', 'torn', _tear, (0,)),
        FileCase(
            variant, all_checkpoints, 'with an empty step_00000099', lambda path: (path / 'step_00000099').mkdir()
        ),
        FileCase(variant, all_checkpoints, 'with an unfinished save', _plant_unfinished, (0,)),
        FileCase(variant, all_checkpoints, 'a file', _turn_into_file, (2,), named='checkpoints'),
    ]
    return (
        falls_back
        + others
        + [
            FileCase(variant, all_checkpoints, f'with every {name} torn', _tear_every(name), (2,), named='checkpoints')
            for name in ('run_state.json', 'contents.json', 'manifest.ocdbt')
        ]
        # orbax's own table of a tree: a resume does not read it, and compares the arrays with their checksums
        + [FileCase(variant, all_checkpoints, 'with every _METADATA torn', _tear_every('_METADATA'), (0,))]
    )


def _plant_unfinished(directory: pathlib.Path) -> None:
    unfinished = directory / f'.step_{_STEPS:08d}.partial' / 'arrays'
    unfinished.mkdir(parents=True)
    (unfinished / 'half').write_bytes(b'written')


def _tear_every(name: str) -> Damage:
    def damage(directory: pathlib.Path) -> None:
        for path in directory.rglob(name):
            _tear(path)

    return damage


def _stopped_run(ground: Ground, variant: Variant) -> pathlib.Path:
    """A run that was killed between its third and its fourth checkpoint; made once."""
    workdir = ground.directory / f'stopped_{variant.name.replace(" ", "_")}' / 'run'
    while logs.newest_update(workdir) != _NEWEST:  # again, where the kill came too late
        shutil.rmtree(workdir.parent, ignore_errors=True)
        workdir.parent.mkdir(parents=True)
        with ground.start(variant, workdir.parent) as run:
            if not run.wait_for(lambda: logs.newest_update(workdir) == _NEWEST):
                raise RuntimeError(f'the run to damage could not be made: {run.wait().violations((0,))}')
            run.send(signal.SIGKILL)
            run.wait()
    return workdir
