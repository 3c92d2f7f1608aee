"""What a user can mend, and how a command ends. Imports no other module of the package."""

from __future__ import annotations

import enum
import errno
import itertools
import reprlib
from collections.abc import Iterable


class UserError(Exception):
    """What the user can mend: one sentence that names the thing, its value and the fix; printed without a traceback.

    Every other exception is a bug of this program and keeps its traceback.
    """


class LostPeerError(UserError):
    """Another process of the run failed, is gone or never came: the same command with --resume goes on."""


class ExitCode(enum.IntEnum):
    """How every command of this project ends."""

    FINISHED = 0  # also a server that was told to stop
    BUG = 1  # with a traceback
    USER_ERROR = 2  # one sentence: something the user can mend, or a check or replay that failed
    NOTHING_TRAINED = 3  # no optimizer step since update 0, resumes counted
    STOPPED = 75  # by a signal or a lost peer: the same command with --resume goes on


_LONGEST_NAME = 100
_CUT_ROOM = 40  # characters for the words behind a text that was cut
_ALIKE, _SHORT = 0.75, 4  # difflib's ratio of two names that are one misspelled; fewer letters begin no name
_DISK_TROUBLE = {
    errno.ENOSPC: 'the disk is full: make room',
    errno.EDQUOT: 'the quota of the disk is used up: make room',
    errno.EFBIG: 'the file may not grow: raise the limit (ulimit -f)',
    errno.EROFS: 'the disk is read-only: use another workdir',
    errno.EACCES: 'permission was denied: use a directory of your own',
    errno.EPERM: 'permission was denied: use a directory of your own',
    errno.EIO: 'the disk reports an error: use another one',
    errno.ENAMETOOLONG: 'the name is too long: choose a shorter one',
    errno.ENOTDIR: 'a part of the path is not a directory: choose another path',
    errno.EISDIR: 'it is a directory, and a file was expected: choose another path',
}


def cut_text(text: str, most: int) -> str:
    """A text of others with at most `most` characters, 40 or more: a longer one ends with how many it lost."""
    kept = most - _CUT_ROOM
    return text if len(text) <= most else f'{text[:kept]}... {len(text) - kept} more characters'


def name_type(kind: type) -> str:
    """The name of a type, whatever its metaclass says, in at most 100 characters."""
    name = type.__dict__['__name__'].__get__(kind)
    return cut_text(str.__str__(name), _LONGEST_NAME)


def describe_disk_trouble(error: BaseException, doing: str) -> str:
    """One sentence for an OSError that the state of a disk explains, '' for any other exception.

    Args:
      doing: what was going on, for errors that carry no file name: 'writing to runs/tiny'.
    """
    if not isinstance(error, OSError) or error.errno not in _DISK_TROUBLE:
        return ''
    where = f'{doing}, at {error.filename}' if error.filename else doing
    return f'{where}: {_DISK_TROUBLE[error.errno]} ({error.strerror})'


def describe_memory_trouble(error: BaseException) -> str:
    """One sentence for an array that no memory holds, on the host or on a device; '' for any other exception."""
    exhausted = isinstance(error, RuntimeError) and str(error).startswith('RESOURCE_EXHAUSTED')  # of jax's runtime
    if not exhausted and not isinstance(error, MemoryError):
        return ''
    reason = (str(error).splitlines() or ['no memory is left'])[0].removeprefix('RESOURCE_EXHAUSTED: ')
    return (
        f'out of memory ({reason}): lower learner.rows_per_microbatch, learner.row_tokens, rollout.slots or the size '
        'of the model, or raise learner.remat'
    )


def suggest(name: str, known: Iterable[str]) -> str:
    """'; did you mean NAME?' with the nearest of the known names, '' where none is near."""
    return ask_whether(find_near(name, known))


def ask_whether(near: str) -> str:
    """'; did you mean NEAR?', '' for ''."""
    return f'; did you mean {near}?' if near else ''


def find_near(name: str, known: Iterable[str]) -> str:
    """The known name of which `name` is a misspelling or the beginning; '' = none."""
    import difflib  # here: only a wrong name needs it, and a scorer process starts in milliseconds

    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=_ALIKE)
    if near:
        return near[0]
    begun = [other for other in names if len(name) >= _SHORT and other.startswith(name)]
    return begun[0] if len(begun) == 1 else ''


_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = 60
_SHOWN.maxlevel = 2


def show(value: object) -> str:
    """The beginning of a value as Python writes it, for a sentence that refuses it: however long and deep it is."""
    if isinstance(value, dict) and len(value) > _SHOWN.maxdict:  # reprlib would sort all its keys
        value = dict(itertools.islice(value.items(), _SHOWN.maxdict + 1))
    return _SHOWN.repr(value)
