"""What Python asks the kernels for: the same as numpy and jax, without a program of XLA."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from areal_jax.models.quantized import NativeColumns
from areal_jax.native.arrays import empty_aligned, host_view, pack_panels, sum_words
from tests.native import needs_kernels

pytestmark = needs_kernels


@pytest.mark.parametrize('shape', [(8, 1), (16, 5), (24, 16), (40, 33)])
def test_panels_made_outside_a_program_are_those_of_one(shape):
    matrix = np.random.default_rng(0).normal(size=shape).astype(np.float32)  # [out, in]
    form = NativeColumns()
    for by_rows, given, store in ((True, matrix, form.stored_table), (False, matrix.T.copy(), form.stored)):
        packed = pack_panels(given, by_rows=by_rows)
        np.testing.assert_array_equal(packed, np.asarray(jax.jit(store)(jnp.asarray(given))))
        np.testing.assert_array_equal(packed, np.asarray(store(jnp.asarray(given))))


def test_the_form_for_decoding_is_on_the_device_of_the_weights():
    there = jax.devices()[1]
    assert NativeColumns().stored(jax.device_put(np.ones((4, 8), np.float32), there)).devices() == {there}


@pytest.mark.parametrize('dtype', ['float32', 'float16', ml_dtypes.bfloat16])
def test_values_that_are_not_finite_are_counted(dtype):
    values = np.linspace(-3, 3, 40_000).astype(dtype)
    values[[0, 7, -1]] = np.nan, np.inf, -np.inf
    assert sum_words(values)[2] == 3
    assert sum_words(values[8:-1])[2] == 0


def test_integers_are_always_finite():
    assert sum_words(np.full(9, -1, np.int32))[2] == 0


@pytest.mark.parametrize('dtype', ['float64', 'int64', ml_dtypes.float8_e4m3fn])
def test_other_dtypes_are_left_to_others(dtype):
    assert sum_words(np.ones(3, dtype)) is None


def test_what_does_not_lie_in_one_piece_has_no_view():
    mesh = jax.make_mesh((8,), ('x',))
    assert host_view(np.ones((3, 4)).T) is None
    assert host_view(jax.device_put(np.ones(8), jax.NamedSharding(mesh, jax.P('x')))) is None
    seen = []
    jax.jit(lambda x: (seen.append(host_view(x)), x)[1])(np.ones(3))
    assert seen == [None]


def test_jax_takes_aligned_memory_as_it_is():
    memory = empty_aligned((3, 5))
    assert jax.device_put(memory, jax.devices()[0]).unsafe_buffer_pointer() == memory.ctypes.data
