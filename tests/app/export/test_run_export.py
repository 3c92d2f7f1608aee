"""Exports of runs: equal to the weights bit for bit, of any checkpoint, whole or not there."""

import errno
import json
import os
import re
import shutil

import jax
import pytest

from areal_jax import main_export
from areal_jax.app.export.run_export import export_run, separates_head, write_export
from areal_jax.app.library import build_run
from areal_jax.app.model.model import Model
from areal_jax.config import TrackedConfig, default_config
from areal_jax.errors import UserError
from areal_jax.formats.hf_directory import load_hf
from areal_jax.models.decoder import Decoder
from areal_jax.publication import export as publication_export
from areal_jax.publication.export import export_hf
from areal_jax.publication.manifest import weights_sha256
from areal_jax.text.file_tokenizers import GgufTokenizer, HfTokenizer
from areal_jax.text.tokenizer import chat_messages
from tests.app.run.test_supervised import sft_config
from tests.app.small import SmallRun, equal, to_host
from tests.publication.tiny import CONFIG, host_params
from tests.tasks import hf_directory
from tests.text.test_tokenizer import MINIMAL

FILES = {'config.json', 'generation_config.json', 'model.safetensors', 'areal_jax.json', 'README.md'}


def weights_in(directory):
    return to_host(load_hf(directory)[1])


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    """A run by rewards with checkpoints of the updates 2, 4 and 5."""
    fields = {'checkpoint__every': 2, 'checkpoint__keep': 9, 'evaluation__problems': 2, 'run__export': True}
    return SmallRun(tmp_path_factory.mktemp('finished'), **fields).train()


def test_a_finished_run_holds_its_last_weights(finished):
    directory = finished.workdir / 'export'
    assert set(contents(directory)) == FILES
    assert equal(weights_in(directory), finished.final)
    facts = json.loads((finished.workdir / 'facts.json').read_text())
    assert weights_sha256(weights_in(directory)) == facts['weights_sha256']
    record = {'step': 5, 'weights_sha256': facts['weights_sha256'], 'dtype': 'float32'}
    assert json.loads((directory / 'areal_jax.json').read_text()) == record


def test_the_command_writes_the_same_files_from_the_checkpoint(finished, tmp_path, capsys):
    assert main_export.main([f'--workdir={finished.workdir}', f'--out={tmp_path / "out"}']) == 0
    assert capsys.readouterr().out == f'{tmp_path / "out"}\n'
    assert contents(tmp_path / 'out') == contents(finished.workdir / 'export')


@pytest.mark.parametrize('step', [2, 4])
def test_an_earlier_checkpoint_is_chosen_by_its_step_or_its_path(finished, tmp_path, step):
    export_run(finished.workdir, tmp_path / 'by_step', step=step)
    assert equal(weights_in(tmp_path / 'by_step'), finished.weights[step])
    checkpoint = finished.workdir / 'checkpoints' / f'step_{step:08d}'
    export_run(checkpoint, tmp_path / 'by_path')
    assert contents(tmp_path / 'by_path') == contents(tmp_path / 'by_step')
    card = (tmp_path / 'by_step' / 'README.md').read_text()
    assert f'| updates | {step}, of 5 that the run was to make |' in card
    assert '| after | these weights were not measured |' in card


def test_the_card_has_the_facts_of_the_run(finished):
    card = (finished.workdir / 'export' / 'README.md').read_text()
    facts = json.loads((finished.workdir / 'facts.json').read_text())
    accuracy = json.loads((finished.workdir / 'report.json').read_text())['accuracy']['sampled']['after']
    interval = f'{accuracy["mean"]:.3f} [{accuracy["low"]:.3f}, {accuracy["high"]:.3f}], 95% (n = 2 problems)'
    for row in (
        '| weights at the start | drawn, family llama, from the seed of the run |',
        '| task | token_reversal |',
        '| updates | 5 |',
        '| seed | 0 |',
        '| staleness | eta 4 |',
        '| sampling | temperature 1.0, top_k 0, top_p 1.0, max_new_tokens 8 |',
        f'| weights here | float32; sha256 {facts["weights_sha256"]} before a cast |',
        f'| after, sampled | {interval} |',
        *([f'| commit | {facts["git_commit"]} |'] if facts['git_commit'] else []),
    ):
        assert row in card
    assert '**There is no tokenizer here.**' in card
    assert 'AutoTokenizer' not in card


def test_generation_samples_as_the_run_did(finished):
    fields = json.loads((finished.workdir / 'export' / 'generation_config.json').read_text())
    # symbols a, b, = and the end, which is token 0; all four tokens are no cut
    assert fields == {'eos_token_id': 0, 'do_sample': True, 'temperature': 1.0, 'top_k': 4, 'top_p': 1.0}
    assert json.loads((finished.workdir / 'export' / 'config.json').read_text())['eos_token_id'] == 0


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_weights_are_cast_to_the_dtype(finished, tmp_path, dtype):
    export_run(finished.workdir, tmp_path / 'out', dtype=dtype)
    cast = jax.tree.map(lambda leaf: leaf.astype(dtype), finished.final)
    assert equal(to_host(load_hf(tmp_path / 'out', dtype=dtype)[1]), cast)


@pytest.mark.slow
def test_adapters_are_merged_and_engines_of_lower_precision_change_nothing(tmp_path):
    run = SmallRun(
        tmp_path / 'run', run__export=True, run__steps=2, lora__rank=2, publication__dtype='bfloat16'
    ).train()  # the learner publishes rounded weights; the checkpoint has those that it trained
    found = weights_in(tmp_path / 'run' / 'export')
    assert not equal(found, jax.tree.map(lambda leaf: leaf.astype('float32'), run.final))
    rounded = jax.tree.map(lambda leaf: leaf.astype(jax.numpy.bfloat16), found)
    assert equal(rounded, run.final)


def test_large_weights_are_several_files_with_an_index(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(publication_export, 'FILE_BYTES', 10_000)
    export_run(finished.workdir, tmp_path / 'out')
    files = sorted(path.name for path in (tmp_path / 'out').glob('*.safetensors'))
    count = len(files)
    assert count > 1
    assert files == [f'model-{number:05d}-of-{count:05d}.safetensors' for number in range(1, count + 1)]
    assert (tmp_path / 'out' / 'model.safetensors.index.json').is_file()
    assert equal(weights_in(tmp_path / 'out'), finished.final)


def test_a_tokenizer_from_gguf_is_written(finished, tmp_path):
    tokenizer = GgufTokenizer(MINIMAL | {'bos_id': 3, 'pad_id': 3})
    model = Model(Decoder(CONFIG), None, tokenizer)
    write_export(tmp_path / 'out', finished.workdir, 5, host_params(), 'digest', model, 'float32')
    assert set(contents(tmp_path / 'out')) == FILES | {'tokenizer.json', 'tokenizer_config.json'}
    ids = {'bos_token_id': 3, 'eos_token_id': 3, 'pad_token_id': 3}
    for name in ('config.json', 'generation_config.json'):
        assert ids.items() <= json.loads((tmp_path / 'out' / name).read_text()).items()
    chat = chat_messages('ab12')
    assert HfTokenizer(tmp_path / 'out').encode_chat(chat).tolist() == tokenizer.encode_chat(chat).tolist()
    card = (tmp_path / 'out' / 'README.md').read_text()
    assert "tokenizer = AutoTokenizer.from_pretrained('.')" in card
    assert 'apply_chat_template' in card


def test_a_tokenizer_from_hugging_face_is_copied(finished, tmp_path):
    source = tmp_path / 'source'
    export_hf(source, host_params(), CONFIG, dtype='float32')
    hf_directory.write(source)
    config = json.loads((source / 'config.json').read_text())
    (source / 'config.json').write_text(json.dumps(config | {'eos_token_id': [7, 259]}))
    makers = {'eos_token_id': 8, 'pad_token_id': 9, 'repetition_penalty': 1.1, 'temperature': 0.2}
    (source / 'generation_config.json').write_text(json.dumps(makers))
    model = Model(Decoder(CONFIG), None, HfTokenizer(source), companions=source)
    write_export(tmp_path / 'out', finished.workdir, 5, host_params(), 'digest', model, 'float32')
    for name in ('tokenizer.json', 'tokenizer_config.json'):
        assert (tmp_path / 'out' / name).read_bytes() == (source / name).read_bytes()
    # the run stopped at token 259; its own sampling defines the policy
    assert json.loads((tmp_path / 'out' / 'generation_config.json').read_text()) == {
        'eos_token_id': [259, 8, 7], 'pad_token_id': 9,
        'do_sample': True, 'temperature': 1.0, 'top_k': 11, 'top_p': 1.0,
    }  # fmt: skip


def test_supervised_runs_export_too_and_both_can_be_told_not_to(tmp_path):
    session = build_run(sft_config(run__steps=2), tmp_path / 'sft')
    session.train()
    assert set(contents(tmp_path / 'sft' / 'export')) == FILES
    assert equal(weights_in(tmp_path / 'sft' / 'export'), to_host(session.site.learner.publish(2)))
    card = (tmp_path / 'sft' / 'export' / 'README.md').read_text()
    assert 'after 2 updates of supervised training on token_reversal' in card
    assert '| nats per answer token after 2 updates |' in card
    assert 'do_sample' not in (tmp_path / 'sft' / 'export' / 'generation_config.json').read_text()
    export_run(tmp_path / 'sft', tmp_path / 'out')
    assert contents(tmp_path / 'out') == contents(tmp_path / 'sft' / 'export')
    build_run(sft_config(run__steps=1, run__export=False), tmp_path / 'not').train()
    assert not (tmp_path / 'not' / 'export').exists()


def test_a_run_that_goes_on_past_its_end_replaces_its_export(tmp_path):
    fields = {'run__export': True, 'run__steps': 1}
    SmallRun(tmp_path, **fields).train()
    before = weights_in(tmp_path / 'export')
    SmallRun(tmp_path, resume=True, **fields).train()  # nothing is left to do
    assert equal(weights_in(tmp_path / 'export'), before)
    longer = SmallRun(tmp_path, resume=True, **fields | {'run__steps': 2}).train()
    assert not equal(weights_in(tmp_path / 'export'), before)
    assert equal(weights_in(tmp_path / 'export'), longer.final)
    assert not list(tmp_path.glob('.export*'))


def fail_to_write(monkeypatch, error):
    def write(*arguments, **options):
        raise error

    monkeypatch.setattr('areal_jax.formats.hf_export.write_tensors', write)


@pytest.mark.parametrize('before', [False, True], ids=['no export before', 'an older export'])
def test_a_full_disk_leaves_the_results_and_resume_writes_the_export(tmp_path, before):
    fields = {'run__export': True, 'run__steps': 1}
    if before:
        SmallRun(tmp_path, **fields).train()
        fields['run__steps'] = 2
    session = SmallRun(tmp_path, resume=before, **fields).session
    with pytest.MonkeyPatch.context() as patch:
        fail_to_write(patch, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        with pytest.raises(UserError, match=r'has finished and its report is in .*, but the export failed: wri'):
            session.train()
    assert {'facts.json', 'report.json', 'report.md', 'checkpoints'} <= {path.name for path in tmp_path.iterdir()}
    assert (tmp_path / 'export').exists() == before
    assert not list(tmp_path.glob('.export*'))
    again = SmallRun(tmp_path, resume=True, **fields)
    assert again.train().report['steps'] == fields['run__steps']
    assert equal(weights_in(tmp_path / 'export'), to_host(session.site.learner.publish(0)))


def test_a_damaged_newest_checkpoint_is_passed_over_loudly(finished, tmp_path, capsys):
    shutil.copytree(finished.workdir, tmp_path / 'run')
    steps = tmp_path / 'run' / 'checkpoints'
    for file in (steps / 'step_00000005' / 'arrays').rglob('*'):
        if file.is_file():
            file.write_bytes(b'')
    export_run(tmp_path / 'run', tmp_path / 'out')
    warning = capsys.readouterr().err
    assert warning.startswith(f'warning: the checkpoint {steps / "step_00000005"} is damaged (')
    assert warning.endswith('); step_00000004 is read in its place\n')
    assert equal(weights_in(tmp_path / 'out'), finished.weights[4])
    assert (steps / 'step_00000005').is_dir()  # the run's own files are as they were
    with pytest.raises(UserError, match=r'step_00000005 is damaged'):
        export_run(tmp_path / 'run', tmp_path / 'none', step=5)
    assert not (tmp_path / 'none').exists()


BAD = [
    ({'out': 'full'}, r"--out='.*full' exists and is not empty: name another directory, or remove it"),
    ({'out': 'full/file'}, r"--out='.*file' is a file: name a directory that is not there yet"),
    ({'workdir': 'full'}, r"--workdir='.*full' is no run: .*full has no config\.json of one\. Give the --workdir"),
    ({'workdir': 'nowhere'}, r"--workdir='.*nowhere' is no run"),
    ({'workdir': 'run/export'}, r"--workdir='.*export' is no run: .*export has no config\.json of one"),
    ({'workdir': 'torn'}, r'torn/config\.json is no JSON: .*; restore the file as the run wrote it'),
    (
        {'workdir': 'moved'},
        r'moved/config\.json names the model that the run started from.*none/config\.json.*A relative',
    ),
    ({'workdir': 'begun'}, r"--workdir='.*begun' holds no checkpoint: let that run end, or stop it with Ctrl-C"),
    ({'step': 3}, r'checkpoints has no checkpoint of step 3; it has: 2, 4, 5'),
    ({'workdir': 'run/checkpoints/step_00000003'}, r'has no checkpoint step_00000003; it has: 2, 4, 5'),
    ({'workdir': 'run/checkpoints/step_00000002', 'step': 4}, r'names a checkpoint already, and the step 4: give one'),
    ({'dtype': 'int8'}, r"dtype='int8' is unknown; use one of float32, bfloat16, float16"),
]


@pytest.mark.parametrize(('changes', 'message'), BAD, ids=[' '.join(map(str, change.values())) for change, _ in BAD])
def test_what_cannot_be_exported_is_one_sentence(finished, tmp_path, capsys, changes, message):
    (tmp_path / 'full').mkdir()
    (tmp_path / 'full' / 'file').write_text('')
    (tmp_path / 'begun').mkdir()
    shutil.copyfile(finished.workdir / 'config.json', tmp_path / 'begun' / 'config.json')
    (tmp_path / 'run').symlink_to(finished.workdir)
    shutil.copytree(finished.workdir, tmp_path / 'moved')
    config = json.loads((tmp_path / 'moved' / 'config.json').read_text())
    config['model'] |= {'source': 'hf', 'path': 'none'}
    (tmp_path / 'moved' / 'config.json').write_text(json.dumps(config))
    (tmp_path / 'torn').mkdir()
    (tmp_path / 'torn' / 'config.json').write_text('{"model":')
    before = {path for path in tmp_path.rglob('*') if 'run/' not in str(path)}
    given = {'workdir': 'run', 'out': 'out', **changes}
    paths = {name: tmp_path / given[name] for name in ('workdir', 'out')}
    arguments = [f'--{name}={value}' for name, value in {**given, **paths}.items()]
    assert main_export.main(arguments) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count('\n'), said.err[:7]) == ('', 1, 'error: ')
    assert re.search(message, said.err)
    assert {path for path in tmp_path.rglob('*') if 'run/' not in str(path)} == before


@pytest.mark.parametrize(
    ('server', 'urls', 'backend', 'expected'),
    [
        ('vllm', (), 'cpu', True),
        ('external', ('sglang+http://a:1', 'vllm+http://b:2'), 'cpu', True),
        ('external', ('sglang+http://a:1',), 'cpu', False),
        ('own', (), 'cpu', False),
        ('vllm', (), 'gpu', False),
    ],
)
def test_versions_for_vllm_on_a_cpu_have_a_head_of_their_own(monkeypatch, server, urls, backend, expected):
    config = default_config()
    config.rollout.server, config.rollout.urls = server, urls
    monkeypatch.setattr(jax, 'default_backend', lambda: backend)
    assert separates_head(TrackedConfig(config)) is expected
