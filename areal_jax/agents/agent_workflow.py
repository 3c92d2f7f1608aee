"""A workflow that runs a function of the user for each episode: an agent, which talks to the policy and calls tools."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from areal_jax.agents.dialogue import Dialogue, EpisodeEnd, Label, Message, ProgramsError, ToolFailedError, Turn
from areal_jax.control.episode import Call, Episode
from areal_jax.control.groups import RequestLostError
from areal_jax.errors import UserError
from areal_jax.files import JsonObject
from areal_jax.protocols import Clock
from areal_jax.text.chat_template import ToolsNotShownError, read_arguments
from areal_jax.types import FinishReason, Prompt, Work

if TYPE_CHECKING:
    from areal_jax.agents.gateway import Session

RunTool = Callable[[object], Awaitable[str]]  # takes the arguments; runs on the I/O loop, see Dialogue.call_tool


class OfferedTools:
    """The `call_tool` of an agent.

    Args:
      tools: by name.
    """

    def __init__(self, dialogue: Dialogue, tools: Mapping[str, RunTool]):
        self._dialogue, self._tools = dialogue, tools

    async def call_tool(
        self, name: str, arguments: object, tool: Callable[[], Awaitable[str]] | None = None, **options: int
    ) -> str:
        """See Dialogue.call_tool; without a `tool`, calls the tool of agent.tools with this name.

        `arguments` of such a tool: the text that the model wrote, or a dict. If no tool has the name, the result is an
        error that the model reads. Raises TypeError if agent.tools is empty.
        """
        if tool is None and not self._tools:
            raise TypeError(
                f'call_tool({name!r}, ...) has no third argument, and agent.tools=() names no tool: give an `async '
                "def` without parameters, or set agent.tools=('python',)"
            )
        run = tool or functools.partial(self._run, name, read_arguments(arguments))
        return await self._dialogue.call_tool(name, arguments, run, **options)

    async def _run(self, name: str, arguments: object) -> str:
        if name not in self._tools:
            return f'error: there is no tool {name!r}; tools: {", ".join(self._tools)}'
        return await self._tools[name](arguments)


# The program of an episode, seen from the host's loop: each call that it makes over HTTP becomes a turn.
#
# The program's actions arrive as outcomes of clock calls, one for each of its requests and one for its end. They are in
# the event log, so a replay needs no program, and a resumed run answers repeated requests from its record.


_GRACE_S = 60.0  # of the call of the clock: the deadline of the episode comes first
_SPENT: dict[Label, str] = {
    # clients recognize the first words, and end or summarize a conversation that has become too long
    'length': 'the maximum context length is reached: no row of this episode has room for another turn '
    '(rollout.context_tokens, rollout.max_new_tokens)',
    'turns': 'this episode has had all its turns (agent.max_turns)',
}


class ProgramFailedError(Exception):
    """Raised if the program of an episode ended with an error: the episode has no reward."""


class ProgramAgent:
    """An agent that is a program: called for each episode (agent_workflow.Agent).

    Args:
      open_session: given a prompt and a sample, returns a session whose program starts with its first event.
      lane: the lane of the clock on which the program's events are awaited.
      deadline_s: the deadline of an episode.
    """

    def __init__(self, clock: Clock, open_session: Callable[[Prompt, int], Session], lane: str, deadline_s: float):
        self._clock, self._open_session, self._lane, self._deadline_s = clock, open_session, lane, deadline_s

    async def __call__(self, prompt: Prompt, dialogue: Dialogue) -> None:
        """Returns when the program has ended well; raises EpisodeEnd, ProgramFailedError, or an error of generation."""
        sample = dialogue.episode.sample
        session = self._open_session(prompt, sample)
        answering, detail = _Answering(session, dialogue), {'draw': prompt.draw, 'sample': sample}
        work = Work('program', 1.0, detail, recorded=True)
        next_event = lambda: self._clock.call(self._lane, session.next, work, self._deadline_s + _GRACE_S)
        try:
            while (event := await next_event())['event'] in ('call', 'too_long'):
                answering.begin(event)
        finally:
            session.close()
        if event['event'] == 'fault':
            raise ProgramsError(event['detail'])
        await answering.end(event)


class _Answering:
    """The calls of one program; each is answered by a separate coroutine."""

    def __init__(self, session: Session, dialogue: Dialogue):
        self._session, self._dialogue = session, dialogue
        self._messages: list[list[Message]] = []  # by number of the call
        self._turns: dict[int, list[Call]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._spent: Label | None = None
        self._fatal: BaseException | None = None
        self._has_ended = False

    def begin(self, event: JsonObject) -> None:
        if event['event'] == 'too_long':
            self._messages.append([])
            self._refuse(event['number'], EpisodeEnd('length'))
            return
        before = [] if event['of'] is None else self._messages[event['of']]
        self._messages.append([*before[: event['kept']], *event['messages']])
        self._tasks.append(asyncio.get_running_loop().create_task(self._answer(event), name='call of a program'))

    async def end(self, event: JsonObject) -> None:
        """Cancels calls that are still sampled, and withdraws calls whose reply the program never got."""
        self._has_ended = True
        await self._dialogue.close('stop')
        await asyncio.gather(*self._tasks)
        self._dialogue.episode.count(**event['counts'])
        if self._fatal is not None:
            raise self._fatal
        undelivered = [call for number in event['undelivered'] for call in self._turns.get(number, ())]
        self._dialogue.withdraw(undelivered)
        self._dialogue.episode.count(undelivered=len(undelivered))
        self._dialogue.episode.outcome = event['outcome']
        if event['status'] == 'lost':
            raise EpisodeEnd('env_error') from ToolFailedError(event['detail'])
        if self._spent is not None:
            raise EpisodeEnd(self._spent)
        if event['status'] != 'ended':
            raise ProgramFailedError(event['detail'])

    async def _answer(self, event: JsonObject) -> None:
        number, messages = event['number'], self._messages[event['number']]
        how = {'one_tool_call': event['one_tool_call'], 'wish': event['wish']}
        ask = lambda: self._dialogue.take_turn(messages, event['tools'], **how)
        found = await asyncio.gather(*(ask() for _ in range(event['n'])), return_exceptions=True)
        turns = [turn for turn in found if isinstance(turn, Turn)]
        self._turns[number] = [turn.call for turn in turns]
        fault = next((one for one in found if isinstance(one, BaseException)), None)
        if fault is None:
            self._session.answer(number, turns)
        else:
            self._refuse(number, fault)

    def _refuse(self, number: int, fault: BaseException) -> None:
        if isinstance(fault, EpisodeEnd) and fault.label in _SPENT:
            self._spent = self._spent or fault.label
            self._session.refuse(number, _SPENT[fault.label])
        elif isinstance(fault, UserError) and not isinstance(fault, RequestLostError):
            self._session.refuse(number, str(fault))  # e.g. the template refuses the messages
        elif not self._has_ended:
            self._fatal = self._fatal or fault
            self._session.close()


Agent: TypeAlias = Callable[[Prompt, Dialogue], Awaitable[object]]  # returns when the episode is over
_FINISH: dict[Label, FinishReason] = {'stop': 'stop', 'length': 'length', 'turns': 'length'}


class AgentWorkflow:
    """Implements protocols.Workflow for episodes of control/episode.py.

    Args:
      agent: runs an episode; a resumed run starts it again, and its calls are answered from the record.
      make_dialogue: makes the dialogue of an episode.
      on_error: called with the prompt and the exception of an agent that raised, or of a tool that failed.
      deadline_s: of an episode, by the clock; an episode that misses it has no reward. 0 = no deadline.
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
        """Sets the label of the episode, and its finish reason if it is scored."""
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
        except Exception as error:  # raised by the program: it ends this episode alone
            self._on_error(prompt, error)
            return 'agent_error'
        return 'stop' if any(call.reply for call in episode.calls) else 'agent_error'


def _without_answer(label: Label) -> Label:
    """The label of an episode without an answer: if the first call did not fit, there is nothing to score."""
    return label if label in ('cancelled', 'env_error', 'deadline') else 'agent_error'
