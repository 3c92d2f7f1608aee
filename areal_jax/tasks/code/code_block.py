"""Finds the code in the text of an answer, by its characters alone: nothing of it runs, and nothing parses it."""

from __future__ import annotations

import re
from collections.abc import Sequence

_FENCE = re.compile(r'^[ \t]*(?:```|~~~)[ \t]*([\w+#.-]*)[ \t]*$', re.MULTILINE)


def find_code(text: str, entry_point: str = '', prompt: str = '') -> str:
    """The source of the answer; '' where it has none.

    It is the last fenced block that is closed, the rest of the text behind an open fence, or else the whole text, if
    that defines `entry_point`. A source that does not is the completion of `prompt`, where the problem has one.
    """
    fences = list(_FENCE.finditer(text))
    code = _last_block(text, fences) if fences else text
    if not code.strip():
        return ''
    if entry_point and not defines(code, entry_point):
        return prompt + code if prompt else code if fences else ''
    return code


def defines(code: str, name: str) -> bool:
    """Whether the source seems to give a value to the name at its top level."""
    word = re.escape(name)
    return bool(
        re.search(rf'^(?:async[ \t]+)?def[ \t]+{word}\b|^class[ \t]+{word}\b|^{word}[ \t]*(?::[^=\n]*)?=', code, re.M)
        or re.search(rf'^from\b.*\bimport\b.*\b{word}\b', code, re.M)
    )


def _last_block(text: str, fences: Sequence[re.Match[str]]) -> str:
    last = len(fences) - 1
    if len(fences) % 2:  # the last fence opens a block that nothing closes
        if last == 0 or text[fences[last].end() :].strip():
            return text[fences[last].end() :].removeprefix('\n')
        last -= 1
    return text[fences[last - 1].end() : fences[last].start()].removeprefix('\n')
