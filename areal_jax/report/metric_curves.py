"""Which metrics of the updates a page draws as curves, and their points. Used by figures.py and comparison_page.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from areal_jax.report.aggregates import Metrics
from areal_jax.telemetry import names
from areal_jax.telemetry.values import number


@dataclasses.dataclass(frozen=True)
class Curve:
    """Metrics of one unit in one figure; runs are compared by the first."""

    title: str
    unit: str
    metrics: Sequence[tuple[str, str]]  # label, name
    logarithmic: bool = False

    @property
    def name(self) -> str:
        """Of the figure."""
        return self.title.lower().replace(', ', '_').replace(' ', '_')


CURVES = (
    Curve('Reward', 'reward', (('mean', names.REWARD_MEAN), ('standard deviation', names.REWARD_STD))),
    Curve(
        'Unread answers and filtered groups',
        'share',
        (('answers that could not be read', names.REWARD_UNPARSED), ('groups filtered', names.FILTERED_RATE)),
    ),
    Curve('Loss', '', (('value', 'loss/value'),)),
    Curve('Gradient norm', '', (('before clipping', 'update/grad_norm'),)),
    Curve('Clipped tokens', 'share', (('clip fraction', 'loss/clip_fraction'),)),
    Curve(
        'KL',
        'nats a token',
        (('behavior to policy', 'loss/approx_kl'), ('policy to reference', 'loss/reference_kl')),
    ),
    Curve('Effective sample size', 'share', (('of the behavior weights', 'loss/effective_sample_size'),)),
    Curve(
        'Behavior weights', 'weight', (('mean', 'loss/behavior_weight_mean'), ('largest', 'loss/behavior_weight_max'))
    ),
    Curve('Entropy', 'nats a token', (('of the policy', 'loss/entropy'),)),
    Curve(
        'Token age',
        'versions',
        (('mean', names.TOKEN_AGE_MEAN), ('oldest', names.TOKEN_AGE_MAX)),
    ),
    Curve('Token age in steps', 'optimizer steps', (('mean', names.STEP_AGE_MEAN), ('largest', names.STEP_AGE_MAX))),
    Curve('Versions in a trajectory', 'versions', (('mean', names.VERSIONS_MEAN), ('largest', names.VERSIONS_MAX))),
    Curve(
        'Mismatch of engine and learner',
        'nats',
        (('mean', names.MISMATCH_MEAN), ('largest', names.MISMATCH_MAX)),
        logarithmic=True,
    ),
    Curve('Throughput', 'tokens/s', (('generated', names.GENERATE_RATE), ('trained', names.TRAIN_RATE))),
    Curve(
        'Pauses for new weights',
        's',
        (('longest of an engine', names.PUBLISH_PAUSE), ('of a request, p50', names.REQUEST_PAUSE_MEDIAN)),
    ),
    Curve('Groups in the buffer', 'groups', (('when weights were published', names.BUFFER_GROUPS),)),
)
SPLIT = Curve(
    'RMS of the parts of the importance ratio',
    'nats',
    tuple((part, f'{names.RATIO}{part}_rms') for part in ('total', 'mismatch', 'drift', 'inside')),
    logarithmic=True,
)


def curve_points(metrics: Metrics, name: str) -> tuple[list[int], list[float]]:
    """Updates that have the metric, and its values."""
    updates: list[int] = []
    values: list[float] = []
    for line in metrics:
        if isinstance(value := line.get(name), int | float):
            updates.append(int(number(line, names.STEP) or 0))
            values.append(value)
    return updates, values


def has_points(metrics: Metrics, curve: Curve) -> bool:
    """Whether an update has one of its metrics; on a logarithmic axis it must be above 0."""
    lowest = 0.0 if curve.logarithmic else float('-inf')
    return any(value > lowest for _, name in curve.metrics for value in curve_points(metrics, name)[1])
