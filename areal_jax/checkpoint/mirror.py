"""Copies of a run's files in an object store or a directory: each copy is committed as a whole, or does not exist.

MIRROR/step_00000012/...               the files of a copy
MIRROR/step_00000012/committed.json    written last: size and SHA-256 of each file
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping

import msgspec

from areal_jax.checkpoint.shards import brief
from areal_jax.errors import UserError
from areal_jax.files import find_package, is_address
from areal_jax.installation import describe_install

COMMITTED = 'committed.json'  # in a copy
_STEP = re.compile(r'step_(\d{8,})(?:_(\d+))?')
_STREAMS = 4  # files that are copied at the same time
_BLOCK_BYTES = 8 << 20


class MirrorError(UserError, RuntimeError):
    """A mirror that cannot be read or written; the message names the address and the cause."""


class DamagedCopyError(MirrorError):
    """A committed copy with a file that is missing or differs from the committed one."""


@dataclasses.dataclass(frozen=True)
class CopyRecord:
    """The content of committed.json."""

    step: int  # updates
    files: Mapping[str, tuple[int, str]]  # (bytes, SHA-256 in hex) by path in the copy

    @property
    def digest(self) -> str:
        """SHA-256 over paths, sizes and digests, in hex."""
        return hashlib.sha256(json.dumps(sorted(self.files.items())).encode()).hexdigest()


def order_of_step(name: str) -> tuple[int, int] | None:
    """Returns (updates, repetition) of 'step_00000012_1'; None for a copy of something else."""
    match = _STEP.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else None


class Mirror:
    """The copies below an address: gs://BUCKET/PATH, s3://BUCKET/PATH, memory://PATH, or a directory.

    Object stores find credentials and endpoint in their usual environment variables. Every method raises MirrorError.

    Args:
      check: is called between blocks of an upload; an exception that it raises ends the upload.
    """

    def __init__(self, address: str, check: Callable[[], None] = lambda: None):
        if (package := find_package(address)) and importlib.util.find_spec(package) is None:
            raise MirrorError(
                f'{address} needs the package {package}, which is not installed: {describe_install("mirror")}'
            )
        from fsspec.core import url_to_fs  # takes 0.1 s

        self.address, self._check = address.rstrip('/'), check
        with self._explained():
            options = {} if is_address(address) else {'auto_mkdir': True}
            self._store, self._root = url_to_fs(self.address, **options)

    def steps(self) -> list[str]:
        """Returns the names of the committed copies of checkpoints, oldest first."""
        with self._explained():
            self._store.invalidate_cache()  # other processes write too
            names = [path.split('/')[-2] for path in self._store.glob(f'{self._root}/step_*/{COMMITTED}')]
        orders = {name: order for name in names if (order := order_of_step(name))}
        return sorted(orders, key=orders.__getitem__)

    def read_record(self, name: str) -> CopyRecord | None:
        """Returns the record of a committed copy, None without one; raises DamagedCopyError if it cannot be read."""
        try:
            with self._explained(missing=FileNotFoundError):
                content = self._store.cat_file(f'{self._root}/{name}/{COMMITTED}')
            return msgspec.json.decode(content, type=CopyRecord)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise DamagedCopyError(f'{self.address}/{name}/{COMMITTED} cannot be read ({error})') from error

    def write(self, name: str, step: int, sources: Mapping[str, pathlib.Path]) -> None:
        """Uploads files, then the record that commits them; replaces an earlier copy with the name.

        A file that grows meanwhile is copied up to its size when it is opened.

        Args:
          sources: files of this machine by path in the copy.
        """
        target = f'{self._root}/{name}'
        with self._explained():
            self._remove(target)
            with concurrent.futures.ThreadPoolExecutor(_STREAMS, thread_name_prefix='mirror') as pool:
                sent = pool.map(lambda path: self._send(sources[path], f'{target}/{path}'), sources)
                record = CopyRecord(step, dict(zip(sources, sent, strict=True)))
            self._require_sizes(target, record)
            self._store.pipe_file(f'{target}/{COMMITTED}', msgspec.json.encode(record))

    def fetch(self, name: str, directory: pathlib.Path) -> CopyRecord:
        """Downloads a committed copy into a directory; raises DamagedCopyError for a file that is not as committed."""
        record = self.read_record(name)
        if record is None:
            raise DamagedCopyError(f'{self.address}/{name} is not committed')
        with concurrent.futures.ThreadPoolExecutor(_STREAMS, thread_name_prefix='mirror') as pool:
            list(pool.map(lambda path: self._receive(name, path, *record.files[path], directory), record.files))
        return record

    def withdraw(self, name: str) -> None:
        """Removes the record of a copy, which then does not exist for readers."""
        with self._explained():
            self._store.rm(f'{self._root}/{name}/{COMMITTED}')

    def remove_others(self, newest: str, keep: int) -> None:
        """Removes the copies of checkpoints except the `keep` newest up to `newest`.

        Unfinished copies are removed too, and copies of later steps: the run has returned to a step before them.
        """
        limit = order_of_step(newest)
        assert limit is not None
        earlier = [name for name in self.steps() if (order_of_step(name) or limit) <= limit]
        with self._explained():
            for path in self._store.ls(self._root, detail=False):
                name = path.rstrip('/').split('/')[-1]
                if order_of_step(name) and name not in earlier[-keep:]:
                    self._remove(path)

    def _remove(self, target: str) -> None:
        """Removes a copy, its record first."""
        self._store.invalidate_cache()
        for path, recursive in ((f'{target}/{COMMITTED}', False), (target, True)):
            if self._store.exists(path):
                self._store.rm(path, recursive=recursive)

    def _send(self, source: pathlib.Path, target: str) -> tuple[int, str]:
        digest = hashlib.sha256()
        with source.open('rb') as file, self._store.open(target, 'wb') as out:
            size = left = os.fstat(file.fileno()).st_size
            while left and (block := file.read(min(left, _BLOCK_BYTES))):
                self._check()
                digest.update(block)
                out.write(block)
                left -= len(block)
        return size - left, digest.hexdigest()

    def _receive(self, name: str, path: str, size: int, digest: str, directory: pathlib.Path) -> None:
        target = directory / path
        if not target.resolve().is_relative_to(directory.resolve()):
            raise DamagedCopyError(f'{self.address}/{name} has a file outside of it, {path!r}')
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._explained(missing=FileNotFoundError):
                self._store.get_file(f'{self._root}/{name}/{path}', str(target))
        except FileNotFoundError as error:
            raise DamagedCopyError(f'{self.address}/{name} lacks {path}') from error
        with target.open('rb') as file:
            found = hashlib.file_digest(file, 'sha256').hexdigest()
        if (target.stat().st_size, found) != (size, digest):
            raise DamagedCopyError(f'{self.address}/{name}: {path} is not the committed file')

    def _require_sizes(self, target: str, record: CopyRecord) -> None:
        self._store.invalidate_cache()
        stored = self._store.find(target, detail=True)
        sizes = {path.removeprefix(f'{target}/'): entry['size'] for path, entry in stored.items()}
        for path, (size, _) in record.files.items():
            if sizes.get(path) != size:
                raise MirrorError(f'{self.address}: {path} has {sizes.get(path)} bytes after an upload of {size}')

    @contextlib.contextmanager
    def _explained(self, missing: type[Exception] | tuple[()] = ()) -> Iterator[None]:
        """Raises MirrorError for whatever the store's library raises, and lets `missing` through."""
        try:
            yield
        except MirrorError:
            raise
        except missing:
            raise
        except Exception as error:
            raise MirrorError(f'{self.address}: {brief(error)}') from error
