"""Keys of lines that a user wrote: used, refused where they would change what is trained, or ignored and named once.

docs/your_data.md publishes the tables.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import sys
from collections.abc import Collection, Mapping, Sequence

from areal_jax.errors import find_near, show
from areal_jax.files import JsonObject
from areal_jax.tasks.task import TaskError

_MOST_NAMED = 8


@dataclasses.dataclass(frozen=True)
class Telling:
    """A key that says something of what is trained."""

    what: str  # it holds: 'a part of the prompt'
    fix: str  # how it is said here


_TOOLS = Telling('functions that the model may call', 'tools are shown from lines of sft and pairs, and by agents')
_MEDIA = Telling('more than text', 'this project trains on text alone')
_SYSTEM = Telling('a system turn', 'set task.system_prompt, or write it as the first of the messages')
_PROMPT = Telling('a part of the prompt', 'write it into the question')
_TEMPLATE = Telling('what a chat template is told', 'write it into the template, model.chat_template')
_WEIGHT = Telling('how much the line counts', 'every line counts once: repeat it')
_THOUGHT = Telling('what the model thinks before its answer', 'write it into the answer, in the marks of the model')
_CALLS = Telling('calls of tools', 'write them into the content, in the notation of the model')
_MASK = Telling('which tokens are trained', 'the last answer is, and nothing else')
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
_SAYS_NOTHING: Mapping[str, tuple[object, ...]] = {  # besides null and what is empty
    **dict.fromkeys(('weight', 'weights', 'sample_weight', 'label', 'train'), (1, True)),
}
_MOST_FORMS = 64  # of lines that are remembered


class LineKeys:
    """What becomes of the keys of the lines of one file.

    Args:
      used: by the reader of the lines.
      first_counts: names of the same thing, of which a line's first one counts; another is not read.
      telling: keys that are refused where the reader does not use them.
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
        """Raises TaskError, which names the line, for a key that would change what is trained and is not used."""
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
        """A key that nothing reads."""
        self._ignored[key] += 1

    def tell(self) -> None:
        """Names on stderr, once, the keys that nothing reads."""
        if sentence := self.describe():
            print(f'warning: {sentence}', file=sys.stderr, flush=True)

    def describe(self) -> str:
        """The sentence; '' where every key is read."""
        listed = [self._describe(key, count) for key, count in self._ignored.most_common(_MOST_NAMED)]
        more = len(self._ignored) - len(listed)
        also = f' and {more} others' if more > 0 else ''
        return f'task.path={self._path!r} has keys that nothing reads: {", ".join(listed)}{also}' if listed else ''

    def _describe(self, key: str, count: int) -> str:
        near = '' if '.' in key else find_near(key, self._used - {key})
        return f'{show(key)} (of {count}{f"; did you mean {near}?" if near else ""})'


def refuse(key: str, value: object, place: str, telling: Telling) -> TaskError:
    """The error for a key that is not used: raise it. `place` names the line, `key` may be 'messages[1].weight'."""
    return TaskError(
        f'{place}: {key}={show(value)} would change what is trained, and is not used: it holds {telling.what}; '
        f'{telling.fix}, and remove the key'
    )


def says_something(key: str, value: object) -> bool:
    """Whether a key is on the list of messages with a value that means something."""
    return key in OF_MESSAGES and value not in (None, '', [], {})


def _says_nothing(key: str, value: object) -> bool:
    return value in (None, '', [], {}) or any(value == other for other in _SAYS_NOTHING.get(key, ()))
