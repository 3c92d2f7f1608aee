"""Joins the turns that the gateway has given an episode to those in the record of its environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from areal_jax.agents.dialogue import Turn
from areal_jax.agents.programs.program_host import SaidTurn
from areal_jax.files import JsonObject
from areal_jax.text.chat_template import read_arguments


def join_record(said: Sequence[SaidTurn], turns: Mapping[int, Sequence[Turn]]) -> tuple[list[int], int]:
    """The calls none of whose turns is in the record, and how many turns of the record are none of the gateway's.

    A turn is that of the record with the same ids, where that has ids, else with the same text and calls of tools.

    Args:
      turns: that were sampled for each call, by its number.
    """
    left, strangers = dict(turns), 0
    for one in said:
        number = next((number for number, given in left.items() if any(_is_same(one, turn) for turn in given)), None)
        if number is None:
            strangers += 1
        else:
            del left[number]
    return list(left), strangers


def _is_same(said: SaidTurn, turn: Turn) -> bool:
    if said.tokens is not None:
        return np.array_equal(said.tokens, np.concatenate([segment.tokens for segment in turn.answer]))
    functions = [cast(JsonObject, call)['function'] for call in turn.reply.tool_calls]
    # as JSON: a dialect whose arguments are objects writes them anew
    given = [(function['name'], read_arguments(function['arguments'])) for function in functions]
    told = [(name, read_arguments(arguments)) for name, arguments in said.calls]
    return said.text == turn.reply.text and told == given
