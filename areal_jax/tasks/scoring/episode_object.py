"""The episode as JSON, which a scorer with a parameter `episode` gets beside the text of the answer.

{'label', 'turns', 'messages', 'conversations', 'tools'}: see docs/your_task.md. What has no calls is one question and
one answer; control/episode_description.py describes the episodes of agents.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from areal_jax.files import JsonObject

DescribeEpisode = Callable[[], JsonObject]  # control/episode_description.py


def takes_episode(score: Callable[..., object]) -> bool:
    """Whether the scorer has a parameter `episode`."""
    try:
        parameter = inspect.signature(score).parameters.get('episode')
    except (TypeError, ValueError):  # a function of C without a signature
        return False
    return parameter is not None and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def complete_episode(
    found: JsonObject, problem: Mapping[str, object], read_prompt: Callable[[], str], text: str, finish_reason: str
) -> JsonObject:
    """`found`, with a conversation of one question and the answer where no program has made calls.

    Args:
      found: of control/episode_description.py; {} = one turn.
      read_prompt: the text of the prompt, asked where the problem has no text `question`.
      text: of the answer.
    """
    if found.get('messages'):
        return found
    question = problem.get('question')
    asked = question if isinstance(question, str) else read_prompt()
    messages = [{'role': 'user', 'content': asked}, {'role': 'assistant', 'content': text}]
    one_turn = {'label': finish_reason, 'turns': 1, 'tools': []}
    return {**one_turn, **found, 'messages': messages, 'conversations': [messages]}
