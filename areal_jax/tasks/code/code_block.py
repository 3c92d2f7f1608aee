"""Finds the code in the text of an answer, by its characters alone: nothing of it runs, and nothing parses it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

# three to sixteen backticks or tildes, indented or behind the mark of a list, and what says the language
_FENCE = re.compile(
    r'^(?P<indent>[ \t]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)?)'
    r'(?P<mark>`{3,16}(?!`)(?=[^`\n]*$)|~{3,16}(?!~))[ \t]*(?P<info>[^\n]*)$',
    re.MULTILINE,
)
_INNER = 4  # a fence that is so much further right than that of its block belongs to the code
_LANGUAGE = re.compile(r'\{?\s*(?:#\S+\s+)?\.?([^\s{}:;,=]*)')  # of 'py title="x"', '{.python #id}', 'python:main.py'
_PYTHON = re.compile(r'(?:(?:i?python|pypy|py)[\d.]*|.+\.py)?', re.IGNORECASE)  # or no word at all, or a file


@dataclasses.dataclass(frozen=True)
class _Block:
    """What stands between two fences, or behind the last one."""

    info: str
    code: str

    @property
    def is_python(self) -> bool:
        word = _LANGUAGE.match(self.info)
        return bool(self.code.strip()) and word is not None and bool(_PYTHON.fullmatch(word[1]))


def find_code(text: str, entry_point: str = '', prompt: str = '') -> str:
    """Returns the source of the answer, with lines that end in '\\n'; '' where it has none.

    It is the last fenced block of Python that defines `entry_point`, or else the last one, or the whole text of an
    answer without fences. A block is one of Python where its fence says so or says nothing, and something is in it; the
    last one needs no closing fence. A source that does not define `entry_point` is the completion of `prompt`, where
    the problem has one.
    """
    text = text.replace('\r\n', '\n').replace('\r', '\n')
    blocks = _list_blocks(text)
    sources = [block.code for block in reversed(blocks) if block.is_python] if blocks else [text]
    if not sources or not sources[0].strip():
        return ''
    if not entry_point:
        return sources[0]
    if code := next((one for one in sources if defines(one, entry_point)), ''):
        return code
    return prompt + sources[0] if prompt else sources[0] if blocks else ''


def defines(code: str, name: str) -> bool:
    """Whether the source seems to give a value to the name at its top level."""
    word = re.escape(name)
    return bool(
        re.search(rf'^(?:async[ \t]+)?def[ \t]+{word}\b|^class[ \t]+{word}\b|^{word}[ \t]*(?::[^=\n]*)?=', code, re.M)
        or re.search(rf'^from\b.*\bimport\b.*\b{word}\b', code, re.M)
    )


def _list_blocks(text: str) -> Sequence[_Block]:
    """As in CommonMark, but that a fence with a language inside of a block, which closes none, begins the next one."""
    blocks: list[_Block] = []
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opened and not _ends(fence, opened):
            continue
        if opened:
            blocks.append(_cut(text, opened, fence.start()))
        opened = fence if opened is None or fence['info'].strip() else None
    return [*blocks, _cut(text, opened, len(text))] if opened else blocks


def _ends(fence: re.Match[str], opened: re.Match[str]) -> bool:
    """Whether a fence ends the block of another: the same mark, as long or longer, and not within its code."""
    is_alike = fence['mark'].startswith(opened['mark'])
    return is_alike and len(fence['indent'].expandtabs()) < len(opened['indent'].expandtabs()) + _INNER


def _cut(text: str, opened: re.Match[str], end: int) -> _Block:
    """The block from behind its opening fence, without the blanks by which that is indented."""
    code = text[opened.end() : end].removeprefix('\n')
    if indent := len(opened['indent']):
        code = re.sub(rf'^[ \t]{{1,{indent}}}', '', code, flags=re.MULTILINE)
    return _Block(opened['info'], code)
