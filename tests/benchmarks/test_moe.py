"""benchmarks/moe.py: its smallest run, and a part that cannot run here."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import moe, parts
from benchmarks.moe_parts.decode_side import make_layer
from benchmarks.moe_parts.layer_case import SIZES, draw_steps
from benchmarks.moe_parts.mesh import MESHES
from benchmarks.moe_parts.product_side import measure_square, mix_scanned
from tests.native import needs_kernels


def test_a_part_without_its_interpreter_says_so(tmp_path):
    rows = moe.main(['--parts=parity,torch,decode,generation', f'--out={tmp_path / "moe.json"}'])['rows']
    assert all('torch-python is not set' in row['cannot_run'] for row in rows)
    assert parts.judge(rows) == 2


@pytest.mark.slow
def test_the_smallest_run_of_the_meshes(tmp_path):
    [row] = moe.main(['--small', '--parts=mesh', f'--out={tmp_path / "moe.json"}'])['rows']
    assert set(row['value']) == set(MESHES)
    assert row['met']
    assert row['leaves'] > 20
    assert row['trained_tokens'] > 0


@needs_kernels
def test_the_layer_of_a_step_is_that_of_the_other_sides():
    sizes = SIZES['small'] | {'tokens': 6}
    inputs = draw_steps(sizes, 3)
    weights, square = make_layer(sizes, inputs)
    measure = measure_square(mix_scanned, sizes['choices'])
    for x in inputs['x']:
        np.testing.assert_allclose(square(weights, x), measure(inputs | {'x': x})[0], rtol=1e-5)


@pytest.mark.slow
def test_the_smallest_run_of_the_product(tmp_path):
    [row] = moe.main(['--small', '--parts=product', '--turns=1', f'--out={tmp_path / "moe.json"}'])['rows']
    assert set(row['value']) == {'scan', 'ragged', 'blocks', 'memory'}
