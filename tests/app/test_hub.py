"""Runs from names of the Hub, against a local server of its protocol."""

import dataclasses
import io
import json

import jax
import pyarrow
import pytest
from pyarrow import parquet

from areal_jax import hub, main_replay
from areal_jax.app.export.run_export import export_run
from areal_jax.app.library import build_run
from areal_jax.app.run.reports import rebuild_report
from areal_jax.app.workdir.run_directory import WEIGHTS
from areal_jax.errors import ExitCode, UserError
from areal_jax.files import read_json
from areal_jax.formats.hf_export import plan_hf_files
from areal_jax.hub import HubError
from areal_jax.models.decoder import Decoder
from areal_jax.publication.export import write_hf_directory
from areal_jax.text.file_tokenizers import HfTokenizer
from tests.app.run.test_supervised import sft_config
from tests.app.small import equal, small_config, to_host
from tests.learning.examples import tiny_decoder
from tests.stub_hub import COMMIT, EARLIER, serving
from tests.tasks import hf_directory

ROWS = [{'problem': f'what is {n}?', 'final': str(n)} for n in range(8)]
REVISIONS = {COMMIT: ROWS, EARLIER: ROWS[:6]}


def make_table(rows):
    table = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    return table.getvalue()


@pytest.fixture(scope='module')
def directory(tmp_path_factory):
    """A model of Hugging Face files."""
    tokenizer, folder = tmp_path_factory.mktemp('tokenizer'), tmp_path_factory.mktemp('hub') / 'model'
    hf_directory.write(tokenizer)
    shape = dataclasses.replace(tiny_decoder(1).config, vocab_size=HfTokenizer(tokenizer).vocab_size)
    params = jax.device_get(Decoder(shape).init(0))
    write_hf_directory(folder, plan_hf_files(params, shape, separate_head=False))
    hf_directory.write(folder)
    return folder


@pytest.fixture
def server(directory, tmp_path, monkeypatch):
    from huggingface_hub import constants

    model = {file.name: file.read_bytes() for file in directory.iterdir() if file.is_file()}
    data = {commit: {'main/train-00000-of-00001.parquet': make_table(rows)} for commit, rows in REVISIONS.items()}
    hub.locate_model.cache_clear()
    with serving({'org/tiny': {COMMIT: model}, 'datasets/org/sums': data}) as found:
        monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path / 'hub'))
        monkeypatch.setattr(constants, 'ENDPOINT', found.address)
        monkeypatch.setattr(
            constants, 'HUGGINGFACE_CO_URL_TEMPLATE', found.address + '/{repo_id}/resolve/{revision}/{filename}'
        )
        yield found


def fields(model, task, **changes):
    return {
        'model__source': 'hf', 'model__path': str(model), 'task__name': 'jsonl', 'task__path': str(task),
        'task__held_out_fraction': 0.0, 'run__steps': 2, 'learner__groups_per_update': 3, 'learner__row_tokens': 64,
        'evaluation__problems': 0, **changes,
    }  # fmt: skip


def start(workdir, resume=False, columns=None, **changes):
    config = sft_config(**changes)
    config.task.columns.update(columns or {})
    return build_run(config, workdir, resume=resume)


def test_a_run_from_names_of_the_hub_is_the_run_from_their_files(server, directory, tmp_path):
    lines = tmp_path / 'a.jsonl'
    lines.write_text(''.join(json.dumps({'question': row['problem'], 'answer': row['final']}) + '\n' for row in ROWS))
    local = start(tmp_path / 'local', **fields(directory, lines))
    local.train()
    columns = {'question': 'problem', 'answer': 'final'}
    named = start(tmp_path / 'named', columns=columns, **fields('org/tiny', 'hf:org/sums:main'))
    named.train()
    assert equal(to_host(named.site.learner.save()), to_host(local.site.learner.save()))
    assert COMMIT in read_json(tmp_path / 'named' / WEIGHTS)['path']
    revisions = {'model.path': COMMIT, 'task.path': COMMIT}
    assert read_json(tmp_path / 'named' / 'facts.json')['revisions'] == revisions
    assert read_json(tmp_path / 'named' / 'report.json')['revisions'] == revisions
    assert f'model.path at revision `{COMMIT}`' in (tmp_path / 'named' / 'report.md').read_text()
    assert read_json(tmp_path / 'local' / 'report.json')['revisions'] == {}
    server.asked.clear()
    resumed = start(
        tmp_path / 'named', resume=True, columns=columns, **fields('org/tiny', 'hf:org/sums:main', run__steps=3)
    )
    resumed.train()
    assert server.asked == []
    export_run(tmp_path / 'named', tmp_path / 'out')
    card = (tmp_path / 'out' / 'README.md').read_text()
    assert f'`org/tiny` (hf, revision {COMMIT})' in card
    assert f'| revision of task.path | {COMMIT} |' in card


def generate(workdir, **changes):
    """A small run with an engine, from names of the Hub."""
    answers = {'rollout__max_new_tokens': 4, 'rollout__context_tokens': 64, 'rollout__prefill_buckets': (64,)}
    config = small_config(**fields('hf:org/tiny', 'hf:org/sums:main') | answers | changes)
    config.task.columns.update({'question': 'problem', 'answer': 'final'})
    build_run(config, workdir).train()


def test_a_run_with_engines_notes_its_revisions_at_the_start_and_in_its_report(server, tmp_path):
    generate(tmp_path / 'run')
    revisions = {'model.path': COMMIT, 'task.path': COMMIT}
    [start] = read_json(tmp_path / 'run' / 'starts.json')['starts']
    assert start['revisions'] == revisions
    assert COMMIT in start['data']['task.path']['path']
    sentence = f'From the Hugging Face Hub: model.path at revision `{COMMIT}`, task.path at revision `{COMMIT}`.'
    assert sentence in (tmp_path / 'run' / 'report.md').read_text()
    (tmp_path / 'run' / 'facts.json').unlink()  # as of a run that was killed
    rebuild_report(tmp_path / 'run', plots=False)
    assert read_json(tmp_path / 'run' / 'report.json')['revisions'] == revisions


def mix(path):
    columns = {'question': 'problem', 'answer': 'final'}
    return {'task__sources': {'sums': {'weight': 1.0, 'path': path, 'columns': columns}}, 'task__path': ''}


def test_a_mixture_notes_the_revision_of_the_data_set_of_a_source(server, tmp_path, capsys):
    generate(tmp_path / 'run', **mix('hf:org/sums:main'), run__clock='real')
    revisions = {'model.path': COMMIT, 'task.sources.sums.path': COMMIT}
    [start] = read_json(tmp_path / 'run' / 'starts.json')['starts']
    assert start['revisions'] == revisions
    assert read_json(tmp_path / 'run' / 'facts.json')['revisions'] == revisions
    hub.locate_dataset('task.path', f'hf:org/sums@{EARLIER}:main')
    (tmp_path / 'hub' / 'datasets--org--sums' / 'refs' / 'main').write_text(EARLIER)
    words = [f'--workdir={tmp_path}/run']
    assert main_replay.main([*words, f'--out={tmp_path}/other']) == ExitCode.USER_ERROR
    assert f'--data=task.sources.sums.path=FILE, or name its revision {COMMIT}' in capsys.readouterr().err
    named = f'hf:org/sums@{COMMIT}:main'
    assert main_replay.main([*words, f'--out={tmp_path}/no', f'--data=task.path={named}']) == ExitCode.USER_ERROR
    assert 'task.path names no data; use task.sources.sums.path, staleness.schedule' in capsys.readouterr().err
    again = [*words, f'--out={tmp_path}/again', f'--data=task.sources.sums.path={named}']
    assert main_replay.main(again) == ExitCode.FINISHED


def test_a_name_that_the_hub_lacks_ends_the_start(server, directory, tmp_path):
    with pytest.raises(HubError, match=r"model\.path='org/missing', which is no file or directory here: the Hub has"):
        start(tmp_path / 'a', **fields('org/missing', 'hf:org/sums')).train()
    with pytest.raises(HubError, match=r"task\.path='hf:org/missing': the Hub has no data set org/missing that"):
        start(tmp_path / 'b', **fields(directory, 'hf:org/missing')).train()
    with pytest.raises(UserError, match=r"^task\.sources\.sums: task\.path='hf:org/missing': the Hub has no data set"):
        generate(tmp_path / 'c', **mix('hf:org/missing'))


def test_a_run_is_replayed_from_its_revision_alone(server, tmp_path, capsys):
    generate(tmp_path / 'run', run__clock='real')
    words = [f'--workdir={tmp_path}/run']
    assert main_replay.main([*words, f'--out={tmp_path}/again']) == ExitCode.FINISHED
    hub.locate_dataset('task.path', f'hf:org/sums@{EARLIER}:main')
    (tmp_path / 'hub' / 'datasets--org--sums' / 'refs' / 'main').write_text(
        EARLIER
    )  # as after a download of a newer one
    assert main_replay.main([*words, f'--out={tmp_path}/other']) == ExitCode.USER_ERROR
    said = capsys.readouterr().err
    assert 'train-00000-of-00001.parquet is not the file that the run read' in said
    assert f'or name its revision {COMMIT}' in said
    named = f'--data=task.path=hf:org/sums@{COMMIT}:main'
    assert main_replay.main([*words, f'--out={tmp_path}/named', named]) == ExitCode.FINISHED
