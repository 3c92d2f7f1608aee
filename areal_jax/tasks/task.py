"""What a task is, and the seeded, resumable stream of its prompts: the loop begins here."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from areal_jax.errors import UserError
from areal_jax.tasks.tokenizer import Messages, Tokenizer
from areal_jax.types import FinishReason, Prompt, PromptStream

Split = Literal['train', 'held_out']
Problem = Mapping[str, Any]  # JSON-able: what a scorer needs to know
Scorer = Callable[[Problem, str, FinishReason], float]  # (problem, text of the answer, how it ended) -> reward


class TaskError(UserError, ValueError):
    """A task that cannot be built or continued as asked; the message names the fields and the fix."""


class Task(Protocol):
    """Prompts whose answers can be scored."""

    name: str
    scorer: str  # 'module:function', how a worker process finds `score`

    def prompts(self, split: Split, seed: int) -> PromptStream:
        """An endless stream over the problems of one side of the split."""
        ...

    def held_out(self, n: int, seed: int) -> list[Prompt]:
        """Distinct held-out problems, draw numbers 0, 1, ...: n of them, or all if there are fewer."""
        ...

    def score(self, problem: Problem, answer_text: str, finish_reason: FinishReason) -> float:
        """The reward: a function of its arguments alone."""
        ...


class ListedTask:
    """A task whose problems are all listed and already split."""

    def __init__(
        self,
        name: str,
        score: Scorer,
        problems: Mapping[Split, Sequence[Problem]],
        messages: Callable[[Problem], Messages],
        tokenizer: Tokenizer,
    ):
        self.name = name
        self.scorer = f'{score.__module__}:{score.__name__}'
        self.problems = {side: tuple(listed) for side, listed in problems.items()}
        self._score = score
        self._messages = messages
        self._tokenizer = tokenizer

    def prompts(self, split: Split, seed: int) -> ShuffledStream:
        """An endless stream over the problems of one side of the split. Raises TaskError when it has none."""
        if not self.problems[split]:
            raise TaskError(f'task {self.name!r} has no problem on the side {split!r}; change task.held_out_fraction')
        return ShuffledStream(self.problems[split], self._make_prompt, seed)

    def held_out(self, n: int, seed: int) -> list[Prompt]:
        """Distinct held-out problems, draw numbers 0, 1, ...: n of them, or all if there are fewer."""
        if n == 0:
            return []
        stream = self.prompts('held_out', seed)
        return [stream.draw() for _ in range(min(n, stream.size))]  # the first epoch repeats nothing

    def score(self, problem: Problem, answer_text: str, finish_reason: FinishReason) -> float:
        """The reward: a function of its arguments alone."""
        return self._score(problem, answer_text, finish_reason)

    def _make_prompt(self, draw: int, problem: Problem) -> Prompt:
        return Prompt(draw, self._tokenizer.encode_chat(self._messages(problem)), self.name, problem)


class ShuffledStream:
    """Every problem once per epoch, in an order that is a function of (seed, epoch): the position is a number."""

    def __init__(self, problems: Sequence[Problem], make_prompt: Callable[[int, Problem], Prompt], seed: int):
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

    def state(self) -> Mapping[str, Any]:
        """The number of the next draw, and what makes it mean the same prompt again."""
        return {'draw': self._next, 'seed': self._seed, 'size': self.size}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`; raises TaskError when it comes from a stream of other prompts."""
        for field, here in (('seed', self._seed), ('size', self.size)):
            if state[field] != here:
                raise TaskError(
                    f'the saved prompt stream has {field}={state[field]}, this one {field}={here}: its next draw would '
                    'be another prompt. Restore with the run.seed and the task of the saved run'
                )
        self._next = int(state['draw'])


def shuffle(size: int, seed: int, epoch: int) -> np.ndarray:
    """int64 [size], a permutation: the ranks of raw Philox output, which every version of numpy reproduces."""
    key = np.array([seed % 2**64, epoch], np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(size), kind='stable')


def hash_fraction(key: str) -> float:
    """A number in [0, 1) that depends on the text alone: the same in every process, version and order."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:6], 'big') / 2**48
