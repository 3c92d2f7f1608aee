r"""Finds the final answer in a text: in <answer> or \boxed{}, after '####', after 'answer is', else the last line.

The same searches read the answers of a model and the gold of a file, for every kind of answer. Each search takes time
linear in the text, because a policy may generate any text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from areal_jax.tasks.answers.extraction import FONT

MARK = '####'  # before the final answer of a worked solution, as in GSM8K
_THOUGHT_END = '</think>'
_BOX_TOKEN = re.compile(r'\\{1,2}(?:boxed|fbox)(?:\s*(\{)|[ ]+([^\s${}\\]+))|\\.|([{}])', re.DOTALL)
_PHRASE = re.compile(r'(?<!\w)answer(?!\w)\s*+(?:[*_`]++\s*+)?+(?:is(?!\w)(?:\s*+[*_`]*+[:：])?|[:：=])', re.IGNORECASE)
_HOPE = re.compile(r'I hope (?:it|this|that) is correct[.!]?')  # models write it behind an answer
_EMPHASIS = ('**', '__', '*', '_', '`')
_WHOLE = (  # marks around a whole text; what is inside has none of the same mark
    re.compile(r'\*\*((?:[^*]|\*(?!\*))+)\*\*', re.DOTALL),
    re.compile(r'\*([^*]+)\*'),
    re.compile(r'__(?![a-z][a-z0-9_]*__$)([^_]+)__'),  # __init__ is a name, not a bold word
    re.compile(r'_([^_]+)_'),
    re.compile(r'(`+)([^`]+)\1'),
    re.compile(r'\$\$((?:[^$\\]|\\.)+)\$\$', re.DOTALL),
    re.compile(r'\$((?:[^$\\]|\\.)+)\$', re.DOTALL),
    re.compile(r'\\\(((?:[^\\]|\\[^)])+)\\\)', re.DOTALL),
    re.compile(r'\\\[((?:[^\\]|\\[^\]])+)\\\]', re.DOTALL),
)
_GROUP = re.compile(rf'(?:\\(?:{FONT}|textcolor\s*\{{[^{{}}]*\}})\s*)?\{{')
_BRACE = re.compile(r'\\.|[{}]', re.DOTALL)
_MARKS = '*_`$\\{'  # how a mark begins
_MOST_LAYERS = 8  # of marks that are removed: bounds the time


class Marked(NamedTuple):
    """An answer that a text marks."""

    text: str  # as it is written, without blanks around it
    is_alone: bool = True  # a box or an <answer>: no other mark counts
    end: int = 0  # where the text goes on behind the line of another mark


def final_text(text: str) -> str | None:
    """The final answer as it is written, without blanks and marks around it; None for a text of blanks."""
    text = without_thoughts(text)
    found = last_marked(text) or _last_line(text)
    return unwrap(found) if found else None


def last_marked(text: str) -> str | None:
    """The first of `marked_answers`; None without any."""
    marked = next(marked_answers(text), None)
    return marked.text if marked else None


def without_thoughts(text: str) -> str:
    """What follows the last '</think>', or, where nothing does, what stands before it; else the text."""
    thoughts, mark, rest = text.rpartition(_THOUGHT_END)
    if not mark:
        return text
    return rest if rest.strip() else thoughts


def marked_answers(text: str) -> Iterator[Marked]:
    r"""The text in the last <answer>, else in the last \boxed{}; else after the last '####', after 'answer is' or ':'.

    In an <answer>, the other marks are looked for first. A box or an <answer> that is not empty is the only result.
    Elsewhere an answer reaches to the end of its line. Empty ones are left out.
    """
    if '</' in text and (tagged := _last_tagged(text)) is not None:
        yield Marked(last_marked(tagged) or tagged)
    elif 'box' in text and (boxed := last_boxed(text)):
        yield Marked(boxed)
    else:
        for find in (_after_mark, _after_phrase):
            if (found := find(text)) and found.text:
                yield found


def unwrap(text: str) -> str:
    r"""The text without marks around the whole of it: **, $, \( \), \text{}, braces, backticks."""
    text = text.strip()
    for _ in range(_MOST_LAYERS):
        if not text or text[0] not in _MARKS:
            break
        match = next((match for mark in _WHOLE if (match := mark.fullmatch(text))), None)
        inner = match[match.lastindex or 1] if match else _inside_braces(text)
        if not inner.strip():
            break
        text = inner.strip()
    return text


def _inside_braces(text: str) -> str:
    """What stands in the braces that enclose the whole text; '' where none do."""
    if not (opening := _GROUP.match(text)):
        return ''
    depth = 1
    for brace in _BRACE.finditer(text, opening.end()):
        depth += {'{': 1, '}': -1}.get(brace[0], 0)
        if not depth:
            return text[opening.end() : brace.start()] if brace.end() == len(text) else ''
    return ''


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} that is closed, the inner one of nested ones; None without any."""
    opened: list[int | None] = []  # of each open brace: where the content of its box begins, None for another brace
    start, content = -1, None
    for token in _BOX_TOKEN.finditer(text):
        brace, bare, other = token.groups()
        if brace:
            opened.append(token.end())
        elif bare:
            start, content = token.start(), bare
        elif other == '{':
            opened.append(None)
        elif other == '}' and opened:
            begin = opened.pop()
            if begin is not None and begin > start:
                start, content = begin, text[begin : token.start()]
    return content.strip() if content else None


def _last_tagged(text: str) -> str | None:
    """What stands between the last <answer> and </answer>; None without any, and where it is blank."""
    if '</answer>' not in (lower := _lower(text)):
        return None
    end = lower.rfind('</answer>')
    begin = lower.rfind('<answer>', 0, end)
    return (text[begin + len('<answer>') : end].strip() or None) if begin >= 0 else None


def _after_mark(text: str) -> Marked | None:
    if (start := text.rfind(MARK)) < 0:
        return None
    line, end = _first_line(text, start + len(MARK))
    if line.startswith(':'):
        line = line.lstrip(': ')
    inner = _after_phrase(line) if len(line) > len('answer:') else None  # '#### Answer: 5'
    return Marked(inner.text if inner and inner.text else line, False, end)


def _after_phrase(text: str) -> Marked | None:
    lower, start = _lower(text), len(text)
    while (start := lower.rfind('answer', 0, start)) >= 0:
        if match := _PHRASE.match(text, start):
            line, end = _first_line(text, match.end())
            return Marked(_clean_line(text[text.rfind('\n', 0, start) + 1 : start], line), False, end)
    return None


def _clean_line(before: str, line: str) -> str:
    """The line behind 'answer is', without the end of an emphasis that began before it and without a full stop."""
    for mark in _EMPHASIS:
        if before.count(mark) % 2 and line.count(mark) % 2:
            line = line.removeprefix(mark) if line.startswith((mark + ' ', mark + '\t')) else line.removesuffix(mark)
        elif line.startswith((mark + ' ', mark + '\t')):
            line = line.removeprefix(mark)  # '**Answer:** 42'
    line = line.strip()
    if (hope := line.find('I hope')) > 0 and _HOPE.fullmatch(line, hope):
        line = line[:hope].rstrip()
    while (stripped := unwrap(line).removesuffix('.').rstrip()) != line:
        line = stripped
    return line


def _lower(text: str) -> str:
    """In lower case, with every character in its place."""
    lower = text.lower()
    return lower if len(lower) == len(text) else ''.join(c.lower() if c.isascii() else c for c in text)


def _first_line(text: str, start: int) -> tuple[str, int]:
    """The first line from there that is not blank, and its end."""
    rest = text[start:].lstrip()
    line, _, after = rest.partition('\n')
    return line.strip(), len(text) - len(after)


def _last_line(text: str) -> str | None:
    """The last line that is not blank; None without any."""
    return text.rstrip().rpartition('\n')[2].strip() or None
