"""Files that are not JSON lines, known by their first bytes: what each is, and the command that makes lines of it."""

from __future__ import annotations

import re

HEAD_BYTES = 4096  # of a file, from which its format is told
_PANDAS = "python -c \"import pandas; pandas.read_{0}('FILE').to_json('FILE.jsonl', orient='records', lines=True)\""
_ARROW = "python -c \"import datasets; datasets.Dataset.from_file('FILE').to_json('FILE.jsonl')\""
_ARRAY = "jq -c '.[]' FILE > FILE.jsonl"
_BEGINS_ARRAY = re.compile(rb'\[(\s*\n|\s*[]{])')  # of objects, or over several lines; [1] may be a wrong line
_ONE_LINE = 'jq -c . FILE > FILE.jsonl'
_UTF_8 = 'iconv -f {} -t UTF-8 FILE > FILE.jsonl'
# what a file begins with, what it is, and the command that makes lines of it
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
)  # fmt: skip


def describe_other_format(head: bytes, name: str) -> str:
    """'is a Parquet file, and ...' with the command that makes JSON lines of it; '' for what may be JSON lines.

    Args:
      head: the first HEAD_BYTES bytes of the file, without a mark of UTF-8.
      name: of the file: of tables in text the suffix alone tells which.
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
