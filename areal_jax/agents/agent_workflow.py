"""A workflow that runs a function of the user for each episode: an agent, which talks to the policy and calls tools."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from areal_jax.agents.dialogue import Dialogue, EpisodeEnd, Label, ProgramsError, ToolFailedError
from areal_jax.control.episode import Episode
from areal_jax.control.failures import RequestLostError
from areal_jax.protocols import Clock
from areal_jax.text.chat_template import ToolsNotShownError
from areal_jax.types import FinishReason, Prompt

Agent: TypeAlias = Callable[[Prompt, Dialogue], Awaitable[object]]  # returns when the episode is over
_FINISH: dict[Label, FinishReason] = {'stop': 'stop', 'length': 'length', 'turns': 'length'}


class AgentWorkflow:
    """Implements protocols.Workflow for episodes of control/episode.py.

    Args:
      agent: what a program does; it starts again in a resumed run, and its calls are answered from the record.
      make_dialogue: the calls of an episode.
      on_error: called with the prompt and the exception of an agent that raised, or of a tool that failed.
      deadline_s: of an episode, on the clock: then it has no reward; 0 = none.
    """

    def __init__(
        self,
        agent: Agent,
        make_dialogue: Callable[[Prompt, Episode], Dialogue],
        on_error: Callable[[Prompt, Exception], None],
        clock: Clock,
        deadline_s: float = 0.0,
    ):
        self._agent, self._make_dialogue, self._on_error = agent, make_dialogue, on_error
        self._clock, self._deadline_s = clock, deadline_s

    async def run(self, prompt: Prompt, episode: Episode) -> None:
        """Sets the label of the episode, and the finish reason of one that is scored."""
        dialogue = self._make_dialogue(prompt, episode)
        if self._deadline_s:
            label = await self._run_within(prompt, episode, dialogue)
        else:
            label = await self._run(prompt, episode, dialogue)
        if label == 'cancelled':
            return
        dialogue.withdraw_unused()
        episode.label = label
        episode.finish_reason = _FINISH.get(label)

    async def _run_within(self, prompt: Prompt, episode: Episode, dialogue: Dialogue) -> Label:
        """An agent that is late is ended, and so are the answers that it waits for."""
        name = f'agent {prompt.draw}.{episode.sample}'
        ended = self._clock.event(f'end of {name}')
        task = asyncio.get_running_loop().create_task(self._run(prompt, episode, dialogue), name=name)
        task.add_done_callback(lambda _: ended.set())
        try:
            if await self._clock.wait(ended, self._deadline_s):
                return task.result()
            await dialogue.close('deadline')
        finally:
            task.cancel()  # it waits for a tool, or has ended
        return 'deadline'

    async def _run(self, prompt: Prompt, episode: Episode, dialogue: Dialogue) -> Label:
        try:
            await self._agent(prompt, dialogue)
        except EpisodeEnd as end:
            if isinstance(end.__cause__, ToolFailedError):
                self._on_error(prompt, end.__cause__)
            return end.label if any(call.reply for call in episode.calls) else _without_answer(end.label)
        except (ProgramsError, RequestLostError, ToolsNotShownError):
            raise  # no episode of this run can do better
        except Exception as error:  # of the program: it ends this episode alone
            self._on_error(prompt, error)
            return 'agent_error'
        return 'stop' if any(call.reply for call in episode.calls) else 'agent_error'


def _without_answer(label: Label) -> Label:
    """An episode whose first call did not fit has nothing to score."""
    return label if label in ('cancelled', 'env_error', 'deadline') else 'agent_error'
