"""The whole command on this machine, with tiny shapes: a first run on a GPU is to meet no typo."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from areal_jax.native import compiled_library as library
from benchmarks.gpu_parts.plans import PLANS

ROOT = pathlib.Path(__file__).parents[2]
PAGED_CASES = (
    'bfloat16, 12 on 2 heads of 128', 'bfloat16, 28 on 4 heads of 128', 'float32, 9 on 3 heads of 64',
    'bfloat16, window',
)  # fmt: skip


def run_command(out, *arguments):
    """The JSON of a call with tiny shapes, and what it printed."""
    environment = os.environ | {'AREAL_JAX_PYTHON': sys.executable, 'XLA_FLAGS': ''}
    command = ['bash', 'launch/test_gpu.sh', f'--json={out}', '--tiny', '--minutes=30', *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=2000, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(out.read_text()), done.stdout


@pytest.mark.slow
def test_every_part_runs_with_tiny_shapes(tmp_path):
    session, printed = run_command(tmp_path / 'gpu.json')
    parts = {name: part['numbers'] for name, part in session['parts'].items()}
    assert tuple(parts) == PLANS['check'].parts
    assert session['commit']
    assert parts['facts']['device']['platform'] == 'cpu'
    found = {name: cell['status'] for name, cell in parts['backends'].items() if cell and 'status' in cell}
    assert {name for name, status in found.items() if status == 'ran'} == {
        'attention dense: bfloat16, heads of 64', 'attention blocked: bfloat16, heads of 64', 'decode: float32',
        'decode: bfloat16', *(f'paged {name}: {case}' for name in ('gather', 'loops') for case in PAGED_CASES),
        *(f'paged native: {case}' for case in PAGED_CASES if 'float32' in case and library.is_available()),
    }  # fmt: skip
    assert {name.split()[1] for name, status in found.items() if status == 'refused'} == {
        'pallas:',
        'splash:',
        'cudnn:',
        'native:',
        'pallas_gpu:',
        'pallas_tpu:',
    }
    assert parts['tests']['failed'] == []
    assert parts['tests']['passed'] >= 10
    for name in ('train_0.5b', 'train_1.5b', 'train_3b'):
        train = parts[name]
        assert train['rates']['tokens_per_second'] > 0
        assert set(train['pieces']) >= {'pack', 'transfer', 'forward_backward', 'optimizer'}
        assert set(train['shares']) == {'forward', 'backward', 'attention', 'head'}
    assert parts['train_3b']['case']['optimizer'] == 'adamw8bit'
    for name, context_tokens in (('decode_64', 64), ('decode_16k', 192), ('decode_256', 64)):
        decode = parts[name]
        assert decode['case'] | {'attention': 'loops', 'context_tokens': context_tokens} == decode['case']
        assert decode['decode']['tokens_per_second'] > 0
        assert decode['decode']['bytes_a_step_reads'] >= decode['decode']['bytes_a_step_must_read']
        swap = decode['swap']
        assert swap['pause_s'] >= swap['rebuild_s'] > 0
        # the prompt and all new tokens of every slot but the last token, which is the next input
        assert swap['rebuilt_tokens'] == decode['case']['slots'] * (decode['case']['prompt_tokens'] + 16 - 1)
    beside, one = (parts[f'compile_{order}']['compile'] for order in ('beside', 'one'))
    assert beside['programs'] == one['programs'] > 2
    assert one['covered_s'] == pytest.approx(one['summed_s'])  # one after the other
    assert parts['run']['compile']['programs'] > 2
    assert parts['run']['report']['steps'] == 3
    assert parts['run']['limit']['achieved_s'] > 0
    assert 'tokens/s' in printed


@pytest.mark.slow
def test_the_parts_of_the_plan_to_measure_run_with_tiny_shapes(tmp_path):
    wanted = [name for name in PLANS['measure'].parts if name not in PLANS['check'].parts]
    session, printed = run_command(tmp_path / 'gpu.json', '--plan=measure', f'--parts={",".join(wanted)}', '--seed=3')
    parts = {name: part['numbers'] for name, part in session['parts'].items()}
    assert list(parts) == wanted
    both = [parts[f'schedules_{name}'] for name in ('sync', 'async')]
    for numbers, eta in zip(both, (0.0, 2.0), strict=True):
        config = numbers['case']['config']
        assert (config['run']['seed'], config['staleness']['eta']) == (3, eta)
        assert numbers['end'] == 'version 4 was published'
        assert numbers['rate']['answer_tokens'] > 3 * 16  # three updates of 16 answers, none of one token
        config['staleness'].pop('eta')
    assert both[0]['case']['config'] == both[1]['case']['config']
    found = session['asynchrony']
    assert found['ratio'] == pytest.approx(found['async'] / found['sync'])
    assert (both[0]['report']['token_age']['max'], both[0]['report']['interruptions']) == (0, 0)
    assert both[1]['report']['token_age']['mean'] > 0
    assert {'32', '64'} < set(parts['rebuild'])
    assert set(parts['experts']) >= {'layer', 'update'}
    assert parts['experts']['update']['tokens_per_second'] > 0
    assert parts['flags_triton']['update']['n'] > 1
    assert 'asynchronous' in printed
