"""Arrow 6: groups become rows of a fixed shape, without padding to the longest. numpy only.

A trajectory whose last loss token is token t needs t places in a row: that token is predicted and never read. In
shared-prompt packing the prompt of a group stands once in a row and each of its answers there sees it.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence

import numpy as np

from areal_jax.learning.bins import pack_first_fit
from areal_jax.types import PackedBatch, Trajectory, TrajectoryGroup

MODES = ('shared_prompt', 'ordinary')
_PADDING = -1  # trajectory id of a loss place that holds no token


@dataclasses.dataclass(frozen=True)
class NextTokenForm:
    """A trajectory as the learner reads it: what goes in, and what is predicted from where."""

    inputs: np.ndarray  # int32 [n], tokens up to the one that predicts the last loss token
    sources: np.ndarray  # int32 [L], index into inputs whose hidden state predicts loss token l
    targets: np.ndarray  # int32 [L]
    behavior_logprobs: np.ndarray  # float32 [L]
    policy_versions: np.ndarray  # int32 [L]


def next_token_form(trajectory: Trajectory) -> NextTokenForm:
    """The only shift by one: arrays aligned by the token they describe go to the position that predicts it.

    The first answer token is predicted by the last prompt token. Environment tokens are context: read, never targets.
    Raises ValueError where the very first token was generated: nothing predicts it.
    """
    tokens = trajectory.tokens
    predicted = np.flatnonzero(trajectory.loss_mask)
    if len(predicted) and predicted[0] == 0:
        raise ValueError(f'draw {trajectory.prompt.draw}: the prompt is empty, so nothing predicts its first token')
    return NextTokenForm(
        inputs=tokens[: predicted[-1]] if len(predicted) else tokens[:0],
        sources=(predicted - 1).astype(np.int32),
        targets=tokens[predicted],
        behavior_logprobs=trajectory.behavior_logprobs[predicted],
        policy_versions=trajectory.policy_versions[predicted],
    )


@dataclasses.dataclass(frozen=True)
class PackingReport:
    """How well the rows of an update are filled, over all its minibatches."""

    rows: int = 0  # with at least one token
    microbatches: int = 0  # empty ones included
    tokens: int = 0  # that stand in rows, a prompt as often as it is repeated
    capacity_tokens: int = 0
    loss_tokens: int = 0  # generated tokens, before any rejection
    capacity_loss_tokens: int = 0
    saved_tokens: int = 0  # that sharing prompts kept out of the rows

    def metrics(self) -> dict[str, float]:
        return {
            'train/rows': float(self.rows),
            'train/microbatches': float(self.microbatches),
            'train/row_tokens': float(self.tokens),
            'train/saved_tokens': float(self.saved_tokens),
            'train/packing_utilization': self.tokens / max(self.capacity_tokens, 1),
            'train/loss_utilization': self.loss_tokens / max(self.capacity_loss_tokens, 1),
        }


@dataclasses.dataclass(frozen=True)
class _Example:
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
class _Unit:
    """What must stand in one row: a prompt and the answers that share it; in ordinary packing one answer."""

    examples: tuple[_Example, ...]

    @property
    def prompt(self) -> np.ndarray:
        first = self.examples[0]
        return first.form.inputs[: first.prompt_tokens]

    @property
    def size(self) -> tuple[int, int]:
        """(row tokens, loss tokens) with the prompt once."""
        tokens, loss_tokens = (sum(s) for s in zip(*(e.size for e in self.examples), strict=True))
        return len(self.prompt) + tokens, loss_tokens


def pack(
    groups: Sequence[TrajectoryGroup],
    advantages: Sequence[np.ndarray],
    *,
    mode: str,
    row_tokens: int,
    row_loss_tokens: int,
    rows_per_microbatch: int,
    n_minibatches: int = 1,
    oldest_version: int | None = None,
    round_microbatches: bool = False,
) -> tuple[list[PackedBatch], PackingReport]:
    """Packs the groups of one update: one PackedBatch for each minibatch that has a token to train.

    A group goes whole into one minibatch, so fewer groups than `n_minibatches` give fewer batches, and nothing to train
    gives none. Tokens generated before `oldest_version` keep their place and trajectory id but leave `loss_mask`:
    denominators count trajectory ids (`denominator_weights`), hence tokens before this rejection.

    Args:
      advantages: per group float32 [trajectories of the group].
      mode: 'shared_prompt' | 'ordinary'.
      round_microbatches: add empty micro-batches up to a power of two.

    Raises:
      ValueError: an unknown mode, or a trajectory that does not fit a row.
    """
    if mode not in MODES:
        raise ValueError(f'learner.packing={mode!r} is unknown; use one of {", ".join(MODES)}')
    capacity = (row_tokens, row_loss_tokens)
    examples_of = _examples(groups, advantages, capacity)
    loss_tokens = [sum(e.size[1] for e in examples) for examples in examples_of]
    batches, unshared_tokens = [], 0
    for members in split_minibatches(loss_tokens, n_minibatches):
        units = [unit for g in members for unit in _units(examples_of[g], mode, capacity)]
        rows = [[units[u] for u in row] for row in pack_first_fit([u.size for u in units], capacity)]
        n_microbatches = -(-len(rows) // rows_per_microbatch)
        if round_microbatches:
            n_microbatches = 1 << (n_microbatches - 1).bit_length()
        batch = _fill(rows, capacity, (n_microbatches, rows_per_microbatch), oldest_version)
        if batch.loss_mask.any():
            batches.append(batch)
            unshared_tokens += sum(len(e.form.inputs) for g in members for e in examples_of[g])
    return batches, _report(batches, unshared_tokens)


def empty_batch(microbatches: int, rows: int, row_tokens: int, row_loss_tokens: int) -> PackedBatch:
    """A batch of padding: nothing to read, nothing to train."""
    places, loss_places = (microbatches, rows, row_tokens), (microbatches, rows, row_loss_tokens)
    return PackedBatch(
        tokens=np.zeros(places, np.int32),
        positions=np.zeros(places, np.int32),
        segment_ids=np.zeros(places, np.int32),
        parent_ids=np.zeros(places, np.int32),
        sources=np.zeros(loss_places, np.int32),
        targets=np.zeros(loss_places, np.int32),
        loss_mask=np.zeros(loss_places, bool),
        behavior_logprobs=np.zeros(loss_places, np.float32),
        advantages=np.zeros(loss_places, np.float32),
        policy_versions=np.zeros(loss_places, np.int32),
        trajectory_ids=np.full(loss_places, _PADDING, np.int32),
    )


def split_minibatches(loss_tokens: Sequence[int], n_minibatches: int) -> list[list[int]]:
    """Groups to minibatches of about equal loss tokens: largest first, to the minibatch that has least.

    A function of the groups alone, so that what an optimizer step sees does not depend on the packing. Groups without
    loss tokens are left out; minibatches are never empty, so there may be fewer than asked for.
    """
    members = [g for g, n in enumerate(loss_tokens) if n]
    heap = [(0, m) for m in range(min(n_minibatches, len(members)))]
    minibatches: list[list[int]] = [[] for _ in heap]
    for g in sorted(members, key=lambda g: (-loss_tokens[g], g)):
        load, m = heapq.heappop(heap)
        minibatches[m].append(g)
        heapq.heappush(heap, (load + loss_tokens[g], m))
    return [sorted(m) for m in minibatches]


def denominator_weights(batch: PackedBatch, aggregation: str) -> tuple[np.ndarray, float]:
    """Weight of each loss token and the denominator of the minibatch, both from tokens before any rejection.

    'token_mean': every token 1, over the tokens. 'sequence_mean': every token 1 / (tokens of its trajectory), over the
    trajectories. Either way the loss is a weighted masked sum over the denominator.

    Returns:
      (float32 of the shape of `batch.trajectory_ids`, denominator).
    """
    real = batch.trajectory_ids != _PADDING
    if aggregation == 'token_mean':
        return real.astype(np.float32), float(real.sum())
    if aggregation == 'sequence_mean':
        counts = np.bincount(batch.trajectory_ids[real], minlength=1)
        weights = np.where(real, 1.0 / np.maximum(counts[np.where(real, batch.trajectory_ids, 0)], 1), 0.0)
        return weights.astype(np.float32), float((counts > 0).sum())
    raise ValueError(f"loss.aggregation={aggregation!r} is unknown; use 'token_mean' or 'sequence_mean'")


def count_tokens(groups: Sequence[TrajectoryGroup], mode: str) -> int:
    """Tokens that packing would put into rows, if no group had to be split: cheap, to price an update before it."""
    total = 0
    for group in groups:
        prompts = 1 if mode == 'shared_prompt' else len(group.trajectories)
        answers = sum(len(s.tokens) for t in group.trajectories for s in t.segments)
        total += prompts * len(group.trajectories[0].prompt.tokens) + answers - len(group.trajectories)
    return total


def _examples(
    groups: Sequence[TrajectoryGroup], advantages: Sequence[np.ndarray], capacity: tuple[int, int]
) -> list[list[_Example]]:
    """Per group its trajectories with loss tokens; ids number all trajectories of the update."""
    examples_of, next_id = [], 0
    for group, values in zip(groups, advantages, strict=True):
        examples = []
        for trajectory, advantage in zip(group.trajectories, values, strict=True):
            form = next_token_form(trajectory)
            if len(form.targets):
                _require_fit(trajectory, form, capacity)
                examples.append(_Example(form, len(trajectory.prompt.tokens), float(advantage), next_id))
            next_id += 1
        examples_of.append(examples)
    return examples_of


def _require_fit(trajectory: Trajectory, form: NextTokenForm, capacity: tuple[int, int]) -> None:
    fields = ('learner.row_tokens', 'learner.row_loss_tokens')
    for field, needed, available in zip(fields, (len(form.inputs), len(form.targets)), capacity, strict=True):
        if needed > available:
            raise ValueError(
                f'draw {trajectory.prompt.draw}, sample {trajectory.sample}: {len(trajectory.tokens)} tokens of '
                f'trajectory need {needed} places of a row, but {field}={available}; raise {field} to at least '
                f'{needed} or lower rollout.max_new_tokens'
            )


def _units(examples: Sequence[_Example], mode: str, capacity: tuple[int, int]) -> list[_Unit]:
    """Shared: as many answers of the group beside one prompt as a row holds, then the next row's worth."""
    if mode == 'ordinary' or not examples:
        return [_Unit((e,)) for e in examples]
    row_tokens, row_loss_tokens = capacity
    beside_prompt = (row_tokens - examples[0].prompt_tokens, row_loss_tokens)
    bins = pack_first_fit([e.size for e in examples], beside_prompt)
    return [_Unit(tuple(examples[i] for i in sorted(b))) for b in bins]


def _fill(
    rows: Sequence[Sequence[_Unit]], capacity: tuple[int, int], shape: tuple[int, int], oldest_version: int | None
) -> PackedBatch:
    batch = empty_batch(*shape, *capacity)
    for r, row in enumerate(rows):
        writer = _RowWriter(batch.microbatch(r // shape[1]).microbatch(r % shape[1]), oldest_version)
        for unit in row:
            writer.write(unit)
    return batch


class _RowWriter:
    """Appends units to one row, in place: `row` holds views, leaves [T] or [N]."""

    def __init__(self, row: PackedBatch, oldest_version: int | None):
        self._row, self._oldest_version = row, oldest_version
        self._token = self._loss_token = self._segment = 0

    def write(self, unit: _Unit) -> None:
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

    def _append_loss(self, example: _Example, sources: np.ndarray) -> None:
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


def _report(batches: Sequence[PackedBatch], unshared_tokens: int) -> PackingReport:
    tokens = sum(int((b.segment_ids > 0).sum()) for b in batches)
    return PackingReport(
        rows=sum(int((b.segment_ids > 0).any(-1).sum()) for b in batches),
        microbatches=sum(len(b.tokens) for b in batches),
        tokens=tokens,
        capacity_tokens=sum(b.tokens.size for b in batches),
        loss_tokens=sum(int((b.trajectory_ids != _PADDING).sum()) for b in batches),
        capacity_loss_tokens=sum(b.targets.size for b in batches),
        saved_tokens=unshared_tokens - tokens,
    )
