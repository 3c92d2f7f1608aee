"""The inputs of a run, drawn by key: lengths of prompts and answers, rewards, seconds of a verifier.

Every number is a function of the seed, the draw and the sample, never of the order of events: two simulations that
differ in a setting see the same answers.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import numpy as np

from areal_jax import lanes
from areal_jax.agents.agent_workflow import AgentWorkflow
from areal_jax.agents.dialogue import Budgets, Dialogue, Message, Messages, Tools
from areal_jax.config.drawn_lengths import Lengths
from areal_jax.control.episode import Episode
from areal_jax.lanes import REWARD
from areal_jax.protocols import Clock, Event, Generator, PromptStream, Workflow
from areal_jax.simulation.count_backend import prompt_tokens, result_tokens
from areal_jax.tasks.task import OverLength, Problem, Split
from areal_jax.types import FinishReason, Prompt, SamplingParams, Verdict, Work

NAME = 'simulated'
_MOST_KEPT = 1 << 17  # cached lengths of answers under way, which every dispatch needs


class Answers(Protocol):
    """The answers of a simulation."""

    @property
    def of_agents(self) -> bool:
        """Whether an answer is an episode of turns with a tool call between them."""
        ...

    def turns(self, draw: int, sample: int) -> int: ...

    def length(self, draw: int, sample: int, turn: int = 0) -> int:
        """Tokens after which the turn stops by itself; a limit may come first."""
        ...

    def result(self, draw: int, sample: int, call: int) -> int:
        """Tokens of the tool's result after turn `call`."""
        ...

    def tool_s(self, draw: int, sample: int, call: int) -> float:
        """Seconds of the tool call after turn `call`."""
        ...

    def reward(self, draw: int, sample: int) -> float: ...

    def verifier_s(self, draw: int, sample: int, attempt: int = 0) -> float:
        """Seconds of the verifier in an attempt, counted from 0."""
        ...


class DrawnPrompts:
    """Implements protocols.PromptStream: every draw is a new prompt with a drawn length."""

    def __init__(self, lengths: Lengths, seed: int):
        self._lengths, self._seed, self._next = lengths, seed, 0

    def draw(self) -> Prompt:
        draw = self._next
        self._next += 1
        length = self._lengths.draw(self._seed, draw, 0, 'prompt')
        return Prompt(draw, prompt_tokens(draw, length), NAME, {})

    def state(self) -> Mapping[str, Any]:
        return {'next': self._next}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._next = state['next']


class CountedPrompts:
    """Implements protocols.PromptStream: prompts of a task, reduced to their lengths."""

    def __init__(self, stream: PromptStream):
        self._stream = stream
        self.state, self.restore = stream.state, stream.restore

    def draw(self) -> Prompt:
        return count_prompt(self._stream.draw())


def count_prompt(prompt: Prompt) -> Prompt:
    """Replaces the tokens of a prompt by as many counted ones."""
    return Prompt(prompt.draw, prompt_tokens(prompt.draw, len(prompt.tokens)), NAME, {}, prompt.source)


class Places:
    """Admits `count` at once to the `async with` block; others wait in the order in which they came."""

    def __init__(self, clock: Clock, count: float, name: str):
        self._clock, self._free, self._name = clock, count, name
        self._queue: collections.deque[Event] = collections.deque()

    async def __aenter__(self) -> None:
        if self._free:
            self._free -= 1
            return
        turn = self._clock.event(self._name)
        self._queue.append(turn)
        await self._clock.wait(turn)

    async def __aexit__(self, *_: object) -> None:
        if self._queue:
            self._queue.popleft().set()
        else:
            self._free += 1


class DrawnVerifier:
    """Implements protocols.Verifier: workers of a lane, whose seconds and rewards are drawn.

    An attempt ends at `deadline_s`; after `attempts` such attempts the reward is 0.
    """

    def __init__(
        self, clock: Clock, answers: Answers, workers: int, *, deadline_s: float, attempts: int, lane: str = REWARD
    ):
        self._clock, self._answers, self._lane = clock, answers, lane
        self._deadline_s, self._attempts = deadline_s, attempts
        self._places = Places(clock, workers, 'a free verifier worker')

    def launch(self) -> None:
        """Does nothing: there is no process."""

    def start(self) -> None:
        """Does nothing: there is no process."""

    def close(self) -> None:
        """Does nothing: there is no process."""

    async def verify(
        self,
        prompt: Prompt,
        answer_tokens: np.ndarray,
        finish_reason: FinishReason,
        describe_episode: Callable[[], dict[str, Any]] | None = None,
    ) -> Verdict:
        draw, sample = prompt.draw, self._find_sample(describe_episode)
        for attempt in range(1, self._attempts + 1):
            seconds = self._answers.verifier_s(draw, sample, attempt - 1)
            size = {'seconds': min(seconds, self._deadline_s)}
            work = Work('reward', detail={'draw': draw, 'attempt': attempt}, size=size)
            async with self._places:
                await self._clock.run(self._lane, lambda: None, work)
            if seconds <= self._deadline_s:
                return Verdict(self._answers.reward(draw, sample), attempt)
        return Verdict(0.0, self._attempts, 'timeout')

    def _find_sample(self, describe_episode: Callable[[], dict[str, Any]] | None) -> int:
        assert describe_episode is not None  # the loop passes it with every answer
        return int(describe_episode()['sample'])


def keep_lengths(answers: Answers) -> Callable[[int, int, int], int]:
    """Returns `answers.length` with a cache of the last results."""
    return functools.lru_cache(_MOST_KEPT)(answers.length)


class DrawnTask:
    """Implements tasks.task.Task without problems.

    Args:
      make_prompts, make_held_out: the stream of training, and a given number of held-out prompts; their answers are
        drawn like the training answers with the same draw number.
    """

    name, scorer = NAME, ''

    def __init__(self, make_prompts: Callable[[], PromptStream], make_held_out: Callable[[int], list[Prompt]]):
        self._make_prompts, self._make_held_out = make_prompts, make_held_out

    def fitting(self, prompt_tokens: int, over_length: OverLength) -> DrawnTask:
        return self

    def sizes(self) -> dict[str, int]:
        return {'train': 0, 'held_out': 0, 'dropped': 0}

    def prompts(self, split: Split, seed: int) -> PromptStream:
        return self._make_prompts()

    def held_out(self, n: int, seed: int) -> list[Prompt]:
        return self._make_held_out(n)

    def score(self, problem: Problem, answer_text: str, finish_reason: FinishReason) -> float:
        raise NotImplementedError('answers of a simulation have no text')

    def final_answer(self, text: str) -> str:
        return text


# Agents of a simulation: turns whose number, lengths and tools are drawn, through the dialogue of real agents.


TOOL = 'tool'  # name of the tool that is called


@dataclasses.dataclass(frozen=True)
class CountFormat:
    """The chat form of one episode, whose messages are counts of tokens. Implements agents.dialogue.ChatFormat."""

    prompt: Prompt
    result: Callable[[int], int]  # tokens of the tool's result after a turn

    def render(self, messages: Messages, tools: Tools) -> np.ndarray:
        return self.prompt.tokens

    def extend(self, messages: Messages, tools: Tools, *, closed_by: int | None) -> np.ndarray:
        call = int(str(messages[-1]['content']))
        return result_tokens(call, self.result(call))

    def parse(self, answer: np.ndarray, tools: Tools, prefix: str) -> tuple[Message, int]:
        return {'role': 'assistant', 'content': ''}, 0

    def closes(self, token: int) -> bool:
        return True


class DrawnAgents:
    """Makes the workflow of a simulated run from a pool, the sampling and a seed.

    Args:
      deadline_s: of an episode; 0 = none.
      most: episodes at once; others wait.
    """

    def __init__(self, answers: Answers, clock: Clock, budgets: Budgets, *, deadline_s: float, most: float):
        self._answers, self._clock, self._budgets, self._deadline_s = answers, clock, budgets, deadline_s
        self._places = Places(clock, most, 'a free place for the program of an episode')

    def __call__(self, pool: Generator, sampling: SamplingParams, seed: int) -> Workflow:
        def make_dialogue(prompt: Prompt, episode: Episode) -> Dialogue:
            form = CountFormat(prompt, lambda call: self._answers.result(prompt.draw, episode.sample, call))
            return Dialogue(
                pool, self._clock, prompt, episode,
                sampling=sampling, seed=seed, chat_format=form, budgets=self._budgets, lane=lanes.TOOL,
            )  # fmt: skip

        return cast(Workflow, AgentWorkflow(self._run, make_dialogue, _raise, self._clock, self._deadline_s))

    async def _run(self, prompt: Prompt, dialogue: Dialogue) -> None:
        async with self._places:
            await self._take_turns(prompt, dialogue)

    async def _take_turns(self, prompt: Prompt, dialogue: Dialogue) -> None:
        turns = self._answers.turns(prompt.draw, dialogue.episode.sample)
        history: list[Message] = [{'role': 'user', 'content': ''}]
        for turn in range(turns):
            reply = await dialogue.chat(history)
            if reply.finish_reason == 'length' or turn + 1 == turns:
                return
            await dialogue.call_tool(TOOL, turn, _give)
            history += [reply.message, {'role': 'tool', 'content': str(turn)}]


async def _give() -> str:
    """Returns no text: the result is a count of tokens, which the chat form knows."""
    return ''


def _raise(prompt: Prompt, error: Exception) -> None:
    """Raises the error, which is a bug: a simulated episode never fails by itself."""
    raise error
