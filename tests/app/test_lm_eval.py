"""lm_eval, unchanged, against a server with SmolLM2: multiple choice and generation as through transformers.

lm_eval brings torch, so it runs in an environment of its own: `bash launch/test_external.sh lm_eval` says which. The
weights are float32 values; transformers computes in float64, so that what differs is the rounding of the server alone.
"""

import json
import os
import pathlib
import subprocess

import pytest

from tests.app.test_export_loaded import export_gguf
from tests.app.test_main_serve import serving

PYTHON = os.environ.get('AREAL_JAX_LM_EVAL_PYTHON')
HERE = pathlib.Path(__file__).parent
OFFLINE = {'HF_HUB_OFFLINE': '1', 'HF_DATASETS_OFFLINE': '1'}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason='AREAL_JAX_LM_EVAL_PYTHON names no Python of an environment with lm-eval'),
]


@pytest.fixture(scope='module')
def sides(tmp_path_factory):
    """What lm_eval says of the server, of the server with its tokenizer, and of transformers."""
    directory = tmp_path_factory.mktemp('lm_eval')
    export_gguf(directory)
    model = str(directory / 'export')
    sizes = {'context_tokens': 512, 'slots': 4, 'prefill_buckets': '(64, 512)'}
    flags = [f'--config.rollout.{name}={value}' for name, value in sizes.items()]
    with serving(f'--model={model}', *flags) as (_, url):
        command = [PYTHON, str(HERE / 'lm_eval_side.py'), url, model, str(HERE / 'lm_eval_tasks')]
        done = subprocess.run(
            command, cwd=directory, env=os.environ | OFFLINE, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize('side', ['server', 'remote tokenizer'])
def test_log_likelihoods_are_those_of_transformers(sides, side):
    ours, theirs = (sides[name]['answers']['areal_jax_choices'] for name in (side, 'transformers'))
    pairs = [pair for a, b in zip(ours, theirs, strict=True) for pair in zip(a, b, strict=True)]
    assert len(pairs) == 21
    for [[_, is_greedy]], [[_, expected_greedy]] in pairs:
        assert is_greedy == expected_greedy
    largest = max(abs(float(found) - float(expected)) for [[found, _]], [[expected, _]] in pairs)
    print(f'{side}: largest difference of {len(pairs)} log-likelihoods {largest:.3g}')
    assert largest <= 1e-4


@pytest.mark.parametrize('side', ['server', 'remote tokenizer'])
def test_generated_texts_and_metrics_are_those_of_transformers(sides, side):
    task = 'areal_jax_continuations'
    assert sides[side]['answers'][task] == sides['transformers']['answers'][task]
    assert sides[side]['metrics'] == sides['transformers']['metrics']
    assert 0 < sides[side]['metrics']['areal_jax_choices']['acc,none'] < 1
