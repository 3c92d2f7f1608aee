"""The whole command on this machine, with tiny shapes: a first run on a GPU is to meet no typo."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PARTS = ('facts', 'backends', 'tests', 'train_1.5b', 'decode_64', 'run', 'decode_256', 'train_3b', 'train_0.5b')


@pytest.mark.slow
def test_every_part_runs_with_tiny_shapes(tmp_path):
    out = tmp_path / 'gpu.json'
    environment = os.environ | {'AREAL_JAX_PYTHON': sys.executable, 'XLA_FLAGS': ''}
    command = ['bash', 'launch/test_gpu.sh', f'--json={out}', '--tiny', '--minutes=30']
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=2000, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    session = json.loads(out.read_text())
    parts = {name: part['numbers'] for name, part in session['parts'].items()}
    assert tuple(parts) == PARTS
    assert session['commit']
    assert parts['facts']['device']['platform'] == 'cpu'
    found = {name: cell['status'] for name, cell in parts['backends'].items() if cell and 'status' in cell}
    assert {name for name, status in found.items() if status == 'ran'} == {
        'attention dense: bfloat16, heads of 64', 'attention blocked: bfloat16, heads of 64', 'decode: float32',
        'decode: bfloat16',
    }  # fmt: skip
    assert {name.split()[1] for name, status in found.items() if status == 'refused'} == {
        'pallas:',
        'splash:',
        'cudnn:',
    }
    assert parts['tests']['failed'] == []
    assert parts['tests']['passed'] >= 10
    for name in ('train_0.5b', 'train_1.5b', 'train_3b'):
        train = parts[name]
        assert train['rates']['tokens_per_second'] > 0
        assert set(train['pieces']) >= {'pack', 'transfer', 'forward_backward', 'optimizer'}
        assert set(train['shares']) == {'forward', 'backward', 'attention', 'head'}
    assert parts['train_3b']['case']['optimizer'] == 'adamw8bit'
    assert parts['decode_256']['decode']['tokens_per_second'] > 0
    assert parts['run']['report']['steps'] == 3
    assert parts['run']['limit']['achieved_s'] > 0
    assert 'tokens/s' in done.stdout
