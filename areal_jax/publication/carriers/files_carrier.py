"""Records over the file system: whole versions are the directories that servers load, deltas are files next to them.

record_channel.py sends with FilesSender and reads with FilesReceiver. A whole version and the deltas
after it are a chain; the chain stays on the disk while any of its versions is needed.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import struct
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np

from areal_jax import files
from areal_jax.formats.hf_directory import map_hf_weights
from areal_jax.formats.hf_export import HfCompanions, plan_hf_files
from areal_jax.models.families import ModelConfig
from areal_jax.publication.export import write_hf_directory
from areal_jax.publication.files_channel import not_as_published, parse_manifest
from areal_jax.publication.manifest import encode_manifest, leaves_by_path
from areal_jax.publication.record import Held, Part, Record, RecordHeader, decode_header, leaf_bytes, tree_of_record
from areal_jax.publication.versions import (
    KEPT,
    MANIFEST,
    PublicationError,
    clear_versions,
    delta_path,
    keep_while_read,
    list_deltas,
    list_versions,
    remove_unread,
    version_path,
)

_MAGIC = b'ARJDELTA'
_PREFIX, _FIELDS = struct.Struct('<8sI'), struct.Struct('<qqI')
_START = _PREFIX.size + _FIELDS.size  # offset of the header
_MOST_BYTES = 1 << 40  # a delta is smaller than its weights
_AGAIN = 'the whole version before it is still valid; publish again, and let nothing else write there'


def write_delta(path: pathlib.Path, record: Record) -> None:
    """Writes a delta to a file; raises PublicationError for lack of space, with both sizes, and for a failed write."""
    header = record.header
    assert header.base is not None
    encoded = header.encode()
    checked = [_FIELDS.pack(header.version, header.base.version, len(encoded)), encoded, *record.parts]
    check = 0
    for piece in checked:
        check = zlib.crc32(piece, check)
    content = b''.join([_PREFIX.pack(_MAGIC, check), *checked])
    if (free := files.free_bytes(path.parent)) < len(content):
        raise PublicationError(
            f'writing {path} failed: {path.parent} has {free} bytes free, and the delta has {len(content)}: make room '
            'or name another publication.directory'
        )
    try:
        files.write_bytes(path, content)
    except OSError as error:
        raise PublicationError(
            f'writing {path} failed ({error}); the disk has {files.free_bytes(path.parent)} bytes free. Make room or '
            'name another publication.directory'
        ) from error


def read_delta(path: pathlib.Path, version: int) -> Record:
    """Returns the record in the file; its parts are views of the content.

    Raises PublicationError if the file is missing, too short, too long, of another version, or has any bit flipped.
    """
    try:
        content = files.read_regular(path, 'ask for a newer version', _MOST_BYTES)
    except files.FileError as error:
        raise PublicationError(str(error)) from error
    check, found, _, length = _read_prefix(path, content)
    if zlib.crc32(memoryview(content)[_PREFIX.size :]) != check:
        raise PublicationError(f'{path} is cut or changed: its {len(content)} bytes have another checksum; {_AGAIN}')
    header = decode_header(content[_START : _START + length])
    if header.base is None or not header.version == found == version:
        raise PublicationError(f'{path} holds a record of version {header.version}, not version {version}; {_AGAIN}')
    start, parts = _START + length, []
    for size in header.sizes:
        parts.append(memoryview(content)[start : start + size])
        start += size
    if start != len(content):
        raise PublicationError(f'{path} has {len(content)} bytes, and its header says {start}; {_AGAIN}')
    return Record(header, parts)


def read_base(path: pathlib.Path) -> int:
    """Returns the version that the delta in the file applies to; raises PublicationError for any other file."""
    try:
        with path.open('rb') as file:
            return _read_prefix(path, file.read(_START))[2]
    except OSError as error:
        raise PublicationError(f'{path} cannot be read ({error.strerror}); ask for a newer version') from error


def _read_prefix(path: pathlib.Path, content: bytes) -> tuple[int, int, int, int]:
    if len(content) < _START or not content.startswith(_MAGIC):
        raise PublicationError(f'{path} is no delta of weights, or is cut to {len(content)} bytes; {_AGAIN}')
    version, base, length = _FIELDS.unpack_from(content, _PREFIX.size)
    if base >= version:
        raise PublicationError(f'{path} is a delta of version {version} against the later {base}; {_AGAIN}')
    return _PREFIX.unpack_from(content)[1], version, base, length


_READERS = 'readers'  # directory next to the versions; says which version each reader holds


class FilesSender:
    """record.RecordSender over a directory. Only one sender at a time may use it.

    Args:
      companions, separate_head: see FilesChannel; used for whole versions.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        config: ModelConfig,
        *,
        companions: HfCompanions | None = None,
        separate_head: bool = False,
    ):
        self._directory, self._config = pathlib.Path(directory), config
        self._companions, self._separate_head = companions or HfCompanions(), separate_head

    def send(self, record: Record) -> str:
        """Writes a record; the address is the absolute path of a directory or of a file.

        A whole record first removes this and later versions, which the run wrote before it was resumed.
        """
        directory, header = self._directory.absolute(), record.header
        if header.base is not None:
            path = delta_path(directory, header.version)
            write_delta(path, record)
            return str(path)
        clear_versions(directory, header.version)
        target = version_path(directory, header.version)
        manifest = {
            'format': 1, 'version': header.version, 'manifest_hash': header.manifest_hash,
            'leaves': encode_manifest(header.leaves),
        }  # fmt: skip
        tree, separate = tree_of_record(record), self._separate_head
        plan = plan_hf_files(tree, self._config, companions=self._companions, separate_head=separate)
        write_hf_directory(target, plan, {MANIFEST: manifest})
        return str(target)

    def release(self, version: int, pinned: Collection[int] = ()) -> None:
        """See RecordSender. Keeps the newest two versions in any case, and a whole version while a process reads it."""
        wholes, deltas = list_versions(self._directory), list_deltas(self._directory)
        existing = sorted({*wholes, *deltas})
        kept: set[int] = set()
        for needed in [v for v in existing if v >= version or v in pinned or v in existing[-KEPT:]]:
            kept.update(_chain(needed, deltas))
        for v, path in deltas.items():
            if v not in kept:
                path.unlink(missing_ok=True)
        for v, path in wholes.items():
            if v not in kept:
                remove_unread(path)

    def held(self) -> Mapping[str, Held]:
        """See RecordSender. In the readers' names, '_' replaces all but letters, digits, '-' and '.'."""
        found = {}
        for path in sorted((self._directory / _READERS).glob('*.json')):
            with contextlib.suppress(files.FileError, KeyError, TypeError, ValueError):
                told = files.read_json(path)
                found[path.stem] = Held(int(told['version']), str(told['manifest_hash']))
        return found

    def close(self) -> None:
        """Does nothing: versions stay on the disk."""


class FilesReceiver:
    """record.RecordReceiver over a directory that a FilesSender writes.

    Args:
      config: of the model; the directories of whole versions must match it.
      name: of the reader, for `RecordSender.held`; '' = `acknowledge` does nothing.
    """

    def __init__(self, directory: str | os.PathLike[str], config: ModelConfig, name: str = ''):
        self._directory, self._config, self._name = pathlib.Path(directory), config, name

    def fetch(self, version: int, held: Held | None, consume: Callable[[Record], None]) -> None:
        whole, deltas = self._find_way(version, held)
        if whole is not None:
            with _reading(version_path(self._directory, whole), whole, self._config) as record:
                consume(record)
        for v in deltas:
            consume(read_delta(delta_path(self._directory, v), v))

    def acknowledge(self, held: Held) -> None:
        """See RecordReceiver. Ignores a directory that cannot be written: the reader can still read."""
        if not self._name:
            return
        name = ''.join(c if c.isalnum() or c in '-.' else '_' for c in self._name)
        path = self._directory / _READERS / f'{name}.json'
        with contextlib.suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            files.write_json(path, {'version': held.version, 'manifest_hash': held.manifest_hash})

    def close(self) -> None:
        """Does nothing: no file is open."""

    def _find_way(self, version: int, held: Held | None) -> tuple[int | None, list[int]]:
        """Returns (whole version or None, deltas in order): the records that lead from `held` to `version`."""
        deltas: list[int] = []
        at = version
        while (path := delta_path(self._directory, at)).exists():
            deltas.insert(0, at)
            at = read_base(path)
            if held is not None and at == held.version and read_delta(path, deltas[0]).header.base == held:
                return None, deltas
        if not (version_path(self._directory, at) / MANIFEST).exists():
            wanted = '' if at == version else f', which version {version} needs'
            raise PublicationError(
                f'{self._directory} holds no version {at}{wanted}: it was removed, or never written; ask for a newer '
                f'version (whole ones: {sorted(list_versions(self._directory))})'
            )
        return at, deltas


class _Leaves(Sequence[Part]):
    def __init__(self, leaves: Sequence[np.ndarray]):
        self._leaves = leaves

    def __len__(self) -> int:
        return len(self._leaves)

    def __getitem__(self, index: int) -> Part:  # type: ignore[override]  # no slices
        return leaf_bytes(self._leaves[index])


@contextlib.contextmanager
def _reading(path: pathlib.Path, version: int, config: ModelConfig) -> Iterator[Record]:
    """Yields the whole record of a directory, which is not removed meanwhile."""
    with contextlib.ExitStack() as reading:
        try:
            found, manifest = parse_manifest(reading.enter_context(keep_while_read(path)))
            if found != version:
                raise ValueError(f'its manifest is of version {found}')
            leaves = leaves_by_path(map_hf_weights(path, config))
            if sorted(manifest) != list(leaves):
                raise ValueError('its manifest has other leaves')
        except PublicationError:
            raise
        except Exception as error:  # the readers raise many types for damaged files
            raise not_as_published(path, version, error) from error
        sizes = [leaf.nbytes for leaf in leaves.values()]
        yield Record(RecordHeader(version, manifest, sizes), _Leaves([np.asarray(leaf) for leaf in leaves.values()]))


def _chain(version: int, deltas: Mapping[int, pathlib.Path]) -> Iterator[int]:
    yield version
    while version in deltas:
        try:
            version = read_base(deltas[version])
        except PublicationError:  # the file is damaged, so the chain ends here
            return
        yield version
