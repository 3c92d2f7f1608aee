"""Finds the export of a finished run, makes it in a separate process, and pushes it to the Hub. Imports no jax."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from areal_jax import files
from areal_jax.errors import UserError
from areal_jax.installation import __version__

if TYPE_CHECKING:
    from huggingface_hub import HfApi


DIRECTORY = 'export'  # of a workdir: the weights of the finished run
RECORD = 'areal_jax.json'  # in the directory: which weights it holds
_FIX = 'remove the directory, it is written again'


def export_in_process(workdir: pathlib.Path, step: int, dtype: str) -> str:
    """Writes WORKDIR/export from the checkpoint of a step, in place of an earlier one; returns the weights' digest.

    Raises UserError with the last line that the child process prints if it fails.
    """
    out = workdir / DIRECTORY
    if out.exists():
        files.remove_directory(out)
    command = [sys.executable, '-m', 'areal_jax.main_export', f'--workdir={workdir}', f'--out={out}']
    done = subprocess.run(
        [*command, f'--step={step}', f'--dtype={dtype}'],
        env={**os.environ, 'JAX_PLATFORMS': 'cpu'},  # devices belong to other roles
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ['it said nothing'])[-1].removeprefix('error: ')
        raise UserError(
            f'the export of update {step} to {out} failed ({said}): python -m areal_jax.main_export writes it'
        )
    return str(read_record(workdir).get('weights_sha256', ''))


def holds_export(workdir: pathlib.Path, step: int) -> bool:
    """Whether the complete export of the weights after `step` updates is there."""
    return (workdir / DIRECTORY / RECORD).exists() and read_record(workdir).get('step') == step


def read_record(workdir: pathlib.Path) -> files.JsonObject:
    return files.read_json(workdir / DIRECTORY / RECORD, _FIX)


# Uploads an export to the Hugging Face Hub. Everything that can be refused is checked before the export is made.
#
# The token is the one of `hf auth login` or of HF_TOKEN, and is never printed.


_REPLACED = ['*.safetensors', '*.safetensors.index.json']  # an earlier export may have other shards
_TOKEN = 'a token that may write, from https://huggingface.co/settings/tokens, by `hf auth login` or in HF_TOKEN'
Result = TypeVar('Result')


class PushError(UserError):
    """The Hub cannot be reached, or refuses; the message names the repository and the fix."""


@dataclasses.dataclass(frozen=True)
class Destination:
    """A model repository of the Hub that may be written to."""

    api: HfApi
    repo: str  # OWNER/NAME
    private: bool  # of a repository that is made; an existing one must be private if this is set
    revision: str | None  # a branch, made where it is missing; None = main


def open_destination(repo: str, *, private: bool = False, revision: str | None = None) -> Destination:
    """Checks name, login and rights; creates and writes nothing.

    Raises PushError for a missing package, an invalid name, HF_HUB_OFFLINE, a missing or refused token, a read-only
    token, an owner that the token may not write for, and a public repository if `private` is set.
    """
    if importlib.util.find_spec('huggingface_hub') is None:
        raise PushError(
            f"--push={repo} needs the package huggingface_hub, which is not installed: pip install 'areal_jax[push]'"
        )
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import RepositoryNotFoundError

    _require_name(repo)
    if constants.HF_HUB_OFFLINE:
        raise PushError(f'--push={repo}: HF_HUB_OFFLINE is set, which forbids every connection; unset it, or use --out')
    token = huggingface_hub.get_token()
    if not token:
        raise PushError(f'--push={repo}: nobody is logged in to the Hugging Face Hub; give {_TOKEN}')
    api = huggingface_hub.HfApi(token=token, library_name='areal_jax', library_version=__version__)
    destination = Destination(api, repo, private, revision)
    _require_rights(repo, _ask(destination, api.whoami))
    try:
        known = _ask(destination, lambda: api.repo_info(repo), passing=RepositoryNotFoundError)
    except RepositoryNotFoundError:
        return destination
    if private and not known.private:
        raise PushError(
            f'--push={repo} --private: the repository exists and is public; make it private in its settings, or push '
            'to another one'
        )
    return destination


def push_export(destination: Destination, directory: pathlib.Path, workdir: pathlib.Path, message: str = '') -> str:
    """Uploads an exported directory, model card included, as one commit; returns the commit's address.

    Args:
      workdir: of the run; its name, the update and the version of this program are the default message.

    Raises PushError; the repository then has the files that it had before.
    """
    api, repo, revision = destination.api, destination.repo, destination.revision
    step = files.read_json(directory / RECORD).get('step')
    run = workdir.resolve().name
    told = message or f'{run}: update {step}, exported by areal_jax {__version__}'
    # an existing repository keeps its visibility; None = as the owner's account has it
    _ask(destination, lambda: api.create_repo(repo, private=destination.private or None, exist_ok=True))
    if revision:
        _ask(destination, lambda: api.create_branch(repo, branch=revision, exist_ok=True))
    commit = _ask(
        destination,
        lambda: api.upload_folder(
            repo_id=repo, folder_path=directory, revision=revision, commit_message=told, delete_patterns=_REPLACED
        ),
    )
    return str(commit.commit_url)


def _require_name(repo: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise PushError(f'--push={repo!r} is no name of a repository ({_line(error)}); use OWNER/NAME') from error
    if '/' not in repo:
        raise PushError(f'--push={repo!r} names no owner: use OWNER/NAME, with your user or organization as OWNER')


def _require_rights(repo: str, user: Mapping[str, object]) -> None:
    """Raises PushError unless the token of `user`, the Hub's answer to whoami, may write for the owner of `repo`."""
    owner = repo.partition('/')[0]
    listed = user.get('orgs')
    organizations = [str(entry['name']) for entry in listed if 'name' in entry] if isinstance(listed, list) else []
    if owner.lower() not in (name.lower() for name in (str(user.get('name')), *organizations)):
        others = f', or one of {", ".join(organizations)}' if organizations else ''
        name = user.get('name')
        raise PushError(f'--push={repo}: the token is of {name}, not of {owner}; use {name} as owner{others}')
    auth = user.get('auth')
    token = auth.get('accessToken') if isinstance(auth, dict) else None
    if isinstance(token, dict) and token.get('role') == 'read':
        raise PushError(f'--push={repo}: the token may only read; give {_TOKEN}')


def _ask(destination: Destination, call: Callable[[], Result], passing: type[Exception] | tuple[()] = ()) -> Result:
    """Calls the Hub and returns its answer; raises PushError if the Hub refuses, and lets `passing` through."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return call()
    except passing:
        raise
    except HfHubHTTPError as error:
        code = error.response.status_code if error.response is not None else 0
        fix = f'; give {_TOKEN}' if code in (401, 403) else ''
        said = _line(error.server_message or error)
        sentence = f'--push={destination.repo}: the Hub refuses with status {code} ({said}){fix}'
    except Exception as error:
        if not isinstance(error, OSError) and not type(error).__module__.startswith('http'):
            raise
        sentence = (
            f'--push={destination.repo}: {destination.api.endpoint} cannot be reached ({_line(error)}); check the '
            'network, or use --out alone'
        )
    raise PushError(_hide(sentence, destination.api.token)) from None


def _hide(text: str, token: str | bool | None) -> str:
    return text.replace(token, '***') if isinstance(token, str) else text


def _line(error: object) -> str:
    return ' '.join(str(error).split()).rstrip('.') or type(error).__name__
