"""What the arms of a study left, as numbers: scores, curves, ages, throughput."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from areal_jax import files
from areal_jax.app.sweep.arms import Arm, ArmState, read_state
from areal_jax.app.sweep.endpoints import read_record
from areal_jax.errors import UserError
from areal_jax.report.report import FILE as REPORT
from areal_jax.studies.arm_programs import SCORE, Program
from areal_jax.studies.stages import Factors
from areal_jax.telemetry.metrics import FILE as METRICS
from areal_jax.telemetry.metrics import read_metrics


@dataclasses.dataclass(frozen=True)
class Record:
    """One arm, and its numbers where it has finished; None for what it does not have."""

    factors: Factors
    state: ArmState
    score: float | None = None  # of the final weights
    curve: Sequence[float] = ()  # share of right places in the batch of each update
    tokens_per_second: float | None = None  # trained, by the clock
    age: float | None = None  # mean over the trained tokens, versions
    oldest: float | None = None
    weights: str = ''  # SHA-256
    initial_weights: str = ''  # of lock-step arms
    mismatch: float | None = None  # RMS, nats
    drift: float | None = None  # RMS, nats
    split_cost: float | None = None  # share of the update's seconds that went into these two

    @property
    def area(self) -> float | None:
        """Mean of the curve."""
        return statistics.fmean(self.curve) if self.curve else None

    def window(self, first: int, end: int) -> float | None:
        """Mean of the curve from update `first` on, counted from 0, up to the one before `end`."""
        part = self.curve[first:end]
        return statistics.fmean(part) if part else None


Records: TypeAlias = Sequence[Record]


def read_records(arms: Mapping[Factors, Arm], programs: Iterable[Program] = ()) -> list[Record]:
    """Of all arms, finished or not; a damaged file makes its arm unfinished.

    An arm without a reason of its own gets the reason of its program.
    """
    reasons = {arm.workdir: program.read_state().reason for program in programs for arm in program.arms}
    return [_read(factors, arm, reasons.get(arm.workdir, '')) for factors, arm in arms.items()]


def select(records: Iterable[Record], **wanted: object) -> list[Record]:
    """Finished arms whose factors have these values: select(records, stage='knee', lag=0)."""
    has = lambda record: all(getattr(record.factors, name) == value for name, value in wanted.items())
    return [record for record in records if record.score is not None and has(record)]


def by_seed(records: Iterable[Record], read: Callable[[Record], float | None]) -> dict[int, float]:
    """One number of each record by its seed; records without it are left out."""
    found = {record.factors.seed: read(record) for record in records}
    return {seed: value for seed, value in found.items() if value is not None}


def _read(factors: Factors, arm: Arm, reason: str) -> Record:
    state = read_state(arm)
    if not state.is_finished:
        return Record(factors, dataclasses.replace(state, reason=state.reason or reason))
    try:
        return _read_finished(factors, arm, state)
    except UserError as error:
        return Record(factors, dataclasses.replace(state, is_finished=False, reason=str(error)))


def _read_finished(factors: Factors, arm: Arm, state: ArmState) -> Record:
    report = files.read_json(arm.workdir / REPORT)
    score = report.get('score')
    if score is None and (arm.workdir / SCORE).exists():
        score = files.read_json(arm.workdir / SCORE)['score']
    if score is None or not math.isfinite(score):
        return Record(factors, dataclasses.replace(state, is_finished=False, reason='its final weights have no score'))
    record = read_record(read_metrics(arm.workdir / METRICS), report)
    # a batch of answers that cannot end has a reward of at most A / (A + 1)
    unit = (arm.config.task.length + 1) / arm.config.task.length if arm.config.rollout.ignore_eos else 1.0
    split = report.get('ratio_split') or {}
    parts = split.get('parts', {})
    return Record(
        factors,
        state,
        score=score,
        curve=tuple(value * unit for value in record.reward.values),
        tokens_per_second=record.tokens / record.seconds if record.seconds else None,
        age=report['token_age']['mean'],
        oldest=report['token_age']['max'],
        weights=str(report.get('weights_sha256') or ''),
        initial_weights=str(report.get('initial_weights_sha256') or ''),
        mismatch=parts.get('mismatch', {}).get('rms'),
        drift=parts.get('drift', {}).get('rms'),
        split_cost=split.get('share'),
    )
