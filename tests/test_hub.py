"""Names of the Hub against a local server of its protocol, a filled cache, and the listings of known data sets."""

import os
import pathlib

import pytest

from areal_jax import hub
from areal_jax.hub import HubError, choose_files, find_revision, is_hub_name, read_name
from tests.stub_hub import COMMIT, EARLIER, serving

MODEL = {'config.json': b'{"a": 1}', 'tokenizer.json': b'{}', 'README.md': b'# A model', 'vocab.txt': b'a'}
WEIGHTS = {'model.safetensors': b'1', 'original/model.safetensors': b'2', 'consolidated.safetensors': b'3'}
CARD = b"""---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
---
# Problems
"""
DATA = {
    'README.md': CARD,
    'main/train-00000-of-00002.parquet': b'PAR1a',
    'main/train-00001-of-00002.parquet': b'PAR1b',
    'main/test-00000-of-00001.parquet': b'PAR1c',
    'socratic/train-00000-of-00001.parquet': b'PAR1d',
}
REPOSITORIES = {
    'org/tiny': {COMMIT: MODEL | WEIGHTS, EARLIER: MODEL | WEIGHTS | {'config.json': b'{"a": 0}'}},
    'org/words': {COMMIT: {'README.md': b''}},
    'datasets/org/data': {COMMIT: DATA},
}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the Hub, and no token."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path / 'hub'))
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', False)
    hub.locate_model.cache_clear()
    return tmp_path / 'hub'


@pytest.fixture
def server(cache, monkeypatch):
    from huggingface_hub import constants

    with serving(REPOSITORIES) as found:
        monkeypatch.setattr(constants, 'ENDPOINT', found.address)
        monkeypatch.setattr(
            constants, 'HUGGINGFACE_CO_URL_TEMPLATE', found.address + '/{repo_id}/resolve/{revision}/{filename}'
        )
        yield found


def locate(path, weights=True):
    hub.locate_model.cache_clear()
    return hub.locate_model('model.path', path, weights=weights)


def names(folder):
    return sorted(os.listdir(folder))


def test_a_description_is_fetched_without_weights_and_weights_once(server):
    assert names(locate('hf:org/tiny', weights=False)) == ['config.json', 'tokenizer.json', 'vocab.txt']
    found = locate('hf:org/tiny')
    assert names(found) == ['config.json', 'model.safetensors', 'tokenizer.json', 'vocab.txt']
    asked = len(server.asked)
    assert locate('hf:org/tiny') == locate('org/tiny') == found
    assert len(server.asked) == asked
    assert find_revision(found) == COMMIT
    assert find_revision(pathlib.Path('runs/a')) == ''


def test_a_shape_is_one_file_and_the_rest_of_a_description_is_fetched_later(server):
    assert names(hub.locate_shape('--model', 'hf:org/tiny')) == ['config.json']
    assert [path for path in server.asked if '/resolve/' in path] == [f'/org/tiny/resolve/{COMMIT}/config.json'] * 2
    asked = len(server.asked)
    hub.locate_shape('--model', 'org/tiny')
    assert len(server.asked) == asked
    assert names(locate('hf:org/tiny', weights=False)) == ['config.json', 'tokenizer.json', 'vocab.txt']
    with pytest.raises(HubError, match=r"--model='hf:org/words': the repository has no config\.json"):
        hub.locate_shape('--model', 'hf:org/words')


def test_the_revisions_of_what_was_located_are_known(server):
    locate(f'hf:org/tiny@{EARLIER}')
    hub.locate_dataset('task.path', 'hf:org/data:main')
    values = {'model.path': f'hf:org/tiny@{EARLIER}', 'task.path': 'hf:org/data:main', 'run.steps': 3}
    assert hub.find_revisions(values) == {'model.path': EARLIER, 'task.path': COMMIT}
    assert hub.find_revisions({'model.path': 'runs/a', 'loss.reference': f'hf:org/tiny@{EARLIER}'}) == {}
    hub.locate_dataset('task.path', 'hf:org/data:main:test')  # and again, from the cache
    hub.locate_dataset('task.path', 'hf:org/data:main:test')
    assert hub.find_revisions({'task.path': 'hf:org/data:main:test'}) == {'task.path': COMMIT}


def test_a_revision_is_the_one_that_is_named(server):
    assert (locate(f'hf:org/tiny@{EARLIER}') / 'config.json').read_bytes() == b'{"a": 0}'
    assert (locate('hf:org/tiny@main') / 'config.json').read_bytes() == b'{"a": 1}'


def test_an_index_says_which_weights_are_whole(server, tmp_path):
    folder = locate('hf:org/tiny', weights=False)
    (folder / 'model.safetensors.index.json').write_text('{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}')
    (folder / '1.safetensors').write_bytes(b'')
    asked = len(server.asked)
    locate('hf:org/tiny')
    assert len(server.asked) > asked
    (folder / 'model.safetensors').unlink()
    (folder / '2.safetensors').write_bytes(b'')
    asked = len(server.asked)
    locate('hf:org/tiny')
    assert len(server.asked) == asked


def test_what_the_cache_holds_needs_no_server(server, monkeypatch):
    from huggingface_hub import constants

    found, files = locate('hf:org/tiny'), hub.locate_dataset('task.path', 'hf:org/data:main:test')
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
    server.asked.clear()
    assert locate('hf:org/tiny') == found
    assert hub.locate_dataset('task.path', 'hf:org/data:main:test') == files
    with pytest.raises(HubError, match=r'HF_HUB_OFFLINE is set: unset it, or run `hf download --repo-type dataset org'):
        hub.locate_dataset('task.path', 'hf:org/data:socratic')
    assert server.asked == []


def test_the_files_of_a_split_are_fetched_in_order(server):
    files = hub.locate_dataset('task.path', 'hf:org/data:main')
    assert [file.read_bytes() for file in files] == [b'PAR1a', b'PAR1b']
    assert [file.read_bytes() for file in hub.locate_dataset('task.path', f'org/data@{COMMIT}:main:test')] == [b'PAR1c']
    files[1].unlink()  # as a download that was cut off leaves it
    assert [file.read_bytes() for file in hub.locate_dataset('task.path', 'hf:org/data:main')] == [b'PAR1a', b'PAR1b']


def test_a_cache_without_a_list_of_files_needs_all_shards(server, cache):
    files = hub.locate_dataset('task.path', 'hf:org/data:main')
    [tree] = cache.rglob('trees/*.json')
    tree.unlink()
    asked = len(server.asked)
    assert hub.locate_dataset('task.path', 'hf:org/data:main') == files
    assert len(server.asked) == asked
    files[0].unlink()
    assert hub.locate_dataset('task.path', 'hf:org/data:main') == files
    assert len(server.asked) > asked


@pytest.mark.parametrize(
    ('path', 'said'),
    [
        ('hf:org/missing', 'the Hub has no model org/missing that you may read: check the name; for a private one `hf'),
        ('hf:org/tiny@nowhere', "org/tiny has no revision 'nowhere': name a branch, a tag or a commit of http"),
        ('hf:org/gated', 'is gated: accept its terms there, then `hf auth login`'),
        ('hf:org/broken', 'answers with 500: run `hf download org/broken` where there is a network'),
        ('hf:org/words', 'the repository has no config.json: name one of a model for transformers'),
        ('hf:org', 'is no name of the Hugging Face Hub: write hf:ORG/NAME[@REVISION]'),
        ('hf:org/tiny@', 'is no name of the Hugging Face Hub: write hf:ORG/NAME[@REVISION]'),
        ('hf:org/tiny:main', 'is no name of the Hugging Face Hub: write hf:ORG/NAME[@REVISION]'),
        ('hf:../tiny', 'is no name of the Hugging Face Hub: write hf:ORG/NAME[@REVISION]'),
    ],
)
def test_what_is_wrong_is_one_sentence_with_the_remedy(server, path, said):
    with pytest.raises(HubError) as refused:
        locate(path)
    assert said in str(refused.value)
    assert str(refused.value).startswith(f'model.path={path!r}')
    assert '\n' not in str(refused.value)


def test_a_name_without_the_prefix_may_have_been_a_path(server):
    with pytest.raises(HubError, match=r"model.path='org/missing', which is no file or directory here: the Hub has no"):
        locate('org/missing')


def test_a_server_that_nobody_runs_is_named(cache, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, 'ENDPOINT', 'http://127.0.0.1:9')
    with pytest.raises(
        HubError, match=r'and http://127\.0\.0\.1:9 cannot be reached: run `hf download org/tiny` where'
    ):
        locate('hf:org/tiny')


def test_a_connection_that_breaks_is_named(server, monkeypatch):
    monkeypatch.setattr('tests.stub_hub._Handler.do_GET', lambda self: self.connection.shutdown(2))
    with pytest.raises(HubError, match=r'the connection to http.* broke \(.*\): the same command continues the downlo'):
        locate('hf:org/tiny')


def test_a_cache_that_cannot_be_written_is_named(server, cache):
    cache.write_text('a file')
    with pytest.raises(
        HubError, match=r'org/tiny cannot be stored in .*hub \(.*\): set HF_HOME to a directory of your'
    ):
        locate('hf:org/tiny')


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
    with pytest.raises(HubError, match=r"model.path='hf:org/tiny' needs the package huggingface_hub: .*pip install"):
        locate('hf:org/tiny')


def test_which_paths_are_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'models' / 'mine').mkdir(parents=True)
    yes = ['hf:a/b', 'Qwen/Qwen3-0.6B', 'Qwen/Qwen3-0.6B@main', 'openai/gsm8k:main:test']
    no = ['models/mine', './models/other', '/models/other', 'a', 'a/b/c', 'data/train.jsonl', 'm/a.gguf', '../b', '']
    assert [path for path in (*yes, *no) if is_hub_name(path)] == yes


# (files, card, asked for) -> the files; listings as the repositories have them
GSM8K = [f'{config}/{split}-00000-of-00001.parquet' for config in ('main', 'socratic') for split in ('test', 'train')]
MATH = ['README.md', 'test.jsonl', '.gitattributes']
NUMINA = [f'data/train-{shard:05}-of-00003.parquet' for shard in range(3)] + ['data/test-00000-of-00001.parquet']
PREFERENCES = [f'data/{split}-00000-of-00001.parquet' for split in ('train_prefs', 'test_prefs', 'train_sft')]
PREFERENCES_CARD = {
    'configs': [
        {
            'config_name': 'default',
            'data_files': [{'split': name, 'path': f'data/{name}-*'} for name in ('train_prefs', 'test_prefs')],
        }
    ]
}


@pytest.mark.parametrize(
    ('listing', 'card', 'asked', 'chosen'),
    [
        (GSM8K, {}, 'hf:o/d:main', ['main/train-00000-of-00001.parquet']),
        (GSM8K, {}, 'hf:o/d:socratic:test', ['socratic/test-00000-of-00001.parquet']),
        (MATH, {}, 'hf:o/d', ['test.jsonl']),
        (NUMINA, {}, 'hf:o/d', NUMINA[:3]),
        (NUMINA, {}, 'hf:o/d:test', NUMINA[3:]),
        (['data/dapo-math-17k.parquet'], {}, 'hf:o/d', ['data/dapo-math-17k.parquet']),
        (PREFERENCES, PREFERENCES_CARD, 'hf:o/d::test_prefs', ['data/test_prefs-00000-of-00001.parquet']),
        (['a.json', 'b.json'], {'configs': [{'config_name': 'x', 'data_files': 'b.json'}]}, 'hf:o/d', ['b.json']),
        (['x/y/a.csv', 'x/b.csv'], {'configs': [{'data_files': ['x/*.csv']}]}, 'hf:o/d', ['x/b.csv']),
        (['x/y/a.csv', 'x/b.csv'], {'configs': [{'data_files': '**/*.csv'}]}, 'hf:o/d', ['x/b.csv', 'x/y/a.csv']),
        (['d/a.csv'], {'configs': [{'data_dir': 'd', 'data_files': '*.csv'}]}, 'hf:o/d', ['d/a.csv']),
        (
            ['a.json', 'b.json'],
            {'configs': [{'config_name': 'x', 'data_files': 'a.json', 'default': True}, {'data_files': 'b.json'}]},
            'hf:o/d', ['a.json'],
        ),
    ],
)  # fmt: skip
def test_the_files_of_a_split_follow_from_card_and_names(listing, card, asked, chosen):
    assert choose_files(read_name('task.path', asked, 'dataset'), listing, card) == chosen


@pytest.mark.parametrize(
    ('listing', 'card', 'asked', 'said'),
    [
        (GSM8K, {}, 'hf:o/d', 'has more than one config; name one of main, socratic'),
        (GSM8K, {}, 'hf:o/d:other', "has no config 'other'; name one of main, socratic"),
        (MATH, {}, 'hf:o/d:train', "has no split 'train'; name one of test"),
        (MATH, {}, 'hf:o/d:algebra', "has no config 'algebra': leave it out"),
        (PREFERENCES, PREFERENCES_CARD, 'hf:o/d', 'has more than one split; name one of test_prefs, train_prefs'),
        (PREFERENCES, PREFERENCES_CARD, 'hf:o/d:train', "has no split 'train'; name one of test_prefs, train_prefs"),
        (['script.py', 'README.md'], {}, 'hf:o/d', 'has no file in .parquet, .jsonl, .json, .csv'),
    ],
)
def test_a_split_that_is_not_there_is_refused_with_the_others(listing, card, asked, said):
    with pytest.raises(HubError, match=f"task.path='{asked}': the data set ") as refused:
        choose_files(read_name('task.path', asked, 'dataset'), listing, card)
    assert said in str(refused.value)
