"""The log-probs that the engine records are those of the learner, on the device and in the dtypes of runs."""

import jax
import pytest

from benchmarks.gpu_parts.decode import decode_errors
from benchmarks.gpu_parts.shapes import TINY

pytestmark = pytest.mark.gpu
# nats, mean and largest: float32 products have 10 bits on tensor cores unless the precision is 'highest'
ALLOWED = {'float32': (5e-3, 5e-2), 'bfloat16': (5e-2, 0.6)}


@pytest.mark.parametrize('attention', ['dense', 'auto'])
@pytest.mark.parametrize('dtype', ALLOWED)
def test_decoding_and_training_agree(dtype, attention, device):
    errors = decode_errors(TINY, dtype, attention)
    mean, largest = ALLOWED[dtype]
    assert errors['mean_difference'] <= mean
    assert errors['largest_difference'] <= largest


def test_they_agree_to_rounding_with_whole_float32_products(device):
    with jax.default_matmul_precision('highest'):
        assert decode_errors(TINY, 'float32')['largest_difference'] <= 2e-4
