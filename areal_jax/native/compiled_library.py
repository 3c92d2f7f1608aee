"""The library of kernels: compiled once for a machine, with the C++ compiler that is found, and registered with XLA.

The package has no compiled code, because the instructions of a machine are only known there. Without a compiler, XLA
does the same work.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import pathlib
import platform
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jaxlib

from areal_jax.installation import find_cache

# names in the source
ATTEND, WRITE, MULTIPLY = 'areal_jax_cache_attend', 'areal_jax_cache_write', 'areal_jax_multiply'
PROJECT, FINISH, STEP = 'areal_jax_project', 'areal_jax_finish', 'areal_jax_step'
RANK = 'areal_jax_rank'
BYTE_MULTIPLY, BYTE_STEP = 'areal_jax_byte_multiply', 'areal_jax_byte_step'
BYTE_PROJECT, BYTE_FINISH = 'areal_jax_byte_project', 'areal_jax_byte_finish'
EXPERT_PRODUCTS, EXPERT_MIX, EXPERT_GRADIENT = (
    'areal_jax_expert_products', 'areal_jax_expert_mix', 'areal_jax_expert_gradient',
)  # fmt: skip
_NAMES = (
    ATTEND, WRITE, MULTIPLY, PROJECT, FINISH, STEP, RANK, BYTE_MULTIPLY, BYTE_PROJECT, BYTE_FINISH, BYTE_STEP,
    EXPERT_PRODUCTS, EXPERT_MIX, EXPERT_GRADIENT,
)  # fmt: skip
SOURCE = pathlib.Path(__file__).with_name('kernels.cc')
FLAGS = ('-std=c++17', '-O3', '-march=native', '-fopenmp-simd', '-shared', '-fPIC', '-w')  # of the compiler
_COMPILERS = ('c++', 'g++', 'clang++')
COMPILE_S = 120.0


class NativeError(Exception):
    """The kernels are not available on this machine; the message says why."""


@functools.cache
def register() -> ctypes.CDLL:
    """Registers the kernels with XLA under the names above, once per process. Raises NativeError."""
    path = find_or_compile(find_cache())
    try:
        library = ctypes.CDLL(str(path))
        for name in _NAMES:
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform='cpu')
    except (OSError, AttributeError) as error:
        raise NativeError(f'{path} can not be loaded: {error}; delete it') from error
    return library


def registered() -> ctypes.CDLL | None:
    """The library if `register` has succeeded, else None."""
    return register() if register.cache_info().currsize else None


@functools.cache
def is_available() -> bool:
    """Whether `register` succeeds; calls it."""
    try:
        register()
    except NativeError:
        return False
    return True


def find_or_compile(directory: pathlib.Path) -> pathlib.Path:
    """The path of the library for this source, compiler and processor; compiles it if it does not exist."""
    compiler = find_compiler()
    command = [compiler, *FLAGS, f'-isystem{jax.ffi.include_dir()}', str(SOURCE), '-o']
    sources = [SOURCE, *sorted(SOURCE.parent.glob('*.h'))]
    parts = [
        *(path.read_text() for path in sources),
        compiler,
        *FLAGS,  # not the places of the source and of jax: another clone has the same library
        _version(compiler),
        jaxlib.__version__,
        describe_processor(),
    ]
    path = directory / f'kernels_{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.so'
    if path.exists():
        return path
    with _hold(directory):
        return path if path.exists() else _compile(command, path)


@contextlib.contextmanager
def _hold(directory: pathlib.Path) -> Iterator[None]:
    """Admits one process of this machine at a time, so that engines that start together compile once.

    If the directory cannot be locked, they compile concurrently.
    """
    with contextlib.ExitStack() as stack:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            handle = os.open(directory, os.O_RDONLY)
            stack.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            pass
        yield


def _compile(command: list[str], path: pathlib.Path) -> pathlib.Path:
    """Compiles to `path`, or to a temporary file for this process if nothing can be written there; returns the path."""
    try:
        # processes that could not lock the directory may compile at once: each into its own file; the last one stays
        handle, made = tempfile.mkstemp(dir=path.parent, suffix='.so')
        os.close(handle)
    except OSError:
        made = os.path.join(tempfile.mkdtemp(prefix='areal_jax_'), path.name)
        path = pathlib.Path(made)
    try:
        code, said = _run([*command, made])
    except BaseException as error:
        pathlib.Path(made).unlink(missing_ok=True)
        if isinstance(error, OSError | subprocess.TimeoutExpired):
            raise NativeError(f'{command[0]} does not compile {SOURCE.name}: {error}') from error
        raise
    if code:
        pathlib.Path(made).unlink(missing_ok=True)
        reason = next((line for line in said.splitlines() if 'error:' in line), said.strip()[-200:])
        raise NativeError(f'{command[0]} does not compile {SOURCE.name}: {reason}')
    os.replace(made, path)
    return path


def _run(command: list[str]) -> tuple[int, str]:
    """The exit code and stderr; after a timeout or interruption, the command and its children are killed.

    The compiler proper is a child of the command, and would run on for minutes.
    """
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            _, said = process.communicate(timeout=COMPILE_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, said


def find_compiler() -> str:
    """The path of $CXX, or else of the first usual compiler that is installed. Raises NativeError without any."""
    asked = os.environ.get('CXX')
    for name in (asked,) if asked else _COMPILERS:
        if found := shutil.which(name):
            return found
    raise NativeError(f'there is no C++ compiler ({asked or ", ".join(_COMPILERS)}); install one or set CXX')


def _version(compiler: str) -> str:
    try:
        return subprocess.run([compiler, '--version'], capture_output=True, text=True, check=False).stdout
    except OSError as error:
        raise NativeError(f'{compiler} does not run: {error}') from error


def describe_processor() -> str:
    """The processor features on which -march=native depends: machines of a cluster may share a home directory."""
    info = pathlib.Path('/proc/cpuinfo')
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line for line in lines if line.startswith(('model name', 'flags', 'Features', 'CPU part'))]
    return '\n'.join(sorted(set(named))) or platform.platform() + platform.processor()


# Reuse of the memory that XLA frees: the settings of blocks.h for this process.


_XLA = b'libjax_common'  # part of the file name of XLA's library


class BlockCounts(NamedTuple):
    """Blocks of at least 1 MiB that XLA allocated since `keep_blocks`."""

    kept_bytes: int  # free, for XLA alone
    used_bytes: int
    given_again: int  # number of blocks that were reused


def keep_blocks() -> bool:
    """Keeps freed blocks for XLA for the rest of this process, if it computes on a CPU; True if blocks are kept.

    Used and kept bytes together are at most 5/4 of the most bytes that were in use at once since the last
    `free_kept_blocks`.
    """
    if not _has_kernels():
        return False
    keep = register().areal_jax_keep_blocks
    keep.restype = ctypes.c_bool
    return bool(keep(_XLA))


def free_kept_blocks() -> None:
    """Returns kept blocks to the system, before something else needs much memory."""
    if _has_kernels():
        register().areal_jax_free_kept_blocks()


def count_blocks() -> BlockCounts:
    """Counts the blocks; the library must be registered."""
    counts = (ctypes.c_uint64 * 3)()
    register().areal_jax_count_blocks(counts)
    return BlockCounts(*map(int, counts))


def _has_kernels() -> bool:
    return jax.default_backend() == 'cpu' and is_available()


# Decoding gives way to training if both run on the processors of one process.
#
# An update that shares the processors with decoding ends late, and decoding ends before it: then no answer is left in
# progress when the new weights arrive. Kernels that give way run on separate threads, and only while no other thread
# wants the processor (threads.h).


@contextlib.contextmanager
def preferred() -> Iterator[None]:
    """While the context is open, kernels that decode in this process give way to all other work; no result changes.

    Does nothing if the library is not registered.
    """
    kernels = registered()
    if kernels is None:
        yield
        return
    prefer = kernels.areal_jax_prefer
    prefer.argtypes = (ctypes.c_int64,)
    prefer(1)
    try:
        yield
    finally:
        prefer(-1)
