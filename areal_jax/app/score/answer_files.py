"""The files of areal-score: identified problems, given answers, and their scores."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import IO, cast, get_args

import numpy as np

from areal_jax import files
from areal_jax.errors import UserError
from areal_jax.files import FileError, JsonObject
from areal_jax.tasks.task import ListedTask, Problem, Split, Task
from areal_jax.tasks.user_lines import HEAD_BYTES, describe_other_format
from areal_jax.types import FinishReason, Prompt, Verdict

_QUESTION = 'question'
_TEXTS = (_QUESTION, 'prompt', 'problem')  # names of the question in an answers line
_IDS = ('task_id', 'id')
_SHOWN = 80  # characters of a value in a message


class ProblemIndex:
    """All problems of a task, from both sides, with the fields that may identify them."""

    def __init__(self, task: Task, seed: int):
        self.task = task.name
        self.prompts = list_prompts(task, seed)
        self._places: dict[str, dict[str, list[int]]] = {field: {} for field in (*_TEXTS, *_IDS)}  # by value
        for place, prompt in enumerate(self.prompts):
            for field, places in self._places.items():
                if field in prompt.problem:
                    places.setdefault(_spell(prompt.problem[field]), []).append(place)

    def find(self, record: JsonObject, where: str) -> tuple[int, JsonObject]:
        """Returns (place of the problem in `prompts`, the fields that identify it).

        A record identifies it by its question, by its ids if the problems have ids, or by the whole `problem`. All
        given fields must fit; next to a whole problem, other fields count only if several problems have its question.

        Raises FileError, naming `where`, if no problem fits, or more than one.
        """
        whole = record.get('problem')
        given = self._names_in(whole if isinstance(whole, dict) else record)
        if isinstance(whole, dict) and not given:
            given = {'problem': whole}
            found = self._wholes.get(_spell(whole), [])
        elif not given:
            ids = ''.join(f', or its {field}' for field in _IDS if self._places[field])
            raise FileError(f'{where} names no problem: give its question as the task has it, as a text{ids}')
        else:
            found = self._intersect(given)
        if len(found) > 1 and isinstance(whole, dict):
            equal = [place for place in found if place in self._wholes.get(_spell(whole), [])]
            found = equal[:1] or found
        if len(found) != 1:
            raise FileError(f'{where} {self._describe(given, len(found))}')
        return found[0], given

    def digest(self) -> str:
        """Returns the SHA-256 of all problems, independent of their order."""
        own = sorted(hashlib.sha256(_spell(dict(prompt.problem)).encode()).digest() for prompt in self.prompts)
        return hashlib.sha256(b''.join(own)).hexdigest()

    @functools.cached_property
    def _wholes(self) -> dict[str, list[int]]:
        """The places by the whole problem."""
        found: dict[str, list[int]] = {}
        for place, prompt in enumerate(self.prompts):
            found.setdefault(_spell(dict(prompt.problem)), []).append(place)
        return found

    def _names_in(self, record: Mapping[str, object]) -> JsonObject:
        texts = {field: record[field] for field in _TEXTS if isinstance(record.get(field), str)}
        ids = {field: record[field] for field in _IDS if field in record and self._places[field]}
        return {**texts, **ids}

    def _intersect(self, given: JsonObject) -> list[int]:
        found: list[int] | None = None
        for field, value in given.items():
            known = self._places[field] or self._places[_QUESTION]
            places = known.get(_spell(value), [])
            found = places if found is None else [place for place in found if place in places]
        return found or []

    def _describe(self, given: JsonObject, count: int) -> str:
        named = ' and '.join(f'{field}={_shorten(value)}' for field, value in given.items())
        if count:
            return (
                f'names {count} problems of task {self.task!r} by {named}: add a field that tells them apart, or the '
                'whole problem as an object'
            )
        return (
            f'names no problem of task {self.task!r} by {named}: write it exactly as the task has it, or give the '
            '--config of the task that was answered'
        )


def list_prompts(task: Task, seed: int) -> list[Prompt]:
    """Returns every problem once; prompts are tokenized only if a scorer may ask for their text."""
    if isinstance(task, ListedTask):
        listed: list[Problem] = [problem for side in task.problems.values() for problem in side]
        if all(isinstance(problem.get(_QUESTION), str) for problem in listed):
            return [Prompt(place, np.zeros(0, np.int32), task.name, problem) for place, problem in enumerate(listed)]
    sizes = task.sizes()
    prompts = []
    for side in cast(tuple[Split, ...], ('train', 'held_out')):
        if sizes[side]:
            stream = task.prompts(side, seed)
            prompts += [stream.draw() for _ in range(sizes[side])]  # the first epoch repeats nothing
    return prompts


def _spell(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f'{text[:_SHOWN]}...'


# The answers given to areal-score: a file of JSON lines, read line by line. A line identifies a problem and has
# `answer`, a text, or `answers`, a list of texts or objects. The lines of an evaluation's answers.jsonl
# (evaluation/results.py) have this form.


_LONGEST_LINE = 64 << 20  # bytes: bounds memory
_FIX = 'give one JSON object a line, with question and answer'
_BYTE_ORDER_MARK = b'\xef\xbb\xbf'
_GIVEN_ANSWERS_TEXTS = ('answer', 'text')  # names of the text of an answer
_ENDS: tuple[str, ...] = get_args(FinishReason)
_DIGITS = 16  # of the digest of a line

Sample = str | int


@dataclasses.dataclass(frozen=True)
class GivenAnswer:
    """One answer to score."""

    line: int  # in the file, from 1
    digest: str  # of the line
    sample: Sample | None  # tells the answers of a line apart; None: the line has one answer, without a name
    place: int  # of its problem in the index
    names: JsonObject  # the fields by which the line identifies the problem
    text: str
    finish_reason: FinishReason


def read_answers(path: pathlib.Path, index: ProblemIndex) -> Iterator[GivenAnswer]:
    """Yields the answers in the order of the file; memory holds one line, and some dozen bytes per named sample.

    Raises FileError that names file, line and fix for a file that cannot be read or has no answer, for a line that is
    no JSON object, names no problem of the task or has no answer, and for a sample of a problem that comes twice.
    """
    is_empty = True
    seen: dict[int, dict[Sample, int]] = {}  # line numbers, by place of the problem and name of the sample
    for number, content in _read_lines(path):
        where = f'{path}: line {number}'
        record = files.parse_object(content, where, _FIX)
        place, names = index.find(record, where)
        if type(record.get('draw')) is int:
            names = {'draw': record['draw'], **names}
        digest = hashlib.sha256(content).hexdigest()[:_DIGITS]
        for position, entry in enumerate(_list_entries(record, where), start=1):
            sample = _take_sample(entry, where)
            if sample is not None and (before := seen.setdefault(place, {}).setdefault(sample, number)) != number:
                raise FileError(f'{where} has the sample {sample!r} of a problem that line {before} has: remove one')
            if sample is None and 'answers' in record:
                sample = position
            text, finish_reason = _take_text(entry, where), _take_end(entry, record, where)
            yield GivenAnswer(number, digest, sample, place, names, text, finish_reason)
            is_empty = False
    if is_empty:
        raise FileError(f'--answers={path} has no line: {_FIX}')


def _read_lines(path: pathlib.Path) -> Iterator[tuple[int, bytes]]:
    """Yields (number, content) of each line that is not blank."""
    try:
        if path.exists() and not path.is_file():
            raise FileError(f'--answers={path} is no regular file: write the answers to a file, which is read twice')
        file = path.open('rb')
    except OSError as error:
        raise FileError(f'--answers={path} cannot be read ({error.strerror}); name a file of JSON lines') from error
    with file:
        if file.peek(3)[:3] == _BYTE_ORDER_MARK:
            file.read(3)
        if reason := describe_other_format(file.peek(HEAD_BYTES)[:HEAD_BYTES], path.name):
            raise FileError(f'--answers={path} {reason}')
        number = 0
        while content := file.readline(_LONGEST_LINE + 1):
            number += 1
            if len(content) > _LONGEST_LINE:
                raise FileError(f'{path}: line {number} has more than {_LONGEST_LINE >> 20} MiB; {_FIX}')
            if content := content.strip():
                yield number, content


def _list_entries(record: JsonObject, where: str) -> list[JsonObject]:
    """Returns the objects that contain the text of each answer: the line itself, or the entries of `answers`."""
    answers = record.get('answers')
    if answers is None:
        return [record]
    if given := [field for field in _GIVEN_ANSWERS_TEXTS if field in record]:
        raise FileError(f'{where} has both answers and {given[0]}: remove one')
    if not isinstance(answers, list) or not answers:
        raise FileError(f'{where} has answers={_shorten(answers)}: give a list with one text or more')
    entries = [{'answer': answer} if isinstance(answer, str) else answer for answer in answers]
    if wrong := [entry for entry in entries if not isinstance(entry, dict)]:
        raise FileError(f'{where} has the answer {_shorten(wrong[0])}: give a text, or an object with text')
    names = [sample for entry in entries if (sample := _take_sample(entry, where)) is not None]
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise FileError(f'{where} has the sample {repeated!r} twice: remove one')
    return entries


def _take_text(entry: JsonObject, where: str) -> str:
    found = [field for field in _GIVEN_ANSWERS_TEXTS if field in entry]
    if not found:
        raise FileError(f'{where} has no answer: add "answer", the text that is scored')
    if len(found) > 1:
        raise FileError(f'{where} has both {found[0]} and {found[1]}: remove one')
    text = entry[found[0]]
    if not isinstance(text, str):
        raise FileError(f'{where} has {found[0]}={_shorten(text)}: give a text, in quotation marks')
    return text


def _take_sample(entry: JsonObject, where: str) -> Sample | None:
    sample = entry.get('sample')
    if sample is not None and type(sample) not in (str, int):
        raise FileError(f'{where} has sample={_shorten(sample)}: give a number or a name')
    return cast(Sample | None, sample)


def _take_end(entry: JsonObject, record: JsonObject, where: str) -> FinishReason:
    end = entry.get('finish_reason', record.get('finish_reason', 'stop'))
    if end not in _ENDS:
        raise FileError(f'{where} has finish_reason={_shorten(end)}: give {" or ".join(_ENDS)}, or leave it out')
    return cast(FinishReason, end)


# The scores that areal-score writes, one JSON line per answer, in the order of the answers.
#
# A partial file is always a prefix of the complete one, so a command that was ended continues after its last line. The
# file OUT.task.json, next to it, names the task that scored it.


SUFFIX = '.task.json'  # of the second file
_SCORE_FILE_FIX = 'restore the file as areal-score wrote it, or give another --out'
_NAMES = ('line', 'digest', 'sample')  # fields of a score that identify the scored answer


class ScoreFile:
    """Appends scores; each line survives the death of the process. `close` it.

    Args:
      identity: the facts that decide the rewards apart from the answers, as flat JSON.

    Raises UserError if another process writes the file, if it holds something other than scores, or if another task
    wrote it.
    """

    def __init__(self, path: pathlib.Path, identity: Mapping[str, object]):
        self._path, self._identity_path = path, path.with_name(f'{path.name}{SUFFIX}')
        self._writer: files.LineWriter | None = None
        self._lock = _lock(path)
        try:
            if path.stat().st_size:
                self._require_same(identity)
            else:
                files.write_json(self._identity_path, identity)
        except BaseException:
            self.close()
            raise

    def read(self) -> Iterator[JsonObject]:
        """Yields the scores in the file, one at a time; afterwards removes a last line that was cut off.

        Raises FileError, naming the line, for a line that is no score.
        """
        end = 0
        with self._path.open('rb') as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b'\n'):
                    break
                where = f'{self._path}: line {number}'
                record = files.parse_object(line, where, _SCORE_FILE_FIX)
                if not isinstance(record.get('label'), str) or 'reward' not in record:
                    raise FileError(f'{where} is no score; {_SCORE_FILE_FIX}')
                yield record
                end += len(line)
        os.truncate(self._path, end)

    def require_answer(self, score: JsonObject, answer: GivenAnswer | None, answers: pathlib.Path) -> None:
        """Raises FileError if a score in the file does not belong to the answer that now has its place."""
        if answer is not None and all(score.get(name) == getattr(answer, name) for name in _NAMES):
            return
        raise FileError(
            f'{answers}: line {score.get("line")} is not what {self._path} has a score of: the answers have changed '
            'since; restore them, or give another --out'
        )

    def append(self, score: JsonObject) -> None:
        """Writes one line; `read` must have ended before, because a torn line would be extended."""
        if self._writer is None:
            self._writer = files.LineWriter(self._path)
        self._writer.write(json.dumps(score))

    def close(self) -> None:
        """Syncs the file to disk and unlocks it for other processes; removes an empty file.

        A second call does nothing.
        """
        if self._lock.closed:
            return
        if self._writer is not None:
            with contextlib.suppress(OSError):  # `append` has raised it
                self._writer.sync()
            self._writer.close()
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            if not self._path.stat().st_size:
                self._path.unlink()
                self._identity_path.unlink(missing_ok=True)
        self._lock.close()

    def _require_same(self, identity: Mapping[str, object]) -> None:
        if not self._identity_path.exists():
            raise UserError(
                f'--out={self._path} holds something else than scores (there is no {self._identity_path.name} beside '
                'it): choose another name'
            )
        before = files.read_json(self._identity_path, _SCORE_FILE_FIX)
        names = sorted({*before, *identity})
        if different := [name for name in names if before.get(name) != identity.get(name)]:
            changes = ', '.join(f'{name}: {before.get(name)!r} -> {identity.get(name)!r}' for name in different)
            raise UserError(f'--out={self._path} has scores of another task: {changes}; use the same, or another --out')


def make_score(answer: GivenAnswer, verdict: Verdict) -> JsonObject:
    """Returns a line of the file: the answer's identity and the verdict; a failed verdict has no reward."""
    sample = {} if answer.sample is None else {'sample': answer.sample}
    reason = {'reason': verdict.reason} if verdict.reason else {}
    return {
        'line': answer.line,
        **sample,
        **answer.names,
        'reward': None if verdict.failed else verdict.reward,
        'label': verdict.label,
        'attempts': verdict.attempts,
        **reason,
        'digest': answer.digest,
    }


def _lock(path: pathlib.Path) -> IO[bytes]:
    """Locks the file against other writers, if its file system has locks. Raises UserError if it is locked."""
    file = path.open('ab')
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UserError(
            f'--out={path} is being written by another areal-score: wait for it to end, stop it, or give another --out'
        ) from None
    except OSError:
        pass
    return file
