"""What the dialects of conversations besides OpenAI's chat have in common: they become the same call as chat."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from areal_jax.rollout.http.wire.exchange import Call, Message, Wish
from areal_jax.rollout.http.wire.openai import AskedTools
from areal_jax.rollout.http.wire.request_fields import OPENAI, Fields, read_sampling


def make_call(
    fields: Fields,
    messages: Sequence[Message],
    prompt_field: str,
    max_new_tokens: int | None,
    asked: AskedTools,
    wishes: Sequence[Wish],
    stop_strings: Sequence[str] = (),
) -> Call:
    """Takes how the answer is sampled and sent, and refuses what is left. One answer, to a conversation."""
    sampling = read_sampling(fields, OPENAI, max_new_tokens)
    if stop_strings:
        sampling = dataclasses.replace(sampling, stop_strings=(*sampling.stop_strings, *stop_strings))
    call = Call(
        prompts=(tuple(messages),),
        prompt_field=prompt_field,
        sampling=(sampling,),
        request_ids=(fields.take_text('request_id'),),
        model=fields.take_text('model'),
        stream=fields.take_flag('stream'),
        tools=asked.tools,
        one_tool_call=asked.one_tool_call,
        wishes=(*asked.wishes, *wishes),
        session=fields.take_text('session_id'),
        cache_salt=fields.take_text('cache_salt'),
        priority=fields.take_integer('priority', 0, least=-(2**31)),
    )
    fields.note_ignored(session_id=call.session, priority=call.priority)
    fields.finish()
    return dataclasses.replace(call, ignored=fields.ignored)


def join_assistant(messages: Sequence[Message]) -> list[Message]:
    """The messages with one turn where a text of the assistant and its calls came one by one."""
    found: list[Message] = []
    for message in messages:
        last = found[-1] if found else None
        if last and last.role == message.role == 'assistant' and (last.tool_calls or message.tool_calls):
            found[-1] = Message('assistant', last.content + message.content, (*last.tool_calls, *message.tool_calls))
        else:
            found.append(message)
    return found
