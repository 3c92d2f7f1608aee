"""Attempts to reach files of others: to read, write, move and execute them, and to change what is said of them."""

from __future__ import annotations

import ctypes
import os
import pathlib
import pwd
import shutil
import stat
import struct
import sys
from collections.abc import Callable

import areal_jax
from tests.workers.sandbox.place import Attempt, Place, call, in_child

_AT = -100  # AT_FDCWD
_HOME = pwd.getpwuid(0).pw_dir
_THIS = pathlib.Path(areal_jax.__file__)
_INSTALLERS = ('pip', 'pkg_resources', 'setuptools', 'wheel')
_PACKAGES = [pathlib.Path(folder) for folder in sys.path if folder.endswith('-packages')]
_UNLISTED = next(
    (
        file
        for folder in _PACKAGES
        for file in sorted(folder.glob('[!_n]*/__init__.py'))
        if file.parent.name not in _INSTALLERS
    ),
    _THIS,
)


def read(path: str) -> Callable[[Place], object]:
    """Of a file whose name may have the parent's number in it."""
    return lambda place: pathlib.Path(path.format(parent=place.parent)).read_bytes()


def read_own(place: Place) -> None:
    file = place.work / 'own'
    file.write_text('x')
    assert file.read_text() == 'x'


def list_own(place: Place) -> None:
    os.listdir(place.work)
    os.listdir('/usr/lib')


def write_own(place: Place) -> None:
    (place.work / 'written').write_text('x')
    (place.work / 'folder').mkdir()


def write_in(folder: str) -> Callable[[Place], object]:
    def write(place: Place) -> None:
        path = pathlib.Path(folder.format(outside=place.outside), f'sandbox-{os.getpid()}')
        path.write_text('x')
        path.unlink()

    return write


def make_in(make: Callable[[str], object], remove: Callable[[str], object]) -> Callable[[Place], object]:
    def make_and_remove(place: Place) -> None:
        path = str(place.outside / 'made')
        make(path)
        remove(path)

    return make_and_remove


def write_through_link(place: Place) -> None:
    (place.work / 'link').symlink_to(place.victim)
    (place.work / 'link').write_text('x')


def read_through_link(place: Place) -> None:
    (place.work / 'link').symlink_to(place.secret)
    (place.work / 'link').read_text()


def follow_own_link(place: Place) -> None:
    (place.work / 'own').write_text('x')
    (place.work / 'link').symlink_to(place.work / 'own')
    (place.work / 'link').write_text('y')


def link_own(place: Place) -> None:
    (place.work / 'own').write_text('x')
    os.link(place.work / 'own', place.work / 'again')


def move_own(place: Place) -> None:
    (place.work / 'own').write_text('x')
    (place.work / 'own').rename(place.work / 'moved')
    os.truncate(place.work / 'moved', 0)
    (place.work / 'moved').unlink()


def move_out(place: Place) -> None:
    (place.work / 'own').write_text('x')
    (place.work / 'own').rename(place.outside / 'own')


def make_node(kind: int, device: int) -> Callable[[Place], object]:
    return lambda place: os.mknod(place.work / 'node', kind | 0o600, device)


def run_copy(place: Place) -> None:
    """A program that it wrote itself."""
    program = place.work / 'program'
    with open(os.open(program, os.O_WRONLY | os.O_CREAT, 0o700), 'wb') as file, open('/usr/bin/true', 'rb') as true:
        shutil.copyfileobj(true, file)
    in_child(lambda: os.execv(program, [str(program)]))


def open_with_openat2(place: Place) -> None:
    os.close(call(437, _AT, os.fsencode(place.secret), struct.pack('QQQ', os.O_RDONLY, 0, 0), 24))


def on_victim(number: int, *arguments: object, at: bool = False) -> Callable[[Place], object]:
    """A system call whose first argument is the path, or a folder and the path."""
    return lambda place: call(number, *([_AT] if at else []), os.fsencode(place.victim), *arguments)


def remove_attribute(number: int) -> Callable[[Place], object]:
    """One that is not there: without a sandbox that is said."""
    return on_victim(number, b'user.none')


def _own(number: int, *rest: int, at: bool = False) -> Callable[[Place], object]:
    return lambda place: on_victim(number, *_ids(), *rest, at=at)(place)


def _ids() -> tuple[int, int]:
    return os.getuid(), os.getgid()


def _set_attribute_at(place: Place) -> None:
    value = ctypes.create_string_buffer(b'x')
    arguments = struct.pack('QII', ctypes.addressof(value), 1, 0)
    call(463, _AT, os.fsencode(place.victim), 0, b'user.sandbox', arguments, 16)


def _attribute_of_own(place: Place) -> None:
    (place.work / 'own').write_text('x')
    assert os.stat(place.work / 'own').st_uid == os.getuid()


_READ = {
    'read /etc/passwd': Attempt(read('/etc/passwd'), read_own),
    'list /': Attempt(lambda place: os.listdir('/'), list_own),
    'list /etc': Attempt(lambda place: os.listdir('/etc'), list_own),
    'list /home': Attempt(lambda place: os.listdir('/home'), list_own),
    'list /proc': Attempt(lambda place: os.listdir('/proc'), list_own),
    'list /sys': Attempt(lambda place: os.listdir('/sys'), list_own),
    'list /tmp': Attempt(lambda place: os.listdir('/tmp'), list_own),
    'list the home of root': Attempt(lambda place: os.listdir(_HOME), list_own),
    'read /proc/1/environ': Attempt(read('/proc/1/environ'), read_own),
    "read the parent's environ": Attempt(read('/proc/{parent}/environ'), read_own),
    "read the parent's command line": Attempt(read('/proc/{parent}/cmdline'), read_own),
    'read its own environ': Attempt(read('/proc/self/environ'), read_own),
    'read a secret': Attempt(lambda place: place.secret.read_bytes(), read_own),
    'read an outside file': Attempt(lambda place: place.victim.read_bytes(), read_own),
    'read a secret by ..': Attempt(lambda place: (place.work / '..' / 'secret').read_bytes(), read_own),
    'read a secret with openat2': Attempt(open_with_openat2, read_own),
    'read a secret through a symlink': Attempt(read_through_link, follow_own_link),
    'read a module of this package': Attempt(lambda place: _THIS.read_bytes(), read_own),
    'read a package that is not listed': Attempt(lambda place: _UNLISTED.read_bytes(), read_own),
    'list the folder of a secret': Attempt(lambda place: os.listdir(place.secret.parent), list_own),
}
_WRITE = {
    'write in /tmp': Attempt(write_in('/tmp'), write_own),
    'write in /var/tmp': Attempt(write_in('/var/tmp'), write_own),
    'write in /dev/shm': Attempt(write_in('/dev/shm'), write_own),
    'write in the home of root': Attempt(write_in(_HOME), write_own),
    'write in an open folder': Attempt(write_in('{outside}'), write_own),
    'write its own oom_score_adj': Attempt(
        lambda place: pathlib.Path('/proc/self/oom_score_adj').write_text('1000'), write_own
    ),
    'make a folder outside': Attempt(make_in(os.mkdir, os.rmdir), write_own),
    'make a fifo outside': Attempt(make_in(os.mkfifo, os.unlink), write_own),
    'make a symlink outside': Attempt(make_in(lambda path: os.symlink('/', path), os.unlink), follow_own_link),
    'write an outside file': Attempt(lambda place: place.victim.write_text('x'), write_own),
    'write through a symlink': Attempt(write_through_link, follow_own_link),
    'hard link of an outside file': Attempt(
        lambda place: os.link(place.victim, place.work / 'link'), link_own, ('EXDEV', 'EPERM', 'EACCES')
    ),
    'truncate an outside file': Attempt(lambda place: os.truncate(place.victim, 0), move_own),
    'unlink an outside file': Attempt(lambda place: place.victim.unlink(), move_own),
    'rename an outside file': Attempt(lambda place: place.victim.rename(place.outside / 'moved'), move_own),
    'move an outside file into work': Attempt(
        lambda place: place.victim.rename(place.work / 'moved'), move_own, ('EXDEV', 'EPERM', 'EACCES')
    ),
    'move a file out of work': Attempt(move_out, move_own, ('EXDEV', 'EPERM', 'EACCES')),
    'mknod of a character device': Attempt(make_node(stat.S_IFCHR, os.makedev(1, 3)), write_own),
    'mknod of a block device': Attempt(make_node(stat.S_IFBLK, os.makedev(7, 0)), write_own),
    'mknod of a whiteout': Attempt(make_node(stat.S_IFCHR, 0), write_own),
    'mknod of a socket': Attempt(make_node(stat.S_IFSOCK, 0), write_own),
    'execute a file of its own': Attempt(run_copy, lambda place: in_child(lambda: os.execv('/usr/bin/true', ['true']))),
}
_METADATA = {
    'chmod': Attempt(on_victim(90, 0o777), _attribute_of_own),
    'fchmod of a file of its own': Attempt(
        lambda place: os.fchmod(os.open(place.work / 'own', os.O_CREAT | os.O_WRONLY), 0o4777), _attribute_of_own
    ),
    'fchmodat': Attempt(on_victim(268, 0o777, at=True), _attribute_of_own),
    'fchmodat2': Attempt(on_victim(452, 0o777, 0, at=True), _attribute_of_own),
    'chown': Attempt(_own(92), _attribute_of_own),
    'lchown': Attempt(_own(94), _attribute_of_own),
    'fchownat': Attempt(_own(260, 0, at=True), _attribute_of_own),
    'utime': Attempt(on_victim(132, None), _attribute_of_own),
    'utimes': Attempt(on_victim(235, None), _attribute_of_own),
    'futimesat': Attempt(on_victim(261, None, at=True), _attribute_of_own),
    'utimensat': Attempt(on_victim(280, None, 0, at=True), _attribute_of_own),
    'setxattr': Attempt(on_victim(188, b'user.sandbox', b'x', 1, 0), _attribute_of_own),
    'lsetxattr': Attempt(on_victim(189, b'user.sandbox', b'x', 1, 0), _attribute_of_own),
    'setxattrat': Attempt(_set_attribute_at, _attribute_of_own, ('EPERM', 'EACCES', 'ENOSYS')),
    'removexattr': Attempt(remove_attribute(197), _attribute_of_own),
    'lremovexattr': Attempt(remove_attribute(198), _attribute_of_own),
    'removexattrat': Attempt(
        on_victim(466, 0, b'user.none', at=True), _attribute_of_own, ('EPERM', 'EACCES', 'ENOSYS')
    ),
    'file_setattr': Attempt(
        on_victim(469, bytes(24), 24, 0, at=True), _attribute_of_own, ('EPERM', 'EACCES', 'ENOSYS')
    ),
}
FILES = {'read files': _READ, 'change files': _WRITE, 'change what is said of files': _METADATA}
