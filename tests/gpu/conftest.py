"""Skips the tests of this folder where the default device is no GPU."""

import os

import pytest


@pytest.fixture(scope='session')
def on_gpu():
    """Whether the default device is a GPU; the import of jax waits until a test needs it."""
    import jax

    return jax.default_backend() == 'gpu'


@pytest.fixture(autouse=True)
def device(on_gpu):
    import jax

    if not on_gpu and os.environ.get('AREAL_JAX_GPU_TESTS') != 'anywhere':
        pytest.skip(f'needs a GPU; the default device is a {jax.default_backend()}')
    return jax.local_devices()[0]
