"""Reads JSON lines and tables that a user wrote; every fault is named by file and line."""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

from areal_jax.errors import find_near, show
from areal_jax.files import JsonObject
from areal_jax.hub import is_hub_name, locate_dataset
from areal_jax.tasks.task import TaskError
from areal_jax.tasks.user_tables import find_reader, rename_columns

HEAD_BYTES = 4096  # first bytes of a file, which show its format
_PANDAS = "python -c \"import pandas; pandas.read_{0}('FILE').to_json('FILE.jsonl', orient='records', lines=True)\""
_ARROW = "python -c \"import datasets; datasets.Dataset.from_file('FILE').to_json('FILE.jsonl')\""
_ARRAY = "jq -c '.[]' FILE > FILE.jsonl"
_BEGINS_ARRAY = re.compile(rb'\[(\s*\n|\s*[]{])')  # of objects, or over several lines; [1] may be a wrong line
_ONE_LINE = 'jq -c . FILE > FILE.jsonl'
_UTF_8 = 'iconv -f {} -t UTF-8 FILE > FILE.jsonl'
# the first bytes of a file, its format, and the command that converts it to lines
_BEGINNINGS = (
    (b'PAR1', 'a Parquet file', _PANDAS.format('parquet')),
    (b'ORC', 'an ORC file', _PANDAS.format('orc')),
    (b'ARROW1', 'a Feather or Arrow file', _PANDAS.format('feather')),
    (b'\xff\xff\xff\xff', 'an Arrow file', _ARROW),  # as the package datasets keeps its data
    (b'\x1f\x8b', 'compressed with gzip', 'gunzip -c FILE > FILE.jsonl'),
    (b'\x28\xb5\x2f\xfd', 'compressed with zstd', 'zstd -dc FILE > FILE.jsonl'),
    (b'\xfd7zXZ\x00', 'compressed with xz', 'xz -dc FILE > FILE.jsonl'),
    (b'BZh', 'compressed with bzip2', 'bunzip2 -c FILE > FILE.jsonl'),
    (b'PK\x03\x04', 'a ZIP archive, as those of spreadsheets are', 'unzip FILE'),
    (b'SQLite format 3\x00', 'a SQLite database', 'sqlite3 -json FILE "select ..." | jq -c \'.[]\' > FILE.jsonl'),
    (b'\x00\x00\xfe\xff', 'text in UTF-32', _UTF_8.format('UTF-32')),
    (b'\xff\xfe\x00\x00', 'text in UTF-32', _UTF_8.format('UTF-32')),
    (b'\xff\xfe', 'text in UTF-16', _UTF_8.format('UTF-16')),
    (b'\xfe\xff', 'text in UTF-16', _UTF_8.format('UTF-16')),
    (b'version https://git-lfs', 'a pointer of Git LFS', 'git lfs pull'),
)


def describe_other_format(head: bytes, name: str) -> str:
    """Describes another format, 'is a Parquet file, and ...', with the command that makes lines; '' if it may be lines.

    Args:
      head: the first HEAD_BYTES bytes of the file, without a mark of UTF-8.
      name: of the file: only the suffix tells tables in text apart.
    """
    for beginning, kind, command in _BEGINNINGS:
        if head.startswith(beginning):
            return _describe(kind, command)
    text = head.lstrip()
    if _BEGINS_ARRAY.match(text):
        return _describe('a JSON array', _ARRAY)
    first = text.partition(b'\n')[0].strip()
    if text.startswith(b'{') and b'\n' in text and first.endswith((b'{', b'[', b',')):
        return _describe('one JSON value over several lines', _ONE_LINE)
    if text.lower().startswith((b'<!doctype', b'<html', b'<?xml')):
        return _describe('a page of the web, or XML', 'curl -L ADDRESS > FILE.jsonl')
    for suffix, separator in (('csv', ','), ('tsv', '\\t')):
        if name.endswith(f'.{suffix}') and not text.startswith(b'{'):
            return _describe(
                f'a table of {suffix.upper()}', _PANDAS.replace("FILE')", f"FILE', sep='{separator}')").format('csv')
            )
    return ''


def _describe(kind: str, command: str) -> str:
    return f'is {kind}, and one JSON object a line is wanted: make it with {command}'


# Keys of lines that a user wrote: used, refused if they would change what is trained, or ignored and named once.
#
# docs/your_data.md publishes the tables.


_MOST_NAMED = 8


@dataclasses.dataclass(frozen=True)
class Telling:
    """A key that would change what is trained."""

    what: str  # the content of the key: 'a part of the prompt'
    fix: str  # how to express it here


_TOOLS = Telling('functions that the model may call', 'tools are shown from lines of sft and pairs, and by agents')
_MEDIA = Telling('more than text', 'this project trains on text alone')
_SYSTEM = Telling('a system turn', 'set task.system_prompt, or write it as the first of the messages')
_PROMPT = Telling('a part of the prompt', 'write it into the question')
_TEMPLATE = Telling('what a chat template is told', 'write it into the template, model.chat_template')
_WEIGHT = Telling('how much the line counts', 'every line counts once: repeat it')
_THOUGHT = Telling('what the model thinks before its answer', 'write it into the answer, in the marks of the model')
_CALLS = Telling('calls of tools', 'write them into the content, in the notation of the model')
_MASK = Telling(
    'which tokens are trained', 'the last answer is, and earlier turns of the assistant where train is true'
)
_VERDICT = Telling('whether the answer is wanted', 'remove lines whose answers are not, or give them as pairs')

_OF_ALL: Mapping[str, Telling] = {
    **dict.fromkeys(('tools', 'functions'), _TOOLS),
    **dict.fromkeys(('image', 'images', 'video', 'videos', 'audio', 'audios'), _MEDIA),
    **dict.fromkeys(('system', 'system_prompt', 'developer'), _SYSTEM),
    **dict.fromkeys(('choices', 'options', 'context', 'passage', 'input', 'history'), _PROMPT),
    **dict.fromkeys(('chat_template', 'chat_template_kwargs', 'enable_thinking'), _TEMPLATE),
    **dict.fromkeys(('weight', 'weights', 'sample_weight'), _WEIGHT),
}
_OF_ANSWERS: Mapping[str, Telling] = {
    **dict.fromkeys(('reasoning', 'reasoning_content', 'thinking'), _THOUGHT),
    **dict.fromkeys(('tool_calls', 'function_call'), _CALLS),
    **dict.fromkeys(('loss_mask', 'train'), _MASK),
    'label': _VERDICT,
}
OF_TASKS: Mapping[str, Telling] = {
    **_OF_ALL,
    'answers': Telling('further answers that are right', 'give one answer, or a task of your own'),
}
OF_CODE: Mapping[str, Telling] = _OF_ALL
OF_DEMONSTRATIONS: Mapping[str, Telling] = {**_OF_ALL, **_OF_ANSWERS}
OF_PAIRS: Mapping[str, Telling] = {
    **OF_DEMONSTRATIONS,
    'margin': Telling('by how much the chosen answer is better', 'pairs have no margin'),
}
OF_MESSAGES: Mapping[str, Telling] = {
    **dict.fromkeys(('tool_calls', 'function_call'), _CALLS),
    **dict.fromkeys(('reasoning', 'reasoning_content', 'thinking', 'thoughts'), _THOUGHT),
    **dict.fromkeys(('image', 'images', 'video', 'videos', 'audio', 'audios'), _MEDIA),
    **dict.fromkeys(('weight', 'train', 'training', 'loss', 'loss_mask'), _MASK),
    **dict.fromkeys(('prefix', 'partial'), Telling('the beginning of an answer', 'give the whole answer')),
    'tools': Telling('functions that the model may call', 'give them to the line'),
    'name': Telling('who speaks', 'write it into the content, or into the template, model.chat_template'),
}
_SAYS_NOTHING: Mapping[str, tuple[object, ...]] = {  # in addition to null and empty values
    **dict.fromkeys(('weight', 'weights', 'sample_weight', 'label', 'train'), (1, True)),
}
_MOST_FORMS = 64  # sets of keys of lines that are remembered


class LineKeys:
    """Checks the keys of the lines of one file, and counts those that nothing reads.

    Args:
      used: keys that the reader of the lines uses.
      first_counts: names of the same thing: the first one in a line counts, another is not read.
      telling: keys that are refused if the reader does not use them.
    """

    def __init__(
        self,
        path: str | pathlib.Path,
        used: Collection[str],
        telling: Mapping[str, Telling],
        *first_counts: Sequence[str],
    ):
        self._path, self._used, self._telling = str(path), frozenset(used), telling
        self._first_counts = first_counts
        self._ignored: collections.Counter[str] = collections.Counter()
        self._read_whole: set[tuple[str, ...]] = set()  # keys of lines without an unread one: most lines are alike

    def require(self, row: JsonObject, place: str) -> None:
        """Raises a TaskError, naming the line, for a key that would change what is trained and is not used."""
        keys = tuple(row)
        if keys in self._read_whole:
            return
        unread = [key for key in keys if key not in self._used]
        for names in self._first_counts:
            unread += [name for name in names if name in row][1:]
        if not unread and len(self._read_whole) < _MOST_FORMS:
            self._read_whole.add(keys)
        for key in unread:
            value = row[key]
            if key in self._telling and not _says_nothing(key, value):
                raise refuse(key, value, place, self._telling[key])
            self.note(key)

    def note(self, key: str) -> None:
        """Counts a key that nothing reads."""
        self._ignored[key] += 1

    def tell(self) -> None:
        """Prints the keys that nothing reads on stderr, once."""
        if sentence := self.describe():
            print(f'warning: {sentence}', file=sys.stderr, flush=True)

    def describe(self) -> str:
        """The sentence on the keys that nothing reads; '' if every key is read."""
        listed = [self._describe(key, count) for key, count in self._ignored.most_common(_MOST_NAMED)]
        more = len(self._ignored) - len(listed)
        also = f' and {more} others' if more > 0 else ''
        return f'task.path={self._path!r} has keys that nothing reads: {", ".join(listed)}{also}' if listed else ''

    def _describe(self, key: str, count: int) -> str:
        near = '' if '.' in key else find_near(key, self._used - {key})
        return f'{show(key)} (of {count}{f"; did you mean {near}?" if near else ""})'


def refuse(key: str, value: object, place: str, telling: Telling) -> TaskError:
    """Returns the error for a key that is not used. `place` names the line, `key` may be 'messages[1].weight'."""
    return TaskError(
        f'{place}: {key}={show(value)} would change what is trained, and is not used: it holds {telling.what}; '
        f'{telling.fix}, and remove the key'
    )


def says_something(key: str, value: object) -> bool:
    """Whether a key is on the list of messages with a value that means something."""
    return key in OF_MESSAGES and value not in (None, '', [], {})


def _says_nothing(key: str, value: object) -> bool:
    return value in (None, '', [], {}) or any(value == other for other in _SAYS_NOTHING.get(key, ()))


_LONGEST_LINE = 16 * 2**20  # bytes: bounds memory; a prompt of that length fits no model
_BYTE_ORDER_MARK = b'\xef\xbb\xbf'


def read_objects(
    path: str | pathlib.Path,
    decode: Callable[[str], object] = json.loads,
    columns: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[tuple[str, JsonObject]]:
    """Yields ('FILE:LINE', object) of each line that is not blank, or of each row of a table.

    Args:
      path: a file, or a data set of the Hub, whose files are read one after another.
      decode: parses JSON, or raises ValueError.
      columns: see `rename_columns`.

    Raises TaskError for a file that cannot be read, has another format or no row, and, naming the line, for a line that
    is not UTF-8, too long, or no JSON object; HubError for a data set that cannot be had.
    """
    empty = True
    for file in locate_dataset('task.path', str(path)) if is_hub_name(str(path)) else [pathlib.Path(path)]:
        for place, row in _read_rows(file, decode):
            empty = False
            yield place, rename_columns(row, columns, place)
    if empty:
        raise TaskError(f'task.path={str(path)!r} has no line: give one JSON object a line')


def _read_rows(path: pathlib.Path, decode: Callable[[str], object]) -> Iterator[tuple[str, JsonObject]]:
    try:
        with path.open('rb') as file:
            if file.peek(3)[:3] == _BYTE_ORDER_MARK:
                file.read(3)
            head = file.peek(HEAD_BYTES)[:HEAD_BYTES]
            if read_table := find_reader(path, head):
                yield from read_table(path, decode)
                return
            if other := describe_other_format(head, str(path)):
                raise TaskError(f'task.path={str(path)!r} {other}')
            number = 0
            while line := file.readline(_LONGEST_LINE + 1):  # ends at a line feed only, as JSON does not in its strings
                place, number = f'{path}:{number + 1}', number + 1
                if len(line) > _LONGEST_LINE:
                    raise TaskError(
                        f'{place}: the line has more than {_LONGEST_LINE >> 20} MiB; give one JSON object a line'
                    )
                if text := _decode(line, place).strip():
                    yield place, _parse(text, place, decode)
    except TaskError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL byte
        reason = getattr(error, 'strerror', None) or error
        raise TaskError(f'task.path={str(path)!r} cannot be read ({reason}): give a file of JSON lines') from error


def require_text(value: object, name: str, place: str, *, may_be_blank: bool = False) -> str:
    """Returns the value if it is a text that is not blank; raises a TaskError that names it."""
    if not isinstance(value, str) or not (value.strip() or may_be_blank):
        raise TaskError(f'{place}: {name}={_shorten(value)} must be a text that is not empty')
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise TaskError(
            f'{place}: {name} has {value[error.start]!r} at character {error.start}, half of a surrogate pair: write '
            'the whole character'
        ) from error
    return value


def _decode(line: bytes, place: str) -> str:
    try:
        return line.decode('utf-8')
    except UnicodeDecodeError as error:
        raise TaskError(
            f'{place}: not UTF-8: byte {error.start} of the line is 0x{line[error.start]:02x}; save the file as UTF-8'
        ) from error


def _parse(text: str, place: str, decode: Callable[[str], object]) -> JsonObject:
    try:
        row = decode(text)
    except ValueError as error:
        raise TaskError(f'{place}: not JSON ({error}), got {text[:80]!r}') from error
    except RecursionError as error:
        raise TaskError(f'{place}: the JSON is nested too deep, got {text[:80]!r}') from error
    if not isinstance(row, dict):
        raise TaskError(f'{place}: expected a JSON object, got {text[:80]!r}')
    return row


def _shorten(value: object) -> str:
    text = f'a {type(value).__name__}' if isinstance(value, list | dict) else repr(value)
    return f'{text[:80]}...' if len(text) > 80 else text
