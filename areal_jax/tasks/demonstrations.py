"""Prompts with the answers to imitate, in a resumable stream: the data of supervised training."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from areal_jax.config.training import ROW_ROOM
from areal_jax.files import JsonObject
from areal_jax.tasks.task import ListedTask, OverLength, ShuffledStream, Split, Task, TaskError, hash_fraction
from areal_jax.tasks.user_lines import (
    OF_DEMONSTRATIONS,
    OF_MESSAGES,
    OF_PAIRS,
    LineKeys,
    read_objects,
    refuse,
    require_text,
    says_something,
)
from areal_jax.text.chat_template import ConversationError, Messages, TokenizerError, Tools, for_template, require_shown
from areal_jax.text.tokenizer import Tokenizer, chat_messages
from areal_jax.types import NOT_GENERATED, Prompt, Segment, Trajectory, TrajectoryGroup

_TURN = ('role', 'content', 'tool_calls', 'tool_call_id', 'name')  # of a message for a chat template
_COUNTS = ('weight', 'train', 'training', 'loss')  # whether a turn is trained


def read_tools(row: JsonObject, place: str) -> list[JsonObject]:
    """Returns the tools of a line; raises TaskError if they are not a list of definitions."""
    tools = row.get('tools') or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and 'function' in tool for tool in tools):
        raise TaskError(f"{place}: tools must be a list of objects {{'type': 'function', 'function': ...}}")
    return tools


def require_conversation(messages: object, source: str, name: str = 'messages') -> list[JsonObject]:
    """Returns the turns; raises TaskError for anything but a list of turns that ends in an answer."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise TaskError(f'{source}: {name} must be a list of objects with role and content')
    turns = [_with_content(message) for message in messages]
    for index, message in enumerate(turns):
        if missing := [key for key in ('role', 'content') if not isinstance(message.get(key), str)]:
            raise TaskError(
                f'{source}: {name}[{index}] needs {" and ".join(missing)}, each a text; it has {sorted(message)[:8]}'
            )
    roles = [message['role'] for message in turns]
    if 'user' not in roles[:-1] or roles[-1] != 'assistant':
        raise TaskError(
            f'{source}: {name} has turns of the roles {roles[:8]}; they must end with assistant, after a user'
        )
    needed = {roles.index('user'), len(roles) - 1}
    for index, message in enumerate(turns):
        require_text(message['content'], f'{name}[{index}].content', source, may_be_blank=index not in needed)
    return turns


def take_keys(
    turns: Sequence[JsonObject],
    source: str,
    keys: LineKeys,
    tokenizer: Tokenizer,
    name: str = 'messages',
    *,
    trained: Sequence[int] = (),
) -> list[JsonObject]:
    """Returns the turns with the keys that the chat template reads; `keys` counts the keys that nothing reads.

    Args:
      trained: numbers of the turns to train, of which the content alone is read; () = the last one.

    Raises TaskError for a key of the published list that is not used: in a turn to train, and in another one, if the
    template does not read the key.
    """
    found, trained = [], trained or (len(turns) - 1,)
    for number, turn in enumerate(turns):
        is_answer = number in trained
        kept: JsonObject = {}
        for key, value in turn.items():
            place = f'{name}[{number}].{key}'
            if key in _COUNTS and says_something(key, value):
                if value not in ((1, True) if is_answer else (0, False)):
                    raise refuse(place, value, source, OF_MESSAGES[key])
            elif key in ('role', 'content') or (not is_answer and _reads(tokenizer, key)):
                kept[key] = value
            elif says_something(key, value) and not (key == 'name' and turn['role'] == 'tool'):
                raise refuse(place, value, source, OF_MESSAGES[key])
            elif key not in OF_MESSAGES and key not in _TURN:
                keys.note(f'{name}.{key}')
        found.append(kept)
    for number, turn in enumerate(found[:-1]):
        if turn['role'] != 'tool' and turn.get('name') and not _shows_name(found[:-1], number, tokenizer):
            raise refuse(f'{name}[{number}].name', turn['name'], source, OF_MESSAGES['name'])
    return found


def encode_prompts(
    tokenizer: Tokenizer, conversations: Sequence[Messages], sources: Sequence[str], tools: Sequence[Tools] = ()
) -> list[np.ndarray]:
    """Returns int32 [P] of each conversation; raises TaskError with the source of one that no template renders.

    Args:
      tools: of each conversation; () = no tools.
    """
    places: dict[str, list[int]] = {}  # conversations by their tools: equal tools are encoded together
    for index in range(len(conversations)):
        places.setdefault(json.dumps(tools[index]) if tools else '[]', []).append(index)
    found: dict[int, np.ndarray] = {}
    for shown, indices in places.items():
        alike, listed = [for_template(conversations[index]) for index in indices], json.loads(shown)
        try:
            require_shown(tokenizer, alike, listed)
            prompts = tokenizer.encode_chats(alike, listed)
        except ConversationError as error:
            raise TaskError(f'{sources[indices[error.index]]}: {error}') from error
        found.update(zip(indices, prompts, strict=True))
    return [found[index] for index in range(len(conversations))]


def _with_content(message: JsonObject) -> JsonObject:
    """Gives a turn that has calls and no content an empty content."""
    return {**message, 'content': ''} if message.get('content') is None and message.get('tool_calls') else message


def _reads(tokenizer: Tokenizer, key: str) -> bool:
    """Whether a turn before the answer may have the key; calls are refused later if they are not shown."""
    return key in ('tool_calls', 'tool_call_id') or tokenizer.reads(key)


def _shows_name(turns: Sequence[JsonObject], number: int, tokenizer: Tokenizer) -> bool:
    """Whether the prompt changes without the name: a template may read only the names of tools."""
    without = [dict(turn) for turn in turns]
    del without[number]['name']
    try:
        first, second = tokenizer.encode_chats([for_template(turns), for_template(without)])
    except ConversationError:
        return True  # the template gives the reason when the prompt is made
    return not np.array_equal(first, second)


_USED = ('messages', 'question', 'answer', 'tools')  # keys of a line
_NAME = 'demonstrations'  # the task of the prompts
_TRAINED_VERSION = 0  # policy version of answer tokens: any that is not NOT_GENERATED puts them into the loss


@dataclasses.dataclass(frozen=True)
class Demonstration:
    """A prompt and the answer to imitate, or the chosen and the rejected answer of a pair."""

    prompt_tokens: np.ndarray  # int32 [P], chat template applied, generation prompt included
    answers: tuple[np.ndarray, ...]  # int32 [A] each, the last one EOS; each becomes a trajectory
    source: str  # 'FILE:LINE', or the question of a task: names it in errors
    trained: tuple[np.ndarray, ...] = ()  # bool [A] of each answer, False between its turns; () = all tokens

    @property
    def size(self) -> tuple[int, int]:
        """The places it takes in a row: tokens that are read, tokens in the loss. The last token is never read."""
        answered = sum(map(len, self.answers))
        in_loss = sum(int(mask.sum()) for mask in self.trained) if self.trained else answered
        return len(self.answers) * (len(self.prompt_tokens) - 1) + answered, in_loss

    def segments(self) -> tuple[tuple[Segment, ...], ...]:
        """The segments of each answer; tokens between its turns are not in the loss."""
        masks = self.trained or tuple(np.ones(len(tokens), bool) for tokens in self.answers)
        return tuple(_cut_segments(tokens, mask) for tokens, mask in zip(self.answers, masks, strict=True))


@dataclasses.dataclass(frozen=True)
class Demonstrations:
    """All demonstrations, or all pairs, tokenized and split."""

    train: tuple[Demonstration, ...]
    held_out: tuple[Demonstration, ...]
    dropped: int = 0  # left out because they fit no row
    noun: str = 'demonstration'  # the name of one in errors

    def stream(self, seed: int) -> DemonstrationStream:
        """Returns an endless stream over the training side. Raises TaskError if that is empty."""
        return DemonstrationStream(self._side('train'), seed)

    def held_out_groups(self, n: int, seed: int) -> list[TrajectoryGroup]:
        """Returns n held-out demonstrations, or all if there are fewer. Raises TaskError for n > 0 without any."""
        if n == 0:
            return []
        side = self._side('held_out')
        stream = DemonstrationStream(side, seed)
        return [stream.draw() for _ in range(min(n, len(side)))]  # the first epoch repeats nothing

    def fitting(self, room: tuple[int, int], over_length: OverLength) -> Demonstrations:
        """Keeps the demonstrations that fit a row of this shape.

        Args:
          room: most tokens, and most loss tokens, of a row.
          over_length: 'refuse' | 'drop' (and count) the others.

        Raises TaskError for the first one that does not fit, if it is to be refused.
        """
        capacity = dict(zip(ROW_ROOM, room, strict=True))
        everything = self.train + self.held_out
        train, held_out = (tuple(d for d in side if _fits(d, capacity)) for side in (self.train, self.held_out))
        dropped = len(everything) - len(train) - len(held_out)
        if dropped and over_length == 'refuse':
            raise TaskError(_describe_too_long(everything, capacity, self.noun))
        return dataclasses.replace(self, train=train, held_out=held_out, dropped=self.dropped + dropped)

    def _side(self, split: Split) -> tuple[Demonstration, ...]:
        side = self.train if split == 'train' else self.held_out
        if not side:
            left_out = f' ({self.dropped} fit no row and were dropped)' if self.dropped else ''
            raise TaskError(
                f'there is no {self.noun} on the side {split!r}{left_out}; change task.held_out_fraction'
                f'{", set evaluation.problems=0" if split == "held_out" else ""}'
                f'{f" or raise {ROW_ROOM[0]} and {ROW_ROOM[1]}" if self.dropped else ""}'
            )
        return side


class DemonstrationStream:
    """Every demonstration once per epoch, in an order that is a function of (seed, epoch): the position is a number."""

    def __init__(self, demonstrations: Sequence[Demonstration], seed: int):
        self._demonstrations = demonstrations
        problems = [{'index': index, 'source': d.source} for index, d in enumerate(demonstrations)]
        self._prompts = ShuffledStream(problems, self._make_prompt, seed)

    @property
    def size(self) -> int:
        """Demonstrations in an epoch."""
        return self._prompts.size

    def draw(self) -> TrajectoryGroup:
        """Draws the next demonstration (a group of one trajectory) or pair (a group of two) for the learner."""
        prompt = self._prompts.draw()
        answers = self._demonstrations[prompt.problem['index']].segments()
        return TrajectoryGroup(
            prompt.draw,
            tuple(
                Trajectory(prompt, sample, segments, 0.0, 'stop', '', 0.0, 0.0)
                for sample, segments in enumerate(answers)
            ),
        )

    def state(self) -> JsonObject:
        """The number of the next draw, with the digest that determines which demonstration it is."""
        return {**self._prompts.state(), 'sha256': _digest(self._demonstrations)}

    def restore(self, state: JsonObject) -> None:
        """Continues from `state`; raises TaskError if it comes from a stream of other demonstrations."""
        if state['sha256'] != (here := _digest(self._demonstrations)):
            raise TaskError(
                f'the demonstrations are not those of the saved run: their tokens had sha256 {state["sha256"][:12]}, '
                f'these have {here[:12]}. Resume with the file as it was, or start a new run'
            )
        self._prompts.restore(state)

    def _make_prompt(self, draw: int, problem: JsonObject) -> Prompt:
        return Prompt(draw, self._demonstrations[problem['index']].prompt_tokens, _NAME, problem)


def _cut_segments(tokens: np.ndarray, mask: np.ndarray) -> tuple[Segment, ...]:
    """Cuts int32 [A] where bool [A] changes."""
    places = np.flatnonzero(np.diff(mask)) + 1
    return tuple(
        Segment(part, np.zeros(len(part), np.float32), _TRAINED_VERSION if kept[0] else NOT_GENERATED)
        for part, kept in zip(np.split(tokens, places), np.split(mask, places), strict=True)
    )


def read_demonstrations(
    path: str,
    tokenizer: Tokenizer,
    system_prompt: str,
    held_out_fraction: float,
    columns: Mapping[str, str] = MappingProxyType({}),
) -> Demonstrations:
    """Demonstrations from a file or data set (see `read_objects`); blank lines are skipped, repeated ones kept.

    A line is an object with `messages`, a list of {role, content} whose last is the assistant's answer (earlier ones of
    the assistant are context, except where `train` or `weight` is 1), or else with `question` and `answer`.
    `system_prompt` goes before conversations that do not begin with a system prompt. The chat template shows the
    `tools` of a line, and the keys of earlier messages that it reads. Other keys that would change what is trained are
    refused (user_lines.py). A hash of the first user message decides the side, so that a question with several answers
    is on one side, and on the same side as in the task 'jsonl'.

    Raises TaskError for a file that cannot be read or is empty, and, naming the line, for a malformed line.
    """
    keys = LineKeys(path, _USED, OF_DEMONSTRATIONS, ('messages', 'question'), ('messages', 'answer'))
    lines = [_read_conversation(row, source, keys, tokenizer) for source, row in read_objects(path, columns=columns)]
    keys.tell()
    return _encode_lines(lines, tokenizer, system_prompt, held_out_fraction)


class _Line(NamedTuple):
    source: str
    messages: Messages  # before the answers
    tools: Tools
    answers: tuple[Sequence[JsonObject], ...]  # turns of each, from the first trained one on; see _encode_turns


def _encode_lines(
    lines: Sequence[_Line],
    tokenizer: Tokenizer,
    system_prompt: str,
    held_out_fraction: float,
    noun: str = 'demonstration',
) -> Demonstrations:
    told = [{'role': 'system', 'content': system_prompt}] if system_prompt else []
    conversations = [[*(told if line.messages[0]['role'] != 'system' else ()), *line.messages] for line in lines]
    sources, tools = [line.source for line in lines], [line.tools for line in lines]
    prompts = encode_prompts(tokenizer, conversations, sources, tools)
    sides: dict[Split, list[Demonstration]] = {'train': [], 'held_out': []}
    for line, prompt_tokens in zip(lines, prompts, strict=True):
        question = next(str(m['content']) for m in line.messages if m['role'] == 'user')
        side: Split = 'held_out' if hash_fraction(question) < held_out_fraction else 'train'
        encoded = [_encode_turns(tokenizer, turns, line.tools, line.source) for turns in line.answers]
        answers, trained = tuple(tokens for tokens, _ in encoded), tuple(mask for _, mask in encoded)
        if len(answers) == 2 and np.array_equal(*answers):
            raise TaskError(f'{line.source}: chosen and rejected are the same answer: remove the line, or change one')
        is_cut = not all(mask.all() for mask in trained)
        sides[side].append(Demonstration(prompt_tokens, answers, line.source, trained if is_cut else ()))
    return Demonstrations(tuple(sides['train']), tuple(sides['held_out']), noun=noun)


def _encode_turns(
    tokenizer: Tokenizer, turns: Sequence[JsonObject], tools: Tools, source: str
) -> tuple[np.ndarray, np.ndarray]:
    """Returns int32 [A] and bool [A], whether a token is in the loss: the row that an agent would have.

    Args:
      turns: the assistant's, with `train`, and between them results of tools and at most one turn of the user.

    Raises TaskError for turns that the template cannot continue like that.
    """
    parts: list[tuple[np.ndarray, bool]] = []
    places = [*(index for index, turn in enumerate(turns) if turn['role'] == 'assistant'), len(turns)]
    for place, following in itertools.pairwise(places):
        parts.append((encode_answer(tokenizer, turns[place]['content'], source), turns[place]['train']))
        if between := for_template(turns[place + 1 : following]):
            tokens = tokenizer.extend_chat(between, tools, closed_by=tokenizer.eos_id)
            if tokens is None:
                roles = ', '.join(str(turn['role']) for turn in between)
                raise TaskError(
                    f'{source}: turns of {roles} after a trained turn: only results of tools and then at most one turn '
                    'of the user may be there, and the chat template must write them without changing earlier turns'
                )
            parts.append((tokens, False))
    masks = [np.full(len(tokens), is_trained) for tokens, is_trained in parts]
    return np.concatenate([tokens for tokens, _ in parts]).astype(np.int32), np.concatenate(masks)


def _answer_turns(answer: str) -> list[JsonObject]:
    return [{'role': 'assistant', 'content': answer, 'train': True}]


def solve_task(task: Task, tokenizer: Tokenizer) -> Demonstrations:
    """Returns each problem of a task once, with its answer, or the conversation `messages` if it has one.

    Raises TaskError if a problem has no answer.
    """
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
        if 'messages' in prompt.problem:
            demonstrations.append(_encode_conversation(dict(prompt.problem), source, tokenizer))
            continue
        if 'answer' not in prompt.problem:
            raise TaskError(f'{source} has no answer to imitate; use task.name=jsonl with task.path')
        answer = encode_answer(tokenizer, str(prompt.problem['answer']), source)
        demonstrations.append(Demonstration(prompt.tokens, (answer,), source))
    return tuple(demonstrations)


def _encode_conversation(problem: JsonObject, source: str, tokenizer: Tokenizer) -> Demonstration:
    row = {'messages': problem['messages'], 'tools': problem.get('tools')}
    line = _read_conversation(row, source, LineKeys(source, _USED, OF_DEMONSTRATIONS), tokenizer)
    [found] = _encode_lines([line], tokenizer, '', 0.0).train
    return found


def _read_conversation(row: JsonObject, source: str, keys: LineKeys, tokenizer: Tokenizer) -> _Line:
    if not ('messages' in row or {'question', 'answer'} <= row.keys()):
        raise TaskError(f'{source}: expected an object with question and answer, or messages; it has {sorted(row)[:8]}')
    keys.require(row, source)
    if 'messages' not in row:
        question = chat_messages(require_text(row['question'], 'question', source))
        answers = _answer_turns(require_text(row['answer'], 'answer', source))
        return _Line(source, question, read_tools(row, source), (answers,))
    turns = require_conversation(row['messages'], source)
    trained = _find_trained(turns)
    for number in trained:
        require_text(turns[number]['content'], f'messages[{number}].content', source)
    kept = take_keys(turns, source, keys, tokenizer, trained=trained)
    answers = [{**turn, 'train': number in trained} for number, turn in enumerate(kept)][trained[0] :]
    for number, turn in enumerate(answers, start=trained[0]):
        if turn['role'] == 'assistant' and turn.get('tool_calls'):
            raise refuse(f'messages[{number}].tool_calls', turn['tool_calls'], source, OF_MESSAGES['tool_calls'])
    return _Line(source, kept[: trained[0]], read_tools(row, source), (answers,))


def _find_trained(turns: Sequence[JsonObject]) -> list[int]:
    """Returns the numbers of the turns to train: the last one, and the assistant's that one of _COUNTS marks."""
    marked = (
        number
        for number, turn in enumerate(turns[:-1])
        if turn['role'] == 'assistant' and any(turn.get(key) in (1, True) for key in _COUNTS)
    )
    return [*marked, len(turns) - 1]


def encode_answer(tokenizer: Tokenizer, answer: str, source: str) -> np.ndarray:
    """Returns int32 [A], the end token last; raises TaskError if the answer cannot be encoded or holds an end token."""
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


def _fits(demonstration: Demonstration, capacity: Mapping[str, int]) -> bool:
    return all(needed <= room for needed, room in zip(demonstration.size, capacity.values(), strict=True))


def _describe_too_long(demonstrations: Sequence[Demonstration], capacity: Mapping[str, int], noun: str) -> str:
    too_long = [d for d in demonstrations if not _fits(d, capacity)]
    needed = dict(zip(capacity, np.max([d.size for d in too_long], axis=0).tolist(), strict=True))
    lacking = [f'{field} to {needed[field]} (it is {room})' for field, room in capacity.items() if needed[field] > room]
    read, answered = too_long[0].size
    return (
        f'{too_long[0].source} takes {read} places of a row, {answered} of them in the loss, and no row has as many; '
        f'{len(too_long)} of {len(demonstrations)} {noun}s are too long: raise {" and ".join(lacking)}, or '
        'leave them out with task.over_length=drop'
    )


def _digest(demonstrations: Sequence[Demonstration]) -> str:
    digest = hashlib.sha256()
    for d in demonstrations:
        parts = [d.prompt_tokens, *d.answers, *d.trained]
        digest.update(np.array([len(part) for part in parts], '<i4').tobytes())
        digest.update(np.concatenate(parts).astype('<i4').tobytes())
    return digest.hexdigest()


# Pairs of answers to a prompt, of which one was preferred to the other: the data of preference training.


_FIELDS = ('prompt', 'chosen', 'rejected')
_NOUN = 'pair'


def read_pairs(
    path: str,
    tokenizer: Tokenizer,
    system_prompt: str,
    held_out_fraction: float,
    columns: Mapping[str, str] = MappingProxyType({}),
) -> Demonstrations:
    """Pairs from a file or data set (see `read_objects`); blank lines are skipped, repeated ones kept.

    A line is an object with `prompt`, a text or a list of {role, content} whose last is the user's, and the texts
    `chosen` and `rejected`. `system_prompt` goes before prompts that do not begin with a system prompt. `tools` and
    other keys are as in read_demonstrations. A hash of the first user message decides the side, so that pairs of the
    same prompt are on one side.

    Raises TaskError for a file that cannot be read or is empty, and, naming the line, for a malformed line.
    """
    keys = LineKeys(path, (*_FIELDS, 'tools'), OF_PAIRS)
    lines = [_read_pair(row, source, keys, tokenizer) for source, row in read_objects(path, columns=columns)]
    keys.tell()
    return _encode_lines(lines, tokenizer, system_prompt, held_out_fraction, _NOUN)


def contrast_task(task: Task, tokenizer: Tokenizer) -> Demonstrations:
    """Returns each problem of a task once: its answer is chosen, the answer of another problem of its side is rejected.

    Raises TaskError for a task whose problems have no answers, and for a side on which all answers are the same.
    """
    solved = solve_task(task, tokenizer)
    if any(d.trained for d in (*solved.train, *solved.held_out)):
        raise TaskError(f'task.name={task.name!r} has conversations to imitate, and pairs are of single answers')
    return Demonstrations(_contrast(solved.train), _contrast(solved.held_out), noun=_NOUN)


def _contrast(solved: Sequence[Demonstration]) -> tuple[Demonstration, ...]:
    """Pairs each answer with a rejected one: the next different answer of another problem, cyclically."""
    pairs = []
    for index, (prompt_tokens, answer, source) in enumerate((d.prompt_tokens, d.answers[0], d.source) for d in solved):
        others = (other.answers[0] for other in (*solved[index + 1 :], *solved[:index]))
        rejected = next((other for other in others if not np.array_equal(other, answer)), None)
        if rejected is None:
            raise TaskError(f'{source}: no other problem of its side has another answer that could be rejected')
        pairs.append(Demonstration(prompt_tokens, (answer, rejected), source))
    return tuple(pairs)


def _read_pair(row: JsonObject, source: str, keys: LineKeys, tokenizer: Tokenizer) -> _Line:
    if missing := [name for name in _FIELDS if name not in row]:
        raise TaskError(
            f'{source}: expected an object with prompt, chosen and rejected, {" and ".join(missing)} is missing'
        )
    keys.require(row, source)
    chosen, rejected = (require_text(row[name], name, source) for name in _FIELDS[1:])
    messages = _read_prompt(row['prompt'], chosen, source, keys, tokenizer)
    return _Line(source, messages, read_tools(row, source), (_answer_turns(chosen), _answer_turns(rejected)))


def _read_prompt(prompt: object, chosen: str, source: str, keys: LineKeys, tokenizer: Tokenizer) -> Messages:
    if not isinstance(prompt, list):
        return chat_messages(require_text(prompt, 'prompt', source))
    whole = require_conversation([*prompt, {'role': 'assistant', 'content': chosen}], source, 'prompt')
    if whole[-2]['role'] != 'user':
        raise TaskError(f'{source}: the prompt ends with the role {whole[-2]["role"]!r}; it must end with user')
    return take_keys(whole, source, keys, tokenizer, 'prompt')[:-1]
