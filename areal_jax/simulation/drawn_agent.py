"""Agents of a simulation: turns whose number, lengths and tools are drawn, through the dialogue of real agents."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import cast

import numpy as np

from areal_jax import lanes
from areal_jax.agents.agent_workflow import AgentWorkflow
from areal_jax.agents.dialogue import Budgets, Dialogue, Message, Messages, Tools
from areal_jax.control.episode import Episode
from areal_jax.protocols import Clock, Generator, Workflow
from areal_jax.simulation.count_backend import result_tokens
from areal_jax.simulation.drawn_task import Answers, Places
from areal_jax.types import Prompt, SamplingParams

TOOL = 'tool'  # name of the one that is called


@dataclasses.dataclass(frozen=True)
class CountFormat:
    """The chat form of one episode, whose messages are counts of tokens. Implements agents.dialogue.ChatFormat."""

    prompt: Prompt
    result: Callable[[int], int]  # tokens of what the tool gives after a turn

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
      most: episodes at once, others wait.
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
    """The result is a count of tokens, which the chat form knows."""
    return ''


def _raise(prompt: Prompt, error: Exception) -> None:
    """Nothing of a simulated episode fails by itself."""
    raise error
