"""The scores that areal-score writes, one JSON line an answer, in the order of the answers.

The file is always the beginning of the whole one, so a command that was ended goes on after its last line. A second
file beside it, OUT.task.json, says which task scored it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import IO

from areal_jax import files
from areal_jax.app.score.given_answers import GivenAnswer
from areal_jax.errors import UserError
from areal_jax.files import FileError, JsonObject
from areal_jax.types import Verdict

SUFFIX = '.task.json'  # of the second file
_FIX = 'restore the file as areal-score wrote it, or give another --out'
_NAMES = ('line', 'digest', 'sample')  # of a score, which say what was scored


class ScoreFile:
    """Appends scores; each line survives the death of the process. `close` it.

    Args:
      identity: what decides the rewards besides the answers, as flat JSON.

    Raises UserError where another process writes the file, where it holds something else, or where another task wrote
    it.
    """

    def __init__(self, path: pathlib.Path, identity: Mapping[str, object]):
        self._path, self._identity_path = path, path.with_name(f'{path.name}{SUFFIX}')
        self._writer: files.LineWriter | None = None
        self._lock = _lock(path)
        try:
            if path.stat().st_size:
                self._require_same(identity)
            else:
                files.write_json(self._identity_path, identity)
        except BaseException:
            self.close()
            raise

    def read(self) -> Iterator[JsonObject]:
        """The scores in the file, one at a time; a last line that was cut off is removed after the others.

        Raises FileError, naming the line, for a line that is no score.
        """
        end = 0
        with self._path.open('rb') as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b'\n'):
                    break
                where = f'{self._path}: line {number}'
                record = files.parse_object(line, where, _FIX)
                if not isinstance(record.get('label'), str) or 'reward' not in record:
                    raise FileError(f'{where} is no score; {_FIX}')
                yield record
                end += len(line)
        os.truncate(self._path, end)

    def require_answer(self, score: JsonObject, answer: GivenAnswer | None, answers: pathlib.Path) -> None:
        """Raises FileError where a score in the file is not that of the answer which has its place now."""
        if answer is not None and all(score.get(name) == getattr(answer, name) for name in _NAMES):
            return
        raise FileError(
            f'{answers}: line {score.get("line")} is not what {self._path} has a score of: the answers have changed '
            'since; restore them, or give another --out'
        )

    def append(self, score: JsonObject) -> None:
        """Writes one line; `read` must have ended before, because a torn line would be extended."""
        if self._writer is None:
            self._writer = files.LineWriter(self._path)
        self._writer.write(json.dumps(score))

    def close(self) -> None:
        """What was written is on the disk when this returns, and others may write the file; an empty one is removed.

        Nothing the second time.
        """
        if self._lock.closed:
            return
        if self._writer is not None:
            with contextlib.suppress(OSError):  # `append` has raised it
                self._writer.sync()
            self._writer.close()
        with contextlib.suppress(FileNotFoundError):  # somebody has removed it
            if not self._path.stat().st_size:
                self._path.unlink()
                self._identity_path.unlink(missing_ok=True)
        self._lock.close()

    def _require_same(self, identity: Mapping[str, object]) -> None:
        if not self._identity_path.exists():
            raise UserError(
                f'--out={self._path} holds something else than scores (there is no {self._identity_path.name} beside '
                'it): choose another name'
            )
        before = files.read_json(self._identity_path, _FIX)
        names = sorted({*before, *identity})
        if different := [name for name in names if before.get(name) != identity.get(name)]:
            changes = ', '.join(f'{name}: {before.get(name)!r} -> {identity.get(name)!r}' for name in different)
            raise UserError(f'--out={self._path} has scores of another task: {changes}; use the same, or another --out')


def make_score(answer: GivenAnswer, verdict: Verdict) -> JsonObject:
    """A line of the file: what was scored, and the verdict; a failed one has no reward."""
    sample = {} if answer.sample is None else {'sample': answer.sample}
    reason = {'reason': verdict.reason} if verdict.reason else {}
    return {
        'line': answer.line,
        **sample,
        **answer.names,
        'reward': None if verdict.failed else verdict.reward,
        'label': verdict.label,
        'attempts': verdict.attempts,
        **reason,
        'digest': answer.digest,
    }


def _lock(path: pathlib.Path) -> IO[bytes]:
    """Keeps other processes from writing the file, where its file system has locks. Raises UserError."""
    file = path.open('ab')
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UserError(
            f'--out={path} is being written by another areal-score: wait for it to end, stop it, or give another --out'
        ) from None
    except OSError:
        pass
    return file
