"""`areal-export --push`: refusals come before the export, and a push is one commit of all files, the card included."""

from __future__ import annotations

import importlib.util
import json
import pathlib

import pytest

import areal_jax
from areal_jax import main_export
from areal_jax.app.export.finished_export import PushError, open_destination, push_export
from tests.app.hub import TOKEN, Hub, serving_hub

huggingface_hub = pytest.importorskip('huggingface_hub')
constants = pytest.importorskip('huggingface_hub.constants')


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch):
    """A hub at which the library asks, with a login."""
    with serving_hub() as served:
        monkeypatch.setattr(constants, 'ENDPOINT', served.url)
        monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', False)
        monkeypatch.setenv('HF_TOKEN', TOKEN)
        monkeypatch.setenv('NO_PROXY', '127.0.0.1')
        yield served


@pytest.fixture
def exported(tmp_path: pathlib.Path) -> pathlib.Path:
    directory = tmp_path / 'export'
    directory.mkdir()
    (directory / 'README.md').write_text('---\nlibrary_name: transformers\n---\n# A model\n')
    (directory / 'model.safetensors').write_bytes(b'weights')
    (directory / 'areal_jax.json').write_text(json.dumps({'step': 12}))
    return directory


def test_a_push_is_one_commit_that_names_run_update_and_version(hub: Hub, exported: pathlib.Path):
    address = push_export(open_destination('me/model'), exported, pathlib.Path('runs/quickstart'))
    assert address == f'{hub.url}/me/model/commit/abc'
    assert hub.repos['me/model']['main'] == {path.name: path.read_bytes() for path in exported.iterdir()}
    assert hub.repos['me/model']['private'] is False
    message = f'quickstart: update 12, exported by areal_jax {areal_jax.__version__}'
    assert hub.commits == [('me/model', 'main', message)]


def test_weights_of_an_earlier_push_under_other_names_go(hub: Hub, exported: pathlib.Path):
    before = {'model-00001-of-00002.safetensors': b'', 'model.safetensors.index.json': b'', 'notes.txt': b'mine'}
    hub.repos['lab/model'] = {'private': True, 'main': before}
    push_export(open_destination('lab/model', private=True), exported, pathlib.Path('run'), 'second try')
    assert sorted(hub.repos['lab/model']['main']) == ['README.md', 'areal_jax.json', 'model.safetensors', 'notes.txt']
    assert hub.commits == [('lab/model', 'main', 'second try')]


def test_private_and_a_branch(hub: Hub, exported: pathlib.Path):
    push_export(open_destination('me/new', private=True, revision='step-12'), exported, pathlib.Path('run'))
    assert hub.repos['me/new']['private'] is True
    assert sorted(hub.repos['me/new']) == ['main', 'private', 'step-12']
    assert hub.repos['me/new']['main'] == {}
    assert 'model.safetensors' in hub.repos['me/new']['step-12']


@pytest.mark.parametrize(
    ('repo', 'message'),
    [
        ('model', "--push='model' names no owner: use OWNER/NAME"),
        ('me/mo del', "--push='me/mo del' is no name of a repository"),
        ('you/model', '--push=you/model: the token is of me, not of you; use me as owner, or one of lab'),
    ],
)
def test_a_name_that_cannot_be_pushed_to_is_refused(hub: Hub, repo: str, message: str):
    with pytest.raises(PushError) as refused:
        open_destination(repo)
    assert message in str(refused.value)
    assert not any(asked.startswith('POST') for asked in hub.asked)


def test_a_public_repository_is_not_taken_for_a_private_one(hub: Hub):
    hub.repos['me/model'] = {'private': False, 'main': {}}
    with pytest.raises(PushError, match='exists and is public'):
        open_destination('me/model', private=True)


def test_a_token_that_may_only_read_is_refused(hub: Hub):
    hub.user['auth']['accessToken']['role'] = 'read'
    with pytest.raises(PushError, match='may only read; give a token that may write'):
        open_destination('me/model')


def test_a_token_that_the_hub_refuses_is_not_printed(hub: Hub, monkeypatch: pytest.MonkeyPatch, exported: pathlib.Path):
    hub.failing = '/commit/'
    with pytest.raises(PushError) as refused:
        push_export(open_destination('me/model'), exported, pathlib.Path('run'))
    assert 'status 403 (not allowed for ***)' in str(refused.value)
    monkeypatch.setenv('HF_TOKEN', 'hf_another')
    with pytest.raises(PushError, match='status 401') as refused:
        open_destination('me/model')
    assert 'hf_another' not in str(refused.value)


def push(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit code and stderr of the command, whose workdir does not exist: an export that begins fails with another."""
    code = main_export.main(['--workdir=nothing', *words])
    return code, capsys.readouterr().err


def test_what_is_missing_is_said_before_the_export(hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys):
    no_run = "error: --workdir='nothing' is no run"
    code, said = push(capsys, '--push=me/model')
    assert (code, said[: len(no_run)]) == (2, no_run)  # login and name were in order
    monkeypatch.setattr(constants, 'ENDPOINT', 'http://127.0.0.1:9')
    assert 'error: --push=me/model: http://127.0.0.1:9 cannot be reached' in push(capsys, '--push=me/model')[1]
    monkeypatch.setattr(huggingface_hub, 'get_token', lambda: None)
    assert 'error: --push=me/model: nobody is logged in' in push(capsys, '--push=me/model')[1]
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
    assert 'error: --push=me/model: HF_HUB_OFFLINE is set' in push(capsys, '--push=me/model')[1]
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    assert "pip install 'areal_jax[push]'" in push(capsys, '--push=me/model')[1]


def test_flags_that_do_not_fit_together(capsys):
    assert push(capsys) == (
        2, 'error: --out is missing: name the directory to make, or a repository with --push=OWNER/NAME\n'
    )  # fmt: skip
    assert '--private belongs to --push=OWNER/NAME' in push(capsys, '--out=x', '--private')[1]


def test_a_push_that_fails_leaves_the_export(hub: Hub, exported: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys):
    hub.failing = '/commit/'
    monkeypatch.setattr(main_export, 'write_export', lambda options, out: exported)
    code, said = push(capsys, '--push=me/model', f'--out={exported}')
    assert (code, (exported / 'model.safetensors').exists()) == (2, True)
    assert f'The export is in {exported}: `hf upload me/model {exported}` uploads it' in said
