"""Prompts with the answers to imitate, in a resumable stream: the data of supervised training."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from areal_jax.files import JsonObject
from areal_jax.tasks.demonstrations import encode_prompts, read_tools, require_conversation, take_keys
from areal_jax.tasks.task import ListedTask, OverLength, ShuffledStream, Split, Task, TaskError, hash_fraction
from areal_jax.tasks.user_lines import OF_DEMONSTRATIONS, LineKeys, read_objects, require_text
from areal_jax.text.chat_template import Messages, TokenizerError, Tools
from areal_jax.text.tokenizer import Tokenizer, chat_messages
from areal_jax.types import Prompt, Segment, Trajectory, TrajectoryGroup

_USED = ('messages', 'question', 'answer', 'tools')  # keys of a line
_NAME = 'demonstrations'  # what the prompts give as their task
_TRAINED_VERSION = 0  # policy version of answer tokens: any that is not NOT_GENERATED puts them into the loss


@dataclasses.dataclass(frozen=True)
class Demonstration:
    """A prompt and the answer to imitate."""

    prompt_tokens: np.ndarray  # int32 [P], chat template applied, generation prompt included
    answer_tokens: np.ndarray  # int32 [A], the last one EOS
    source: str  # 'FILE:LINE', or the question of a task: names it in errors

    @property
    def answers(self) -> tuple[np.ndarray, ...]:
        """Of which each becomes a trajectory."""
        return (self.answer_tokens,)

    @property
    def size(self) -> tuple[int, int]:
        """Places it takes in a row: tokens that are read, tokens in the loss. The last token is never read."""
        return len(self.prompt_tokens) + len(self.answer_tokens) - 1, len(self.answer_tokens)


class Given(Protocol):
    """What supervised training draws: a Demonstration, or a pair of answers (demonstrations.py)."""

    @property
    def prompt_tokens(self) -> np.ndarray: ...
    @property
    def answers(self) -> tuple[np.ndarray, ...]: ...
    @property
    def source(self) -> str: ...
    @property
    def size(self) -> tuple[int, int]: ...


@dataclasses.dataclass(frozen=True)
class Demonstrations:
    """All that is to be imitated, or all pairs, tokenized and split."""

    train: tuple[Given, ...]
    held_out: tuple[Given, ...]
    dropped: int = 0  # left out because they fit no row
    noun: str = 'demonstration'  # what errors call one

    def stream(self, seed: int) -> DemonstrationStream:
        """An endless stream over the training side. Raises TaskError when that is empty."""
        return DemonstrationStream(self._side('train'), seed)

    def held_out_groups(self, n: int, seed: int) -> list[TrajectoryGroup]:
        """n of the held-out demonstrations, or all if there are fewer. Raises TaskError for n > 0 and none."""
        if n == 0:
            return []
        side = self._side('held_out')
        stream = DemonstrationStream(side, seed)
        return [stream.draw() for _ in range(min(n, len(side)))]  # the first epoch repeats nothing

    def fitting(self, row_tokens: int, row_loss_tokens: int, over_length: OverLength) -> Demonstrations:
        """Those that fit a row of this shape.

        Args:
          over_length: what to do about others: 'refuse' | 'drop', which counts them.

        Raises TaskError for the first one that does not fit and is not to be dropped.
        """
        capacity = {'learner.row_tokens': row_tokens, 'learner.row_loss_tokens': row_loss_tokens}
        everything = self.train + self.held_out
        train, held_out = (tuple(d for d in side if _fits(d, capacity)) for side in (self.train, self.held_out))
        dropped = len(everything) - len(train) - len(held_out)
        if dropped and over_length == 'refuse':
            raise TaskError(_describe_too_long(everything, capacity, self.noun))
        return dataclasses.replace(self, train=train, held_out=held_out, dropped=self.dropped + dropped)

    def _side(self, split: Split) -> tuple[Given, ...]:
        side = self.train if split == 'train' else self.held_out
        if not side:
            left_out = f' ({self.dropped} fit no row and were dropped)' if self.dropped else ''
            raise TaskError(
                f'there is no {self.noun} on the side {split!r}{left_out}; change task.held_out_fraction'
                f'{", set evaluation.problems=0" if split == "held_out" else ""}'
                f'{" or raise learner.row_tokens and learner.row_loss_tokens" if self.dropped else ""}'
            )
        return side


class DemonstrationStream:
    """Every demonstration once per epoch, in an order that is a function of (seed, epoch): the position is a number."""

    def __init__(self, demonstrations: Sequence[Given], seed: int):
        self._demonstrations = demonstrations
        problems = [{'index': index, 'source': d.source} for index, d in enumerate(demonstrations)]
        self._prompts = ShuffledStream(problems, self._make_prompt, seed)

    @property
    def size(self) -> int:
        """Demonstrations in an epoch."""
        return self._prompts.size

    def draw(self) -> TrajectoryGroup:
        """The next demonstration, a group of one trajectory, or the next pair, one of two: what the learner takes."""
        prompt = self._prompts.draw()
        answers = self._demonstrations[prompt.problem['index']].answers
        segments = [Segment(tokens, np.zeros(len(tokens), np.float32), _TRAINED_VERSION) for tokens in answers]
        return TrajectoryGroup(
            prompt.draw,
            tuple(
                Trajectory(prompt, sample, (segment,), 0.0, 'stop', '', 0.0, 0.0)
                for sample, segment in enumerate(segments)
            ),
        )

    def state(self) -> JsonObject:
        """The number of the next draw, with the digest that determines which demonstration it is."""
        return {**self._prompts.state(), 'sha256': _digest(self._demonstrations)}

    def restore(self, state: JsonObject) -> None:
        """Go on from `state`; raises TaskError when it comes from a stream of others."""
        if state['sha256'] != (here := _digest(self._demonstrations)):
            raise TaskError(
                f'the demonstrations are not those of the saved run: their tokens had sha256 {state["sha256"][:12]}, '
                f'these have {here[:12]}. Resume with the file as it was, or start a new run'
            )
        self._prompts.restore(state)

    def _make_prompt(self, draw: int, problem: JsonObject) -> Prompt:
        return Prompt(draw, self._demonstrations[problem['index']].prompt_tokens, _NAME, problem)


def read_demonstrations(
    path: str, tokenizer: Tokenizer, system_prompt: str, held_out_fraction: float
) -> Demonstrations:
    """Demonstrations from a file of JSON lines; blank lines are skipped, repeated ones kept.

    A line is an object with `messages`, a list of {role, content} whose last is the assistant's answer (earlier
    ones of the assistant are context), or else with `question` and `answer`. `system_prompt` goes before conversations
    that do not begin with one of their own. The chat template shows the `tools` of a line that has some, and what it
    reads of earlier messages. Other keys that would change what is trained are refused (user_lines.py). The side is
    decided by a hash of the first user message, so that a question with several answers is on one side, and on the same
    as in the task 'jsonl'.

    Raises TaskError for a file that cannot be read, and, naming the line, for one that is malformed or empty.
    """
    keys = LineKeys(path, _USED, OF_DEMONSTRATIONS, ('messages', 'question'), ('messages', 'answer'))
    rows = [
        (source, *_read_conversation(row, source, system_prompt, keys, tokenizer)) for source, row in read_objects(path)
    ]
    keys.tell()
    sources = [row[0] for row in rows]
    prompts = encode_prompts(tokenizer, [messages for _, messages, _, _ in rows], sources, [row[2] for row in rows])
    sides: dict[Split, list[Demonstration]] = {'train': [], 'held_out': []}
    for (source, messages, _, answer), prompt_tokens in zip(rows, prompts, strict=True):
        question = next(str(m['content']) for m in messages if m['role'] == 'user')
        side: Split = 'held_out' if hash_fraction(question) < held_out_fraction else 'train'
        sides[side].append(_encode(tokenizer, prompt_tokens, answer, source))
    return Demonstrations(tuple(sides['train']), tuple(sides['held_out']))


def solve_task(task: Task, tokenizer: Tokenizer) -> Demonstrations:
    """Each problem of a task once, with its own answer. Raises TaskError for a task whose problems have none."""
    if not isinstance(task, ListedTask):
        raise TaskError(f'task.name={task.name!r} does not list its problems; use task.name=jsonl with task.path')
    return Demonstrations(_solve_side(task, 'train', tokenizer), _solve_side(task, 'held_out', tokenizer))


def _solve_side(task: ListedTask, split: Split, tokenizer: Tokenizer) -> tuple[Demonstration, ...]:
    if not task.problems[split]:
        return ()
    stream = task.prompts(split, seed=0)
    demonstrations = []
    for prompt in (stream.draw() for _ in range(stream.size)):  # the first epoch: each once
        source = f'{task.name}: {prompt.problem.get("question", dict(prompt.problem))!r}'
        if 'answer' not in prompt.problem:
            raise TaskError(f'{source} has no answer to imitate; use task.name=jsonl with task.path')
        demonstrations.append(_encode(tokenizer, prompt.tokens, str(prompt.problem['answer']), source))
    return tuple(demonstrations)


def _read_conversation(
    row: JsonObject, source: str, system_prompt: str, keys: LineKeys, tokenizer: Tokenizer
) -> tuple[Messages, Tools, str]:
    """The conversation up to the answer, its tools, and the answer."""
    if not ('messages' in row or {'question', 'answer'} <= row.keys()):
        raise TaskError(f'{source}: expected an object with question and answer, or messages; it has {sorted(row)[:8]}')
    keys.require(row, source)
    if 'messages' not in row:
        messages: list[JsonObject] = list(chat_messages(require_text(row['question'], 'question', source)))
        messages.append({'role': 'assistant', 'content': require_text(row['answer'], 'answer', source)})
    else:
        messages = take_keys(require_conversation(row['messages'], source), source, keys, tokenizer)
    if system_prompt and messages[0]['role'] != 'system':
        messages = [{'role': 'system', 'content': system_prompt}, *messages]
    return messages[:-1], read_tools(row, source), messages[-1]['content']


def _encode(tokenizer: Tokenizer, prompt_tokens: np.ndarray, answer: str, source: str) -> Demonstration:
    return Demonstration(prompt_tokens, encode_answer(tokenizer, answer, source), source)


def encode_answer(tokenizer: Tokenizer, answer: str, source: str) -> np.ndarray:
    """int32 [A], the end token last; raises TaskError where the answer cannot be encoded or holds the end token."""
    try:
        answer_tokens = tokenizer.encode(answer)
    except TokenizerError as error:
        raise TaskError(f'{source}: {error}') from error
    if not set(tokenizer.end_ids).isdisjoint(answer_tokens.tolist()):
        raise TaskError(
            f'{source}: the answer {answer[-80:]!r} contains the text of an end token, which would end it there; '
            'remove it: the end token is added'
        )
    return np.append(answer_tokens, np.int32(tokenizer.eos_id))


def _fits(demonstration: Given, capacity: Mapping[str, int]) -> bool:
    return all(needed <= room for needed, room in zip(demonstration.size, capacity.values(), strict=True))


def _describe_too_long(demonstrations: Sequence[Given], capacity: Mapping[str, int], noun: str) -> str:
    too_long = [d for d in demonstrations if not _fits(d, capacity)]
    needed = dict(zip(capacity, np.max([d.size for d in too_long], axis=0).tolist(), strict=True))
    lacking = [f'{field} to {needed[field]} (it is {room})' for field, room in capacity.items() if needed[field] > room]
    read, answered = too_long[0].size
    return (
        f'{too_long[0].source} takes {read} places of a row, {answered} of them in the loss, and no row has as many; '
        f'{len(too_long)} of {len(demonstrations)} {noun}s are too long: raise {" and ".join(lacking)}, or '
        'leave them out with task.over_length=drop'
    )


def _digest(demonstrations: Sequence[Given]) -> str:
    """sha256, in hex, of all tokens and of the lengths of prompts and answers."""
    digest = hashlib.sha256()
    for d in demonstrations:
        parts = [d.prompt_tokens, *d.answers]
        digest.update(np.array([len(part) for part in parts], '<i4').tobytes())
        digest.update(np.concatenate(parts).astype('<i4').tobytes())
    return digest.hexdigest()
