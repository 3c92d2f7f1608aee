"""Errors that a user can fix, and the exit codes of commands. Imports no other module of the package."""

from __future__ import annotations

import enum
import errno
import itertools
import reprlib
from collections.abc import Iterable


class UserError(Exception):
    """An error that the user can fix: a sentence that names the thing, its value and the fix; shown without traceback.

    Every other exception is a bug of this program and keeps its traceback.
    """


class LostPeerError(UserError):
    """Another process of the run failed, is gone or never came: the same command with --resume continues."""


class ExitCode(enum.IntEnum):
    """The exit codes of every command of this project."""

    FINISHED = 0  # also a server that was told to stop
    BUG = 1  # with a traceback
    USER_ERROR = 2  # with one sentence: an error that the user can fix, or a check or replay that failed
    NOTHING_TRAINED = 3  # no optimizer step since update 0, resumes counted
    STOPPED = 75  # by a signal or a lost peer: the same command with --resume continues


_LONGEST_NAME = 100
_CUT_ROOM = 40  # characters for the words after a text that was cut
_ALIKE, _SHORT = 0.75, 4  # least difflib ratio of a misspelled name; fewest letters that count as a name's beginning
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
    """Cuts a text to at most `most` >= 40 characters; a cut text ends with the number of lost characters."""
    kept = most - _CUT_ROOM
    return text if len(text) <= most else f'{text[:kept]}... {len(text) - kept} more characters'


def name_type(kind: type) -> str:
    """The name of a type, independent of its metaclass, in at most 100 characters."""
    name = type.__dict__['__name__'].__get__(kind)
    return cut_text(str.__str__(name), _LONGEST_NAME)


def describe_disk_trouble(error: BaseException, doing: str) -> str:
    """One sentence for an OSError that the state of a disk explains, '' for any other exception.

    Args:
      doing: the activity, for errors without a file name: 'writing to runs/tiny'.
    """
    if not isinstance(error, OSError) or error.errno not in _DISK_TROUBLE:
        return ''
    where = f'{doing}, at {error.filename}' if error.filename else doing
    return f'{where}: {_DISK_TROUBLE[error.errno]} ({error.strerror})'


def describe_memory_trouble(error: BaseException) -> str:
    """One sentence for an array that does not fit in memory, on host or device; '' for any other exception."""
    exhausted = isinstance(error, RuntimeError) and str(error).startswith('RESOURCE_EXHAUSTED')  # of jax's runtime
    if not exhausted and not isinstance(error, MemoryError):
        return ''
    reason = (str(error).splitlines() or ['no memory is left'])[0].removeprefix('RESOURCE_EXHAUSTED: ')
    return (
        f'out of memory ({reason}): lower learner.rows_per_microbatch, learner.row_tokens, rollout.slots or the size '
        'of the model, or raise learner.remat'
    )


def suggest(name: str, known: Iterable[str]) -> str:
    """'; did you mean NAME?' with the nearest of the known names, '' if no name is near."""
    return ask_whether(find_near(name, known))


def ask_whether(near: str) -> str:
    """'; did you mean NEAR?', '' for ''."""
    return f'; did you mean {near}?' if near else ''


def find_near(name: str, known: Iterable[str]) -> str:
    """The known name that `name` misspells or begins; '' = none."""
    import difflib  # imported here: only a wrong name needs it, and a scorer process must start in milliseconds

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
    """The beginning of a value's repr, for an error message, even if the value is long and deep."""
    if isinstance(value, dict) and len(value) > _SHOWN.maxdict:  # reprlib would sort all its keys
        value = dict(itertools.islice(value.items(), _SHOWN.maxdict + 1))
    return _SHOWN.repr(value)
