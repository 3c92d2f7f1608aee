"""`python -m areal_jax.main_serve` as a process: a model behind HTTP, updates from disk, its end and its refusals."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import jax
import numpy as np
import pytest

from areal_jax.app.command_line import load_config
from areal_jax.app.model.model import describe_model
from areal_jax.app.roles.serve import load_directory
from areal_jax.config import TrackedConfig
from areal_jax.publication.files_channel import FilesChannel
from areal_jax.publication.versions import PublicationError
from areal_jax.rollout.http.service import UpdateError, WeightsDirectory
from areal_jax.rollout.servers.keeper import ServerFacts
from areal_jax.rollout.servers.server_entries import read_registry
from areal_jax.types import PublishedWeights
from tests.app.test_main_train import ROOT, environment
from tests.rollout.decode.examples import DECODER

CONFIG = 'configs/tiny_cpu.py'


def command(*arguments):
    return [sys.executable, '-m', 'areal_jax.main_serve', *arguments]


@contextlib.contextmanager
def serving(*arguments):
    """(process, URL) of a server that has started; killed at the end where it has not ended."""
    process = subprocess.Popen(
        command(f'--config={CONFIG}', '--port=0', *arguments), cwd=ROOT, env=environment(), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        lines = []
        while (line := process.stdout.readline()) and not line.startswith('serving '):
            lines.append(line)
        assert line, ''.join(lines)
        yield process, re.search(r'http://\S+', line)[0]
    finally:
        process.kill()
        process.wait()


def ask(url, path, body=None, **headers):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {'Content-Type': 'application/json', **headers})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.loads(reply.read() or b'null')
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b'null')


def tiny_config():
    from areal_jax.app.command_line import load_config

    return load_config(str(ROOT / CONFIG))


def publish(directory, family='llama', **fields):
    """Version 3 of the tiny model's weights as a run publishes it; `fields` of the config by their path."""
    config = tiny_config()
    config.model.family = family
    config.update_from_flattened_dict(fields)
    decoder = describe_model(TrackedConfig(config)).decoder
    params = decoder.init(5, scale=1.0)
    published = FilesChannel(directory, decoder.config, verify=True).transfer(3, params)
    return published, decoder, params


def test_a_server_generates_takes_new_weights_and_ends_when_it_is_told(tmp_path):
    published, decoder, params = publish(tmp_path / 'publication', 'qwen3')
    with serving('--config.model.family=qwen3') as (process, url):
        greedy = {'input_ids': [1, 2, 1], 'return_logprob': True, 'logprob_start_len': 2}
        greedy['sampling_params'] = {'temperature': 0, 'max_new_tokens': 6, 'ignore_eos': True}
        _, before = ask(url, '/generate', greedy)
        wrong = ask(url, '/update_weights_from_disk', {'model_path': published.handle, 'weight_version': '4'})
        update = ask(url, '/update_weights_from_disk', {'model_path': published.handle, 'weight_version': '3'})
        _, after = ask(url, '/generate', greedy)
        _, info = ask(url, '/model_info')
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert wrong[0] == 400
    assert (update[0], update[1]['success']) == (200, True)
    assert before['meta_info']['weight_version'] == '0'
    assert (info['weight_version'], info['manifest_hash']) == ('3', published.manifest_hash)
    assert info['architectures'] == ['Qwen3ForCausalLM']
    logprobs = [entry[0] for entry in after['meta_info']['output_token_logprobs']]
    tokens = np.array([1, 2, 1, *after['output_ids']])
    np.testing.assert_allclose(logprobs, plain_logprobs(decoder, params, tokens, 3), atol=1e-5)


def plain_logprobs(decoder, params, tokens, prompt):
    """By a forward over the whole sequence, at temperature 1."""
    from tests.rollout.decode.examples import whole_attention

    hidden, _ = decoder.hidden(params, tokens, np.arange(len(tokens)), whole_attention)
    logprobs = jax.nn.log_softmax(decoder.logits(params, hidden).astype(np.float32))
    return [float(logprobs[t - 1, tokens[t]]) for t in range(prompt, len(tokens))]


def test_a_server_of_a_run_serves_a_published_version_and_registers(tmp_path):
    published, _, _ = publish(tmp_path / 'publication')
    run = [f'--workdir={tmp_path}', f'--model={published.handle}', '--config.learner.n_minibatches=1',
           '--config.cluster.engines=2 x shared']  # fmt: skip
    with serving(*run) as (process, url):
        without, _ = ask(url, '/model_info')
        key = (tmp_path / 'registry' / 'api_key').read_text().strip()
        _, info = ask(url, '/model_info', Authorization=f'Bearer {key}')
        [entry] = read_registry(tmp_path)
        assert (entry.url, entry.kind, entry.is_leaving) == (url, 'own', False)
        config = TrackedConfig(load_config(str(ROOT / CONFIG)))
        needs = ServerFacts(
            'recompute', config.rollout.context_tokens, config.publication.dtype, 'processed', '1 x cpu'
        )  # fmt: skip
        assert (entry.facts, config.rollout.kv_policy) == (needs, 'recompute')
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert without == 401  # a server of a run has a key, also where nobody has set one
    assert (info['weight_version'], info['manifest_hash']) == ('3', published.manifest_hash)
    assert [entry.is_leaving for entry in read_registry(tmp_path)] == [True]


@pytest.mark.parametrize(('arguments', 'says'), [
    ((f'--config={CONFIG}',), '--port is missing'),
    ((f'--config={CONFIG}', '--port=0', '--host=nowhere.invalid'), "--host='nowhere.invalid'"),
    (
        (f'--config={CONFIG}', '--port=0', '--host=0.0.0.0'),
        '--host=0.0.0.0 lets other machines reach this server, and without a key any of them controls it: set '
        'AREAL_JAX_API_KEY, or add --insecure',
    ),
    pytest.param((f'--config={CONFIG}', '--port=0', '--model=nowhere'), '--model=nowhere', marks=pytest.mark.slow),
])  # fmt: skip
def test_what_can_not_be_served_is_one_sentence(arguments, says):
    done = subprocess.run(
        command(*arguments), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count('\n') == 1


def load(path, label='', decoder=DECODER):
    published = PublishedWeights(1, '', WeightsDirectory(str(path), label))
    return load_directory(published, decoder=decoder, place=jax.local_devices()[0], dtype='float32')


def test_weights_of_another_model_another_version_or_torn_ones_are_refused(tmp_path):
    published, decoder, params = publish(tmp_path)
    loaded = load(published.handle, '3', decoder)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    with pytest.raises(UpdateError, match='is a model with vocab_size='):
        load(published.handle, '3', DECODER)
    with pytest.raises(PublicationError, match='holds version 3, and version 4'):
        load(published.handle, '4', decoder)
    weights = next(path for path in (tmp_path / 'v000003').iterdir() if path.suffix == '.safetensors')
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(PublicationError):
        load(published.handle, '3', decoder)
