"""The results of a sweep: read from its arms, compared, and written as tables."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import pathlib
from collections.abc import Iterator, Mapping, Sequence

from areal_jax import files
from areal_jax.app.sweep.arms import SEED, Arm, ArmState, Group, group_arms, read_state
from areal_jax.app.sweep.endpoints import (
    ENDPOINTS,
    ArmRecord,
    Endpoint,
    PairedDifference,
    Values,
    common_horizon,
    endpoint_values,
    holm,
    paired_difference,
    read_record,
)
from areal_jax.errors import UserError
from areal_jax.report.pages.colors import Look, choose_looks
from areal_jax.report.report import FILE as REPORT
from areal_jax.report.statistics import CONFIDENCE, Interval, cluster_interval
from areal_jax.telemetry.metrics import FILE as METRICS
from areal_jax.telemetry.metrics import read_metrics

NO_DIFFERENCE, HIGHER, LOWER = 'no difference shown', 'higher', 'lower'  # verdicts


@dataclasses.dataclass(frozen=True)
class ArmResult:
    """One arm: its state, and its endpoints if it has finished."""

    arm: Arm
    state: ArmState
    values: Values
    weights: str  # SHA-256 of the last version; '' if it has not finished
    record: ArmRecord | None  # None: not finished


@dataclasses.dataclass(frozen=True)
class GroupResult:
    """Arms that differ only in seed, finished or not, and means over the finished seeds."""

    name: str
    arms: tuple[ArmResult, ...]
    means: Mapping[str, Interval]  # Student's 95% interval, by the name of an endpoint

    @property
    def finished(self) -> list[ArmResult]:
        return [result for result in self.arms if result.state.is_finished]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A group compared with an earlier one, over the seeds that have finished in both."""

    endpoint: str
    baseline: str  # the earlier group
    group: str
    difference: PairedDifference
    holm_p: float | None  # over the pairs that are compared by this endpoint

    @property
    def verdict(self) -> str:
        """What the 95% interval of the difference says; 'not known' from a single seed."""
        bounds, p = self.difference.t, self.holm_p
        if bounds is None or p is None:
            return 'not known'
        if bounds.low <= 0 <= bounds.high:
            return NO_DIFFERENCE
        side = HIGHER if bounds.low > 0 else LOWER
        return side if 1 - p > CONFIDENCE else f'{side}, by this interval alone'


@dataclasses.dataclass(frozen=True)
class Series:
    """Groups that differ in one numeric field only, and in fields that change with it, in ascending order."""

    label: str  # other fields with their values; '' if all groups are in this series
    groups: Mapping[str, float]  # value of the field by name of the group


@dataclasses.dataclass(frozen=True)
class Results:
    """The contents of the tables and the page."""

    source: str  # --config
    groups: tuple[GroupResult, ...]
    comparisons: tuple[Comparison, ...]

    @property
    def arms(self) -> list[ArmResult]:
        return [result for group in self.groups for result in group.arms]

    @property
    def endpoints(self) -> list[Endpoint]:
        """The endpoints that at least one finished arm has."""
        return [endpoint for endpoint in ENDPOINTS if any(endpoint.name in result.values for result in self.arms)]

    @property
    def outcomes(self) -> list[Endpoint]:
        """The endpoints by which arms are compared, of those that a finished arm has."""
        return [endpoint for endpoint in self.endpoints if endpoint.is_outcome]


def build_results(source: str, arms: Sequence[Arm]) -> Results:
    """Reads the workdirs of all arms. A damaged file makes its arm unfinished, with the reason."""
    read = {arm.name: _read_arm(arm) for arm in arms}
    records = [record for _, record in read.values() if record]
    horizon = common_horizon(records)

    def result(arm: Arm) -> ArmResult:
        state, record = read[arm.name]
        values = endpoint_values(record, horizon) if record else {}
        weights = str(record.report.get('weights_sha256') or '') if record else ''
        return ArmResult(arm, state, values, weights, record)

    groups = tuple(_group_result(group, [result(arm) for arm in group.arms]) for group in group_arms(arms))
    return Results(source, groups, tuple(_compare(groups)))


def _read_arm(arm: Arm) -> tuple[ArmState, ArmRecord | None]:
    state = read_state(arm)
    if not state.is_finished:
        return state, None
    try:
        report = files.read_json(arm.workdir / REPORT)
        return state, read_record(read_metrics(arm.workdir / METRICS), report)
    except UserError as error:
        return dataclasses.replace(state, is_finished=False, reason=str(error)), None


def _group_result(group: Group, results: Sequence[ArmResult]) -> GroupResult:
    means = {}
    for endpoint in ENDPOINTS:
        values = [result.values[endpoint.name] for result in results if endpoint.name in result.values]
        if values:
            means[endpoint.name] = cluster_interval([[value] for value in values])
    return GroupResult(group.name, tuple(results), means)


def group_looks(groups: Sequence[GroupResult]) -> tuple[str, dict[str, Look]]:
    """Returns the numeric field that orders the groups ('' if none does), and the look of each group."""
    return choose_looks({group.name: group.arms[0].arm.values() for group in groups if group.arms})


def split_series(groups: Sequence[GroupResult]) -> list[Series]:
    """Divides the groups into series by the fields that differ at one value of the field that orders them.

    Returns [] if no numeric field orders the groups.
    """
    field, _ = group_looks(groups)
    if not field:
        return []
    values = {group.name: group.arms[0].arm.values() for group in groups}
    at = {name: float(str(own.pop(field))) for name, own in values.items()}
    others = {
        path: None
        for first, second in itertools.combinations(values, 2)
        if at[first] == at[second]
        for path in sorted(values[first])
        if path != SEED and values[first][path] != values[second].get(path)
    }
    found: dict[str, dict[str, float]] = {}
    for name in sorted(values, key=lambda name: at[name]):
        label = ', '.join(f'{path}={values[name].get(path)}' for path in others)
        found.setdefault(label, {})[name] = at[name]
    return [Series(label, members) for label, members in found.items()]


def _compare(groups: Sequence[GroupResult]) -> list[Comparison]:
    found = []
    named = {group.name: group for group in groups}
    pairs = _list_pairs(groups)
    for endpoint in ENDPOINTS:
        if not endpoint.is_outcome:
            continue
        differences = {
            (first, second): paired_difference(*values)
            for first, second in pairs
            if (values := _pair(endpoint, named[first], named[second]))
        }
        tested = {pair: difference.p for pair, difference in differences.items() if difference.p is not None}
        adjusted = dict(zip(tested, holm(list(tested.values())), strict=True))
        found += [
            Comparison(endpoint.name, *pair, difference, adjusted.get(pair)) for pair, difference in differences.items()
        ]
    return found


def _list_pairs(groups: Sequence[GroupResult]) -> list[tuple[str, str]]:
    """Returns the names of the groups to compare, in their order.

    If a numeric field orders the groups, two groups are compared if they differ in it alone or have the same value of
    it; else every group is compared with the first.
    """
    series = split_series(groups)
    names = [group.name for group in groups]
    if not series:
        return [(names[0], name) for name in names[1:]]
    of = {name: (index, value) for index, one in enumerate(series) for name, value in one.groups.items()}
    return [
        (first, second)
        for first, second in itertools.combinations(names, 2)
        if any(a == b for a, b in zip(of[first], of[second], strict=True))
    ]


def _pair(endpoint: Endpoint, first: GroupResult, second: GroupResult) -> tuple[list[float], list[float]] | None:
    """Returns the values of the seeds that both groups have, by ascending seed; None if they share no seed."""
    values = [
        {result.arm.seed: result.values[endpoint.name] for result in group.arms if endpoint.name in result.values}
        for group in (first, second)
    ]
    seeds = sorted(values[0].keys() & values[1].keys())
    return ([values[0][seed] for seed in seeds], [values[1][seed] for seed in seeds]) if seeds else None


# The tables of a sweep as files for other programs: results.csv and differences.csv.
#
# results.csv has a row for each arm, unfinished ones included, and the rows mean, low and high for each group. Numbers
# have all their digits; unknown values are empty.


RESULTS, DIFFERENCES = 'results.csv', 'differences.csv'
_HEAD = ('row', 'group', 'arm', 'seed', 'seeds', 'state', 'updates', 'planned_updates', 'reason')
_PAIRING = ('r', 'seeds_factor', 'error_factor', 'paired_error', 'unpaired_error')  # attributes of Pairing
_DIFFERENCE_HEAD = (
    *('endpoint', 'baseline', 'group', 'seeds', 'difference', 't_low', 't_high', 'bootstrap_low', 'bootstrap_high'),
    *('p', 'p_holm', *_PAIRING),
)


def write_tables(results: Results, workdir: pathlib.Path) -> None:
    """Writes both files, each whole or not at all."""
    fields = dict.fromkeys(path for result in results.arms for path in result.arm.overrides)
    head = [*_HEAD, *fields, *(endpoint.name for endpoint in results.endpoints), 'weights_sha256']
    rows = [row for group in results.groups for row in _group_rows(group)]
    files.write_text(workdir / RESULTS, _render(head, rows))
    files.write_text(workdir / DIFFERENCES, _render(_DIFFERENCE_HEAD, [*map(_row_of, results.comparisons)]))


def _group_rows(group: GroupResult) -> Iterator[Mapping[str, object]]:
    for result in group.arms:
        arm, state = result.arm, result.state
        values = (
            'arm',
            group.name,
            arm.name,
            arm.seed,
            '',
            state.word,
            state.updates,
            arm.config.run.steps,
            state.reason,
        )
        head = dict(zip(_HEAD, values, strict=True))
        yield {**head, **arm.overrides, **result.values, 'weights_sha256': result.weights}
    for row in ('mean', 'low', 'high'):
        means = {name: getattr(mean, row) for name, mean in group.means.items()}
        yield {'row': row, 'group': group.name, 'seeds': len(group.finished), **means}


def _row_of(comparison: Comparison) -> Mapping[str, object]:
    found, pairing = comparison.difference, comparison.difference.pairing
    bounds = (found.t, found.bootstrap)
    ends = [end for one in bounds for end in ((one.low, one.high) if one else (None, None))]
    gains = [getattr(pairing, name, None) for name in _PAIRING]
    values = (comparison.endpoint, comparison.baseline, comparison.group, found.n, found.mean, *ends)
    return dict(zip(_DIFFERENCE_HEAD, (*values, found.p, comparison.holm_p, *gains), strict=True))


def _render(head: Sequence[str], rows: Sequence[Mapping[str, object]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, head, extrasaction='ignore', lineterminator='\n')
    writer.writeheader()
    writer.writerows(rows)  # None and what a row lacks are empty cells
    return text.getvalue()
