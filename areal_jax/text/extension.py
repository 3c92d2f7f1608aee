"""What a chat template writes after an answer: so a conversation goes on from the sampled ids, which stay as they are.

The difference of two renderings of a short conversation gives it (template difference). It holds for every
conversation if the template writes a turn without looking at those around it, which is tried out first.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from areal_jax.text.chat_template import ChatTemplate, ConversationError, Messages, Tools

_QUESTION = {'role': 'user', 'content': 'x'}
# A template that takes the reasoning out of earlier answers changes the second one.
_ANSWER, _REASONED = 'y', '<think>\ny\n</think>\n\ny'
_RESULT = {'role': 'tool', 'content': 'z', 'name': 'z', 'tool_call_id': 'zzzzzzzzz'}  # Mistral's have nine characters
_MOST_KNOWN = 64  # sets of tools and kinds of messages whose test is remembered


def can_extend(messages: Messages) -> bool:
    """Whether they are results of tools, then at most one message of the user."""
    roles = [message.get('role') for message in messages]
    results = roles[:-1] if roles[-1:] == ['user'] else roles
    return all(role == 'tool' for role in results)


class Extension:
    """The texts that follow an answer in one template; thread-safe."""

    def __init__(self, template: ChatTemplate):
        self._template = template
        self._known: dict[tuple[str, bool, bool], str | None] = {}  # what stands before the text, None = unstable

    def render(self, messages: Messages, tools: Tools) -> str | None:
        """From the end of an answer on: the close of its turn, the messages, and the opened turn of the next answer.

        None for messages that no answer is followed by, and where the template does not write a conversation as the
        shorter one and such a text: it refuses the messages, changes earlier turns, or moves the tools.
        """
        if not can_extend(messages):
            return None
        kind = any(m['role'] == 'tool' for m in messages), any(m['role'] == 'user' for m in messages)
        key = (json.dumps(tools), *kind)
        if key not in self._known:
            before = self._find_stable(kind, tools)
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = before
        before = self._known.get(key)
        whole = None if before is None else self._try_render([[_QUESTION, _answer(_ANSWER), *messages]], tools)
        if before is None or whole is None or not whole[0].startswith(before):
            return None
        return whole[0][len(before) :]

    def _find_stable(self, kind: tuple[bool, bool], tools: Tools) -> str | None:
        """What stands before the text that follows the answer; None for an unstable template."""
        has_results, has_question = kind
        then = [_RESULT] * 2 * has_results + [_QUESTION] * has_question
        rounds = [[_answer(text), *then] for text in (_ANSWER, _REASONED)]
        conversations = [[_QUESTION], *([_QUESTION, *turns * count] for turns in rounds for count in (1, 2))]
        found = self._try_render(conversations, tools)
        if found is None:
            return None
        opened, once, twice, once_reasoned, twice_reasoned = found
        text = once[len(opened) + len(_ANSWER) :]
        pieces = [opened, _ANSWER, text, _ANSWER, text]
        reasoned = [_REASONED if piece == _ANSWER else piece for piece in pieces]
        same = [''.join(part) for part in (pieces[:3], pieces, reasoned[:3], reasoned)]
        return opened + _ANSWER if same == [once, twice, once_reasoned, twice_reasoned] else None

    def _try_render(self, conversations: Sequence[Messages], tools: Tools) -> list[str] | None:
        try:
            return self._template.render(conversations, tools)
        except ConversationError:
            return None


def _answer(text: str) -> dict[str, str]:
    return {'role': 'assistant', 'content': text}
