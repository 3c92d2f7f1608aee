"""The library of kernels is compiled once for a machine, and its absence is said in a sentence."""

import concurrent.futures
import errno
import os
import pathlib
import shutil
import stat
import subprocess

import pytest

from areal_jax.native import compiled_library as library
from tests.tasks.process_table import all_end


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A C++ compiler that writes a line to the file after -o, and its name to `calls`."""
    calls = tmp_path / 'calls'
    calls.touch()
    path = tmp_path / 'compiler'
    path.write_text(
        f'#!/bin/sh\necho $1 >> {calls}\n[ "$1" = --version ] && echo one && exit\n'
        'for last; do :; done\necho library > $last\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv('CXX', str(path))
    return lambda: [line for line in calls.read_text().split() if line != '--version']


def test_a_second_process_finds_what_the_first_compiled(tmp_path, compiler):
    first = library.find_or_compile(tmp_path / 'cache')
    assert first.read_text() == 'library\n'
    assert library.find_or_compile(tmp_path / 'cache') == first
    assert len(compiler()) == 1


def test_processes_that_start_together_compile_once(tmp_path, compiler):
    text = (tmp_path / 'compiler').read_text()
    (tmp_path / 'compiler').write_text(text.replace('echo library', 'sleep 0.5; echo library'))
    with concurrent.futures.ThreadPoolExecutor(3) as pool:  # each opens the directory, as a process does
        found = set(pool.map(library.find_or_compile, [tmp_path / 'cache'] * 3))
    assert [path.read_text() for path in found] == ['library\n']
    assert len(compiler()) == 1


def test_a_directory_that_cannot_be_locked_is_used_all_the_same(tmp_path, compiler, monkeypatch):
    def refuse(handle, operation):
        raise OSError(errno.ENOLCK, 'no locks here')

    monkeypatch.setattr(library.fcntl, 'flock', refuse)
    assert library.find_or_compile(tmp_path / 'cache').parent == tmp_path / 'cache'


def test_another_processor_source_or_compiler_gets_its_own_library(tmp_path, compiler, monkeypatch):
    found = {library.find_or_compile(tmp_path)}
    monkeypatch.setattr(library, 'describe_processor', lambda: 'flags: fewer')
    found.add(library.find_or_compile(tmp_path))
    compiler_path = tmp_path / 'compiler'
    compiler_path.write_text(compiler_path.read_text().replace('echo one', 'echo two'))  # its version
    found.add(library.find_or_compile(tmp_path))
    source = tmp_path / 'kernels.cc'
    source.write_text('// another')
    monkeypatch.setattr(library, 'SOURCE', source)
    found.add(library.find_or_compile(tmp_path))
    assert len(found) == len(compiler()) == 4


def test_the_same_source_at_another_place_has_the_same_library(tmp_path, compiler, monkeypatch):
    first = library.find_or_compile(tmp_path / 'cache')
    shutil.copytree(library.SOURCE.parent, tmp_path / 'clone')
    monkeypatch.setattr(library, 'SOURCE', tmp_path / 'clone' / library.SOURCE.name)
    assert library.find_or_compile(tmp_path / 'cache') == first
    assert len(compiler()) == 1


def test_a_directory_that_cannot_be_written_does_not_stop_the_process(tmp_path, compiler):
    blocked = tmp_path / 'file'
    blocked.touch()
    found = library.find_or_compile(blocked / 'cache')
    assert found.read_text() == 'library\n'
    assert tmp_path not in found.parents


@pytest.mark.parametrize(
    ('compiler_name', 'reason'),
    [
        ('no_such_compiler', 'there is no C\\+\\+ compiler .no_such_compiler.; install one or set CXX'),
        ('false', 'false does not compile'),
    ],
)
def test_what_is_missing_is_named(tmp_path, monkeypatch, compiler_name, reason):
    monkeypatch.setenv('CXX', compiler_name)
    with pytest.raises(library.NativeError, match=reason):
        library.find_or_compile(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_that_takes_too_long_leaves_nothing(tmp_path, compiler, monkeypatch):
    """Neither a file nor the process in which it works."""
    pid = tmp_path / 'pid'
    program = pathlib.Path(os.environ['CXX'])
    program.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit\nsleep 60 &\necho $! > {pid}\nwait\n')
    monkeypatch.setattr(library, 'COMPILE_S', 1.0)
    with pytest.raises(library.NativeError, match='timed out'):
        library.find_or_compile(tmp_path / 'cache')
    assert list((tmp_path / 'cache').iterdir()) == []
    assert all_end([int(pid.read_text())])


def test_without_any_compiler_the_usual_names_are_listed(tmp_path, monkeypatch):
    monkeypatch.delenv('CXX', raising=False)
    monkeypatch.setenv('PATH', str(tmp_path))
    with pytest.raises(library.NativeError, match=r'no C\+\+ compiler .c\+\+, g\+\+, clang\+\+.'):
        library.find_or_compile(tmp_path)


def test_an_error_of_the_source_is_quoted(tmp_path, monkeypatch):
    try:
        library.find_compiler()
    except library.NativeError as error:
        pytest.skip(str(error))
    source = tmp_path / 'kernels.cc'
    source.write_text('int f() { return missing; }')
    monkeypatch.setattr(library, 'SOURCE', source)
    with pytest.raises(library.NativeError, match=r'does not compile kernels\.cc: .*missing'):
        library.find_or_compile(tmp_path / 'cache')


@pytest.mark.slow  # a tenth of a minute of the compiler
def test_the_source_compiles_without_avx512(tmp_path):
    """The path of machines with 16 registers; it is compiled, without optimization, and not run."""
    try:
        compiler = library.find_compiler()
    except library.NativeError as error:
        pytest.skip(str(error))
    if os.uname().machine != 'x86_64':
        pytest.skip('the flag is that of x86-64')
    flags = [flag for flag in library.FLAGS if flag not in ('-march=native', '-O3')] + ['-march=haswell']
    command = [compiler, *flags, f'-isystem{library.jax.ffi.include_dir()}', str(library.SOURCE), '-o']
    done = subprocess.run([*command, str(tmp_path / 'kernels.so')], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
