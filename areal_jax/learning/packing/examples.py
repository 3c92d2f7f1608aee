"""Trajectories in the form in which the learner reads them, after a check of what no kernel would notice. numpy only.

A trajectory whose last loss token is token t needs t places in a row: that token is predicted and never read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from areal_jax.columns import Column
from areal_jax.config.training import ROW_ROOM
from areal_jax.learning.packing.rows import BatchError, Example, NextTokenForm
from areal_jax.types import LARGEST_LOGPROB, NOT_GENERATED, Segment, Trajectory, TrajectoryGroup


def make_examples(
    groups: Sequence[TrajectoryGroup],
    advantages: Sequence[np.ndarray],
    capacity: tuple[int, int],
    vocab_size: int | None,
    columns: Sequence[Column] = (),
    masks_truncated: bool = False,
    inputs: Sequence[Column] = (),
) -> list[list[Example]]:
    """For each group, its trajectories that have loss tokens. Ids count all trajectories of the update, also others.

    With `masks_truncated` those that ended at their limit are left out.
    """
    examples_of, next_id = [], 0
    for group, values in zip(groups, advantages, strict=True):
        examples = []
        for trajectory, advantage in zip(group.trajectories, values, strict=True):
            _require_sound(trajectory, float(advantage), vocab_size)
            form = next_token_form(trajectory, columns, inputs)
            if len(form.targets) and not (masks_truncated and trajectory.finish_reason == 'length'):
                _require_fit(trajectory, form, capacity)
                examples.append(Example(form, len(trajectory.prompt.tokens), float(advantage), next_id))
            next_id += 1
        examples_of.append(examples)
    return examples_of


def with_next_token(trajectory: Trajectory) -> Trajectory:
    """The row with one more token, the only one in the loss, so that the state behind the row predicts it."""
    read = (dataclasses.replace(segment, policy_version=NOT_GENERATED) for segment in trajectory.segments)
    following = Segment(np.zeros(1, np.int32), np.zeros(1, np.float32), 0)
    return dataclasses.replace(trajectory, segments=(*read, following))


def _require_sound(trajectory: Trajectory, advantage: float, vocab_size: int | None) -> None:
    """Raises BatchError for values that would train silently wrong.

    A token id outside the vocabulary reads another row of the embedding; a behavior log-prob of -inf gives its token
    the largest weight possible.
    """
    where = f'draw {trajectory.prompt.draw}, sample {trajectory.sample}'
    if not np.isfinite(advantage):
        raise BatchError(
            f'{where}: advantage is {advantage}, which would poison the whole update; rewards must be finite'
        )
    tokens, mask, logprobs = trajectory.tokens, trajectory.loss_mask, trajectory.behavior_logprobs
    if len(logprobs) != len(tokens):
        raise BatchError(f'{where}: {len(logprobs)} behavior log-probs for {len(tokens)} tokens, prompt included')
    outside = (tokens < 0) | (tokens >= (vocab_size or np.inf))
    if outside.any():
        raise BatchError(
            f'{where}: token {tokens[outside][0]} lies outside the vocabulary of {vocab_size} of the model; the '
            'tokenizer or the engine belongs to another model'
        )
    wrong = mask & ~(np.isfinite(logprobs) & (logprobs <= LARGEST_LOGPROB))
    if wrong.any():
        raise BatchError(
            f'{where}: a behavior log-prob is {logprobs[wrong][0]}; the engine must report finite ones of at most 0'
        )


def _require_fit(trajectory: Trajectory, form: NextTokenForm, capacity: tuple[int, int]) -> None:
    for field, needed, available in zip(ROW_ROOM, (len(form.inputs), len(form.targets)), capacity, strict=True):
        if needed > available:
            raise BatchError(
                f'draw {trajectory.prompt.draw}, sample {trajectory.sample}: {len(trajectory.tokens)} tokens of '
                f'trajectory need {needed} places of a row, but {field}={available}; raise {field} to at least '
                f'{needed} or lower rollout.max_new_tokens'
            )


def next_token_form(
    trajectory: Trajectory, columns: Sequence[Column] = (), inputs: Sequence[Column] = ()
) -> NextTokenForm:
    """Aligns arrays by the token that predicts instead of the token that they describe; no other code shifts them.

    The first answer token is predicted by the last prompt token. Environment tokens are context: inputs, never targets.
    The entry of a column of `inputs` is that of the token behind an input: of the pass that read the input.
    Raises BatchError if the very first token was generated, because no token predicts it.
    """
    tokens = trajectory.tokens
    predicted = np.flatnonzero(trajectory.loss_mask)  # [A], indices of the loss tokens
    if len(predicted) and predicted[0] == 0:
        raise BatchError(f'draw {trajectory.prompt.draw}: the prompt is empty, so nothing predicts its first token')
    return NextTokenForm(
        inputs=tokens[: predicted[-1]] if len(predicted) else tokens[:0],
        sources=(predicted - 1).astype(np.int32),
        targets=tokens[predicted],
        behavior_logprobs=trajectory.behavior_logprobs[predicted],
        policy_versions=trajectory.policy_versions[predicted],
        columns={column.name: trajectory.column(column)[predicted] for column in columns},
        read={
            column.name: trajectory.column_with_context(column)[1 : predicted[-1] + 1 if len(predicted) else 1]
            for column in inputs
        },
    )
