"""The mirror of a run: copies checkpoints, records and exports away from this machine, and brings them back.

step_00000012/    a workdir with this checkpoint and the records that a resume reads
finished/         the records and the report of a finished run
export/, exports/16/
"""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import shutil
import sys
import threading
from collections.abc import Collection, Mapping

from ml_collections import config_dict

from areal_jax import files
from areal_jax.app.export.finished_export import DIRECTORY as EXPORT
from areal_jax.app.export.finished_export import RECORD
from areal_jax.app.workdir.run_directory import CHECKPOINTS, holds_run
from areal_jax.checkpoint.mirror import COMMITTED, CopyRecord, DamagedCopyError, Mirror, MirrorError, order_of_step
from areal_jax.config import CONFIG
from areal_jax.config.fields import ConfigError
from areal_jax.errors import UserError
from areal_jax.installation import find_cache
from areal_jax.report import report, timeline
from areal_jax.report.pages import pictures
from areal_jax.telemetry import facts, metrics, rollout_writer

FIELD = 'run.mirror'
_FINISHED = 'finished'
_OF_REPORT = {facts.FILE, report.FILE, timeline.FILE}  # written at the end: a checkpoint's copy has none of them
_FOLDERS = (metrics.DIRECTORY, rollout_writer.DIRECTORY)
_CLOSE_S = 2.0  # for an upload to notice that it is abandoned
_QUIET_S = 2.0  # a longer wait is told


class RunMirror:
    """Copies checkpoints in a thread, one at a time and the newest next; a failure is a warning, and the run continues.

    A checkpoint that becomes older than one that waits is not copied.

    Args:
      keep: checkpoints that stay in the mirror.
    """

    def __init__(self, address: str, workdir: pathlib.Path, keep: int):
        self._mirror = Mirror(address, self._check)
        self._workdir, self._keep = workdir.absolute(), keep  # as the paths of checkpoints
        self._changed = threading.Condition()
        self._held: list[str] = []  # copies at the start
        self._waiting: pathlib.Path | None = None
        self._copying: pathlib.Path | None = None
        self._ends = self._abandoned = False
        self._finished_step: int | None = None
        self._failed: pathlib.Path | None = None  # the newest checkpoint, if its copy failed
        self._missing: dict[str, str] = {}  # error of the last try of each kind of copy that failed
        self._thread = threading.Thread(target=self._work, name='mirror', daemon=True)

    def require_own(self, latest: int | None, *, resume: bool) -> None:
        """Raises ConfigError if the mirror holds another run, or a later checkpoint of this one.

        A mirror that cannot be read gives a warning.

        Args:
          latest: updates of the newest checkpoint of the workdir.
        """
        try:
            self._held = self._mirror.steps()
        except MirrorError as error:
            self._warn(f'cannot be read, and each checkpoint tries again: {error}')
            return
        newest = self._held[-1] if self._held else ''
        place = f'{FIELD}={self._mirror.address!r}'
        if newest and not resume:
            raise ConfigError(f'{place} holds a run already ({newest}): continue it with --resume, or name another')
        if newest and int(newest.split('_')[1]) > (latest or 0):
            raise ConfigError(
                f'{place} holds {newest}, which is newer than every checkpoint of {self._workdir}: remove that '
                'workdir to continue from the mirror, or name another mirror'
            )

    def start(self, latest: pathlib.Path | None) -> None:
        """Starts the thread, with a checkpoint of an earlier start that the mirror lacks."""
        if latest is not None and latest.name not in self._held:
            self._waiting = latest
        self._thread.start()

    def put(self, checkpoint: pathlib.Path) -> None:
        """Hands over a finished checkpoint."""
        with self._changed:
            self._waiting = checkpoint
            self._changed.notify_all()

    def in_use(self) -> Collection[pathlib.Path]:
        """Returns the checkpoints that must stay in the workdir."""
        return [path for path in (self._copying, self._waiting) if path]

    def finish(self, deadline_s: float, finished_step: int | None = None) -> str:
        """Waits until the newest checkpoint is copied, after a failure once more; returns '' or what is missing.

        Args:
          finished_step: the last update of a finished run, whose report and export are copied too.
        """
        with self._changed:
            self._ends, self._finished_step = True, finished_step
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(min(deadline_s, _QUIET_S))
        if self._thread.is_alive() and deadline_s > _QUIET_S:
            print(f'copying to {self._mirror.address}, at most {deadline_s:g} s', flush=True)
            self._thread.join(deadline_s - _QUIET_S)
        if self._thread.is_alive():
            return f'{self._mirror.address}: the copy has not ended after run.mirror_wait_s={deadline_s:g}'
        return '; '.join(self._missing.values())

    def close(self) -> None:
        """Abandons copies under way, which are then not committed. A second call does nothing."""
        self._abandoned = True
        self.finish(_CLOSE_S)

    def _check(self) -> None:
        if self._abandoned:
            raise MirrorError('the run has ended')

    def _work(self) -> None:
        while (checkpoint := self._next()) is not None:
            self._copy_checkpoint(checkpoint)
        if self._failed is not None:
            self._copy_checkpoint(self._failed)
        if self._finished_step is not None:
            self._copy_results(self._finished_step)

    def _next(self) -> pathlib.Path | None:
        with self._changed:
            self._copying = None
            self._changed.wait_for(lambda: self._waiting or self._ends)
            self._copying, self._waiting = self._waiting, None
            return self._copying

    def _copy_checkpoint(self, checkpoint: pathlib.Path) -> None:
        step = int(checkpoint.name.split('_')[1])
        records = [self._workdir / name for name in _FOLDERS]
        records += [path for path in self._workdir.glob('[!.]*.json*') if path.name not in _OF_REPORT]
        sources = _list_sources(self._workdir, [checkpoint, *records])
        self._attempt(checkpoint.name, step, sources)
        self._failed = checkpoint if CHECKPOINTS in self._missing else None

    def _copy_results(self, step: int) -> None:
        found = [path for pattern in ('[!.]*.json*', '*.md', '*.html') for path in self._workdir.glob(pattern)]
        folders = [self._workdir / name for name in (*_FOLDERS, pictures.DIRECTORY)]
        self._attempt(_FINISHED, step, _list_sources(self._workdir, [*found, *folders]))
        if (self._workdir / EXPORT / RECORD).exists():
            self._attempt(EXPORT, step, _list_sources(self._workdir / EXPORT, [self._workdir / EXPORT]))

    def _attempt(self, name: str, step: int, sources: Mapping[str, pathlib.Path]) -> None:
        """Makes a copy; after a copy of a checkpoint, removes older ones."""
        kind = CHECKPOINTS if order_of_step(name) else name
        try:
            self._check()
            self._mirror.write(name, step, sources)
        except Exception as error:  # the run does not depend on it
            self._missing[kind] = f'{name}: {error}'
            if not self._abandoned:
                self._warn(f'lacks {name} ({error}); the run goes on, and the next checkpoint tries again')
            return
        self._missing.pop(kind, None)
        if kind == CHECKPOINTS:
            try:
                self._mirror.remove_others(name, self._keep)
            except MirrorError as error:
                self._warn(f'keeps old checkpoints ({error})')

    def _warn(self, sentence: str) -> None:
        print(f'warning: {FIELD}={self._mirror.address} {sentence}', file=sys.stderr, flush=True)


def _list_sources(base: pathlib.Path, paths: Collection[pathlib.Path]) -> dict[str, pathlib.Path]:
    """Returns all files by their path below `base`: `paths` are files, and directories with all that they hold."""
    found = [file for path in paths for file in (path.rglob('*') if path.is_dir() else [path]) if file.is_file()]
    return {file.relative_to(base).as_posix(): file for file in found}


def copy_export(address: str, workdir: pathlib.Path, out: pathlib.Path, step: int) -> None:
    """Copies one of WORKDIR/exports to the mirror; raises MirrorError."""
    Mirror(address).write(out.relative_to(workdir).as_posix(), step, _list_sources(out, [out]))


# The way back: into an empty workdir for --resume, and into a cache for a model that a command reads.


def fetch_workdir(config: config_dict.ConfigDict, workdir: pathlib.Path) -> None:
    """Fills a workdir without a run with the newest intact checkpoint of run.mirror and the records of its run.

    A mirror without a checkpoint leaves it empty. Raises MirrorError, and UserError for a workdir in use.
    """
    if not config.run.mirror or holds_run(workdir):
        return
    lock = files.DirectoryLock(workdir)
    partial = workdir / '.mirror.partial'
    try:
        if holds_run(workdir):
            return
        mirror = Mirror(config.run.mirror)
        if (name := _fetch_newest(mirror, partial)) is None:
            return
        _install(partial, workdir)
        print(f'fetched {name} from {mirror.address}', flush=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        lock.release()


def holds_copy(config: config_dict.ConfigDict) -> bool:
    """Tells whether run.mirror has a checkpoint; raises MirrorError if it cannot be read."""
    return bool(config.run.mirror) and bool(Mirror(config.run.mirror).steps())


def _fetch_newest(mirror: Mirror, directory: pathlib.Path) -> str | None:
    """Downloads the newest intact copy, and the results of the same step.

    A newer, damaged copy is named on stderr and withdrawn: the run will make its updates again.

    Returns its name, None if the mirror has no copy; raises MirrorError if none is intact.
    """
    damaged: dict[str, str] = {}
    for name in reversed(mirror.steps()):
        shutil.rmtree(directory, ignore_errors=True)
        try:
            step = mirror.fetch(name, directory).step
        except DamagedCopyError as error:
            damaged[name] = str(error)
            print(f'warning: {error}; the copy before it is used', file=sys.stderr, flush=True)
            continue
        results = mirror.read_record(_FINISHED)
        if results is not None and results.step == step:
            mirror.fetch(_FINISHED, directory)
        files.sync_tree(directory)
        for one in damaged:
            mirror.withdraw(one)
        return name
    if damaged:
        raise MirrorError(f'no copy in {mirror.address} is intact ({"; ".join(damaged.values())}): use another mirror')
    return None


def _install(partial: pathlib.Path, workdir: pathlib.Path) -> None:
    """Moves all files to their places, config.json last: with it, the workdir holds a run."""
    found = [path for path in partial.rglob('*') if path.is_file()]
    for path in sorted(found, key=lambda path: path == partial / CONFIG):
        target = workdir / path.relative_to(partial)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.replace(target)
    files.sync_tree(workdir / CHECKPOINTS)
    files.sync(workdir)


@functools.cache  # one process reads one checkpoint
def locate_run(path: str) -> pathlib.Path:
    """Returns the directory of a run; a run in a mirror, or one copy of it, is fetched to a cache first.

    The cache is areal_jax/mirror in XDG_CACHE_HOME or ~/.cache.

    Args:
      path: a workdir or checkpoint; or 's3://BUCKET/RUN' for its newest copy, 's3://BUCKET/RUN/step_00000012'.

    Raises MirrorError.
    """
    given = pathlib.Path(path)
    if not files.is_address(path) and not is_directory_of_copies(given):
        return given
    address, _, name = path.rstrip('/').rpartition('/')
    mirror, names = (Mirror(address), [name]) if order_of_step(name) else (Mirror(path), [])
    names = names or mirror.steps()[::-1]
    for name in names:
        if record := mirror.read_record(name):
            return _fetch_to_cache(mirror, name, record)
    raise MirrorError(f'{path} holds no copy of a checkpoint: name the {FIELD} of a run, or one of its copies')


def is_directory_of_copies(path: pathlib.Path) -> bool:
    """Tells whether a directory is the mirror of a run."""
    return not (path / CONFIG).exists() and any(path.glob(f'step_*/{COMMITTED}'))


def _fetch_to_cache(mirror: Mirror, name: str, record: CopyRecord) -> pathlib.Path:
    cache = find_cache() / 'mirror'
    folder = hashlib.sha256(mirror.address.encode()).hexdigest()[:16]
    target = cache / folder / f'{name}-{record.digest[:16]}'
    if target.is_dir():
        return target
    partial = target.with_name(f'.{target.name}.{os.getpid()}.partial')
    try:
        mirror.fetch(name, partial)
        partial.rename(target)
    except OSError as error:
        if not target.is_dir():  # else another process was faster
            raise UserError(f'{mirror.address}/{name} cannot be stored in {cache} ({error.strerror})') from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target
