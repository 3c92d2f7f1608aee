"""The versions on a disk: the names of their directories, and a lock that protects a directory while it is read.

A version is whole, a directory `v000000/`, or a file `v000007.delta` (files_carrier.py) that needs the version before.

Nothing here imports jax.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypedDict

from areal_jax import files
from areal_jax.errors import UserError


class PublicationError(UserError, RuntimeError):
    """Weights cannot be sent, or differ from what was sent; the message names version, leaf or directory, and fix."""


class ChainFull(PublicationError):
    """A carrier has no room for a delta after the newest whole record; the channel then sends the version whole."""


MANIFEST = 'manifest.json'
DELTA = '.delta'  # ending of the file of a delta
KEPT = 2  # newest versions that stay on the disk after their release: servers load them by path
_NAME = re.compile(r'v(\d{6,})')


def version_path(directory: pathlib.Path, version: int) -> pathlib.Path:
    return directory / f'v{version:06d}'


def parse_version(path: pathlib.Path) -> int | None:
    """The version in the name of a directory; None for any other name."""
    match = _NAME.fullmatch(path.name)
    return None if match is None else int(match[1])


def list_versions(directory: pathlib.Path) -> dict[int, pathlib.Path]:
    """Complete versions by number, lowest first; empty if the directory is missing."""
    found = {parse_version(path): path for path in directory.glob('v*') if (path / MANIFEST).exists()}
    return {version: found[version] for version in sorted(v for v in found if v is not None)}


def delta_path(directory: pathlib.Path, version: int) -> pathlib.Path:
    return directory / f'v{version:06d}{DELTA}'


def parse_delta(path: pathlib.Path) -> int | None:
    """The version in the name of the file of a delta; None for any other name."""
    return parse_version(path.with_suffix('')) if path.suffix == DELTA else None


def list_deltas(directory: pathlib.Path) -> dict[int, pathlib.Path]:
    """Files of deltas by version, lowest first; empty if the directory is missing."""
    found = {parse_delta(path): path for path in directory.glob(f'v*{DELTA}')}
    return {version: found[version] for version in sorted(v for v in found if v is not None)}


@contextlib.contextmanager
def keep_while_read(directory: pathlib.Path) -> Iterator[bytes]:
    """Yields the content of the manifest; meanwhile `remove_unread`, in any process, does not remove the directory.

    The kernel releases the lock when the reader dies. If the file system has no locks, only the newest versions are
    safe from removal.

    Raises PublicationError if the directory is being removed, and at the end if another directory has taken its name.
    """
    with (directory / MANIFEST).open('rb') as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PublicationError(f'{directory} is being removed: load a newer version') from None
        except OSError:  # no locks there
            pass
        yield file.read()
        if not os.path.samestat(os.fstat(file.fileno()), os.stat(directory / MANIFEST)):
            raise PublicationError(f'{directory} was replaced while it was read: load it again')


def clear_versions(directory: pathlib.Path, version: int) -> None:
    """Removes this and later versions, and the partial versions of writers that died."""
    for abandoned in directory.glob('.v*.partial'):
        if abandoned.is_dir():
            shutil.rmtree(abandoned)
        else:
            abandoned.unlink()
    for delta in [path for v, path in list_deltas(directory).items() if v >= version]:
        delta.unlink()
    for path in [path for v, path in list_versions(directory).items() if v >= version]:
        files.remove_directory(path)


def remove_old_versions(directory: pathlib.Path, version: int, pinned: Collection[int] = ()) -> None:
    """Removes versions below `version` from the disk, except the newest two of all and the `pinned` ones.

    Keeps a version that a process is reading until a later call.
    """
    for v, path in list(list_versions(directory).items())[:-KEPT]:
        if v < version and v not in pinned:
            remove_unread(path)


def remove_unread(directory: pathlib.Path) -> bool:
    """Removes the directory of a version; returns False and does nothing while a process on this machine reads it."""
    with (directory / MANIFEST).open('r+b') as file:  # NFS gives an exclusive lock only on a file open for writing
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # no locks there
            pass
        files.remove_directory(directory)
    return True


# Names of versions that are not directories, and manifests as JSON has them.


class EncodedDigest(TypedDict):
    """A manifest.LeafDigest as JSON has it."""

    shape: list[int]
    dtype: str
    content: list[int]


SHARDS = 'shards:'  # before the addresses of the senders of all processes of a learner, separated by semicolons


def name_version(address: str, version: int, manifest_hash: str) -> str:
    """Names a version at an address, 'shm:PATH#7@3f2a...'; servers are told by it which version to load."""
    return f'{address}#{version}@{manifest_hash}'


def join_addresses(addresses: Sequence[str]) -> str:
    """Returns one address of the senders of all processes of a learner."""
    return SHARDS + ';'.join(addresses)


def add_sums(content: Sequence[int], sums: Sequence[int]) -> tuple[int, int]:
    """Returns the content of a LeafDigest with the `sums` of changes, or of another shard, added."""
    return (content[0] + sums[0]) % 2**32, (content[1] + sums[1]) % 2**32


def hash_digests(leaves: Mapping[str, EncodedDigest]) -> str:
    """sha256, in hex, of the sorted JSON of an encoded manifest."""
    return hashlib.sha256(json.dumps(leaves, sort_keys=True).encode()).hexdigest()
