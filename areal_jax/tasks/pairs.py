"""Pairs of answers to a prompt, of which one was chosen above the other: the data of preference training."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from areal_jax.files import JsonObject
from areal_jax.tasks.demonstrations import (
    Demonstrations,
    Given,
    encode_answer,
    encode_prompts,
    read_tools,
    require_conversation,
    solve_task,
    take_keys,
)
from areal_jax.tasks.task import Split, Task, TaskError, hash_fraction
from areal_jax.tasks.user_lines import OF_PAIRS, LineKeys, read_objects, require_text
from areal_jax.text.chat_template import Messages, Tools
from areal_jax.text.tokenizer import Tokenizer, chat_messages

_FIELDS = ('prompt', 'chosen', 'rejected')
_NOUN = 'pair'


@dataclasses.dataclass(frozen=True)
class Pair:
    """A prompt and two answers; see demonstrations.Given. Raises TaskError where the two are the same tokens."""

    prompt_tokens: np.ndarray  # int32 [P], chat template applied, generation prompt included
    chosen_tokens: np.ndarray  # int32 [A], the last one EOS
    rejected_tokens: np.ndarray  # int32 [B], the last one EOS
    source: str  # 'FILE:LINE', or the question of a task: names it in errors

    def __post_init__(self) -> None:
        if np.array_equal(self.chosen_tokens, self.rejected_tokens):
            raise TaskError(f'{self.source}: chosen and rejected are the same answer: remove the line, or change one')

    @property
    def answers(self) -> tuple[np.ndarray, ...]:
        return self.chosen_tokens, self.rejected_tokens

    @property
    def size(self) -> tuple[int, int]:
        """Places it takes in a row, which has both answers: tokens that are read, tokens in the loss."""
        answered = len(self.chosen_tokens) + len(self.rejected_tokens)
        return 2 * (len(self.prompt_tokens) - 1) + answered, answered


def read_pairs(path: str, tokenizer: Tokenizer, system_prompt: str, held_out_fraction: float) -> Demonstrations:
    """Pairs from a file of JSON lines; blank lines are skipped, repeated ones kept.

    A line is an object with `prompt`, a text or a list of {role, content} whose last is the user's, and the texts
    `chosen` and `rejected`. `system_prompt` goes before prompts that do not begin with one of their own. `tools` and
    other keys are those of demonstrations. The side is decided by a hash of the first user message, so that pairs of
    the same prompt are on one side.

    Raises TaskError for a file that cannot be read, and, naming the line, for one that is malformed or empty.
    """
    keys = LineKeys(path, (*_FIELDS, 'tools'), OF_PAIRS)
    rows = [(source, *_read_pair(row, source, system_prompt, keys, tokenizer)) for source, row in read_objects(path)]
    keys.tell()
    sources, tools = [row[0] for row in rows], [row[4] for row in rows]
    prompts = encode_prompts(tokenizer, [row[1] for row in rows], sources, tools)
    sides: dict[Split, list[Pair]] = {'train': [], 'held_out': []}
    for (source, messages, chosen, rejected, _), prompt_tokens in zip(rows, prompts, strict=True):
        question = next(str(m['content']) for m in messages if m['role'] == 'user')
        side: Split = 'held_out' if hash_fraction(question) < held_out_fraction else 'train'
        first, second = (encode_answer(tokenizer, answer, source) for answer in (chosen, rejected))
        sides[side].append(Pair(prompt_tokens, first, second, source))
    return Demonstrations(tuple(sides['train']), tuple(sides['held_out']), noun=_NOUN)


def contrast_task(task: Task, tokenizer: Tokenizer) -> Demonstrations:
    """Each problem of a task once: its own answer is chosen above that of another problem of its side.

    Raises TaskError for a task whose problems have no answers, and for a side on which all have the same.
    """
    solved = solve_task(task, tokenizer)
    return Demonstrations(_contrast(solved.train), _contrast(solved.held_out), noun=_NOUN)


def _contrast(solved: Sequence[Given]) -> tuple[Pair, ...]:
    """The rejected answer is that of the next problem whose answer differs, around the end."""
    pairs = []
    for index, (prompt_tokens, answer, source) in enumerate((d.prompt_tokens, d.answers[0], d.source) for d in solved):
        others = (other.answers[0] for other in (*solved[index + 1 :], *solved[:index]))
        rejected = next((other for other in others if not np.array_equal(other, answer)), None)
        if rejected is None:
            raise TaskError(f'{source}: no other problem of its side has another answer that could be rejected')
        pairs.append(Pair(prompt_tokens, answer, rejected, source))
    return tuple(pairs)


def _read_pair(
    row: JsonObject, source: str, system_prompt: str, keys: LineKeys, tokenizer: Tokenizer
) -> tuple[Messages, str, str, Tools]:
    """The conversation before the answers, the chosen one, the rejected one, and the tools."""
    if missing := [name for name in _FIELDS if name not in row]:
        raise TaskError(
            f'{source}: expected an object with prompt, chosen and rejected, {" and ".join(missing)} is missing'
        )
    keys.require(row, source)
    chosen, rejected = (require_text(row[name], name, source) for name in _FIELDS[1:])
    messages = _read_prompt(row['prompt'], chosen, source, keys, tokenizer)
    if system_prompt and messages[0]['role'] != 'system':
        messages = [{'role': 'system', 'content': system_prompt}, *messages]
    return messages, chosen, rejected, read_tools(row, source)


def _read_prompt(prompt: object, chosen: str, source: str, keys: LineKeys, tokenizer: Tokenizer) -> Messages:
    if not isinstance(prompt, list):
        return chat_messages(require_text(prompt, 'prompt', source))
    whole = require_conversation([*prompt, {'role': 'assistant', 'content': chosen}], source, 'prompt')
    if whole[-2]['role'] != 'user':
        raise TaskError(f'{source}: the prompt ends with the role {whole[-2]["role"]!r}; it must end with user')
    return take_keys(whole, source, keys, tokenizer, 'prompt')[:-1]
