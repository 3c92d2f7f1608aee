"""The arms of each stage of a study, made from its plan; the rate of later stages comes from the sweep of the rate."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Mapping, Sequence

from areal_jax.app.command_line import CommandLine
from areal_jax.app.sweep.arms import Arm, make_arms, read_state
from areal_jax.studies.arm_programs import PROGRAMS, Program, Scoring, make_programs
from areal_jax.studies.plan import Overrides, Plan

CONTROLS, KNEE, PILOT, LOCK_STEP, NATURAL = STAGES = ('controls', 'knee', 'pilot', 'lock_step', 'natural')
CACHE = 'compiled'  # directory of compiled programs, inside the study's
KNOWN, ZERO_RATE, SAME_A, SAME_B, SHUFFLED = 'known', 'zero_rate', 'same_a', 'same_b', 'shuffled'
RATE = 'optimizer.learning_rate'
Rates = Mapping[str, float]  # learning rate of each method


@dataclasses.dataclass(frozen=True)
class Factors:
    """What tells an arm of a study from the others."""

    stage: str
    method: str
    seed: int
    lag: int | None = None  # of a lock-step arm
    eta: float | None = None  # of a natural one
    rate: float | None = None  # None = as in the config
    factor: float = 1.0  # rate / knee
    variant: str = ''  # of a control, or of the natural part

    @property
    def name(self) -> str:
        """Names the arm, and its directory inside the stage's directory."""
        where = f'lag{self.lag}' if self.lag is not None else f'eta{self.eta:g}'
        rate = '' if self.rate is None else f'_rate{self.rate:.3g}'
        return f'{self.variant and self.variant + "_"}{where}_{self.method}{rate}_seed{self.seed}'


@dataclasses.dataclass(frozen=True)
class Stage:
    """Arms that run before the arms of the next stage."""

    name: str
    arms: Mapping[Factors, Arm]
    programs: tuple[Program, ...]
    runs: tuple[Arm, ...]


class StageMaker:
    """Makes stages of a plan.

    Args:
      command: of the study; fields that it sets are set for all arms.
      workdir: of the study.
    """

    def __init__(self, command: CommandLine, plan: Plan, workdir: pathlib.Path):
        self._command, self._plan, self._workdir = command, plan, workdir

    def make(self, name: str, rates: Rates) -> Stage:
        """One of STAGES; the first two need no rates. Raises UserError for an arm that cannot run, naming it."""
        listed = {CONTROLS: self._controls, KNEE: self._knee}.get(name)
        named = {PILOT: self._pilot, LOCK_STEP: self._lock_step, NATURAL: self._natural}.get(name)
        return self.build(name, dict(listed() if listed else named(rates) if named else ()))

    def build(self, name: str, wanted: Mapping[Factors, Overrides]) -> Stage:
        """A stage of these arms. Raises UserError for an arm that cannot run, naming it."""
        built = make_arms(
            self._command,
            {factors.name: self._cached(overrides) for factors, overrides in wanted.items()},
            self._workdir / name,
        )
        arms = dict(zip(wanted, built, strict=True))
        together = [arm for factors, arm in arms.items() if factors.lag is not None]
        alone = tuple(arm for factors, arm in arms.items() if factors.lag is None)
        return Stage(name, arms, tuple(make_programs(name, together, self._workdir)), alone)

    def scoring(self, stage: Stage) -> Scoring:
        """The job that scores the runs of a stage which have finished."""
        name = f'{stage.name}_scores'
        finished = tuple(arm for arm in stage.runs if read_state(arm).is_finished)
        return Scoring(name, self._workdir / PROGRAMS / name, finished)

    def _cached(self, overrides: Overrides) -> Overrides:
        return {'run.compilation_cache': str(self._workdir / CACHE), **overrides}

    def _together(self, factors: Factors, more: Overrides | None = None) -> tuple[Factors, Overrides]:
        """A lock-step arm."""
        part = self._plan.lock_step
        own: Overrides = {'staleness.schedule': f'fixed({factors.lag})', 'run.seed': factors.seed}
        rate: Overrides = {} if factors.rate is None else {RATE: factors.rate}
        return factors, {**part.common, **part.methods[factors.method], **(more or {}), **own, **rate}

    def _alone(self, factors: Factors, more: Overrides | None = None) -> tuple[Factors, Overrides]:
        """A natural run."""
        part = self._plan.natural
        assert factors.eta is not None
        own: Overrides = {'staleness.eta': factors.eta, 'run.seed': factors.seed}
        rate: Overrides = {} if factors.rate is None else {RATE: factors.rate}
        method = self._plan.lock_step.methods[factors.method]
        return factors, {**part.common, **method, **(more or {}), **own, **rate}

    def _controls(self) -> Iterable[tuple[Factors, Overrides]]:
        plan, method = self._plan.controls, self._plan.natural.variant_method
        for lag in plan.known_bounds:
            for seed in plan.known_seeds:
                yield self._together(Factors(CONTROLS, plan.known_method, seed, lag, variant=KNOWN), plan.known)
        yield self._together(Factors(CONTROLS, method, 0, plan.same_lag, rate=0.0, variant=ZERO_RATE))
        for variant in (SAME_A, SAME_B):
            yield self._together(Factors(CONTROLS, method, 0, plan.same_lag, variant=variant))
            yield self._alone(Factors(CONTROLS, method, 0, eta=plan.same_eta, variant=variant))
        shuffled = Factors(CONTROLS, method, 0, eta=plan.same_eta, variant=SHUFFLED)
        yield self._alone(shuffled, plan.shuffled)

    def _knee(self) -> Iterable[tuple[Factors, Overrides]]:
        part = self._plan.lock_step
        for method in dict.fromkeys(part.rate_from.values()):
            for rate in part.rates:
                for seed in part.knee_seeds:
                    yield self._together(Factors(KNEE, method, seed, part.lags[0], rate=rate))

    def _pilot(self, rates: Rates) -> Iterable[tuple[Factors, Overrides]]:
        part = self._plan.lock_step
        for method in part.methods:
            for lag in (part.lags[0], part.pilot_lag):
                for seed in part.pilot_seeds:
                    yield self._together(Factors(PILOT, method, seed, lag, rate=rates[method]))

    def _lock_step(self, rates: Rates) -> Iterable[tuple[Factors, Overrides]]:
        part = self._plan.lock_step
        sides: Sequence[tuple[float, Sequence[int]]] = [(1.0, part.seeds)]
        sides = [*sides, *((factor, part.side_seeds) for factor in part.side_factors)]
        for lag in part.lags:
            for method in part.methods:
                for factor, seeds in sides:
                    for seed in seeds:
                        rate = rates[method] * factor
                        yield self._together(Factors(LOCK_STEP, method, seed, lag, rate=rate, factor=factor))

    def _natural(self, rates: Rates) -> Iterable[tuple[Factors, Overrides]]:
        part = self._plan.natural
        for eta in part.etas:
            for method in part.methods:
                for seed in part.seeds:
                    yield self._alone(Factors(NATURAL, method, seed, eta=eta, rate=rates[method]))
        for variant, overrides in part.variants.items():
            method = part.variant_method
            for seed in part.seeds:
                factors = Factors(NATURAL, method, seed, eta=part.variant_eta, rate=rates[method], variant=variant)
                yield self._alone(factors, overrides)
