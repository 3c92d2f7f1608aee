"""The importance ratio of trained tokens, split by cause; each term from a forward pass under its own version.

For token a, generated at version u by the engine's policy μ and trained at weights θ in the update from version n:

    log π_θ - log μ  =  [log π_u - log μ]  +  Σ_{j = u+1}^{n} [log π_j - log π_{j-1}]  +  [log π_θ - log π_n]
         total             mismatch of              drift of the j-th update              inside the update
                          engine and learner

π_j is the learner's forward pass under its own weights of version j, at the temperature of training. So the mismatch
comes from the engine's program and the rounding of publication, and the drift from the updates alone; other measures
of stale tokens only have the sum of both.

The drift takes versions from the packed batch, the mismatch from the segments of the answer: a wrong version in one of
them breaks the identity, whose error is measured (`ratio/identity_error`).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np
from numpy.typing import DTypeLike

from areal_jax.config.fields import ConfigError
from areal_jax.learning.packed_rows import PADDING
from areal_jax.learning.passes import Passes, PassWeights, Trained, Update
from areal_jax.learning.programs import CompiledPrograms, LearnerState
from areal_jax.learning.row_layout import RowLayout
from areal_jax.learning.settings import LearnerSettings
from areal_jax.sharding.placement import gather, place
from areal_jax.telemetry import names
from areal_jax.telemetry.names import age_ranges, range_label
from areal_jax.telemetry.progress import format_bytes
from areal_jax.types import PackedBatch, Trajectory, TrajectoryGroup, Tree

# (groups, versions) -> float32 [versions, generated tokens in the order of the trajectories]
Score = Callable[[Sequence[TrajectoryGroup], Sequence[int]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Parts:
    """The terms of the identity, float64 [tokens] each but the last."""

    total: np.ndarray
    mismatch: np.ndarray
    drift: np.ndarray  # of all updates together
    inside: np.ndarray
    by_update: np.ndarray  # float64 [n - u_min, tokens], term j of the sum; 0 if the token has no such term

    @property
    def error(self) -> float:
        """Largest difference between both sides of the identity."""
        return float(np.abs(self.total - (self.mismatch + self.drift + self.inside)).max(initial=0.0))


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The trained tokens of the sampled answers, [tokens] each."""

    engines: np.ndarray  # str
    versions: np.ndarray  # int, of the segments
    packed_versions: np.ndarray  # int, of the batch
    behavior: np.ndarray  # float64, of the segments
    packed_behavior: np.ndarray  # float64, of the batch
    policy: np.ndarray  # float64, log π_θ when the gradient was taken, the mean over epochs

    def select(self, chosen: np.ndarray) -> Tokens:
        return Tokens(**{field.name: getattr(self, field.name)[chosen] for field in dataclasses.fields(self)})


def is_sampled(seed: int, draw: int, sample: int, share: float) -> bool:
    """Whether the answer is in a sample of this share: a function of (seed, draw, sample), the same in every run."""
    digest = hashlib.sha256(f'ratio/{seed}/{draw}/{sample}'.encode()).digest()
    return int.from_bytes(digest[:8], 'big') < share * 2**64


def split_ratio(tokens: Tokens, scored: np.ndarray, first: int) -> Parts:
    """The parts for tokens of versions `first` to n.

    Args:
      scored: float [n - first + 1, tokens], log π_j of every token for j = first, ..., n.
    """
    scored = scored.astype(np.float64)
    steps = np.diff(scored, axis=0)
    later = np.arange(first + 1, first + len(scored))[:, None] > tokens.packed_versions
    by_update = np.where(later, steps, 0.0)
    own = np.take_along_axis(scored, (tokens.versions - first)[None], axis=0)[0]
    return Parts(
        total=tokens.policy - tokens.packed_behavior,
        mismatch=own - tokens.behavior,
        drift=by_update.sum(axis=0),
        inside=tokens.policy - scored[-1],
        by_update=by_update,
    )


def measure_split(
    kept: Sequence[TrajectoryGroup],
    batches: Sequence[PackedBatch],
    policy_logprobs: Sequence[np.ndarray],
    *,
    version: int,
    held: Sequence[int],
    is_chosen: Callable[[Trajectory], bool],
    score: Score,
    score_routing: Score | None = None,
) -> dict[str, float]:
    """The metrics of the split for the trained tokens of the chosen answers.

    Args:
      kept: the groups that were packed.
      policy_logprobs: per batch float32 [M, R, N], see Tokens.policy.
      version: n, of the weights before the update.
      held: the versions whose weights are available, ascending, without a gap, up to n.
      score_routing: log-probs with the recorded experts minus log-probs with the live ones; None = no record.
    """
    chosen, trained, table = _collect(kept, batches, policy_logprobs, is_chosen)
    in_ring = trained & (table.versions >= held[0])
    counted = {
        str(names.RATIO_TOKENS): float(in_ring.sum()),
        str(names.RATIO_LEFT_RING): float((trained & ~in_ring).sum()),
    }
    if not in_ring.any():
        return counted
    first = int(min(table.versions[in_ring].min(), table.packed_versions[in_ring].min()))
    scored = score(chosen, range(max(first, held[0]), version + 1))
    tokens = table.select(in_ring)
    parts = split_ratio(tokens, scored[:, in_ring], max(first, held[0]))
    routing = None if score_routing is None else score_routing(chosen, [version])[0, in_ring].astype(np.float64)
    return counted | _describe(tokens, parts, version) | _describe_routing(routing, version - tokens.versions)


def _describe_routing(routing: np.ndarray | None, ages: np.ndarray) -> dict[str, float]:
    if routing is None:
        return {}
    metrics = _moments(f'{names.RATIO}routing', routing)
    for label, chosen in by_range(ages):
        metrics |= _moments(f'{names.RATIO_OF_AGE}{label}/routing', routing[chosen])
    return metrics


def _collect(
    kept: Sequence[TrajectoryGroup],
    batches: Sequence[PackedBatch],
    policy_logprobs: Sequence[np.ndarray],
    is_chosen: Callable[[Trajectory], bool],
) -> tuple[list[TrajectoryGroup], np.ndarray, Tokens]:
    """(the chosen answers in groups, which of their tokens are in the loss, all their generated tokens)."""
    ids = flatten([batch.trajectory_ids for batch in batches], np.int64)
    in_loss = flatten([batch.loss_mask for batch in batches], bool)
    with_loss = set(np.unique(ids[in_loss]).tolist())
    groups, trajectories, wanted, number = [], [], [], 0
    for group in kept:
        own = []
        for trajectory in group.trajectories:
            if number in with_loss and is_chosen(trajectory):
                own.append(trajectory)
                wanted.append(number)
            number += 1
        if own:
            groups.append(TrajectoryGroup(group.draw, tuple(own)))
            trajectories += own
    places = np.flatnonzero((ids != PADDING) & np.isin(ids, wanted))
    places = places[np.argsort(ids[places], kind='stable')]  # tokens of a trajectory are in order in a row
    generated = [trajectory.loss_mask for trajectory in trajectories]
    cut = lambda arrays, dtype: np.hstack([np.zeros(0, dtype), *(a[m] for a, m in zip(arrays, generated, strict=True))])
    pick = lambda arrays, dtype: flatten(arrays, dtype)[places]
    table = Tokens(
        engines=np.repeat([t.engine for t in trajectories] or [''], [int(m.sum()) for m in generated] or [0]),
        versions=cut([t.policy_versions for t in trajectories], np.int64),
        packed_versions=pick([batch.policy_versions for batch in batches], np.int64),
        behavior=cut([t.behavior_logprobs for t in trajectories], np.float64),
        packed_behavior=pick([batch.behavior_logprobs for batch in batches], np.float64),
        policy=pick(policy_logprobs, np.float64),
    )
    return groups, in_loss[places], table


def flatten(arrays: Sequence[np.ndarray], dtype: DTypeLike) -> np.ndarray:
    return np.hstack([np.zeros(0, dtype), *(array.ravel() for array in arrays)])


def _describe(tokens: Tokens, parts: Parts, version: int) -> dict[str, float]:
    terms = {'mismatch': parts.mismatch, 'drift': parts.drift, 'inside': parts.inside, 'total': parts.total}
    metrics = {str(names.RATIO_ERROR): parts.error}
    for name, values in terms.items():
        metrics |= _moments(f'{names.RATIO}{name}', values)
    metrics[f'{names.RATIO}mismatch_mean_abs'] = float(np.abs(parts.mismatch).mean())
    # Var(mismatch + drift) = Var(mismatch) + Var(drift) + 2 of this
    metrics[f'{names.RATIO}covariance'] = float(np.mean(parts.mismatch * parts.drift)) - float(
        parts.mismatch.mean() * parts.drift.mean()
    )
    for label, chosen in by_range(version - tokens.versions):
        metrics |= _part_metrics(
            f'{names.RATIO_OF_AGE}{label}', chosen, {name: terms[name] for name in ('mismatch', 'drift')}
        )
        metrics[f'{names.RATIO_OF_AGE}{label}/mismatch_mean_abs'] = float(np.abs(parts.mismatch[chosen]).mean())
    metrics |= _drift_of_updates(parts.by_update, tokens.packed_versions, version)
    for engine in np.unique(tokens.engines).tolist():
        metrics |= _part_metrics(
            f'{names.RATIO_OF_ENGINE}{engine}', tokens.engines == engine, {'mismatch': parts.mismatch}
        )
    return metrics


def _drift_of_updates(by_update: np.ndarray, versions: np.ndarray, version: int) -> dict[str, float]:
    """Metrics of the drift by how many updates ago it happened: 1 is the update that made version n."""
    back = np.arange(len(by_update), 0, -1)[:, None] + np.zeros_like(versions)  # [updates, tokens]
    is_own = (version - versions) >= back  # the update came after the token
    metrics: dict[str, float] = {}
    for label, chosen in by_range(back[is_own]):
        metrics |= _part_metrics(f'{names.RATIO_OF_UPDATE}{label}', chosen, {'drift': by_update[is_own]})
    return metrics


def by_range(ages: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (label, which ages are in it) of each range of ages that occurs."""
    numbers = age_ranges(ages)
    for number in np.unique(numbers).tolist():
        yield range_label(number), numbers == number


def _part_metrics(prefix: str, chosen: np.ndarray, terms: Mapping[str, np.ndarray]) -> dict[str, float]:
    metrics = {f'{prefix}/tokens': float(chosen.sum())}
    for name, values in terms.items():
        metrics |= _moments(f'{prefix}/{name}', values[chosen])
    return metrics


def _moments(name: str, values: np.ndarray) -> dict[str, float]:
    return {f'{name}_mean': float(values.mean()), f'{name}_rms': float(np.sqrt(np.mean(values**2)))}


# The trained weights of the last published versions, on the host.


_FIELD = 'diagnostics.ring_bytes'


class WeightRing:
    """Copies of the trained weights by version, as passes compute with them; drops the oldest when it needs room.

    Frozen weights are not copied, so that a ring of adapters is small. On a mesh that spans processes, each process
    has the whole weights in its ring, and all must call `add` and `read` in the same order.

    Args:
      most_bytes: the limit of all copies together.
      weights: arrays, or descriptions of them, like the trees that `add` will get.

    Raises ConfigError if not even one version fits.
    """

    def __init__(self, most_bytes: int, weights: Tree):
        self._bytes = sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights))
        self._most = most_bytes // max(self._bytes, 1)  # versions
        if not self._most:
            raise ConfigError(
                f'{_FIELD}={most_bytes} does not hold the weights of one version, {format_bytes(self._bytes)}: raise '
                f'it to at least {self._bytes}, times the versions that trained tokens come from, or set '
                'diagnostics.ratio_sample=0'
            )
        self._held: dict[int, Tree] = {}  # ascending

    @property
    def versions(self) -> Sequence[int]:
        """The versions in the ring, ascending, without a gap."""
        return list(self._held)

    def add(self, version: int, weights: Tree) -> None:
        """Keeps a copy. Clears the ring first if the version neither is nor follows the newest one."""
        if self._held and version not in (last := max(self._held), last + 1):
            self.clear()
        while len(self._held) >= self._most and version not in self._held:
            del self._held[min(self._held)]
        self._held[version] = jax.tree.map(gather, weights)

    def read(self, version: int, shardings: Tree) -> Tree:
        """The weights on the devices again."""
        return place(self._held[version], shardings)

    def clear(self) -> None:
        self._held = {}


# Measures the split of the importance ratio in every update, on a sample of its answers.
#
# It only reads the state of the learner: an update trains the same weights with it and without it, bit for bit.


class RatioSampler:
    """Keeps the weights of published versions, and scores sampled answers under them after each update.

    Args:
      weights: described, as Passes.working gives them.

    Raises ConfigError if the ring does not hold one version.
    """

    def __init__(
        self, settings: LearnerSettings, passes: Passes, layout: RowLayout, programs: CompiledPrograms, weights: Tree
    ):
        self._settings, self._passes, self._layout, self._programs = settings, passes, layout, programs
        self._ring = WeightRing(settings.diagnostics.ring_bytes, weights)
        self._keep_s = 0.0  # wall seconds since the last update

    def keep(self, version: int, state: LearnerState) -> None:
        """Keeps the weights of `state`, which are version `version`."""
        began_s = time.perf_counter()
        self._ring.add(version, self._passes.working(state))
        self._keep_s += time.perf_counter() - began_s

    def require(self, version: int, state: LearnerState) -> None:
        """Calls `keep` if the ring lacks the version, because this learner did not publish it."""
        if version not in self._ring.versions:
            self.keep(version, state)

    def forget(self) -> None:
        """Drops all versions, because the learner takes other weights: these are of another history."""
        self._ring.clear()

    def measure_update(self, update: Update, state: LearnerState) -> dict[str, float]:
        """The metrics of the split of an update, with the weights after it."""
        update_s = time.perf_counter() - update.began_s
        began_s = time.perf_counter()

        score = functools.partial(self._score, state=state)

        def score_routing(groups: Sequence[TrajectoryGroup], versions: Sequence[int]) -> np.ndarray:
            replayed, live = (score(groups, versions, follows=follows) for follows in (True, False))
            return replayed - live

        metrics = measure_split(
            update.kept,
            update.trained.batches,
            _policy_logprobs(update.trained),
            version=update.version,
            held=self._ring.versions,
            is_chosen=self._is_chosen,
            score=score,
            score_routing=score_routing if self._layout.inputs else None,
        )
        seconds, self._keep_s = self._keep_s + time.perf_counter() - began_s, 0.0
        share = seconds / max(update_s + seconds, 1e-9)
        return metrics | {str(names.RATIO_SECONDS): seconds, str(names.RATIO_SHARE): share}

    def _is_chosen(self, trajectory: Trajectory) -> bool:
        settings = self._settings
        return is_sampled(settings.seed, trajectory.prompt.draw, trajectory.sample, settings.diagnostics.ratio_sample)

    def _score(
        self,
        groups: Sequence[TrajectoryGroup],
        versions: Sequence[int],
        state: LearnerState,
        follows: bool | None = None,
    ) -> np.ndarray:
        """float32 [versions, generated tokens]. The rows are packed once, so that equal weights give equal floats.

        `follows`: see Passes.logprobs.
        """
        ones = [np.ones(len(group.trajectories), np.float32) for group in groups]
        (batch,), _ = self._layout.pack(groups, ones, n_minibatches=1)
        places = np.flatnonzero(batch.loss_mask)
        places = places[np.argsort(batch.trajectory_ids.ravel()[places], kind='stable')]
        logprobs = lambda version: self._passes.logprobs(self.weights(version, state), batch, version, follows)
        return np.stack([logprobs(version).ravel()[places] for version in versions])

    def weights(self, version: int, state: LearnerState) -> PassWeights:
        """The kept weights of a version, on the devices again."""
        return PassWeights(version, self._ring.read(version, self._programs.definitions.params), state.frozen)


def _policy_logprobs(trained: Trained) -> list[np.ndarray]:
    """Per minibatch float32 [M, R, N]: log π_θ when its gradient was taken, the mean over the epochs."""
    results, batches = trained.results, trained.batches
    own = lambda index: [result.logprobs for result in results[index :: len(batches)]]
    return [np.mean(own(i), axis=0).reshape(batch.targets.shape) for i, batch in enumerate(batches)]
