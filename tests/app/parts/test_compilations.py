"""Where compiled programs are kept, and for how long the settings of jax are others."""

import pathlib

import jax
import jax.numpy as jnp
import pytest

from areal_jax.app.parts.compilations import use_compilation_cache
from areal_jax.config import TrackedConfig
from tests.app.small import small_config

LEAST = 'jax_persistent_cache_min_compile_time_secs'


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv(LEAST.upper(), raising=False)


def use(cache: pathlib.Path | str):
    return use_compilation_cache(TrackedConfig(small_config(run__compilation_cache=str(cache))))


def compile_for_long(layers):
    """A program of many instructions, of which XLA leaves none out."""
    x = jnp.ones((layers + 2, 3))

    def program(x):
        for i in range(layers):
            x = jnp.sort(jnp.tanh(x @ x.T) @ x, axis=i % 2)
        return x

    jax.jit(program).lower(x).compile()


def test_programs_that_take_less_than_a_second_are_kept(tmp_path):
    with use(tmp_path / 'cache'):
        compile_for_long(150)  # about 0.4 s on an idle machine
    assert list((tmp_path / 'cache').iterdir())


@pytest.mark.parametrize('cache', ['', 'cache'])
def test_the_settings_of_jax_come_back(tmp_path, cache):
    before = dict(jax.config.values)
    with use(cache and tmp_path / cache):
        assert jax.config.values[LEAST] == 0.1
    assert jax.config.values == before


def test_a_variable_of_the_environment_wins(tmp_path, monkeypatch):
    monkeypatch.setenv(LEAST.upper(), '7')
    before = jax.config.values[LEAST]
    with use(tmp_path):
        assert jax.config.values[LEAST] == before
