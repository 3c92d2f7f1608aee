"""Which kind of model a path names."""

import json

import pytest

from areal_jax.app.model.model_origin import choose_source, read_version
from areal_jax.config.ranges import ConfigError

RUN_CONFIG = {'run': {'steps': 2}, 'model': {'source': 'random'}}


@pytest.fixture
def run(tmp_path):
    (tmp_path / 'run' / 'checkpoints' / 'step_00000012_1').mkdir(parents=True)
    (tmp_path / 'run' / 'config.json').write_text(json.dumps(RUN_CONFIG))
    return tmp_path / 'run'


def test_a_run_and_its_checkpoint(run, monkeypatch):
    checkpoint = run / 'checkpoints' / 'step_00000012_1'
    assert choose_source(str(run)) == ('run', str(run))
    assert choose_source(str(checkpoint)) == ('run', str(checkpoint))
    monkeypatch.chdir(checkpoint)
    assert choose_source('.') == ('run', '.')
    assert read_version(checkpoint) == 12
    assert read_version(run) is None
    assert read_version(None) is None


def test_hugging_face_files(tmp_path):
    for content in ('{"model_type": "llama"}', 'torn', '[]'):  # its reader says what is wrong with it
        (tmp_path / 'config.json').write_text(content)
        assert choose_source(str(tmp_path)) == ('hf', str(tmp_path))


def test_a_gguf_file_and_one_in_a_package(tmp_path):
    (tmp_path / 'model').write_bytes(b'GGUF\3\0')
    assert choose_source(str(tmp_path / 'model')) == ('gguf', str(tmp_path / 'model'))
    assert choose_source('package:llm/model.gguf') == ('gguf', 'package:llm/model.gguf')


@pytest.mark.parametrize(
    ('name', 'message'),
    [
        ('', r"^--model='' names no model: give the --workdir of a run, one of its checkpoints, a directory of "),
        ('\0', 'names no model'),
        ('nothing', 'there is no such file or directory; give'),
        ('run/checkpoints', r'the directory has no config\.json; give'),
        ('model.safetensors', r'name the directory that has config\.json beside the safetensors'),
        ('file', 'is a file, but not in GGUF format; give'),
    ],
)
def test_what_is_none_of_them_is_named(run, monkeypatch, name, message):
    monkeypatch.chdir(run.parent)
    for file in ('file', 'model.safetensors'):
        (run.parent / file).write_bytes(b'GGU')
    with pytest.raises(ConfigError, match=message) as caught:
        choose_source(name)
    assert '\n' not in str(caught.value)
