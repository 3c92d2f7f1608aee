"""A run under the virtual clock repeats bit for bit on a GPU, with the flag that makes its kernels deterministic."""

import os

import pytest

from tests.app.small import SmallRun, equal

pytestmark = pytest.mark.gpu


def test_a_run_repeats_bit_for_bit(tmp_path, on_gpu):
    if on_gpu and '--xla_gpu_deterministic_ops=true' not in os.environ.get('XLA_FLAGS', ''):
        pytest.skip('needs XLA_FLAGS=--xla_gpu_deterministic_ops=true, which tests/conftest.py sets with -m gpu')
    fields = {'learner__dtype': 'bfloat16', 'publication__dtype': 'bfloat16', 'learner__layers': 'stacked'}
    first, second = (SmallRun(tmp_path / name, run__steps=3, **fields).train() for name in ('first', 'second'))
    assert first.events == second.events
    assert equal(first.final, second.final)
    assert not equal(first.weights[0], first.final)
