"""The program of arms: updates in a loop on the device, arms side by side in blocks.

A schedule fixed(k) has the batch of update v generated with version max(0, v - k). So an arm generates the batch of
update v + k as soon as it has version v, and keeps k + 1 batches until their turn instead of k + 1 versions of the
weights: the tokens and the noise are the same, and a batch is a small part of the weights. Its first k batches are
generated before its first update. Steps of the loop are therefore numbered from -K, the longest delay of the program.
A schedule every(L) has batches of all ages below L: such an arm keeps the weights of the last version that L divides,
which generate, and no batch waits.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.rollout.decode.decode_rows import Array
from areal_jax.studies.arms.answer_generation import Answers, generate, take
from areal_jax.studies.arms.arm_update import Batch, Sums, update
from areal_jax.studies.arms.problems import Problems
from areal_jax.studies.arms.setting import Constants, Setting
from areal_jax.types import Tree

MOST_SIDE_BY_SIDE = 4  # arms in one vmap: what they compute between two products stays in a CPU's cache


class State(NamedTuple):
    """State of one arm, or of all arms with a leading axis."""

    params: Tree
    optimizer: Tree
    waiting: Answers  # leaves [K + 1, B, G, A]; the batch of update v is at v mod (K + 1)
    held: Tree  # the weights that generate, where an arm holds a version; else None


class Steps(NamedTuple):
    """What the steps of a call do, the same for all arms."""

    number: Array  # int32 [C], the update, or from -K to -1 before the first
    generates: Array  # bool [C]
    trains: Array  # bool [C]


def plan(setting: Setting, per_call: int) -> list[Steps]:
    """The steps of every call: all have the same number, the last is filled up with steps that do nothing."""
    first, end = -setting.longest_delay, setting.updates
    number = np.arange(first, first + -(-(end - first) // per_call) * per_call, dtype=np.int32)
    generates = number < end - setting.shortest_delay
    trains = (number >= 0) & (number < end)
    calls = (x.reshape(-1, per_call) for x in (number, generates, trains))
    return [Steps(*parts) for parts in zip(*calls, strict=True)]


def initial_state(setting: Setting, params: Tree) -> State:
    """Of one arm, with nothing generated yet."""
    shape = (setting.ring, setting.groups, setting.group_size, setting.answer_tokens)
    waiting = Answers(jnp.zeros(shape, jnp.int32), jnp.zeros(shape))
    # a copy: the program donates both
    held = jax.tree.map(jnp.copy, params) if setting.holds_version else None
    return State(params, setting.optimizer.init(params), waiting, held)


def advance(
    setting: Setting, steps: Steps, constants: Constants, problems: Problems, state: State
) -> tuple[State, Sums]:
    """One arm through the steps; the sums have a leading axis C, and are 0 where a step does not train."""
    return jax.lax.scan(functools.partial(_advance_once, setting, constants, problems), state, steps)


def make_program(setting: Setting, arms: int) -> jax.stages.Wrapped:
    """`advance` of so many arms, (steps, constants, problems, state) -> (state, sums); it donates the state."""
    blocks = -(-arms // MOST_SIDE_BY_SIDE)
    index = np.minimum(np.arange(blocks * -(-arms // blocks)), arms - 1)  # the last block is filled with the last arm

    def run(steps: Steps, constants: Constants, problems: Problems, state: State) -> tuple[State, Sums]:
        together = jax.vmap(functools.partial(advance, setting), in_axes=(None, 0, 0, 0))
        if blocks == 1:
            return together(steps, constants, problems, state)
        split = lambda x: jnp.asarray(x)[index].reshape(blocks, -1, *x.shape[1:])
        join = lambda x: x.reshape(-1, *x.shape[2:])[:arms]
        of_block = lambda block: together(steps, *block)
        return jax.tree.map(join, jax.lax.map(of_block, jax.tree.map(split, (constants, problems, state))))

    return jax.jit(run, donate_argnums=3)


def _advance_once(
    setting: Setting, constants: Constants, problems: Problems, state: State, now: Steps
) -> tuple[State, Sums]:
    def fill(state: State) -> State:
        if setting.holds_version:  # under fixed(k) every version generates
            takes = (constants.period == 0) | (now.number % jnp.maximum(constants.period, 1) == 0)
            take = lambda new, old: jnp.where(takes, new, old)
            state = state._replace(held=jax.tree.map(take, state.params, state.held))
        return state._replace(waiting=_generate(setting, constants, problems, state, now.number))

    def train(state: State) -> tuple[State, Sums]:
        return _train(setting, constants, problems, state, now.number)

    def rest(state: State) -> tuple[State, Sums]:
        _, sums = jax.eval_shape(train, state)
        return state, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums)

    # conditions that all arms share, so that what is not due is not computed under a vmap either
    state = jax.lax.cond(now.generates, fill, lambda state: state, state)
    return jax.lax.cond(now.trains, train, rest, state)


def _generate(setting: Setting, constants: Constants, problems: Problems, state: State, number: jax.Array) -> Answers:
    """The waiting batches with the one that is due; an arm for which none is due keeps them as they are."""
    before_first = number < 0
    batch = jnp.where(before_first, number + setting.longest_delay, number + constants.delay)
    due = batch < jnp.where(before_first, constants.delay, setting.updates)
    at = jnp.minimum(batch, setting.updates - 1)
    draws = at * setting.groups + jnp.arange(setting.groups)
    weights = state.held if setting.holds_version else state.params
    faults = take(problems.faults, at)
    scale = None if faults is None else faults.scale
    answers = generate(setting, constants, weights, jnp.asarray(problems.prompts)[at], draws, scale)
    place = batch % setting.ring
    put = lambda waiting, new: waiting.at[place].set(jnp.where(due, new, waiting[place]))
    return jax.tree.map(put, state.waiting, answers)


def _train(
    setting: Setting, constants: Constants, problems: Problems, state: State, number: jax.Array
) -> tuple[State, Sums]:
    answers = jax.tree.map(lambda waiting: waiting[number % setting.ring], state.waiting)
    prompts, truths = (jnp.asarray(side)[number] for side in (problems.prompts, problems.truths))
    batch = Batch(prompts, truths, answers, take(problems.faults, number))
    params, optimizer, sums = update(setting, constants, state.params, state.optimizer, batch, number)
    return State(params, optimizer, state.waiting, state.held), sums
