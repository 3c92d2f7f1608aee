"""benchmarks/moe.py: its smallest run, and a part that cannot run here."""

from __future__ import annotations

import pytest

from benchmarks import moe, parts


def test_a_part_without_its_interpreter_says_so(tmp_path):
    rows = moe.main(['--parts=parity,torch,decode,generation', f'--out={tmp_path / "moe.json"}'])['rows']
    assert all('torch-python is not set' in row['cannot_run'] for row in rows)
    assert parts.judge(rows) == 2


@pytest.mark.slow
def test_the_smallest_run_of_the_product(tmp_path):
    [row] = moe.main(['--small', '--parts=product', '--turns=1', f'--out={tmp_path / "moe.json"}'])['rows']
    assert set(row['value']) == {'scan', 'ragged', 'blocks', 'memory'}
