"""Part of arrow 6: what stands together in a row, and how it is written there. numpy only.

A row holds units, a unit examples: one answer with its prompt, or several answers beside one prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from areal_jax.learning.balance import EMPTY, CostCoefficients, row_cost, visible_pairs
from areal_jax.types import PackedBatch

PADDING = -1  # trajectory id of a loss place that holds no token


class BatchError(ValueError):
    """Trajectories that must not be learned from; the message names the draw, the sample and what is wrong."""


@dataclasses.dataclass(frozen=True)
class NextTokenForm:
    """A trajectory as the learner reads it: what goes in, and what is predicted from where."""

    inputs: np.ndarray  # int32 [n], tokens up to the one that predicts the last loss token
    sources: np.ndarray  # int32 [L], index into inputs whose hidden state predicts loss token l
    targets: np.ndarray  # int32 [L]
    behavior_logprobs: np.ndarray  # float32 [L]
    policy_versions: np.ndarray  # int32 [L]


@dataclasses.dataclass(frozen=True)
class Example:
    """One trajectory with what the loss needs beside its tokens."""

    form: NextTokenForm
    prompt_tokens: int
    advantage: float
    trajectory_id: int

    @property
    def size(self) -> tuple[int, int]:
        """(row tokens, loss tokens) without the prompt."""
        return len(self.form.inputs) - self.prompt_tokens, len(self.form.targets)


@dataclasses.dataclass(frozen=True)
class Unit:
    """What must stand in one row: a prompt and the answers that share it; in ordinary packing one answer."""

    examples: tuple[Example, ...]

    @property
    def prompt(self) -> np.ndarray:
        first = self.examples[0]
        return first.form.inputs[: first.prompt_tokens]

    @property
    def size(self) -> tuple[int, int]:
        """(row tokens, loss tokens) with the prompt once."""
        tokens, loss_tokens = (sum(s) for s in zip(*(e.size for e in self.examples), strict=True))
        return len(self.prompt) + tokens, loss_tokens

    @property
    def pairs(self) -> int:
        """Visible pairs of tokens: an answer sees itself and the prompt, never another answer."""
        prompt = len(self.prompt)
        return visible_pairs(prompt) + sum(visible_pairs(e.size[0], prompt) for e in self.examples)


@dataclasses.dataclass(frozen=True)
class Row:
    """The units that share a row."""

    units: tuple[Unit, ...]

    @property
    def size(self) -> tuple[int, int]:
        """(row tokens, loss tokens)."""
        tokens, loss_tokens = (sum(s) for s in zip(*(u.size for u in self.units), strict=True))
        return tokens, loss_tokens

    def cost(self, coefficients: CostCoefficients) -> float:
        return row_cost(float(self.size[0]), float(sum(u.pairs for u in self.units)), coefficients)

    def share(self, capacity: tuple[int, int]) -> float:
        """Used, of the capacity that is used most."""
        return max(used / available for used, available in zip(self.size, capacity, strict=True))


def write_rows(batch: PackedBatch, rows: Sequence[Row], placement: np.ndarray, oldest_version: int | None) -> None:
    """Writes rows into a batch of padding, in place.

    Args:
      placement: int [M, R], the row of each place or EMPTY.
      oldest_version: tokens generated before it stay out of `loss_mask`; None = all are trained.
    """
    for m, place in np.argwhere(placement != EMPTY):
        writer = _RowWriter(batch.microbatch(m).microbatch(place), oldest_version)
        for unit in rows[placement[m, place]].units:
            writer.write(unit)


class _RowWriter:
    """Appends units to one row, in place: `row` holds views, leaves [T] or [N]."""

    def __init__(self, row: PackedBatch, oldest_version: int | None):
        self._row, self._oldest_version = row, oldest_version
        self._token = self._loss_token = self._segment = 0

    def write(self, unit: Unit) -> None:
        if len(unit.examples) == 1:  # one segment: prompt and answer
            start = self._append(unit.examples[0].form.inputs, first_position=0, parent=None)
            self._append_loss(unit.examples[0], unit.examples[0].form.sources + start)
            return
        prompt_start = self._append(unit.prompt, first_position=0, parent=None)
        prompt_segment = self._segment
        for example in unit.examples:
            n = example.prompt_tokens
            start = self._append(example.form.inputs[n:], first_position=n, parent=prompt_segment)
            sources = example.form.sources
            self._append_loss(example, np.where(sources < n, prompt_start + sources, start + sources - n))

    def _append(self, tokens: np.ndarray, first_position: int, parent: int | None) -> int:
        """A segment of the tokens; returns the place of the first."""
        self._segment += 1
        start, self._token = self._token, self._token + len(tokens)
        place = slice(start, self._token)
        self._row.tokens[place] = tokens
        self._row.positions[place] = first_position + np.arange(len(tokens))
        self._row.segment_ids[place] = self._segment
        self._row.parent_ids[place] = self._segment if parent is None else parent
        return start

    def _append_loss(self, example: Example, sources: np.ndarray) -> None:
        form = example.form
        place = slice(self._loss_token, self._loss_token + len(sources))
        self._loss_token = place.stop
        self._row.sources[place] = sources
        self._row.targets[place] = form.targets
        self._row.loss_mask[place] = self._oldest_version is None or form.policy_versions >= self._oldest_version
        self._row.behavior_logprobs[place] = form.behavior_logprobs
        self._row.advantages[place] = example.advantage
        self._row.policy_versions[place] = form.policy_versions
        self._row.trajectory_ids[place] = example.trajectory_id
