"""What a path of --model names, and what --model and --benchmark make of a config."""

import json

import pytest

from areal_jax.app.evaluate.evaluation_config import adapt_config, choose_source, read_version, set_benchmark
from areal_jax.config import validate_evaluation
from areal_jax.config.fields import ConfigError
from tests.app.small import small_config

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
        ('', r"^--model='' names no model: give the --workdir or run.mirror of a run, one of its checkpoints, hf:"),
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


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / 'lines.jsonl'
    path.write_text('{"question": "1 + 1?", "answer": "2"}\n\n{"question": "1 + 2?", "answer": "3"}')
    return str(path)


def test_all_lines_of_a_benchmark_are_held_out_and_evaluated(lines):
    config = small_config()
    set_benchmark(config, lines, ())
    assert (config.task.name, config.task.path, config.task.held_out_fraction) == ('jsonl', lines, 1.0)
    assert config.evaluation.problems == 2  # the blank line is none
    config = small_config(evaluation__problems=1)
    set_benchmark(config, lines, ['evaluation.problems'])
    assert config.evaluation.problems == 1


def test_a_benchmark_that_cannot_be_used_is_named(lines, tmp_path):
    config = small_config()
    with pytest.raises(ConfigError, match=r'^--benchmark=nothing cannot be read \(No such file.*\): give a file of'):
        set_benchmark(config, 'nothing', ())
    with pytest.raises(ConfigError, match=r'cannot be read \(Is a directory\)'):
        set_benchmark(config, str(tmp_path), ())
    (tmp_path / 'blank').write_text('\n \n')
    with pytest.raises(ConfigError, match='blank has no line: give one JSON object a line'):
        set_benchmark(config, str(tmp_path / 'blank'), ())
    for field in ('task.name', 'task.path', 'task.held_out_fraction'):
        with pytest.raises(ConfigError, match=rf'--benchmark and --config\.{field} are both given'):
            set_benchmark(config, lines, [field])
    assert config.task.name == 'token_reversal'  # unchanged


def test_the_config_of_the_caller_stays_as_it_is(tmp_path):
    (tmp_path / 'model').write_bytes(b'GGUF')
    config = small_config(cluster__learner='fsdp=8', telemetry__plots=True)
    adapted = adapt_config(config, str(tmp_path / 'model'), ())
    assert (adapted.model.source, adapted.model.path) == ('gguf', str(tmp_path / 'model'))
    assert (adapted.cluster.learner, adapted.telemetry.plots) == ('data=1', False)
    assert (config.model.source, config.cluster.learner, config.telemetry.plots) == ('random', 'fsdp=8', True)


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'evaluation__problems': 0}, r'^evaluation\.problems=0 leaves nothing to evaluate'),
        ({'rollout__max_new_tokens': 16}, r'rollout\.max_new_tokens=16 leaves no room for a prompt'),
        ({'rollout__prefill_buckets': ()}, r'leaves no program to prefill prompts'),
        ({'cluster__engines': '2'}, r"cluster\.engines='2' has no 'NUMBER x WHERE'"),
        ({'task__name': 'jsonl'}, r"task\.name='jsonl' needs task\.path"),
        ({'rollout__temperature': -1.0}, r'rollout\.temperature=-1\.0 must be above 0'),
    ],
)
def test_what_cannot_be_evaluated_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        validate_evaluation(small_config(**{'evaluation__problems': 4} | fields))
