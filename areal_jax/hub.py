"""Finds models and data sets of the Hugging Face Hub by name: 'hf:ORG/NAME', in the cache first.

What the cache holds is used without a connection. Everything else is fetched once, by the package huggingface_hub.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from areal_jax.errors import UserError
from areal_jax.files import read_json
from areal_jax.installation import describe_install

PREFIX = 'hf:'
RepoKind = Literal['model', 'dataset']
_BARE = re.compile(r'[\w-][\w.-]*/[\w.-]*[\w-]')  # ORG/NAME; a path that begins with . or / is none
_COMMIT = re.compile('[0-9a-f]{40}')
_DESCRIPTION = ('*.json', '*.jinja', '*.txt', 'tokenizer.model')  # what shape and tokenizer are read from
_WEIGHTS = ('*.safetensors',)
_NOT_READ = ('*/*', 'consolidated*')  # weights that a repository has a second time, in the form of another program
DATA_SUFFIXES = ('.parquet', '.jsonl', '.json', '.csv')
_OF_FILES = (*DATA_SUFFIXES, '.tsv', '.toml', '.gguf', '.safetensors')  # end the name of a file that is missing
_CARD, _CONFIG = 'README.md', 'config.json'
_SHARD = re.compile(r'-(\d{5})-of-(\d{5})\.')
_revisions: dict[tuple[str, str], str] = {}  # commits that this process has located, by field and value


class HubError(UserError, ValueError):
    """A name of the Hub whose files cannot be had; the message names field, value and fix."""


@dataclasses.dataclass(frozen=True)
class HubName:
    """A repository of the Hub as the config names it."""

    field: str  # of the config or flag that names it
    given: str  # its value
    kind: RepoKind
    repo: str  # ORG/NAME
    revision: str | None  # a branch, tag or commit; None = main
    config: str | None = None  # of a data set
    split: str | None = None  # of a data set

    @property
    def place(self) -> str:
        """Field and value, which begin an error; a name without 'hf:' may have been meant as a path."""
        also = '' if self.given.startswith(PREFIX) else ', which is no file or directory here'
        return f'{self.field}={self.given!r}{also}'


def is_hub_name(path: str) -> bool:
    """Tells whether a path names a repository of the Hub: 'hf:ORG/NAME', or ORG/NAME where no such path exists."""
    if path.startswith(PREFIX) or path.endswith(_OF_FILES):
        return path.startswith(PREFIX)
    return _BARE.fullmatch(re.split('[@:]', path)[0]) is not None and not _exists(path)


def _exists(path: str) -> bool:
    try:
        return pathlib.Path(path).exists()
    except (OSError, ValueError):
        return False


def read_name(field: str, path: str, kind: RepoKind) -> HubName:
    """Parses 'hf:ORG/NAME[@REVISION]', for a data set also 'hf:ORG/NAME[@REVISION][:CONFIG][:SPLIT]'.

    One word after a data set is its split if it is one of train, test, validation, else its config.

    Raises HubError for any other form.
    """
    repo, *parts = path.removeprefix(PREFIX).split(':')
    repo, _, revision = repo.partition('@')
    form = 'hf:ORG/NAME[@REVISION]' + ('[:CONFIG][:SPLIT]' if kind == 'dataset' else '')
    if not _BARE.fullmatch(repo) or len(parts) > (2 if kind == 'dataset' else 0) or ('@' in path and not revision):
        raise HubError(f'{field}={path!r} is no name of the Hugging Face Hub: write {form}')
    if len(parts) == 1 and parts[0] in _KNOWN_SPLITS:
        parts = ['', *parts]
    config, split = [*(part or None for part in parts), None, None][:2]
    return HubName(field, path, kind, repo, revision or None, config, split)


@functools.cache
def locate_model(field: str, path: str, *, weights: bool) -> pathlib.Path:
    """Returns the directory of a model's files, which are fetched where the cache lacks them.

    Args:
      weights: also the safetensors; without them config.json and the files of the tokenizer alone.

    Raises HubError if they cannot be had.
    """
    name = read_name(field, path, 'model')
    folder = _find_cached(name)
    if not _is_described(folder) or (weights and not _has_weights(folder)):
        folder = _fetch(name, (*_DESCRIPTION, *(_WEIGHTS if weights else ())), _NOT_READ)
    return _require_model(name, folder)


def locate_shape(field: str, path: str) -> pathlib.Path:
    """Returns the directory with a model's config.json; where the cache lacks it, that file alone is fetched.

    Raises HubError if it cannot be had.
    """
    name = read_name(field, path, 'model')
    folder = _find_cached(name)
    return _require_model(name, folder if (folder / _CONFIG).is_file() else _fetch(name, (_CONFIG,)))


def _require_model(name: HubName, folder: pathlib.Path) -> pathlib.Path:
    if not (folder / _CONFIG).is_file():
        raise HubError(f'{name.place}: the repository has no {_CONFIG}: name one of a model for transformers')
    return _note(name, folder)


def _is_described(folder: pathlib.Path) -> bool:
    """Tells whether the files of a description were fetched; `locate_shape` leaves config.json alone."""
    return (folder / _CONFIG).is_file() and any(path.name != _CONFIG for path in folder.iterdir())


def _has_weights(folder: pathlib.Path) -> bool:
    index = folder / 'model.safetensors.index.json'
    if (folder / 'model.safetensors').is_file() or not index.is_file():
        return (folder / 'model.safetensors').is_file()
    places = read_json(index).get('weight_map')
    return isinstance(places, dict) and all((folder / str(file)).is_file() for file in set(places.values()))


def locate_dataset(field: str, path: str) -> list[pathlib.Path]:
    """Returns the files of one split of a data set, in order; they are fetched where the cache lacks them.

    Raises HubError if they cannot be had, and for a config or split that the data set does not have, with its own.
    """
    name = read_name(field, path, 'dataset')
    if cached := _find_cached_files(name):
        _note(name, cached[0])
        return cached
    folder = _fetch(name, (_CARD,))
    pinned = dataclasses.replace(name, revision=folder.name)
    chosen = choose_files(name, _list_files(pinned), _read_card(folder))
    _fetch(pinned, chosen)
    _note(name, folder)
    return [folder / file for file in chosen]


def _find_cached_files(name: HubName) -> list[pathlib.Path]:
    """Returns the files of the split if the cache has all of them, else none.

    What "all" is follows from the list of the repository's files that huggingface_hub keeps. A cache without that list
    counts if no download was cut off and no shard is missing.
    """
    folder = _find_cached(name)
    store = folder.parents[1]
    tree = store / 'trees' / f'{folder.name}.json'
    listed = read_json(tree).get('files') if tree.is_file() else None
    if isinstance(listed, dict):
        chosen = choose_files(name, listed, _read_card(folder))
    elif folder.is_dir() and not any(store.glob('blobs/*.incomplete')):
        try:
            chosen = choose_files(name, _list_folder(folder), _read_card(folder))
        except HubError:
            return []  # the repository may have more files
        chosen = chosen if _has_all_shards(chosen) else []
    else:
        return []
    files = [folder / file for file in chosen]
    return files if all(file.is_file() for file in files) else []


def find_revision(path: pathlib.Path) -> str:
    """Returns the commit of a directory or file in the cache of the Hub; '' for any other path."""
    for parent in (path, *path.parents):
        if parent.parent.name == 'snapshots' and _COMMIT.fullmatch(parent.name):
            return parent.name
    return ''


def find_revisions(values: Mapping[str, object]) -> dict[str, str]:
    """Returns the commits of the models and data sets that this process has located, by the field that names them.

    Args:
      values: of a config, by 'section.field'.
    """
    return {
        field: commit
        for field, value in values.items()
        if isinstance(value, str) and (commit := _revisions.get((field, value)))
    }


def _note(name: HubName, path: pathlib.Path) -> pathlib.Path:
    _revisions[name.field, name.given] = find_revision(path)
    return path


# Which files of a data set are one split: its card says so, else the names of the files.

_KNOWN_SPLITS = ('train', 'test', 'validation')


def choose_files(name: HubName, listing: Iterable[str], card: Mapping[str, object]) -> list[str]:
    """Returns the files of the config and split that a name asks for, sorted.

    Args:
      listing: paths of all files in the repository.
      card: the metadata at the top of its README.md.

    Raises HubError for a config or split that is not there, or that must be named.
    """
    files = sorted(file for file in listing if file.endswith(DATA_SUFFIXES) and not file.startswith('.'))
    if not files:
        raise HubError(f'{name.place}: the data set has no file in {", ".join(DATA_SUFFIXES)}: name another one')
    splits = _splits_of_card(name, card, files) or _splits_of_names(name, files)
    split = name.split or next((known for known in _KNOWN_SPLITS if known in splits), None)
    if split is None and len(splits) == 1:
        [split] = splits
    if split not in splits:
        asked = f'no split {split!r}' if split else 'more than one split'
        raise HubError(f'{name.place}: the data set has {asked}; name one of {", ".join(sorted(splits))}')
    return splits[split]


def _splits_of_card(name: HubName, card: Mapping[str, object], files: Sequence[str]) -> dict[str, list[str]]:
    """Reads `configs` of a card: each has a config_name and data_files, by split; {} if the card lists none."""
    listed = card.get('configs')
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    configs = {str(entry.get('config_name', 'default')): entry for entry in entries if entry.get('data_files')}
    if not configs:
        return {}
    entry = configs[_choose_config(name, configs)]
    found, base = entry['data_files'], str(entry.get('data_dir') or '')
    pairs = found if isinstance(found, list) and all(isinstance(pair, dict) for pair in found) else None
    splits: dict[str, list[str]] = {}
    for pair in pairs if pairs is not None else [{'split': 'train', 'path': found}]:
        given = pair.get('path') or ()
        patterns = [str(pattern) for pattern in (given if isinstance(given, list) else [given])]
        matches = [pathlib.PurePosixPath(base, pattern).as_posix() for pattern in patterns]
        splits[str(pair.get('split'))] = [file for file in files if any(_matches(file, match) for match in matches)]
    return {split: chosen for split, chosen in splits.items() if chosen}


def _choose_config(name: HubName, configs: Mapping[str, Mapping[str, object]]) -> str:
    chosen = name.config or next((key for key, entry in configs.items() if entry.get('default')), None)
    if chosen is None:
        chosen = 'default' if 'default' in configs else next(iter(configs)) if len(configs) == 1 else None
    if chosen is None or chosen not in configs:
        asked = f'no config {chosen!r}' if chosen else 'more than one config'
        raise HubError(f'{name.place}: the data set has {asked}; name one of {", ".join(sorted(configs))}')
    return chosen


def _matches(file: str, pattern: str) -> bool:
    """Tells whether a path matches a glob in which * stays inside a folder and ** does not."""
    parts = re.split(r'(\*\*/?|\*|\?)', pattern)
    forms = {'**/': '(?:.*/)?', '**': '.*', '*': '[^/]*', '?': '[^/]'}
    return re.fullmatch(''.join(forms.get(part, re.escape(part)) for part in parts), file) is not None


def _splits_of_names(name: HubName, files: Sequence[str]) -> dict[str, list[str]]:
    """Takes the split from the name of each file or folder; a config is the folder above."""
    folders = {file.partition('/')[0] for file in files if '/' in file} - {'data', *_KNOWN_SPLITS}
    if name.config and name.config not in folders:
        listed = f'; name one of {", ".join(sorted(folders))}' if folders else ': leave it out'
        raise HubError(f'{name.place}: the data set has no config {name.config!r}{listed}')
    if name.config:
        files = [file for file in files if file.startswith(f'{name.config}/')]
    elif folders and all('/' in file and file.partition('/')[0] in folders for file in files) and len(folders) > 1:
        raise HubError(f'{name.place}: the data set has more than one config; name one of {", ".join(sorted(folders))}')
    splits: dict[str, list[str]] = {}
    asked = {name.split, *_KNOWN_SPLITS} - {None}
    for file in files:
        words = re.split(r'[/._-]+', file)
        splits.setdefault(next((str(split) for split in asked if split in words), 'train'), []).append(file)
    return splits


def _has_all_shards(files: Iterable[str]) -> bool:
    """Tells whether each 'NAME-00000-of-00003.SUFFIX' has the other shards of its name."""
    by_name: dict[str, tuple[int, int]] = {}
    for file in files:
        if match := _SHARD.search(file):
            name = file[: match.start()]
            by_name[name] = (by_name.get(name, (0, 0))[0] + 1, int(match[2]))
    return all(count == total for count, total in by_name.values())


def _read_card(folder: pathlib.Path) -> Mapping[str, object]:
    file = folder / _CARD
    if not file.is_file():
        return {}
    from huggingface_hub import RepoCard

    try:
        return RepoCard.load(file, ignore_metadata_errors=True).data.to_dict()
    except (ValueError, OSError):
        return {}  # no metadata: the names of the files say what they are


def _list_folder(folder: pathlib.Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob('*') if path.is_file()]


# Calls of huggingface_hub, and what its errors mean for a user.


def _find_cached(name: HubName) -> pathlib.Path:
    """Returns the place of the snapshot in the cache, which may not be there. Uses no connection."""
    if importlib.util.find_spec('huggingface_hub') is None:
        raise HubError(f'{name.place} needs the package huggingface_hub: {describe_install("hub")}')
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    store = pathlib.Path(constants.HF_HUB_CACHE).expanduser() / repo_folder_name(repo_id=name.repo, repo_type=name.kind)
    revision = name.revision or constants.DEFAULT_REVISION
    reference = store / 'refs' / revision
    return store / 'snapshots' / (reference.read_text().strip() if reference.is_file() else revision)


def _fetch(name: HubName, patterns: Sequence[str], left_out: Sequence[str] = ()) -> pathlib.Path:
    """Fetches the files that match; raises HubError if the Hub cannot be reached, or refuses."""
    from huggingface_hub import snapshot_download

    with _explained(name):
        return pathlib.Path(
            snapshot_download(
                name.repo,
                repo_type=name.kind,
                revision=name.revision,
                allow_patterns=list(patterns),
                ignore_patterns=list(left_out) or None,
            )
        )


def _list_files(name: HubName) -> list[str]:
    from huggingface_hub import HfApi

    with _explained(name):
        return list(HfApi().list_repo_files(name.repo, repo_type=name.kind, revision=name.revision))


@contextlib.contextmanager
def _explained(name: HubName) -> Iterator[None]:
    """Raises HubError, with the remedy, for an error of huggingface_hub."""
    from huggingface_hub import constants, errors

    page = f'{constants.ENDPOINT}/{"datasets/" if name.kind == "dataset" else ""}{name.repo}'
    thing = 'data set' if name.kind == 'dataset' else 'model'
    command = f'hf download {"--repo-type dataset " if name.kind == "dataset" else ""}{name.repo}'
    try:
        yield
        return
    except errors.GatedRepoError:
        said = f'{page} is gated: accept its terms there, then `hf auth login` (or set HF_TOKEN)'
    except errors.RepositoryNotFoundError:
        said = (
            f'the Hub has no {thing} {name.repo} that you may read: check the name; for a private one `hf auth login`'
        )
    except errors.RevisionNotFoundError:
        said = f'{name.repo} has no revision {name.revision!r}: name a branch, a tag or a commit of {page}/commits/main'
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        answer = getattr(error.__cause__, 'response', None)
        why = f'{constants.ENDPOINT} ' + (f'answers with {answer.status_code}' if answer else 'cannot be reached')
        why, fix = ('HF_HUB_OFFLINE is set', 'unset it, or ') if constants.HF_HUB_OFFLINE else (why, '')
        said = (
            f'{name.repo} is not (or not whole) in the cache {constants.HF_HUB_CACHE}, and {why}: {fix}run '
            f'`{command}` where there is a network, and copy that folder'
        )
    except errors.HfHubHTTPError as error:
        code = error.response.status_code if error.response is not None else 0
        denied = '; give a token that may read it, by `hf auth login` or in HF_TOKEN' if code in (401, 403) else ''
        said = f'{constants.ENDPOINT} answers with status {code} for {name.repo}{denied or ": try again later"}'
    except OSError as error:
        said = (
            f'{name.repo} cannot be stored in {constants.HF_HUB_CACHE} ({error.strerror or error}): set HF_HOME to a '
            'directory of your own with room'
        )
    except Exception as error:
        if not type(error).__module__.startswith('http'):  # of the library under huggingface_hub: httpx, httpx2, ...
            raise
        reason = ' '.join(str(error).split()) or type(error).__name__
        said = f'the connection to {constants.ENDPOINT} broke ({reason}): the same command continues the download'
    raise HubError(f'{name.place}: {said}') from None
