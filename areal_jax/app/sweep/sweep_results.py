"""What a sweep has found: endpoints of every arm, means over seeds, differences between groups paired by seed.

Built from the workdirs of the arms, whatever state they are in; tables.py, page.py and plots.py write it down.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from areal_jax import files
from areal_jax.app.sweep.arms import Arm, Group, group_arms
from areal_jax.app.sweep.endpoints import (
    ENDPOINTS,
    ArmRecord,
    Endpoint,
    Values,
    common_horizon,
    endpoint_values,
    read_record,
)
from areal_jax.app.sweep.paired import PairedDifference, holm, paired_difference
from areal_jax.app.sweep.sweep_directory import ArmState, read_state
from areal_jax.errors import UserError
from areal_jax.report.report import FILE as REPORT
from areal_jax.report.statistics import Interval, cluster_interval
from areal_jax.telemetry.metrics import FILE as METRICS
from areal_jax.telemetry.metrics import read_metrics


@dataclasses.dataclass(frozen=True)
class ArmResult:
    """One arm: its state, and its endpoints where it has finished."""

    arm: Arm
    state: ArmState
    values: Values
    weights: str  # SHA-256 of the last version; '' where it has not finished
    record: ArmRecord | None  # None: not finished


@dataclasses.dataclass(frozen=True)
class GroupResult:
    """Arms that differ in seed only, finished or not, and means over the seeds that have finished."""

    name: str
    arms: tuple[ArmResult, ...]
    means: Mapping[str, Interval]  # Student's 95% interval, by the name of an endpoint

    @property
    def finished(self) -> list[ArmResult]:
        return [result for result in self.arms if result.state.is_finished]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A group against the first one, over the seeds that have finished in both."""

    endpoint: str
    group: str
    difference: PairedDifference
    holm_p: float | None  # over the groups that are compared in this endpoint


@dataclasses.dataclass(frozen=True)
class Results:
    """Everything that the table says."""

    source: str  # --config
    groups: tuple[GroupResult, ...]
    comparisons: tuple[Comparison, ...]

    @property
    def arms(self) -> list[ArmResult]:
        return [result for group in self.groups for result in group.arms]

    @property
    def endpoints(self) -> list[Endpoint]:
        """Those that at least one finished arm has."""
        return [endpoint for endpoint in ENDPOINTS if any(endpoint.name in result.values for result in self.arms)]

    @property
    def outcomes(self) -> list[Endpoint]:
        """Those of them that are compared."""
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


def _compare(groups: Sequence[GroupResult]) -> list[Comparison]:
    found = []
    for endpoint in ENDPOINTS:
        if not endpoint.is_outcome:
            continue
        differences = {
            group.name: paired_difference(*pairs)
            for group in groups[1:]
            if (pairs := _pair(endpoint, groups[0], group))
        }
        tested = {name: difference.p for name, difference in differences.items() if difference.p is not None}
        adjusted = dict(zip(tested, holm(list(tested.values())), strict=True))
        found += [
            Comparison(endpoint.name, name, difference, adjusted.get(name)) for name, difference in differences.items()
        ]
    return found


def _pair(endpoint: Endpoint, first: GroupResult, second: GroupResult) -> tuple[list[float], list[float]] | None:
    """Values of the seeds that both groups have, in ascending order of the seeds; None without any."""
    values = [
        {result.arm.seed: result.values[endpoint.name] for result in group.arms if endpoint.name in result.values}
        for group in (first, second)
    ]
    seeds = sorted(values[0].keys() & values[1].keys())
    return ([values[0][seed] for seed in seeds], [values[1][seed] for seed in seeds]) if seeds else None
