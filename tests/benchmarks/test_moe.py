"""benchmarks/moe.py: its smallest run, and a part that cannot run here."""

from __future__ import annotations

import json

import pytest

from benchmarks import moe, parts


def test_parity_is_measured_on_every_family(tmp_path):
    out = tmp_path / 'moe.json'
    moe.main(['--parts=parity', f'--out={out}'])
    [row] = json.loads(out.read_text())['rows']
    assert set(row['value']) == {'qwen3_moe', 'qwen3_moe_mixed', 'mixtral', 'olmoe'}
    assert 0 < max(row['value'].values()) < 1e-5
    assert row['met']


def test_a_part_without_its_interpreter_says_so(tmp_path):
    rows = moe.main(['--parts=torch', f'--out={tmp_path / "moe.json"}'])['rows']
    assert 'torch-python is not set' in rows[0]['cannot_run']
    assert parts.judge(rows) == 2


@pytest.mark.slow
def test_the_smallest_run_of_the_product(tmp_path):
    [row] = moe.main(['--small', '--parts=product', '--turns=1', f'--out={tmp_path / "moe.json"}'])['rows']
    assert set(row['value']) == {'scan', 'ragged', 'blocks', 'memory'}
