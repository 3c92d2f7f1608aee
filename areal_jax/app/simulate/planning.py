"""Plans a cluster: simulates the splits of its devices, searches for the best one, and describes it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import io
import math
import pathlib
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ml_collections import config_dict

from areal_jax.app.run.loop import LoopParts
from areal_jax.app.simulate.simulated_site import build_simulation
from areal_jax.config import default_config
from areal_jax.config.cluster import MOST_ENGINES
from areal_jax.config.fields import ConfigError
from areal_jax.errors import UserError
from areal_jax.events.schema import FILE as EVENTS
from areal_jax.files import read_json
from areal_jax.formats.hf_config import read_hf_config
from areal_jax.hub import PREFIX, is_hub_name, locate_shape
from areal_jax.lanes import LEARNER, is_engine_lane
from areal_jax.report.event_log import load_events
from areal_jax.simulation.drawn_answers import read_groups
from areal_jax.simulation.planner.advice import (
    Advice,
    Trade,
    advise,
    count_devices,
    count_running_groups,
    describe_lengths,
    describe_log,
    device_hours,
    find_interval,
    joules_a_token,
    list_trades,
    make_load,
    require_batch,
)
from areal_jax.simulation.planner.cluster_load import Layout, Load
from areal_jax.simulation.planner.neighbours import (
    Answers,
    Outcome,
    Plan,
    Search,
    Setting,
    Simulate,
    choose_start,
    fits,
    predict,
    refine,
)
from areal_jax.simulation.prices import ModelShape, find_shape, shape_of
from areal_jax.simulation.stream_prices import NODE
from areal_jax.telemetry import names
from areal_jax.telemetry.energy_meters import Energy

if TYPE_CHECKING:
    from areal_jax.events.schema import Event
    from areal_jax.telemetry.metrics import Line


GROUP_SIZE = 16
_CONFIG = 'config.json'


def read_model(name: str) -> ModelShape:
    """Returns the sizes of a published model, of a directory with a config.json, or of a model of the Hub.

    Of a model of the Hub, 'hf:ORG/NAME', config.json alone is fetched. Raises ConfigError for an unknown name, HfError
    for a model of an unknown kind, and HubError for a model of the Hub that cannot be had.
    """
    if not name.startswith(PREFIX):
        if pathlib.Path(name).is_dir():
            return shape_of(name, read_hf_config(name))
        try:
            return find_shape(name)
        except ConfigError as error:
            if not is_hub_name(name):
                raise ConfigError(f'{error}, hf:ORG/NAME or a directory with a config.json') from None
    return shape_of(name, read_hf_config(locate_shape('--model', name)))


def read_answers(lengths: str, count: int, group_size: int | None, limit: int, prompt: int) -> Answers:
    """Reads answers from `lengths`, a distribution or the workdir of a run.

    Args:
      group_size: None = GROUP_SIZE, or the group size of the run.
      limit: rollout.max_new_tokens; 0 = the run's limit, or a few mean lengths.

    Raises ConfigError for a text that is neither, for a run with too few answers or another group size, and UserError
    for a log without the lengths of answers.
    """
    if '(' in lengths:
        return describe_lengths(lengths, count, group_size or GROUP_SIZE, limit, prompt)
    run = pathlib.Path(lengths)
    if not (run / EVENTS).is_file():
        raise ConfigError(
            f"--lengths={lengths!r} is no distribution, such as 'lognormal(9000, 0.75)', and there is no {run / EVENTS}"
        )
    try:
        groups = read_groups(load_events(run / EVENTS), run, 1)
    except (KeyError, TypeError) as error:
        raise UserError(
            f'{run / EVENTS} does not say lengths and rewards of answers ({error}): name a run of this program'
        ) from error
    size = len(groups[0])
    if group_size not in (None, size):
        raise ConfigError(f'--group_size={group_size}: {run} has groups of {size}; leave it out')
    require_batch(count, size)
    if len(groups) < count // size:
        raise ConfigError(
            f'--lengths={run} has {len(groups)} whole groups of {size} answers, and --answers={count} needs '
            f'{count // size}: name a longer run or a smaller batch'
        )
    if any(len(answer.turns) > 1 for group in groups for answer in group):
        raise ConfigError(f'--lengths={run} is a run of agents, which are not planned: simulate it, docs/simulation.md')
    answers = [[(answer.length, answer.reward) for answer in group] for group in groups]
    return describe_log(f'log({run})', answers, count, limit or _read_limit(run), prompt)


def _read_limit(run: pathlib.Path) -> int:
    """Reads rollout.max_new_tokens of a run."""
    try:
        return int(read_json(run / _CONFIG)['rollout']['max_new_tokens'])  # type: ignore[index, call-overload]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f'{run / _CONFIG} does not say rollout.max_new_tokens ({error}): give --max_new_tokens'
        ) from error


# Simulates plans: a plan becomes a config; its run is measured after a warm-up and then stopped.


_MEASURED = (6, 24)  # updates, at least and at most
_MEASURED_ANSWERS = 2048  # the number of updates depends on it
WINDOW = 12  # consecutive updates that the interval of a plan covers
_ROW_TOKENS = 1 << 15
_MOST_BLOCK, _FEWEST_BLOCK = 512, 16  # tokens
_BLOCKS = 64  # per sequence


def list_fields(setting: Setting, plan: Plan, decode_steps: int = 16) -> dict[str, object]:
    """Returns the config fields that a plan sets, for a run and for its simulation alike."""
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
    """Returns 4, as in arXiv 2505.24298, or the largest divisor of 4 that divides the groups of an update evenly."""
    return math.gcd(4, groups)


def _describe_learner(devices: int, shards: int) -> str:
    """Describes replicas with as few shards as hold a model: 'data=4', 'data=20,fsdp=8'."""
    fsdp = next(size for size in range(min(shards, devices), devices + 1) if devices % size == 0)
    sizes = {'data': devices // fsdp, 'fsdp': fsdp}
    return ','.join(f'{axis}={size}' for axis, size in sizes.items() if size > 1) or 'data=1'


def build_config(setting: Setting, plan: Plan, updates: int, seed: int, prompts: str) -> config_dict.ConfigDict:
    """Builds the config of the simulation of a plan."""
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
    """Returns the updates until the eta + 1 batches of answers that began together are trained, plus one."""
    return plan.eta + 2


def count_measured(plan: Plan, answers: int) -> int:
    """Returns the number of updates to measure; at least eta + 1, because open answers come in waves."""
    least, most = _MEASURED
    return max(least, min(most, _MEASURED_ANSWERS // answers), plan.eta + 1)


def simulate_plan(
    setting: Setting, plan: Plan, *, seed: int = 1, prompts: str = 'constant(512)', updates: int = 0
) -> Outcome:
    """Runs the production loop with a plan, without weights; leaves nothing on the disk.

    Args:
      updates: the number of measured updates; 0 = `count_measured`.

    Raises ConfigError for a plan that the config refuses.
    """
    first = count_warm_up(plan)
    last = first + (updates or count_measured(plan, setting.answers.count))
    config = build_config(setting, plan, last + plan.eta + 2, seed, prompts)
    with tempfile.TemporaryDirectory(prefix='areal_plan_') as directory, contextlib.redirect_stdout(io.StringIO()):
        run = build_simulation(config, pathlib.Path(directory))
        meter = _Meter(run.program.parts, first, last)
        with contextlib.suppress(_MeasuredError):
            run.train()
    return meter.measure(plan)


class _MeasuredError(Exception):
    """Ends a run that has been measured: a requested stop would first save a checkpoint."""


class _Meter:
    """Records a run from one update to another, and stops it there."""

    def __init__(self, parts: LoopParts, first: int, last: int):
        self._parts, self._first, self._last = parts, first, last
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
        """The relative standard deviation of trained tokens per second, over windows of at most WINDOW updates."""
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
    """Returns the age that a share `share` of the tokens does not exceed."""
    left = share * sum(ages.values())
    for age in sorted(ages):
        left -= ages[age]
        if left <= 0:
            return float(age)
    return 0.0


# A plan for a question: the search on a part of the cluster, the plan at full size, and its description.


MOST_SIMULATIONS = 24
_DIVISORS = (8, 4, 2)
_WHOLE = 16  # up to this number of devices, all are simulated
_FEWEST_PARTS, _FEWEST_GROUPS = 8, 8  # minimum of a part: devices, in engine sizes, and groups of an update
Note = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Planned:
    """A plan with its simulated outcome, at full size."""

    setting: Setting
    divisor: int  # devices and answers were divided by it for the search
    plan: Plan
    outcome: Outcome  # tokens per second of all devices
    interval: tuple[float, float]  # tokens per second, over WINDOW consecutive updates
    in_turns: Outcome | None  # synchronous training on the same devices
    load: Load
    advice: Advice
    fields: Mapping[str, object]  # of the config; the synchronous run's if that is better
    tried: Mapping[Plan, Outcome]  # all plans simulated for it, on a part of the devices
    trades: Sequence[Trade]  # on the same part; tokens per second of all devices
    full: Outcome | None = None  # one simulation at full size
    is_stopped: bool = False  # the search was stopped, with this as the best plan so far

    @property
    def simulations(self) -> int:
        return len(self.tried) + (self.in_turns is not None)


def find_plan(
    setting: Setting, *, seed: int, prompts: str, is_full: bool, note: Note, most: int = MOST_SIMULATIONS
) -> Planned:
    """Returns the best plan; if a KeyboardInterrupt ends the search, the best plan simulated until then.

    Args:
      note: is called with the plan of closed forms, in the first second, and then with each simulated plan.

    Raises ConfigError for a plan that cannot be (no memory, too many engines), and KeyboardInterrupt before the first
    simulation has ended.
    """
    divisor = choose_divisor(setting)
    small = setting.shrink(divisor)

    def simulate(plan: Plan) -> Outcome:
        return simulate_plan(small, plan, seed=seed, prompts=prompts)

    def tell(plan: Plan, outcome: Outcome) -> None:
        note(
            f'{plan.engines} engines, learner on {plan.training}, eta {plan.eta}, {plan.slots} slots: '
            f'{divisor * outcome.tokens_s:,.0f} tokens a second, mean age {outcome.age_mean:.1f}'
        )

    start = choose_start(small)
    note(_tell_start(small, start, divisor))
    search, is_stopped = Search(small, simulate, most, tell), False
    try:
        best = search.run(start)
        in_turns, why_not = _simulate_in_turns(small, simulate)
    except KeyboardInterrupt:
        if not search.tried:
            raise
        best, is_stopped = search.best, True
        in_turns, why_not = None, 'synchronous training was not simulated: the search was stopped'
    plan = refine(setting, small, best, search.tried[best])
    if plan.engines > MOST_ENGINES:
        raise ConfigError(f'the plan has {plan.engines} engines, and cluster.engines takes {MOST_ENGINES}: plan a part')
    outcome = _enlarge(search.tried[best], divisor)
    if divisor > 1:
        note(f'at full size: {plan.engines} engines, learner on {plan.training}')
    full = simulate_plan(setting, plan, seed=seed, prompts=prompts) if is_full and not is_stopped else None
    shown = full or outcome
    in_turns = in_turns and _enlarge(in_turns, divisor)
    load = make_load(setting, _layout(setting, plan), plan, shown.tokens_s)
    advice = advise(setting, plan, shown, load, predict(small, best).live, in_turns, why_not)
    interval = find_interval(setting, plan, shown)
    shared = plan_in_turns(setting) if advice.trains_in_turns else None
    fields = list_fields(setting, shared or plan, load.decode_steps)
    trades = [
        dataclasses.replace(one, outcome=_enlarge(one.outcome, divisor)) for one in list_trades(search.tried, best)
    ]
    return Planned(
        setting, divisor, plan, outcome, interval, in_turns, load, advice, fields, search.tried, trades, full,
        is_stopped,
    )  # fmt: skip


def _tell_start(setting: Setting, plan: Plan, divisor: int) -> str:
    tokens_s = divisor * setting.answers.tokens / predict(setting, plan).period_s
    part = f' (1/{divisor} of the devices)' if divisor > 1 else ''
    return (
        f'by closed forms: {plan.engines} engines, learner on {plan.training}, eta {plan.eta}, {plan.slots} slots'
        f'{part}: about {tokens_s:,.0f} tokens a second; simulations refine it, and Ctrl-C prints the best so far'
    )


def choose_divisor(setting: Setting) -> int:
    """Returns 8, or less if a part would have too few engines or groups; 1 up to 16 devices."""
    for divisor in _DIVISORS:
        parts = setting.devices / divisor / setting.engine_devices
        groups = setting.answers.groups / divisor
        is_even = setting.devices % divisor == 0 and setting.answers.groups % divisor == 0
        if setting.devices > _WHOLE and is_even and parts >= _FEWEST_PARTS and groups >= _FEWEST_GROUPS:
            return divisor
    return 1


def plan_in_turns(setting: Setting) -> Plan | None:
    """Plans engines on all devices, which also train; None if no engines of equal size share them."""
    for engines in range(setting.devices // setting.engine_devices, 0, -1):
        plan = Plan(engines, setting.devices, 0, setting.most_slots, shared=True)
        if setting.devices % engines == 0 and fits(setting, plan):
            return plan
    return None


def _simulate_in_turns(setting: Setting, simulate: Simulate) -> tuple[Outcome | None, str]:
    """Returns (its outcome, '') or (None, why it was not simulated)."""
    plan = plan_in_turns(setting)
    if plan is None:
        return None, 'synchronous training is not simulated: no engines of equal size share these devices'
    return simulate(plan), ''


def _enlarge(outcome: Outcome, scale: int) -> Outcome:
    return dataclasses.replace(outcome, tokens_s=scale * outcome.tokens_s)


def _layout(setting: Setting, plan: Plan) -> Layout:
    """Returns the layout, with the learner on whole nodes if that is possible, as roles have it."""
    fields = list_fields(setting, plan)
    hosts = plan.training // NODE if plan.training % NODE == 0 else 1
    learner = str(fields['cluster.learner'])
    return Layout(setting.shape, f'hosts={hosts} x {learner}', str(fields['cluster.engines']), setting.answers.count)


def energy_of(planned: Planned) -> Energy | None:
    """Returns the joules per trained token; None without published watts."""
    live = predict(planned.setting, planned.plan).live
    return joules_a_token(planned.setting, planned.plan, planned.full or planned.outcome, live)


# A plan as text and as JSON.


MOST_TRADES = 3  # most trades that the text shows
_STOPPED = 'stopped before the search had ended: this is the best plan so far, and another one may be limited otherwise'


def render(planned: Planned, width: int = 0) -> str:
    """Returns sentences and config fields: one field per line, or, if `width` is set, in lines of that width."""
    setting, plan, shown = planned.setting, planned.plan, planned.full or planned.outcome
    answers = setting.answers
    used = count_devices(setting, plan)
    running = count_running_groups(setting, plan)
    low, high = planned.interval
    filled = 100 / answers.moments.tail
    scale = f'1/{planned.divisor} of the devices and of the batch' if planned.divisor > 1 else 'all devices'
    where = 'at full size' if planned.full else f'with {scale}'
    lines = [
        f'{setting.devices} x {setting.chip.name}, {setting.shape.name}; {answers.count:,} answers an update in groups '
        f'of {answers.group_size}, {answers.moments.mean:,.0f} tokens on average, {answers.limit:,} at most',
        '',
        f'split              {plan.engines} engines of {setting.engine_devices}, learner on {plan.training}'
        + (f', {setting.devices - used} left over' if used < setting.devices else ''),
        f'slots              {plan.slots} an engine; {running} groups run at a time (rollout.max_running_groups=0 '
        f'admits them by need: slots / group size would fill {filled:.0f}% of the slots)',
        f'eta                {plan.eta} of --max_eta={setting.most_eta}; weights are published after every update, the '
        'config has no other interval',
        f'tokens a second    {shown.tokens_s:,.0f}; {low:,.0f} to {high:,.0f} in {WINDOW} updates in a row, with the '
        f'published ranges; an update takes {shown.period_s:,.1f} s',
        f'idle               engines {_percent(1 - shown.engines_busy)}, learner {_percent(1 - shown.learner_busy)}',
        f'age                {shown.age_mean:.2f} versions on average, {shown.age_p95:.0f} for 95% of the tokens',
        f'price of age       --age_price={setting.age_price:g} of the speed for a version; {_tell_trades(planned)}',
        f'a million tokens   {device_hours(setting, plan, shown.tokens_s):.3g} device-hours; {_tell_energy(planned)}',
        f'limits             {planned.advice.binds}',
        f'                   {planned.advice.breaks_next}',
        f'synchronous        {planned.advice.asynchrony}',
        '',
        f'{planned.simulations} simulations of {shown.updates} updates {where}, after a warm-up; real engines and '
        "learners reach less than the published shares of their peaks, by 1.5 to 2.5 in AReaL's published runs",
        *([_STOPPED] if planned.is_stopped else []),
        '',
        *(_fill_lines(list_lines(planned.fields), width) if width else list_lines(planned.fields)),
        *(['', _tell_verdict(planned)] if width else []),
    ]
    return '\n'.join(lines)


def list_lines(fields: Mapping[str, object]) -> list[str]:
    """Returns '--config.rollout.slots=256' and so on, in shell syntax."""
    return [f'--config.{name}={_quote(value)}' for name, value in fields.items()]


def _tell_verdict(planned: Planned) -> str:
    """Returns the plan in one line, for the end of a screen."""
    plan, shown = planned.plan, planned.full or planned.outcome
    low, high = planned.interval
    return (
        f'plan: {plan.engines} engines, learner on {plan.training}, eta {plan.eta}, {plan.slots} slots: '
        f'{shown.tokens_s:,.0f} tokens a second ({low:,.0f} to {high:,.0f})'
    )


def _fill_lines(words: Sequence[str], width: int) -> list[str]:
    """Joins the words after a command into few lines, in shell syntax."""
    lines = ['areal-train --config=FILE --workdir=DIR']
    for word in words:
        if len(lines[-1]) + len(word) + 3 > width:
            lines.append(' ')
        lines[-1] += f' {word}'
    return [*(f'{line} \\' for line in lines[:-1]), lines[-1]]


def as_json(planned: Planned) -> dict[str, object]:
    """Returns all facts about a plan."""
    setting, plan, shown = planned.setting, planned.plan, planned.full or planned.outcome
    energy = energy_of(planned)
    return {
        'devices': setting.devices,
        'chip': setting.chip.name,
        'model': setting.shape.name,
        'answers': setting.answers.count,
        'group_size': setting.answers.group_size,
        'lengths': setting.answers.text,
        'max_age': setting.max_age,
        'max_eta': setting.most_eta,
        'age_price': setting.age_price,
        'plan': {**dataclasses.asdict(plan), 'engine_devices': setting.engine_devices},
        'devices_used': count_devices(setting, plan),
        'running_groups': count_running_groups(setting, plan),
        'outcome': _as_json(shown),
        'interval_tokens_s': list(planned.interval),
        'device_hours_a_million_tokens': device_hours(setting, plan, shown.tokens_s),
        'joules_a_token': None if energy is None else [energy.low, energy.mid, energy.high],
        'synchronous': None if planned.in_turns is None else _as_json(planned.in_turns),
        'train_synchronously': planned.advice.trains_in_turns,
        'binding': planned.advice.binding,
        'tried': [{**dataclasses.asdict(one), 'outcome': _as_json(found)} for one, found in planned.tried.items()],
        'trades': [dataclasses.asdict(trade) for trade in planned.trades],
        'limits': planned.load.shares(),
        'sentences': [planned.advice.binds, planned.advice.breaks_next, planned.advice.asynchrony],
        'divisor': planned.divisor,
        'simulations': planned.simulations,
        'stopped': planned.is_stopped,
        'full': planned.full is not None,
        'fields': dict(planned.fields),
    }


def _as_json(outcome: Outcome) -> dict[str, object]:
    return dataclasses.asdict(outcome)


def _tell_energy(planned: Planned) -> str:
    energy = energy_of(planned)
    if energy is None:
        return f'no joules: no watts are published of {planned.setting.chip.name}'
    return f'{energy.low:.2g} to {energy.high:.2g} J a token, of the boards alone'


def _tell_trades(planned: Planned) -> str:
    """Lists the simulated plans that a higher price of age would choose."""
    younger = [
        f'from {trade.price:.3g} on eta {trade.plan.eta} ({trade.outcome.tokens_s:,.0f} tokens a second, mean age '
        f'{trade.outcome.age_mean:.1f})'
        for trade in planned.trades[:MOST_TRADES]
    ]
    return '; '.join(younger) or 'no younger plan was simulated'


def _percent(share: float) -> str:
    return f'{100 * max(0.0, share):.0f}%'


def _quote(value: object) -> str:
    if isinstance(value, tuple):
        return ','.join(map(str, value))
    text = str(value)
    return f'"{text}"' if ' ' in text else text
