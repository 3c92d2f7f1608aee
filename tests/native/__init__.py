"""Tests of the compiled kernels, and what other tests know of a machine that has no C++ compiler."""

import pytest

from areal_jax.native.compiled_library import is_available

needs_kernels = pytest.mark.skipif(not is_available(), reason='this machine has no C++ compiler')


def drop_compiler_warning(stderr: str) -> str:
    """Returns what a command says on stderr, without the one warning that a machine without a compiler adds."""
    if is_available():
        return stderr
    lines = stderr.splitlines(keepends=True)
    return ''.join(line for line in lines if not line.endswith('install one or set CXX\n'))
