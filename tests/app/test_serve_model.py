"""Every kind of --model behind HTTP: a directory, a GGUF file, one in a package, a run, a checkpoint."""

import contextlib
import json
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import pytest

from areal_jax.app.evaluate.evaluate import evaluate_model
from areal_jax.app.model.model import describe_model
from areal_jax.app.process.ending import CallerInterrupts
from areal_jax.app.roles.serve import serve_model
from areal_jax.config import ConfigError, TrackedConfig
from areal_jax.errors import UserError
from areal_jax.formats.gguf import load_gguf
from areal_jax.formats.hf_config import HfError
from areal_jax.models.decoder import Decoder
from areal_jax.publication.export import export_hf
from areal_jax.rollout.http.server.thread import bind, describe_url
from areal_jax.text.file_tokenizers import GgufTokenizer
from tests.app.small import SmallRun, small_config
from tests.app.test_main_serve import plain_logprobs
from tests.formats.test_gguf import file_tensors, write

PROMPT = [1, 2, 1]
GREEDY = {'temperature': 0, 'max_new_tokens': 5, 'ignore_eos': True}


@contextlib.contextmanager
def serving(model):
    """The URL of a server in a thread of this process."""
    interrupts, listener, errors = CallerInterrupts(), bind('127.0.0.1', 0), []
    config = small_config(run__clock='real')

    def serve():
        try:
            serve_model(config, listener, model=str(model), interrupts=interrupts)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        url, end_s = describe_url(listener), time.monotonic() + 60
        while not is_healthy(url):
            assert thread.is_alive(), errors
            assert time.monotonic() < end_s
            time.sleep(0.05)
        yield url
    finally:
        interrupts.note()
        thread.join(30)
    assert errors == []
    assert not thread.is_alive()


def is_healthy(url):
    with contextlib.suppress(urllib.error.URLError, OSError):
        return ask(url, '/health') == (200, None)
    return False


def ask(url, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {'Content-Type': 'application/json'})
    with urllib.request.urlopen(request, timeout=30) as reply:
        return reply.status, json.loads(reply.read() or b'null')


def answer(model):
    """(tokens, log-probs, weight version, name of the model) of a greedy answer."""
    with serving(model) as url:
        _, reply = ask(url, '/generate', {'input_ids': PROMPT, 'sampling_params': GREEDY, 'return_logprob': True})
        _, models = ask(url, '/v1/models')
    logprobs, tokens, _ = zip(*reply['meta_info']['output_token_logprobs'], strict=True)
    return list(tokens), logprobs, reply['meta_info']['weight_version'], models['data'][0]['id']


def check(found, decoder, params):
    """The answer is that of these weights."""
    tokens, logprobs, _, _ = found
    assert len(tokens) == 5
    whole = np.array([*PROMPT, *tokens])
    np.testing.assert_allclose(logprobs, plain_logprobs(decoder, params, whole, len(PROMPT)), atol=1e-5)


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    return SmallRun(tmp_path_factory.mktemp('run'), run__steps=2, checkpoint__every=1).train()


@pytest.mark.parametrize(('place', 'updates'), [('', 2), ('checkpoints/step_00000001', 1)])
def test_a_run_and_one_of_its_checkpoints_are_served(run, place, updates):
    found = answer(run.workdir / place)
    check(found, describe_model(TrackedConfig(small_config())).decoder, run.weights[updates])
    assert found[2:] == (str(updates), (run.workdir / place).name)


@pytest.fixture
def gguf(tmp_path, monkeypatch):
    """The path of a file in a package that must not be imported."""
    folder = tmp_path / 'served_weights'
    folder.mkdir()
    (folder / '__init__.py').write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    tensors, _ = file_tensors()
    return write(folder / 'tiny.gguf', tensors)


def export(gguf, directory):
    """(shape, weights) of the directory, which has the model of a file and its tokenizer."""
    shape, params, fields = load_gguf(gguf)
    export_hf(directory, params, shape, dtype='float32')
    for name, content in GgufTokenizer(fields).hf_files().items():
        (directory / name).write_text(content)
    return shape, params


@pytest.mark.parametrize('kind', ['file', 'package', 'directory'])
def test_a_gguf_file_and_a_directory_are_served(gguf, tmp_path, kind):
    shape, params = export(gguf, tmp_path / 'exported')
    model = {'file': gguf, 'package': 'package:served_weights/tiny.gguf', 'directory': tmp_path / 'exported'}[kind]
    found = answer(model)
    check(found, Decoder(shape), params)
    assert found[2:] == ('0', 'exported' if kind == 'directory' else 'tiny.gguf')


def put_nan(directory):
    """The last value of the last file becomes NaN."""
    path = sorted(directory.glob('*.safetensors'))[-1]
    path.write_bytes(path.read_bytes()[:-4] + np.float32(np.nan).tobytes())


def test_weights_with_nan_are_refused_at_the_start_and_by_the_route_that_updates(gguf, tmp_path):
    """The server keeps the version that it has, and answers with it."""
    for name in ('whole', 'spoilt'):
        export(gguf, tmp_path / name)
    put_nan(tmp_path / 'spoilt')
    with pytest.raises(HfError, match=r'spoilt.* 1 values of .* are NaN or infinite; get the files again'):
        serve_model(small_config(run__clock='real'), bind('127.0.0.1', 0), model=str(tmp_path / 'spoilt'))
    with serving(tmp_path / 'whole') as url:
        update = {'model_path': str(tmp_path / 'spoilt'), 'weight_version': '1'}
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(url, '/update_weights_from_disk', update)
        said = json.loads(refused.value.read())
        assert (refused.value.code, said['success']) == (400, False)
        assert 'are NaN or infinite; get the files again' in said['message']
        asked = {'input_ids': PROMPT, 'sampling_params': GREEDY}
        assert ask(url, '/generate', asked)[1]['meta_info']['weight_version'] == '0'
        assert ask(url, '/health')[0] == 200


def test_an_unknown_notation_is_refused_before_a_model_is_loaded(tmp_path):
    pytest.importorskip('renderers', reason="the package renderers is not installed: pip install -e '.[agents]'")
    (tmp_path / 'config.json').write_text('{}')  # a directory of a model that cannot be loaded
    config = small_config(run__clock='real', server__notation='qwen')
    with pytest.raises(UserError, match=r"^server\.notation='qwen' is neither hermes nor a renderer .*, qwen3, "):
        serve_model(config, bind('127.0.0.1', 0), model=str(tmp_path))


@pytest.mark.parametrize(
    ('field', 'value', 'says'),
    [('cluster.engines', '2 x shared', 'a server has one'), ('run.clock', 'virtual', 'use run.clock=real')],
)
def test_what_a_server_cannot_have_is_refused_before_a_model_is_loaded(tmp_path, field, value, says):
    (tmp_path / 'config.json').write_text('{}')
    config = small_config(run__clock='real')
    config.update_from_flattened_dict({field: value})
    with pytest.raises(ConfigError, match=says):
        serve_model(config, bind('127.0.0.1', 0), model=str(tmp_path))


def test_weights_with_nan_are_not_evaluated(gguf, tmp_path):
    export(gguf, tmp_path / 'spoilt')
    put_nan(tmp_path / 'spoilt')
    with pytest.raises(HfError, match=r'spoilt.* are NaN or infinite') as refused:
        evaluate_model(small_config(evaluation__problems=4), tmp_path / 'evaluation', model=str(tmp_path / 'spoilt'))
    assert 'learning_rate' not in str(refused.value)
    assert not (tmp_path / 'evaluation').exists()
