r"""Finds the final answer in a text: in \boxed{}, after '####', after 'answer is', else the last line.

The same searches read the answers of a model and the gold of a file. Each search takes time linear in the text, because
a policy may generate any text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

MARK = '####'  # before the final answer of a worked solution, as in GSM8K
_BOX_TOKEN = re.compile(r'\\(?:boxed|fbox)(?:\s*(\{)|[ ]+([^\s${}\\]+))|\\.|([{}])', re.DOTALL)
_PHRASE = re.compile(r'\banswer\s*(?:\bis\b\s*:?|:)', re.IGNORECASE)
_DECORATION = ' \t*_`'  # blanks and Markdown around an answer in running text


def final_text(text: str) -> str | None:
    """The final answer as it is written, without blanks around it; None for a text of blanks."""
    return next(marked_answers(text), None) or _last_line(text)


def marked_answers(text: str) -> Iterator[str]:
    r"""The text in the last \boxed{}, after the last '####', after the last 'answer is' or 'answer:', in this order.

    Each reaches to the end of its line but for a box, which ends at its brace. Empty ones are left out.
    """
    for found in (last_boxed(text), _after_mark(text), _after_phrase(text)):
        if found:
            yield found


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


def _after_mark(text: str) -> str | None:
    _, mark, rest = text.rpartition(MARK)
    return _first_line(rest) if mark else None


def _after_phrase(text: str) -> str | None:
    ends = [match.end() for match in _PHRASE.finditer(text)]
    return _first_line(text[ends[-1] :]).strip(_DECORATION).removesuffix('.').rstrip(_DECORATION) if ends else None


def _first_line(text: str) -> str:
    """The first line that is not blank."""
    return text.lstrip().partition('\n')[0].strip()


def _last_line(text: str) -> str | None:
    """The last line that is not blank; None without any."""
    return text.rstrip().rpartition('\n')[2].strip() or None
