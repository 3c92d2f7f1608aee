"""Checkpoints on the disk: a step is complete, with arrays and run state, or absent; the newest steps are kept.

shards.py writes the arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pathlib
import re
import shutil
import sys
import typing
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from areal_jax.checkpoint.shards import (
    ArrayShape,
    CheckpointError,
    Index,
    Piece,
    StoredArray,
    TreeReader,
    brief,
    map_leaves,
    named_leaves,
    require_whole,
    verify_arrays,
    write_shards,
)
from areal_jax.columns import declared, find
from areal_jax.control.controller import HostState
from areal_jax.control.episode import Call, Episode, Row, RunningGroup
from areal_jax.errors import LostPeerError, UserError
from areal_jax.events.records import name_type
from areal_jax.files import JsonObject, free_bytes, partial_name, remove_directory, sync
from areal_jax.sharding.host_shards import HostShards
from areal_jax.types import Prompt, Segment, Trajectory, TrajectoryGroup

FORMAT = 10

# keys of HostState that the record holds in another form, and keys that states of earlier versions lack
_ENCODED, _ADDED = frozenset(('buffer', 'running')), frozenset(('filter',))
_types_of: Callable[[type], Mapping[str, Any]] = functools.cache(typing.get_type_hints)
_Part = typing.TypeVar('_Part')


class RunStateError(UserError, ValueError):
    """A run state that cannot be written or read; the message names the key and the fix."""


def encode_run_state(state: Mapping[str, object]) -> JsonObject:
    """Encodes `Controller.snapshot()` and any further JSON-able keys as a JSON-able dict.

    Raises RunStateError that names a missing key or a value that JSON cannot carry unchanged.
    """
    record = {
        **state,
        'format': FORMAT,
        'buffer': [encode_group(group) for group in _take(state, 'buffer', list, 'run state')],
        'running': [encode_running(group) for group in _take(state, 'running', list, 'run state')],
        'order': [list(entry) for entry in _take(state, 'order', list, 'run state')],
    }
    for key in _types_of(HostState).keys() - _ADDED:
        _take(record, key, object, 'run state')
    for key, value in record.items():
        _require_json(value, f'run state {key!r}')
    return record


def decode_run_state(record: Mapping[str, Any]) -> JsonObject:
    """Inverts `encode_run_state`; raises RunStateError that names a missing or malformed key."""
    found = _take(record, 'format', int, 'run state')
    if found != FORMAT:
        raise RunStateError(
            f'run state has format {found}, this version reads {FORMAT}: resume with the one that saved'
        )
    for key, kind in _types_of(HostState).items():
        if key in record or key not in _ADDED:
            _take(record, key, list if key in _ENCODED else kind, 'run state')
    state = {key: value for key, value in record.items() if key != 'format'}
    state['buffer'] = [decode_group(group) for group in record['buffer']]
    state['running'] = [decode_running(group) for group in record['running']]
    state['order'] = [tuple(entry) for entry in record['order']]
    return state


def encode_group(group: TrajectoryGroup) -> JsonObject:
    return _encode(group, trajectories=[encode_trajectory(t) for t in group.trajectories])


def decode_group(record: Mapping[str, object]) -> TrajectoryGroup:
    trajectories = _take(record, 'trajectories', list, 'group')
    return _decode(TrajectoryGroup, record, 'group', trajectories=tuple(map(decode_trajectory, trajectories)))


def encode_running(group: RunningGroup) -> JsonObject:
    return {
        'prompt': encode_prompt(group.prompt),
        'admitted_s': float(group.admitted_s),
        'episodes': [_encode_episode(episode) for episode in group.episodes],
        'trajectories': [encode_trajectory(t) for rows in group.finished.values() for t in rows],
        'failed': [[int(sample), label] for sample, label in group.failed.items()],
    }


def decode_running(record: Mapping[str, object]) -> RunningGroup:
    where = 'running group'
    rows = tuple(map(decode_trajectory, _take(record, 'trajectories', list, where)))
    return _decode(
        RunningGroup,
        record,
        where,
        prompt=decode_prompt(_take(record, 'prompt', dict, where)),
        episodes=[_decode_episode(episode) for episode in _take(record, 'episodes', list, where)],
        finished={rows[0].sample: rows for rows in TrajectoryGroup(0, rows).episodes},
        failed=dict(_take(record, 'failed', list[tuple[int, str]], where)),
    )


def encode_trajectory(trajectory: Trajectory) -> JsonObject:
    segments = [encode_segment(segment) for segment in trajectory.segments]
    return _encode(trajectory, prompt=encode_prompt(trajectory.prompt), segments=segments)


def decode_trajectory(record: Mapping[str, object]) -> Trajectory:
    where = 'trajectory'
    prompt = decode_prompt(_take(record, 'prompt', dict, where))
    segments = tuple(map(decode_segment, _take(record, 'segments', list, where)))
    return _decode(Trajectory, record, where, prompt=prompt, segments=segments)


def encode_segment(segment: Segment) -> JsonObject:
    own = segment.columns
    return {
        'tokens': _list_tokens(segment.tokens),
        'behavior_logprobs': np.asarray(segment.behavior_logprobs, np.float32).tolist(),
        'policy_version': int(segment.policy_version),
        **{c.name: c.write(own[c.name]) if c.name in own else None for c in declared() if c.saved},
        'context': {name: find(name).write(values) for name, values in segment.context.items() if find(name).saved},
    }


def decode_segment(record: Mapping[str, object]) -> Segment:
    where = 'segment'
    tokens = np.array(_take(record, 'tokens', list[int], where), np.int32)
    further = record.keys() - {'tokens', 'behavior_logprobs', 'policy_version', 'context'}
    context = _take(record, 'context', dict, where)
    return Segment(
        tokens=tokens,
        behavior_logprobs=np.array(_take(record, 'behavior_logprobs', list[float], where), np.float32),
        policy_version=_take(record, 'policy_version', int, where),
        columns={n: find(n).read(record[n], len(tokens)) for n in sorted(further) if record[n] is not None},
        context={name: find(name).read(values, None) for name, values in context.items()},
    )


def encode_prompt(prompt: Prompt) -> JsonObject:
    """Encodes a prompt; raises RunStateError if `problem` holds a value that JSON cannot carry unchanged."""
    problem = dict(prompt.problem)
    _require_json(problem, f'problem of draw {prompt.draw} (task {prompt.task!r})')
    record = _encode(prompt, tokens=_list_tokens(prompt.tokens), problem=problem)
    if not prompt.source:
        del record['source']
    return record


def decode_prompt(record: Mapping[str, object]) -> Prompt:
    tokens = np.array(_take(record, 'tokens', list[int], 'prompt'), np.int32)
    whole = {'source': '', **record}  # runs of one task do not save it
    return _decode(Prompt, whole, 'prompt', tokens=tokens)


def _encode_episode(episode: Episode) -> JsonObject:
    return _encode(
        episode,
        rows=[_encode_row(row) for row in episode.rows],
        calls=[dataclasses.asdict(call) for call in episode.calls],
        discarded=sorted([version, tokens] for version, tokens in episode.discarded.items()),
        counts=dict(sorted(episode.counts.items())),
    )


def _decode_episode(record: Mapping[str, object]) -> Episode:
    where = 'episode'
    rows = [_decode_row(row) for row in _take(record, 'rows', list, where)]
    calls = [_decode(Call, call, 'call') for call in _take(record, 'calls', list, where)]
    discarded = dict(_take(record, 'discarded', list[tuple[int, int]], where))
    return _decode(Episode, record, where, rows=rows, calls=calls, discarded=discarded)


def _encode_row(row: Row) -> JsonObject:
    own = None if row.prompt_tokens is None else _list_tokens(row.prompt_tokens)
    return _encode(row, prompt_tokens=own, segments=[encode_segment(segment) for segment in row.segments])


def _decode_row(record: Mapping[str, object]) -> Row:
    own = _take(record, 'prompt_tokens', list[int] | None, 'row')
    tokens = None if own is None else np.array(own, np.int32)
    segments = [decode_segment(segment) for segment in _take(record, 'segments', list, 'row')]
    return _decode(Row, record, 'row', prompt_tokens=tokens, segments=segments)


def _encode(part: Any, **encoded: object) -> JsonObject:
    """Encodes a dataclass by its fields; `encoded` has the fields that JSON does not hold as they are."""
    values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in values.items()}
    return plain | encoded


def _decode(kind: type[_Part], record: Mapping[str, object], where: str, **decoded: object) -> _Part:
    """Inverts `_encode`."""
    fields = {name: _take(record, name, hint, where) for name, hint in _types_of(kind).items() if name not in decoded}
    return kind(**fields, **decoded)


def _list_tokens(tokens: np.ndarray) -> list[int]:
    return np.asarray(tokens, np.int32).tolist()


def _take(record: Mapping[str, object], key: str, kind: object, where: str) -> Any:
    """The value of a required key; raises RunStateError if it is missing or not of type `kind`."""
    if key not in record:
        raise RunStateError(
            f'{where} has no {key!r}: it was cut short or saved by another program; keys: {list(record)}'
        )
    try:
        return msgspec.convert(record[key], kind)
    except msgspec.ValidationError as error:
        raise RunStateError(f'{where} {key!r} is {record[key]!r}, not of type {name_type(kind)}') from error


def _require_json(value: object, where: str) -> None:
    """Raises RunStateError for values that `json` would refuse or silently change: tuples, keys that are not text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return
    if isinstance(value, list):
        for item in value:
            _require_json(item, where)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise RunStateError(f'{where} has the key {key!r}, which JSON would turn into text: use str keys')
            _require_json(item, where)
    else:
        raise RunStateError(
            f'{where} holds {value!r} of type {type(value).__name__}, which JSON cannot carry unchanged: '
            'use dict, list, str, int, float, bool or None'
        )


CONTENTS = 'contents.json'
DIRECTORY = 'checkpoints'  # in a workdir: holds the steps
_ARRAYS, _RUN_STATE = 'arrays', 'run_state.json'
_OVERHEAD_BYTES = 1 << 20  # upper bound of orbax's metadata of a step
_ROOM = 1.2  # further checkpoints that must fit on the disk; with less room only the newest checkpoint stays


class Follower(Protocol):
    """Another process, with shards of the step that is being saved (distributed/remote_learner.py)."""

    name: str

    def write(self, directory: str) -> None:
        """Starts its `write_shards` to the directory."""
        ...

    def written(self) -> Index | str:
        """Waits until it has written; returns the index of its shards, or the reason of its failure."""
        ...


class _FollowerError(Exception):
    """A follower that did not write its shards."""


class _IntactStep(NamedTuple):
    step: int
    path: pathlib.Path
    arrays: Any
    run_state: JsonObject


class CheckpointStore:
    """Steps `step_00000012/` of `arrays/`, `run_state.json` and `contents.json` (locations and checksums).

    Every process writes its own shards below `arrays/`; all processes must see the directory. A step appears under its
    name only when all of it is on the disk; a step saved again gets a suffix `_1`, `_2`. Calls block: on the real clock
    they run on the lane `disk` of process 0. One run writes to the directory at a time.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int = 1,
        in_use: Callable[[], Collection[pathlib.Path]] = tuple,
    ):
        """`keep` >= 1 newest steps stay on the disk; only the newest if fewer than 1.2 further checkpoints fit.

        Steps `in_use` stay too, unless a new step would not fit.
        """
        if keep < 1:
            raise ValueError(f'checkpoint.keep={keep}: the newest checkpoint must stay; use checkpoint.keep >= 1')
        self._directory, self._keep = pathlib.Path(directory).absolute(), keep
        self._in_use = in_use
        self._warned = False  # of keeping fewer than `keep` steps

    def save(
        self,
        step: int,
        arrays: dict[str, Any],
        run_state: Mapping[str, object],
        followers: Sequence[Follower] = (),
        *,
        consume: bool = False,
    ) -> None:
        """Writes nested dicts of arrays and a JSON-able dict; removes old steps when the new one is complete.

        A leaf is a numpy array, a HostShards if the followers have the other shards of the leaf, or an ArrayShape if
        the followers have all of it. With `consume` the dict is empty afterwards, and each array is released as soon as
        it is written: on a CPU the arrays are a part of the run's peak of memory.

        Raises CheckpointError, leaving earlier steps untouched, if the disk is full or a write fails in any process,
        and LostPeerError for a lost follower.
        """
        leaves = named_leaves(arrays)
        state = json.dumps(run_state)
        names = map_leaves(lambda name, _: name, arrays)
        if consume:
            arrays.clear()
        described = {name: {'shape': list(leaf.shape), 'dtype': str(leaf.dtype)} for name, leaf in leaves.items()}
        target = self._directory / self._new_name(step)
        partial = partial_name(target)
        needed = len(state) + sum(_whole_bytes(leaf) for leaf in leaves.values()) + _OVERHEAD_BYTES
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self.remove_unfinished()
            self._make_room(needed)
            self._require_free_space(step, needed)
            (partial / _ARRAYS).mkdir(parents=True)
            index = _write_everywhere(partial / _ARRAYS, leaves, followers)
            require_whole({name: leaf['shape'] for name, leaf in described.items()}, index)
            contents = {
                'leaves': {name: leaf | {'pieces': index[name]} for name, leaf in described.items()},
                'tree': names,
                'run_state_crc32': zlib.crc32(state.encode()),
            }
            for name, text in {_RUN_STATE: state, CONTENTS: json.dumps(contents)}.items():
                (partial / name).write_text(text)
                sync(partial / name)
            for directory in (partial / _ARRAYS, partial):
                sync(directory)
            partial.rename(target)
            sync(self._directory)
        except (CheckpointError, LostPeerError):
            raise
        except Exception as error:  # orbax raises many kinds
            shutil.rmtree(partial, ignore_errors=True)
            reason = str(error) if isinstance(error, _FollowerError) else brief(error)
            raise CheckpointError(
                f'saving step {step} to {self._directory} failed ({reason}); the disk has '
                f'{free_bytes(self._directory)} bytes free. {self._newest_stands()}Make room or use another workdir'
            ) from error
        self._remove_old(needed)

    def remove_unfinished(self) -> None:
        """Deletes the remains of interrupted saves and removals; call it before a run begins."""
        for abandoned in self._directory.glob('.step_*.partial'):
            shutil.rmtree(abandoned)

    def latest(self) -> int | None:
        """The newest complete step."""
        saves = self._saves()
        return saves[-1][0] if saves else None

    def restore_latest(self) -> tuple[int, Any, JsonObject]:
        """Returns (step, arrays, run state) of the newest intact step; see `restore`.

        All arrays are read once to verify their checksums. A newer, damaged step is named on stderr and renamed to
        `damaged_step_00000012`.

        Raises CheckpointError if there is no intact step.
        """
        found, damaged = self._newest_intact()
        if found is None:
            fix = ': move that directory away to start again at update 0 with --resume, or use another --workdir'
            raise CheckpointError(f'{self._none_intact(damaged)}{fix if damaged else ""}')
        for path_damaged, reason in damaged:
            self._set_aside(path_damaged, reason, found.step)
        return found.step, found.arrays, found.run_state

    def saves(self) -> list[tuple[int, pathlib.Path]]:
        """(step, directory) of the complete steps, oldest first; a step that was saved again appears again."""
        return [(step, path) for step, _, path in self._saves()]

    def read_latest(self, part: str) -> tuple[pathlib.Path, Any]:
        """Returns (directory, arrays) of the newest step with an intact `part`, for instance 'params'; see `restore`.

        For the checkpoints of another run: a newer, damaged step is named on stderr, and nothing is changed on the
        disk.

        Raises CheckpointError if there is no intact step.
        """
        found, damaged = self._newest_intact(part)
        if found is None:
            raise CheckpointError(f'{self._none_intact(damaged)}; name another run')
        for path, reason in damaged:
            print(
                f'warning: the checkpoint {path} is damaged ({reason}); {found.path.name} is read in its place',
                file=sys.stderr,
                flush=True,
            )
        return found.path, found.arrays

    def _newest_intact(self, part: str | None = None) -> tuple[_IntactStep | None, list[tuple[pathlib.Path, str]]]:
        """The newest step whose arrays (only those in `part`) are intact, and (path, damage) of all newer steps."""
        damaged: list[tuple[pathlib.Path, str]] = []
        for step, _, path in reversed(self._saves()):
            try:
                arrays, run_state = _read_step(path, 'it was intact when the run began: look at the disk')
                verify_arrays(_leaves(arrays if part is None else arrays[part]))
            except (MemoryError, PermissionError):  # no sign of a damaged file
                raise
            except Exception as error:  # whatever a damaged file makes the readers raise
                damaged.append((path, brief(error)))
                continue
            return _IntactStep(step, path, arrays, run_state), damaged
        return None, damaged

    def _none_intact(self, damaged: Sequence[tuple[pathlib.Path, str]]) -> str:
        if not damaged:
            return f'{self._directory} has no checkpoint'
        reasons = ', '.join(f'{path.name}: {reason}' for path, reason in damaged)
        return f'no checkpoint in {self._directory} is intact ({reasons})'

    def _set_aside(self, path: pathlib.Path, reason: str, step: int) -> None:
        target = path.with_name(f'damaged_{path.name}')
        while target.exists():
            target = target.with_name(f'{target.name}_again')
        path.rename(target)
        sync(self._directory)
        print(
            f'warning: the checkpoint {path} is damaged ({reason}). The run goes on after update {step}, from the '
            f'checkpoint before; the damaged one is now {target.name}: delete it when nobody needs it',
            file=sys.stderr,
            flush=True,
        )

    def path(self, step: int | str) -> pathlib.Path:
        """The directory of a step, given by number or by directory name; raises CheckpointError for an unknown step.

        If the step was saved several times, a number means the last of its directories.
        """
        saves = self._saves()
        paths = [path for saved, _, path in saves if step in (saved, path.name)]
        if not paths:
            known = ', '.join(str(saved) for saved, _, _ in saves) or 'none'
            wanted = step if isinstance(step, str) else f'of step {step}'
            raise CheckpointError(f'{self._directory} has no checkpoint {wanted}; it has: {known}')
        return paths[-1]

    def restore(self, step: int | str) -> tuple[Any, JsonObject]:
        """(arrays, run state) of a step. The arrays are nested dicts of StoredArray, which are read on access.

        Raises CheckpointError for a missing step, or for damage that shows without reading the arrays.
        """
        path, paths = self.path(step), [path for _, _, path in self._saves()]
        before = paths[: paths.index(path)]
        if_damaged = f'remove it to go back to {before[-1].name}' if before else 'there is no older one'
        try:
            return _read_step(path, if_damaged)
        except Exception as error:  # whatever a damaged file makes the readers raise
            raise CheckpointError(f'{path} is damaged ({brief(error)}): {if_damaged}') from error

    def _saves(self) -> list[tuple[int, int, pathlib.Path]]:
        """(step, repetition, path) of the complete steps, oldest first."""
        if not self._directory.is_dir():
            return []
        matches = [(re.fullmatch(r'step_(\d{8,})(?:_(\d+))?', path.name), path) for path in self._directory.iterdir()]
        return sorted((int(match[1]), int(match[2] or 0), path) for match, path in matches if match)

    def _new_name(self, step: int) -> str:
        repetitions = [repetition for saved, repetition, _ in self._saves() if saved == step]
        return f'step_{step:08d}' + (f'_{max(repetitions) + 1}' if repetitions else '')

    def _make_room(self, needed: int) -> None:
        """Removes oldest steps, never the newest, until _ROOM more checkpoints fit; none if that cannot make room."""
        old = [path for _, _, path in self._saves()[:-1]]
        if free_bytes(self._directory) + sum(map(_stored_bytes, old)) < needed:
            return  # removing them would not make enough room
        for path in old:
            if free_bytes(self._directory) >= _ROOM * needed:
                return
            self._warn_of_room(needed)
            remove_directory(path)

    def _remove_old(self, needed: int) -> None:
        """Removes all but the newest steps; `needed` is the size in bytes of the step just written."""
        for path in self._list_removable(self._keep):
            remove_directory(path)
        if (older := self._list_removable(1)) and free_bytes(self._directory) < _ROOM * needed:
            self._warn_of_room(needed)
            for path in older:
                remove_directory(path)

    def _list_removable(self, kept: int) -> list[pathlib.Path]:
        in_use = self._in_use()
        return [path for _, _, path in self._saves()[:-kept] if path not in in_use]

    def _warn_of_room(self, needed: int) -> None:
        if not self._warned:
            print(
                f'warning: checkpoint.keep={self._keep}, but {self._directory} has {free_bytes(self._directory)} bytes '
                f'free, less than {_ROOM:g} checkpoints of {needed}: only the newest checkpoint is kept',
                file=sys.stderr,
                flush=True,
            )
        self._warned = True

    def _require_free_space(self, step: int, needed: int) -> None:
        free = free_bytes(self._directory)
        if free < needed:
            raise CheckpointError(
                f'{self._directory} has {free} bytes free, step {step} needs {needed}. {self._newest_stands()}'
                'Make room or use another workdir'
            )

    def _newest_stands(self) -> str:
        newest = self.latest()
        return '' if newest is None else f'The checkpoint of step {newest} is untouched. '


def read_named(directory: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Reads the arrays, by name, of a step or of the newest step in a directory of steps or a workdir.

    Raises CheckpointError if it is missing or damaged.
    """
    given = pathlib.Path(directory).absolute()
    if (given / CONTENTS).is_file():
        path = given
    else:
        steps = given / DIRECTORY if (given / DIRECTORY).is_dir() else given
        store = CheckpointStore(steps)
        newest = store.latest()
        if newest is None:
            raise CheckpointError(
                f'{steps} has no checkpoint; name a step, WORKDIR/{DIRECTORY}/step_00000012, or a --workdir'
            )
        path = store.path(newest)
    if_damaged = 'name an older step'
    try:
        arrays, _ = _read_step(path, if_damaged)
    except Exception as error:  # whatever a damaged file makes the readers raise
        raise CheckpointError(f'{path} is damaged ({brief(error)}): {if_damaged}') from error
    return {leaf.name: np.asarray(leaf) for leaf in _leaves(arrays)}


def _write_everywhere(
    directory: pathlib.Path, leaves: dict[str, np.ndarray | HostShards | ArrayShape], followers: Sequence[Follower]
) -> dict[str, list[Piece]]:
    """Returns the index when every process has stopped writing; raises this process's or the first follower's error.

    `leaves` is empty afterwards.
    """
    own = {name: leaf for name, leaf in leaves.items() if not isinstance(leaf, ArrayShape)}
    names = [*leaves]
    leaves.clear()
    for number, follower in enumerate(followers, start=1):
        follower.write(str(directory / f'writer_{number:04d}'))
    try:
        written = write_shards(directory / 'writer_0000', own) if own or not followers else {}
        index = {name: list(written.get(name, ())) for name in names}
    finally:
        outcomes = {follower.name: follower.written() for follower in followers}
    for name, outcome in outcomes.items():
        if isinstance(outcome, str):
            raise _FollowerError(f'{name}: {outcome}')
        for leaf, pieces in outcome.items():
            index[leaf] += pieces
    return index


def _read_step(path: pathlib.Path, if_damaged: str) -> tuple[Any, JsonObject]:
    contents, state = json.loads((path / CONTENTS).read_text()), (path / _RUN_STATE).read_bytes()
    if zlib.crc32(state) != contents['run_state_crc32']:
        raise ValueError(f'{_RUN_STATE} is not what was saved')
    described = contents['leaves']
    index = {name: tuple(Piece(*piece) for piece in leaf['pieces']) for name, leaf in described.items()}
    require_whole({name: leaf['shape'] for name, leaf in described.items()}, index)
    arrays = str(path / _ARRAYS)
    reader = TreeReader()
    leaves = {
        name: StoredArray(arrays, name, tuple(leaf['shape']), np.dtype(leaf['dtype']), index[name], if_damaged, reader)
        for name, leaf in described.items()
    }
    return map_leaves(lambda _, name: leaves[name], contents['tree']), json.loads(state)


def _leaves(arrays: Any) -> list[StoredArray]:
    """The leaves of the arrays of `_read_step`, in the order of their names."""
    found: list[StoredArray] = []
    map_leaves(lambda _, leaf: found.append(leaf), arrays)
    return found


def _whole_bytes(leaf: np.ndarray | HostShards | ArrayShape) -> int:
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize


def _stored_bytes(directory: pathlib.Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob('*') if path.is_file())
