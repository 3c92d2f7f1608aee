"""Which metrics of the updates a page draws as curves, their points and how they are smoothed."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from areal_jax.report.aggregates import Metrics
from areal_jax.telemetry import names
from areal_jax.telemetry.metrics import number
from areal_jax.telemetry.progress import format_number


@dataclasses.dataclass(frozen=True)
class Curve:
    """Metrics of one unit in one figure; runs are compared by the first."""

    title: str
    unit: str
    metrics: Sequence[tuple[str, str]]  # label, name
    group: str  # the section of the page that it belongs to
    logarithmic: bool = False
    smooth: bool = True  # the updates are drawn faint, with their moving mean
    wide: bool = False

    @property
    def name(self) -> str:
        """Of the figure."""
        return self.title.lower().replace(', ', '_').replace(' ', '_')


LEARNING, SPEED, STALENESS, AGREEMENT, OPTIMISATION = 'learning', 'speed', 'staleness', 'agreement', 'optimisation'
CURVES = (
    Curve('Reward', 'mean of the batch', (('mean', names.REWARD_MEAN),), LEARNING, wide=True),
    Curve('Reward, standard deviation', 'reward', (('standard deviation', names.REWARD_STD),), LEARNING),
    Curve(
        'Unread answers and filtered groups',
        'share',
        (('answers not read', names.REWARD_UNPARSED), ('groups filtered', names.FILTERED_RATE)),
        LEARNING,
    ),
    Curve(
        'Throughput',
        'tokens/s',
        (('generated', names.GENERATE_RATE), ('trained', names.TRAIN_RATE)),
        SPEED,
        wide=True,
    ),
    Curve(
        'Pauses for new weights',
        's',
        (('longest of an engine', names.PUBLISH_PAUSE), ('of a request, p50', names.REQUEST_PAUSE_MEDIAN)),
        SPEED,
        smooth=False,
    ),
    Curve(
        'Groups in the buffer',
        'groups',
        (('at publication', names.BUFFER_GROUPS),),
        SPEED,
        smooth=False,
    ),
    Curve(
        'Token age',
        'versions',
        (('mean', names.TOKEN_AGE_MEAN), ('oldest', names.TOKEN_AGE_MAX)),
        STALENESS,
        smooth=False,
        wide=True,
    ),
    Curve(
        'Token age in steps',
        'optimizer steps',
        (('mean', names.STEP_AGE_MEAN), ('largest', names.STEP_AGE_MAX)),
        STALENESS,
        smooth=False,
    ),
    Curve(
        'Versions in a trajectory',
        'versions',
        (('mean', names.VERSIONS_MEAN), ('largest', names.VERSIONS_MAX)),
        STALENESS,
        smooth=False,
    ),
    Curve(
        'Mismatch of engine and learner',
        'nats',
        (('mean', names.MISMATCH_MEAN), ('largest', names.MISMATCH_MAX)),
        AGREEMENT,
        logarithmic=True,
        smooth=False,
    ),
    Curve('Loss', '', (('value', 'loss/value'),), OPTIMISATION),
    Curve('Gradient norm', 'before clipping', (('gradient norm', 'update/grad_norm'),), OPTIMISATION),
    Curve('Entropy', 'nats a token', (('of the policy', 'loss/entropy'),), OPTIMISATION),
    Curve(
        'KL',
        'nats a token',
        (('behavior to policy', 'loss/approx_kl'), ('policy to reference', 'loss/reference_kl')),
        OPTIMISATION,
    ),
    Curve('Clipped tokens', 'share', (('clip fraction', 'loss/clip_fraction'),), OPTIMISATION),
    Curve(
        'Effective sample size',
        'share',
        (('of the behavior weights', 'loss/effective_sample_size'),),
        OPTIMISATION,
    ),
    Curve(
        'Behavior weights',
        'weight',
        (('mean', 'loss/behavior_weight_mean'), ('largest', 'loss/behavior_weight_max')),
        OPTIMISATION,
    ),
)
SPLIT = Curve(
    'RMS of the parts of the importance ratio',
    'nats',
    tuple((part, f'{names.RATIO}{part}_rms') for part in ('total', 'mismatch', 'drift', 'inside')),
    AGREEMENT,
    logarithmic=True,
    smooth=False,
)
_LEAST_SMOOTHED, _SHARE = 10, 20  # points from which a curve is smoothed; the window is the 20th part of a long curve
_LEAST_WINDOW = 5


def curve_points(metrics: Metrics, name: str) -> tuple[list[int], list[float]]:
    """Updates that have the metric, and its values."""
    updates: list[int] = []
    values: list[float] = []
    for line in metrics:
        if isinstance(value := line.get(name), int | float):
            updates.append(int(number(line, names.STEP) or 0))
            values.append(value)
    return updates, values


def describe_undrawn(metrics: Metrics, curve: Curve) -> str:
    """Why the curve would be an empty panel or a straight line, with its numbers; '' where it is worth drawing."""
    found = {label: curve_points(metrics, name) for label, name in curve.metrics}
    found = {label: points for label, points in found.items() if points[1]}
    if not found:
        return f'{curve.title}: not measured.'
    if curve.logarithmic and not any(value > 0 for _, values in found.values() for value in values):
        return f'{curve.title}: never above 0.'
    unit = f' ({curve.unit})' if curve.unit else ''
    first = ', '.join(f'{label} {format_number(values[0])}' for label, (_, values) in found.items())
    updates = {update for own, _ in found.values() for update in own}
    if len(updates) == 1:
        return f'{curve.title}{unit}: measured at update {updates.pop()} only, {first}.'
    if all(len(set(values)) == 1 for _, values in found.values()):
        return f'{curve.title}{unit}: the same in all {len(updates)} updates that measured it, {first}.'
    return ''


def smoothing_window(points: int) -> int:
    """Updates in the moving mean of a curve of so many points; 1 where it is too short to smooth."""
    return 1 if points < _LEAST_SMOOTHED else max(_LEAST_WINDOW, points // _SHARE)


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Of each value and the values before it, `window` in all if there are so many."""
    sums = [0.0, *itertools.accumulate(values)]
    starts = (max(0, end - window) for end in range(1, len(sums)))
    return [(sums[end] - sums[start]) / (end - start) for end, start in enumerate(starts, start=1)]
