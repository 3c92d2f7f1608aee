"""Writes groups of every update into WORKDIR/rollouts, in a separate thread and within a bound of bytes.

000001.jsonl, 000002.jsonl ...     one JSON object per line; each line is handed to the system at once
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import pathlib
import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypedDict

import numpy as np

from areal_jax import files
from areal_jax.files import JsonObject
from areal_jax.telemetry.metrics import plain, read_json_lines, require_fields, rewrite_json_lines
from areal_jax.types import NOT_GENERATED, TokenArrays, Trajectory, TrajectoryGroup

Split = Callable[[np.ndarray], list[str]]  # Tokenizer.split: the piece of the text that each token adds
_CONSTANT = ('ratio', 'weight')  # often equal for all tokens: then one number is written
_BY_TOKEN = (
    'tokens', 'characters', 'versions', 'ages', 'behavior_logprobs', 'policy_logprobs', 'proximal_logprobs', 'ratio',
    'weight', 'clip', 'loss_mask', 'closed',
)  # fmt: skip
_CLIPPED = {0: '.', 1: '+', -1: '-'}


def describe_group(update: int, group: TrajectoryGroup, tokens: Sequence[TokenArrays], split: Split) -> JsonObject:
    """The record of a group that update number `update` took.

    Args:
      tokens: the update's arrays on the tokens of each trajectory; empty for a group that it did not train.
    """
    known = tokens or [{}] * len(group.trajectories)
    prompt = group.trajectories[0].prompt
    answers = [
        _describe_answer(update, trajectory, arrays, prompt.tokens, split)
        for trajectory, arrays in zip(group.trajectories, known, strict=True)
    ]
    return {
        'update': update,
        'draw': group.draw,
        'task': prompt.task,
        **({'source': prompt.source} if prompt.source else {}),
        'trained': bool(tokens),
        'prompt': _describe_prompt(prompt.tokens, split),
        'problem': plain(prompt.problem),
        'answers': answers,
    }


def write_record(record: JsonObject, most_bytes: int) -> str:
    """The record as a line of at most `most_bytes` bytes.

    A longer record loses its lists by token, then parts of its texts; its key 'cut' says which.
    """
    line = json.dumps(record, separators=(',', ':'))
    if len(line) <= most_bytes:
        return line
    answers = [{k: v for k, v in answer.items() if k not in _BY_TOKEN} for answer in record['answers']]
    prompt = {'text': record['prompt']['text']}
    shorter = {**record, 'prompt': prompt, 'answers': answers, 'cut': 'tokens'}
    line = json.dumps(shorter, separators=(',', ':'))
    if len(line) <= most_bytes:
        return line
    most = max(16, most_bytes // (12 * (len(answers) + 1)))  # a character takes at most 12 bytes
    cut = [{k: v for k, v in answer.items() if k != 'prompt'} | {'text': answer['text'][:most]} for answer in answers]
    rest = {**shorter, 'prompt': {'text': prompt['text'][:most]}, 'problem': {}, 'answers': cut, 'cut': 'texts'}
    return json.dumps(rest, separators=(',', ':'))


def _describe_prompt(tokens: np.ndarray, split: Split) -> JsonObject:
    return {**_describe_text(tokens, split), 'tokens': tokens.tolist()}


def _describe_text(tokens: np.ndarray, split: Split) -> JsonObject:
    pieces = split(tokens)
    return {'text': ''.join(pieces), 'characters': [len(piece) for piece in pieces]}


def _describe_answer(update: int, row: Trajectory, arrays: TokenArrays, shared: np.ndarray, split: Split) -> JsonObject:
    generated = row.loss_mask[len(row.prompt.tokens) :]
    own = {} if np.array_equal(row.prompt.tokens, shared) else {'prompt': _describe_prompt(row.prompt.tokens, split)}
    return {
        'sample': row.sample,
        'row': row.row,
        'reward': plain(float(row.reward)) if row.engine else None,  # a given answer has none
        'label': row.label if row.engine else 'given',
        'finish': row.finish_reason,
        'advantage': _join_equal(arrays['advantages']) if arrays and row.engine else None,
        **own,
        **_describe_text(row.answer_tokens, split),
        'tokens': row.answer_tokens.tolist(),
        **(_describe_sampling(update, row) if row.engine else {}),
        **_describe_tokens(arrays, generated),
    }


def _describe_sampling(update: int, row: Trajectory) -> JsonObject:
    """The fields on an answer's generation: engine, times, versions, ages and behavior log-probs."""
    start = len(row.prompt.tokens)
    generated = row.loss_mask[start:]
    spans = [(version, len(list(same))) for version, same in itertools.groupby(row.policy_versions[start:].tolist())]
    return {
        'engine': row.engine,
        'admitted_s': plain(row.admitted_s),
        'finished_s': plain(row.finished_s),
        'consumed_s': plain(row.consumed_s),
        'versions': [[count, version] for version, count in spans],
        'ages': [None if version == NOT_GENERATED else update - 1 - version for version, _ in spans],
        'behavior_logprobs': _align(_shorten(row.behavior_logprobs[start:][generated]), generated),
    }


def _describe_tokens(arrays: TokenArrays, generated: np.ndarray) -> JsonObject:
    """The update's arrays on the tokens, under the names of learning.diagnostics.trained_tokens."""
    found: JsonObject = {}
    for name, values in arrays.items():
        if name == 'advantages':
            continue
        if name == 'clip':
            found[name] = ''.join(_align([_CLIPPED[value] for value in values.tolist()], generated, ' '))
        elif values.dtype == bool:
            if name == 'loss_mask' or values.any():
                found[name] = ''.join(_align(['1' if value else '0' for value in values.tolist()], generated, ' '))
        elif name in _CONSTANT and isinstance(joined := _join_equal(values), float):
            found[name] = joined
        else:
            found[name] = _align(_shorten(values), generated)
    return found


def _align(values: Iterable[object], generated: np.ndarray, blank: object = None) -> list:
    """The values at the generated tokens, `blank` at the others."""
    each = iter(values)
    return [next(each) if is_generated else blank for is_generated in generated.tolist()]


def _shorten(values: np.ndarray) -> list[float | None]:
    """The numbers with the fewest digits that give the same float32 again; None for one that is not finite."""
    return [plain(float(str(value))) for value in values]


def _join_equal(values: np.ndarray) -> float | list[float | None] | None:
    """A single number if all are equal, else the list."""
    if len(values) and (values == values[0]).all():
        return _shorten(values[:1])[0]
    return _shorten(values)


DIRECTORY = 'rollouts'
ALL = 'all'
MOST_BYTES = 64 << 20  # of all files
_FILES = 16  # number of files that share the bound
_MOST_WAITING = 8  # updates in the queue; the learner waits before it adds a ninth
_END_S = 20.0  # longest wait of the end of the run for the thread


class RolloutFacts(TypedDict):
    """Counts of one attempt's writes; for the report."""

    groups: int
    bytes: int
    cpu_seconds: float  # of the thread
    first_error: str


class _Batch(TypedDict):
    update: int
    groups: Sequence[TrajectoryGroup]
    tokens: Sequence[Sequence[TokenArrays]]


class RolloutWriter:
    """Keeps the groups with the lowest draws of each update, whether trained or filtered.

    At the bound, files are removed: the second one, then the next, so that the first and the newest answers stay. The
    first failure to write is printed, and nothing more is written; the run continues.

    Args:
      workdir: the run's.
      split: turns token ids into text, in one piece per token.
      kept: `telemetry.rollouts`, groups per update or 'all'.
      most_bytes: bound of all files together.
    """

    def __init__(self, workdir: pathlib.Path, split: Split, kept: str, most_bytes: int = MOST_BYTES):
        self._directory, self._split = workdir / DIRECTORY, split
        self._kept = math.inf if kept == ALL else int(kept)
        self._most_bytes, self._file_bytes = most_bytes, max(1, most_bytes // _FILES)
        self._sizes: dict[pathlib.Path, int] = {}  # of the files, in order
        self._file: files.LineWriter | None = None
        self._waiting: queue.Queue[_Batch | threading.Event | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._work, name=DIRECTORY, daemon=True)
        self._facts: RolloutFacts = {'groups': 0, 'bytes': 0, 'cpu_seconds': 0.0, 'first_error': ''}

    def start(self, update: int) -> None:
        """Removes the records after this update, which a resumed run makes again, and starts the thread."""
        if update == 0:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(parents=True, exist_ok=True)
        for path in list_files(self._directory):
            kept = [record for record in read_records(path) if int(record['update']) <= update]
            rewrite_json_lines(path, kept) if kept else path.unlink()
        self._sizes = {path: path.stat().st_size for path in list_files(self._directory)}
        self._thread.start()

    def select(self, groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
        """The groups of an update to keep."""
        lowest = sorted(groups, key=lambda group: group.draw)
        return lowest if math.isinf(self._kept) else lowest[: int(self._kept)]

    def put(self, update: int, groups: Sequence[TrajectoryGroup], tokens: Sequence[Sequence[TokenArrays]]) -> None:
        """Hands over groups of an update; waits only if several updates are not written yet."""
        self._waiting.put({'update': update, 'groups': groups, 'tokens': tokens})

    def sync(self) -> None:
        """Returns when all handed-over groups are on the disk, or after _END_S; callable from any thread."""
        if self._thread.is_alive():
            written = threading.Event()
            self._waiting.put(written)
            written.wait(_END_S)

    def facts(self) -> RolloutFacts:
        """The counts of the writes so far."""
        return {**self._facts, 'bytes': sum(self._sizes.values())}

    def close(self) -> None:
        """Waits at most _END_S until all handed-over groups are written. A second call does nothing."""
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join(_END_S)

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None:
            try:
                if isinstance(item, threading.Event):
                    if self._file:
                        self._file.sync()
                    item.set()
                elif not self._facts['first_error']:
                    self._write_batch(item)
            except Exception as error:  # the run does not depend on it
                self._note_failure(error)
                if isinstance(item, threading.Event):
                    item.set()
            self._facts['cpu_seconds'] = time.thread_time()
        if self._file:
            self._file.close()

    def _write_batch(self, batch: _Batch) -> None:
        for group, tokens in zip(batch['groups'], batch['tokens'], strict=True):
            record = describe_group(batch['update'], group, tokens, self._split)
            self._write_line(write_record(record, self._file_bytes - 1))
            self._facts['groups'] += 1

    def _write_line(self, line: str) -> None:
        size = len(line) + 1  # JSON is ASCII
        newest = next(reversed(self._sizes), None)
        if self._file is None or newest is None or self._sizes[newest] + size > self._file_bytes:
            newest = self._open_next(newest)
        while sum(self._sizes.values()) + size > self._most_bytes and len(self._sizes) > 2:
            dropped = list(self._sizes)[1]
            with contextlib.suppress(FileNotFoundError):
                dropped.unlink()
            del self._sizes[dropped]
        assert self._file is not None
        self._file.write(line)
        self._sizes[newest] += size

    def _open_next(self, newest: pathlib.Path | None) -> pathlib.Path:
        if self._file:
            self._file.close()
        path = self._directory / f'{1 if newest is None else int(newest.stem) + 1:06}.jsonl'
        self._file, self._sizes[path] = files.LineWriter(path), 0
        return path

    def _note_failure(self, error: Exception) -> None:
        if not self._facts['first_error']:
            self._facts['first_error'] = f'{type(error).__name__}: {error}'
            print(
                f'warning: {self._directory} gets no more answers ({error}); the run goes on',
                file=sys.stderr,
                flush=True,
            )


def list_files(directory: pathlib.Path) -> list[pathlib.Path]:
    """The files in the order in which they were written."""
    return sorted(path for path in directory.glob('*.jsonl') if path.stem.isdigit())


def read_records(path: pathlib.Path) -> list[files.JsonObject]:
    """Reads the groups in a file; a torn last line is left out, and a missing file gives [].

    Raises FileError for a line that is not such a group.
    """
    records = read_json_lines(path)
    for number, record in enumerate(records, start=1):
        fields = {'update': int, 'draw': int, 'prompt': dict, 'answers': list}
        require_fields(path, number, record, fields)
    return records
