"""Simulates plans: a plan becomes a config, its run is measured after a warm-up and stopped."""

from __future__ import annotations

import collections
import contextlib
import io
import math
import pathlib
import statistics
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ml_collections import config_dict

from areal_jax.app.simulate.simulated_site import SimulatedRun, build_simulation
from areal_jax.config import default_config
from areal_jax.lanes import LEARNER, is_engine_lane
from areal_jax.simulation.planner.cluster_load import NODE
from areal_jax.simulation.planner.plan_setting import Outcome, Plan, Setting
from areal_jax.telemetry import names

if TYPE_CHECKING:
    from areal_jax.events.schema import Event
    from areal_jax.telemetry.metrics import Line

_MEASURED = (6, 24)  # updates, at least and at most
_MEASURED_ANSWERS = 2048  # in as many updates as have them
WINDOW = 12  # updates in a row, of which the interval of a plan speaks
_ROW_TOKENS = 1 << 15
_MOST_BLOCK, _FEWEST_BLOCK = 512, 16  # tokens
_BLOCKS = 64  # of a sequence


def list_fields(setting: Setting, plan: Plan, decode_steps: int = 16) -> dict[str, object]:
    """The fields of the config that a plan sets, for a run and for its simulation alike."""
    answers, groups = setting.answers, setting.answers.groups
    context = answers.context
    block = min(_MOST_BLOCK, max(_FEWEST_BLOCK, 1 << (context // _BLOCKS).bit_length() - 1))
    engines = f'{plan.engines} x {"shared" if plan.shared else f"tensor={setting.engine_devices}"}'
    return {
        'cluster.learner': _describe_learner(plan.training, setting.least_training),
        'cluster.engines': engines,
        'rollout.slots': plan.slots,
        'rollout.max_running_groups': 0,
        'rollout.group_size': answers.group_size,
        'rollout.max_new_tokens': answers.limit,
        'rollout.context_tokens': context,
        'rollout.block_tokens': block,
        'rollout.prefill_buckets': tuple(sorted({min(bucket, context) for bucket in (2048, 16384)})),
        'rollout.decode_steps': decode_steps,
        'learner.groups_per_update': groups,
        'learner.n_minibatches': count_minibatches(groups),
        'learner.rows_per_microbatch': plan.training,
        'learner.row_tokens': max(_ROW_TOKENS, context),
        'learner.row_loss_tokens': max(_ROW_TOKENS, context),
        'staleness.eta': float(plan.eta),
        'buffer.capacity': (plan.eta + 2) * groups,
    }


def count_minibatches(groups: int) -> int:
    """Four where the groups of an update can be shared out so, as in arXiv 2505.24298."""
    return math.gcd(4, groups)


def _describe_learner(devices: int, shards: int) -> str:
    """Replicas of as few shards as hold a model: 'data=4', 'data=20,fsdp=8'."""
    fsdp = next(size for size in range(min(shards, devices), devices + 1) if devices % size == 0)
    sizes = {'data': devices // fsdp, 'fsdp': fsdp}
    return ','.join(f'{axis}={size}' for axis, size in sizes.items() if size > 1) or 'data=1'


def build_config(setting: Setting, plan: Plan, updates: int, seed: int, prompts: str) -> config_dict.ConfigDict:
    """Of the simulation of a plan."""
    config = default_config()
    reached = setting.costs.reached
    fields: Mapping[str, object] = {
        **list_fields(setting, plan),
        'run.steps': updates, 'run.seed': seed,
        'simulation.prices': 'roofline', 'simulation.chip': setting.chip.name, 'simulation.model': setting.shape.name,
        'simulation.answers': setting.answers.text, 'simulation.prompts': prompts,
        'simulation.bandwidth': reached.bandwidth, 'simulation.prefill': reached.prefill,
        'simulation.mfu': reached.mfu, 'simulation.passes': setting.passes,
        'simulation.load_s': setting.costs.load_s,
        'learner.filter_equal_rewards': False, 'checkpoint.every': 0, 'evaluation.problems': 0,
        'telemetry.plots': False, 'telemetry.progress': False, 'telemetry.tensorboard': False,
    }  # fmt: skip
    with config.unlocked():
        config.update_from_flattened_dict(fields)
    return config.lock()


def count_warm_up(plan: Plan) -> int:
    """Updates until the answers that began together, eta + 1 batches of them, are trained."""
    return plan.eta + 2


def count_measured(plan: Plan, answers: int) -> int:
    """Updates that are measured, of so many answers each: at least a turn of all that is open, which comes in waves."""
    least, most = _MEASURED
    return max(least, min(most, _MEASURED_ANSWERS // answers), plan.eta + 1)


def simulate_plan(
    setting: Setting, plan: Plan, *, seed: int = 1, prompts: str = 'constant(512)', updates: int = 0
) -> Outcome:
    """What the production loop does with a plan, without weights; leaves nothing on the disk.

    Args:
      updates: that are measured; 0 = `count_measured`.

    Raises ConfigError for a plan that the config refuses.
    """
    first = count_warm_up(plan)
    last = first + (updates or count_measured(plan, setting.answers.count))
    config = build_config(setting, plan, last + plan.eta + 2, seed, prompts)
    with tempfile.TemporaryDirectory(prefix='areal_plan_') as directory, contextlib.redirect_stdout(io.StringIO()):
        run = build_simulation(config, pathlib.Path(directory))
        meter = _Meter(run, first, last)
        with contextlib.suppress(_MeasuredError):
            run.train()
    return meter.measure(plan)


class _MeasuredError(Exception):
    """Ends a run that has been measured: a stop that is asked for would save a checkpoint first."""


class _Meter:
    """Listens to a run from one update to another, and stops it there."""

    def __init__(self, run: SimulatedRun, first: int, last: int):
        self._parts, self._first, self._last = run.program.parts, first, last
        self._times: dict[int, float] = {}
        self._trained: dict[int, float] = {}  # tokens of an update
        self._generated = 0  # tokens
        self._ages: collections.Counter[int] = collections.Counter()
        self._work: list[tuple[str, float, float]] = []  # lane, start, end
        self._parts.metrics.listeners.append(self._note_update)
        self._parts.host.log.listeners.append(self._note_event)

    def measure(self, plan: Plan) -> Outcome:
        start, end = self._times[self._first], self._times[self._last]
        window_s = end - start
        busy: dict[str, float] = collections.defaultdict(float)
        for lane, began, ended in self._work:
            busy[LEARNER if lane == LEARNER else 'engines'] += max(0.0, min(ended, end) - max(began, start))
        return Outcome(
            period_s=window_s / (self._last - self._first),
            tokens_s=self._generated / window_s,
            trained_s=sum(self._trained.values()) / window_s,
            engines_busy=busy['engines'] / window_s / plan.engines,
            learner_busy=busy[LEARNER] / window_s,
            age_mean=sum(age * count for age, count in self._ages.items()) / max(1, self._ages.total()),
            age_p95=_find_percentile(self._ages, 0.95),
            updates=self._last - self._first,
            scatter=self._find_scatter(),
        )

    def _find_scatter(self) -> float:
        """Of the trained tokens a second of WINDOW updates in a row, or of all that are measured."""
        length = min(WINDOW, self._last - self._first)
        speeds = []
        for end in range(self._first + length, self._last + 1):
            trained = sum(self._trained[update] for update in range(end - length + 1, end + 1))
            speeds.append(trained / (self._times[end] - self._times[end - length]))
        return statistics.pstdev(speeds) / statistics.fmean(speeds)

    def _note_update(self, update: int, values: Line) -> None:
        time, trained, ages = values[names.TIME], values[names.UPDATE_TOKENS], values[names.TOKEN_AGE_HISTOGRAM]
        self._times[update] = float(time)  # type: ignore[arg-type]
        if self._first < update <= self._last:
            self._trained[update] = float(trained)  # type: ignore[arg-type]
            self._ages.update({age: int(tokens) for age, tokens in enumerate(ages)})  # type: ignore[arg-type]
        if update == self._last:
            raise _MeasuredError

    def _note_event(self, event: Event) -> None:
        if len(self._times) < self._first:
            return
        if event['kind'] == 'decode':
            self._generated += event['tokens']
        if event['kind'] != 'run_done':
            return
        lane = event['lane']
        if lane is not None and (lane == LEARNER or is_engine_lane(lane)):
            self._work.append((lane, event['started'], event['started'] + event['seconds']))


def _find_percentile(ages: Mapping[int, int], share: float) -> float:
    """The age that so large a share of the tokens does not exceed."""
    left = share * sum(ages.values())
    for age in sorted(ages):
        left -= ages[age]
        if left <= 0:
            return float(age)
    return 0.0
