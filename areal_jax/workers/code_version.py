"""Which code a process runs; the roles of a run compare it, since a release number tells nothing of an edited copy."""

from __future__ import annotations

import functools
import hashlib
import pathlib

from areal_jax.installation import BESIDE

__version__ = '0.1.0'
_PACKAGE = pathlib.Path(__file__).parent.parent
_SUFFIXES = ('.py', '.cc', '.h')
_DIGITS = 12


@functools.cache
def read_code_version() -> str:
    """'0.1.0+1f0c52b6a9de': the release, and a sha256 over the names and bytes of the package's sources.

    The sources are read at the first call: make it when the process starts, before somebody edits them.
    """
    return f'{__version__}+{digest_sources(_PACKAGE)}'


def digest_sources(package: pathlib.Path) -> str:
    """The first digits of a sha256, in hex, over the sources of a package, without what a clone has beside it."""
    digest = hashlib.sha256()
    for path in sorted(path for path in package.rglob('*') if path.suffix in _SUFFIXES):
        place = path.relative_to(package)
        if place.parts[0] in BESIDE:
            continue
        name, content = str(place).encode(), path.read_bytes()
        for part in (name, content):
            digest.update(len(part).to_bytes(8, 'little') + part)
    return digest.hexdigest()[:_DIGITS]
