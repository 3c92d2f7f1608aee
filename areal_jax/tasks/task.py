"""The protocol of tasks, tasks whose problems are listed, and the seeded, resumable stream of their prompts.

The modules of the tasks build a ListedTask; the controller draws prompts from its stream.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np

from areal_jax.errors import UserError
from areal_jax.files import JsonObject
from areal_jax.plugins import spec_of
from areal_jax.protocols import PromptStream
from areal_jax.tasks.answers.number_reader import integer_or_text
from areal_jax.text.chat_template import ConversationError, Messages
from areal_jax.text.tokenizer import Tokenizer
from areal_jax.types import FinishReason, Prompt

Split = Literal['train', 'held_out']
Problem = JsonObject  # JSON-able: what a scorer needs to know
# (problem, text of the answer, how it ended) -> reward; a parameter `episode` gets the episode as JSON
Scorer = Callable[..., float]
OverLength = Literal['refuse', 'drop']  # what to do with a problem that is too long: task.over_length
_Item = TypeVar('_Item')


class TaskError(UserError, ValueError):
    """Raised for a task that cannot be built or continued as asked; the message names the fields and the fix."""


class PromptSet(Protocol):
    """The prompts of a run: a task, or a mixture of several."""

    name: str

    def sizes(self) -> Mapping[str, int]:
        """The number of problems: {'train', 'held_out', 'dropped'}."""
        ...

    def prompts(self, split: Split, seed: int) -> PromptStream:
        """An endless stream over the problems of one side of the split."""
        ...

    def held_out(self, n: int, seed: int) -> list[Prompt]:
        """Distinct held-out problems, draw numbers 0, 1, ...: n of them, or all if there are fewer."""
        ...


class Task(PromptSet, Protocol):
    """Prompts whose answers can be scored."""

    scorer: str  # 'module:function' or '/path/to/file.py:function', how a worker process finds `score`

    def fitting(self, prompt_tokens: int, over_length: OverLength) -> Task:
        """Returns the task with the problems whose prompts have at most `prompt_tokens` tokens.

        Raises a TaskError that names the first longer one, unless it is to be dropped; dropped problems are counted.
        """
        ...

    def score(self, problem: Problem, answer_text: str, finish_reason: FinishReason) -> float:
        """The reward: a function of its arguments alone."""
        ...

    def final_answer(self, text: str) -> str:
        """The final answer of a text: texts with an equal one give the same answer, as in a majority vote."""
        ...


class ListedTask:
    """A task whose problems are all listed and already split.

    The prompts of a side are tokenized together, when the first of them is needed, and kept: for the 7473 prompts of
    GSM8K this takes about 2 s on 2 CPU cores.
    """

    def __init__(
        self,
        name: str,
        score: Scorer,
        problems: Mapping[Split, Sequence[Problem]],
        messages: Callable[[Problem], Messages],
        tokenizer: Tokenizer,
        final_answer: Callable[[str], str] = integer_or_text,
    ):
        self.name = name
        self.scorer = spec_of(score)
        self.problems = {side: tuple(listed) for side, listed in problems.items()}
        self.dropped = 0  # left out by `fitting`
        self.score = score
        self._messages = messages
        self._tokenizer = tokenizer
        self.final_answer = final_answer
        self._tokens: dict[Split, list[np.ndarray]] = {}  # of the prompts, int32 [P] each

    def fitting(self, prompt_tokens: int, over_length: OverLength) -> ListedTask:
        """Returns the task with the problems whose prompts have at most `prompt_tokens` tokens; see Task."""
        sides = {side: list(zip(self.problems[side], self._encode(side), strict=True)) for side in self.problems}
        pairs = [pair for listed in sides.values() for pair in listed]
        too_long = [(problem, tokens) for problem, tokens in pairs if len(tokens) > prompt_tokens]
        if too_long and over_length == 'refuse':
            problem, tokens = too_long[0]
            longest = max(len(tokens) for _, tokens in too_long)
            raise TaskError(
                f'{_describe(self.name, problem)} has a prompt of {len(tokens)} tokens, but rollout.context_tokens '
                f'less rollout.max_new_tokens leaves {prompt_tokens}; {len(too_long)} of {len(pairs)} prompts are too '
                f'long: raise rollout.context_tokens by at least {longest - prompt_tokens}, or leave them out with '
                'task.over_length=drop'
            )
        kept = {side: [pair for pair in listed if len(pair[1]) <= prompt_tokens] for side, listed in sides.items()}
        problems = {side: [problem for problem, _ in listed] for side, listed in kept.items()}
        fitting = copy.copy(self)
        fitting.problems = {side: tuple(listed) for side, listed in problems.items()}
        fitting._tokens = {side: [tokens for _, tokens in listed] for side, listed in kept.items()}
        fitting.dropped = self.dropped + len(too_long)
        return fitting

    def sizes(self) -> dict[str, int]:
        """The number of problems: {'train', 'held_out', 'dropped'}."""
        return {side: len(listed) for side, listed in self.problems.items()} | {'dropped': self.dropped}

    def prompts(self, split: Split, seed: int) -> ShuffledStream[tuple[Problem, np.ndarray]]:
        """An endless stream over the problems of one side of the split. Raises TaskError if the side is empty."""
        if not self.problems[split]:
            raise TaskError(self._describe_empty(split))
        pairs = list(zip(self.problems[split], self._encode(split), strict=True))
        return ShuffledStream(pairs, self._make_prompt, seed)

    def held_out(self, n: int, seed: int) -> list[Prompt]:
        """Returns distinct held-out problems, draw numbers 0, 1, ...: n of them, or all if there are fewer."""
        if n == 0:
            return []
        stream = self.prompts('held_out', seed)
        return [stream.draw() for _ in range(min(n, stream.size))]  # the first epoch repeats nothing

    def _make_prompt(self, draw: int, item: tuple[Problem, np.ndarray]) -> Prompt:
        problem, tokens = item
        return Prompt(draw, tokens, self.name, problem)

    def _encode(self, split: Split) -> list[np.ndarray]:
        if split not in self._tokens:
            problems = self.problems[split]
            try:
                self._tokens[split] = self._tokenizer.encode_chats([self._messages(problem) for problem in problems])
            except ConversationError as error:
                raise TaskError(f'{_describe(self.name, problems[error.index])}: {error}') from error
            for tokens in self._tokens[split]:
                tokens.flags.writeable = False  # every epoch draws the same array
        return self._tokens[split]

    def _describe_empty(self, split: Split) -> str:
        sizes = self.sizes()
        other = 'train' if split == 'held_out' else 'held_out'
        dropped = f' and {self.dropped} were dropped as too long' if self.dropped else ''
        return (
            f'task {self.name!r} has no problem on the side {split!r}: {sizes[other]} are on the side {other!r}'
            f'{dropped}; change task.held_out_fraction{", or set evaluation.problems=0" if split == "held_out" else ""}'
            f'{", or raise rollout.context_tokens" if self.dropped else ""}'
        )


class ShuffledStream(Generic[_Item]):
    """Every problem once per epoch, in an order that depends on (seed, epoch) alone, so the position is one number."""

    def __init__(self, problems: Sequence[_Item], make_prompt: Callable[[int, _Item], Prompt], seed: int):
        self.size = len(problems)
        self._problems = problems
        self._make_prompt = make_prompt
        self._seed = seed
        self._next = 0
        self._epoch = -1
        self._order = np.zeros(0, np.int64)

    def draw(self) -> Prompt:
        """The next prompt; its `draw` is one more than the last."""
        draw = self._next
        epoch, place = divmod(draw, self.size)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, shuffle(self.size, self._seed, epoch)
        self._next += 1
        return self._make_prompt(draw, self._problems[int(self._order[place])])

    def state(self) -> JsonObject:
        """The number of the next draw, with the seed and size that determine which prompt it is."""
        return {'draw': self._next, 'seed': self._seed, 'size': self.size}

    def restore(self, state: JsonObject) -> None:
        """Continues from `state`; raises TaskError if it comes from a stream of other prompts."""
        for field, here in (('seed', self._seed), ('size', self.size)):
            if state[field] != here:
                raise TaskError(
                    f'the saved prompt stream has {field}={state[field]}, this one {field}={here}: its next draw would '
                    'be another prompt. Restore with the run.seed and the task of the saved run'
                )
        self._next = int(state['draw'])


def _describe(task: str, problem: Problem) -> str:
    question = str(problem.get('question', problem.get('prompt', problem)))
    return f'task {task!r}: the problem {question[:80]!r}'


def require_json(value: object, where: str) -> None:
    """Raises TaskError, naming `where`, if JSON would refuse or change the value: messages and checkpoints are JSON."""
    if isinstance(value, list):
        for item in value:
            require_json(item, where)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TaskError(f'{where} has the key {key!r}, which JSON would turn into text: use texts as keys')
            require_json(item, where)
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise TaskError(
            f'{where} holds {str(value)[:80]} of type {type(value).__name__}, which JSON cannot carry unchanged: use '
            'dict, list, str, int, float, bool or None'
        )


def shuffle(size: int, seed: int, epoch: int) -> np.ndarray:
    """int64 [size], a permutation: the ranks of raw Philox output, which every version of numpy reproduces."""
    key = np.array([seed % 2**64, epoch], np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(size), kind='stable')


def hash_fraction(key: str) -> float:
    """A number in [0, 1) that depends on the text alone: the same in every process, version and order."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:6], 'big') / 2**48


# The prompts of one of several clients that share a stream: each prompt goes to exactly one client.


class ClientStream:
    """`protocols.PromptStream` of prompts client, client + clients, client + 2 clients, ... of the whole stream.

    Their draws are numbered 0, 1, 2, ...: a run knows no other clients.
    """

    def __init__(self, whole: PromptStream, client: int, clients: int):
        self._whole, self._client, self._clients = whole, client, clients
        self._next = 0

    def draw(self) -> Prompt:
        """The next prompt of this client."""
        prompts = [self._whole.draw() for _ in range(self._clients)]
        own = dataclasses.replace(prompts[self._client], draw=self._next)
        self._next += 1
        return own

    def state(self) -> Mapping[str, Any]:
        """The state of the whole stream, with the place of this client in it."""
        whole = dict(self._whole.state())
        return {'whole': whole, 'next': self._next, 'client': self._client, 'clients': self._clients}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`; raises TaskError if it comes from another client."""
        for field, here in (('client', self._client), ('clients', self._clients)):
            if state.get(field) != here:
                raise TaskError(
                    f'the saved prompt stream has distributed.{field}={state.get(field)}, this one distributed.{field}='
                    f'{here}: its next draw would be another prompt. Restore with the client that saved'
                )
        self._whole.restore(state['whole'])
        self._next = int(state['next'])
