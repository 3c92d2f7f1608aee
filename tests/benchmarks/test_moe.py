"""benchmarks/moe.py: its smallest run, and a part that cannot run here."""

from __future__ import annotations

import pytest

from benchmarks import moe, parts
from benchmarks.moe_parts.mesh import MESHES


def test_a_part_without_its_interpreter_says_so(tmp_path):
    rows = moe.main(['--parts=parity,torch', f'--out={tmp_path / "moe.json"}'])['rows']
    assert all('torch-python is not set' in row['cannot_run'] for row in rows)
    assert parts.judge(rows) == 2


def test_the_smallest_run_of_the_meshes(tmp_path):
    [row] = moe.main(['--small', '--parts=mesh', f'--out={tmp_path / "moe.json"}'])['rows']
    assert set(row['value']) == set(MESHES)
    assert row['met']
    assert row['leaves'] > 20
    assert row['trained_tokens'] > 0


@pytest.mark.slow
def test_the_smallest_run_of_the_product(tmp_path):
    [row] = moe.main(['--small', '--parts=product', '--turns=1', f'--out={tmp_path / "moe.json"}'])['rows']
    assert set(row['value']) == {'scan', 'ragged', 'blocks', 'memory'}
