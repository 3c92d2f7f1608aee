"""The answers that areal-score is given: a file of JSON lines, read line by line.

A line names a problem and has `answer`, a text, or `answers`, a list of texts or objects. The lines of an evaluation's
answers.jsonl (evaluation/results.py) are such lines.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections.abc import Iterator
from typing import cast, get_args

from areal_jax import files
from areal_jax.app.score.problem_index import ProblemIndex
from areal_jax.files import FileError, JsonObject
from areal_jax.tasks.user_lines import HEAD_BYTES, describe_other_format
from areal_jax.types import FinishReason

_LONGEST_LINE = 64 << 20  # bytes: bounds memory
_FIX = 'give one JSON object a line, with question and answer'
_BYTE_ORDER_MARK = b'\xef\xbb\xbf'
_TEXTS = ('answer', 'text')  # names of the text of an answer
_ENDS: tuple[str, ...] = get_args(FinishReason)
_DIGITS = 16  # of the digest of a line
_SHOWN = 80  # characters of a value in a message

Sample = str | int


@dataclasses.dataclass(frozen=True)
class GivenAnswer:
    """One answer to score."""

    line: int  # in the file, from 1
    digest: str  # of the line
    sample: Sample | None  # what tells the answers of a line apart; None: it is the only one and has no name
    place: int  # of its problem in the index
    names: JsonObject  # what the line calls the problem
    text: str
    finish_reason: FinishReason


def read_answers(path: pathlib.Path, index: ProblemIndex) -> Iterator[GivenAnswer]:
    """The answers in the order of the file; one line is in memory, and a few dozen bytes for each sample with a name.

    Raises FileError that names file, line and fix for a file that cannot be read or has no answer, for a line that is
    no JSON object, names no problem of the task or has no answer, and for a sample of a problem that comes twice.
    """
    is_empty = True
    seen: dict[int, dict[Sample, int]] = {}  # the lines, by place of the problem and name of the sample
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
    """(number, content) of each line that is not blank."""
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
    """What holds the text of each answer: the line itself, or the entries of `answers`."""
    answers = record.get('answers')
    if answers is None:
        return [record]
    if given := [field for field in _TEXTS if field in record]:
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
    found = [field for field in _TEXTS if field in entry]
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


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f'{text[:_SHOWN]}...'
