"""The metrics that pages and pictures draw over the updates: in which chart each is, and which are worth drawing."""

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
    """Metrics of one unit in one figure; a comparison of runs shows only the first."""

    title: str
    unit: str
    metrics: Sequence[tuple[str, str]]  # label, name
    group: str  # the section of the page that it belongs to
    logarithmic: bool = False
    smooth: bool = True  # the updates are drawn faint, with their moving mean
    wide: bool = False

    @property
    def name(self) -> str:
        """The name of the figure."""
        return self.title.lower().replace(', ', '_').replace(' ', '_')


LEARNING, SPEED, STALENESS, AGREEMENT, OPTIMISATION = 'learning', 'speed', 'staleness', 'agreement', 'optimisation'
EXPERTS = 'experts'
REWARD = Curve('Reward', 'mean of the batch', (('mean', names.REWARD_MEAN),), LEARNING, wide=True)
TOKEN_AGE = Curve(
    'Token age',
    'versions',
    (('mean', names.TOKEN_AGE_MEAN), ('oldest', names.TOKEN_AGE_MAX)),
    STALENESS,
    smooth=False,
    wide=True,
)
CURVES = (
    REWARD,
    Curve('Reward, standard deviation', 'reward', (('standard deviation', names.REWARD_STD),), LEARNING),
    Curve(
        'Unread answers and filtered groups',
        'share',
        (('answers not read', names.REWARD_UNPARSED), ('groups filtered', names.FILTERED_RATE)),
        LEARNING,
    ),
    Curve(
        'Throughput', 'tokens/s', (('generated', names.GENERATE_RATE), ('trained', names.TRAIN_RATE)), SPEED, wide=True
    ),
    Curve(
        'Pauses for new weights',
        's',
        (('longest of an engine', names.PUBLISH_PAUSE), ('of a request, p50', names.REQUEST_PAUSE_MEDIAN)),
        SPEED,
        smooth=False,
    ),
    Curve('Groups in the buffer', 'groups', (('at publication', names.BUFFER_GROUPS),), SPEED, smooth=False),
    TOKEN_AGE,
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
    Curve('Fullest expert', 'times the mean of its layer', (('mean of the layers', names.EXPERT_LOAD),), EXPERTS),
    Curve('Experts without a token', 'experts', (('of all layers', names.EXPERTS_DEAD),), EXPERTS),
    Curve(
        'Tokens with another route in the learner',
        'share',
        (
            ('all ages', f'{names.ROUTES}tokens_changed'),
            *((f'age {age}', f'{names.ROUTES_OF_AGE}{age}/tokens_changed') for age in map(names.range_label, range(5))),
        ),
        EXPERTS,
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
    Curve('Effective sample size', 'share', (('of the behavior weights', 'loss/effective_sample_size'),), OPTIMISATION),
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
_LEAST_SMOOTHED, _SHARE = 10, 20  # fewest points of a smoothed curve; window of a long one: 1/20
_LEAST_WINDOW = 5
MARKED = 60  # a line of at most this many points has a marker at each, unless it is smoothed


def curve_points(metrics: Metrics, name: str) -> tuple[list[int], list[float]]:
    """The updates that have the metric, and its values."""
    updates: list[int] = []
    values: list[float] = []
    for line in metrics:
        if isinstance(value := line.get(name), int | float):
            updates.append(int(number(line, names.STEP) or 0))
            values.append(value)
    return updates, values


def describe_undrawn(metrics: Metrics, curve: Curve) -> str:
    """The reason not to draw the curve (no data, one point, constant), with its numbers; '' if it is worth drawing."""
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
    """The window of the moving mean of a curve of `points` points; 1 if it is too short to smooth."""
    return 1 if points < _LEAST_SMOOTHED else max(_LEAST_WINDOW, points // _SHARE)


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Means of each value with the values before it, at most `window` values in all."""
    sums = [0.0, *itertools.accumulate(values)]
    starts = (max(0, end - window) for end in range(1, len(sums)))
    return [(sums[end] - sums[start]) / (end - start) for end, start in enumerate(starts, start=1)]
