"""Turns a user's request for a plan into a `Setting`, and explains a plan in words and numbers.

Pure: app/ reads the log of a run. The advice names the limit, the next limit, watts, and when to train synchronously.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from areal_jax.config.drawn_lengths import parse_lengths
from areal_jax.config.fields import ConfigError
from areal_jax.simulation.drawn_answers import GroupMoments, group_moments
from areal_jax.simulation.planner.cluster_load import MEASURED, HostCosts, Layout, Load, Pace, choose_pieces
from areal_jax.simulation.planner.neighbours import (
    MOST_ETA,
    Answers,
    Costs,
    Outcome,
    Plan,
    Setting,
    predict,
    publication_s,
    worth,
)
from areal_jax.simulation.prices import MEMORY_SHARE, WEIGHT_BYTES, Chip, ModelShape, Reached, Roofline, find_chip
from areal_jax.telemetry.energy_meters import DECODE, IDLE, POWER, TRAIN, Energy, Phase, decode_activity, joules

WEIGHTS_SHARE = 0.25  # of an engine's memory at most for its weights: an assumption, like MOST_SLOTS
MOST_SLOTS = 256
_FILLED = 0.9  # of the cache by answers of average length: if they filled all of it, long answers would be preempted
STATE_BYTES = 16  # of a parameter that is trained with Adam: float32 weight and two moments, 16-bit weight and gradient
STATE_SHARE = 0.5  # of the memory at most for this state: the rest is for activations
_LARGEST = 64  # devices of one engine


def find_engine_devices(chip: Chip, shape: ModelShape, context: int) -> int:
    """The least power of two of devices whose memory is at most a quarter weights, and has room for one sequence.

    Raises ConfigError, with both numbers, if no engine is large enough.
    """
    devices = 1
    while devices <= _LARGEST:
        weights = WEIGHT_BYTES * shape.parameters / (devices * chip.memory_bytes)
        if weights <= WEIGHTS_SHARE and Roofline(chip, shape, devices=devices).cache_tokens(context) >= context:
            return devices
        devices *= 2
    needed = WEIGHT_BYTES * shape.parameters / WEIGHTS_SHARE
    raise ConfigError(
        f'an engine for {shape.name} needs {needed / 1e9:,.0f} GB, a quarter of them for its weights, and '
        f'{_LARGEST} x {chip.name} have {_LARGEST * chip.memory_bytes / 1e9:,.0f} GB: use another chip or model'
    )


def count_slots(chip: Chip, shape: ModelShape, devices: int, live_positions: float) -> int:
    """The number of answers of average length that fill nine tenths of the cache, at most MOST_SLOTS."""
    cache = _FILLED * Roofline(chip, shape, devices=devices).cache_tokens(live_positions)
    return max(1, min(MOST_SLOTS, int(cache / live_positions)))


def count_training(chip: Chip, shape: ModelShape) -> int:
    """The least number of devices that hold the learner's state."""
    return math.ceil(STATE_BYTES * shape.parameters / (STATE_SHARE * chip.memory_bytes))


def require_room(devices: int, chip: Chip, shape: ModelShape, engine_devices: int) -> None:
    """Raises ConfigError, with both numbers, if the devices do not hold one engine and a learner."""
    training = count_training(chip, shape)
    if devices < (needed := engine_devices + training):
        memory = MEMORY_SHARE * chip.memory_bytes * engine_devices
        raise ConfigError(
            f'--cluster={devices} x {chip.name} is too small for {shape.name}: an engine takes {engine_devices} '
            f'({memory / 1e9:,.0f} GB for weights and cache) and the learner {training} '
            f'({STATE_BYTES * shape.parameters / 1e9:,.0f} GB of weights, gradients and moments), {needed} together'
        )


MEAN_PROMPT = 512  # tokens: half of the limit of arXiv 2505.24298
LIMIT_MEANS = 3.072  # rollout.max_new_tokens in mean lengths: 27,648 / 9,000, as in that paper
_PIECE = 1024  # a limit is rounded up to a multiple of this
_PROMPTS = 2  # limit of a prompt, in mean lengths
_CLUSTER = re.compile(r'\s*(\d+)\s*x\s*(.+?)\s*')


def parse_cluster(text: str) -> tuple[int, Chip]:
    """Parses '64 x H800' into (64, the chip).

    Raises ConfigError for another form, fewer than two devices, several kinds, or an unknown chip.
    """
    match = _CLUSTER.fullmatch(text)
    if match is None:
        raise ConfigError(f"--cluster={text!r} is not of the form '64 x H800'")
    if '+' in match[2] or ',' in match[2]:
        raise ConfigError(f'--cluster={text!r} has devices of several kinds, for which no plan is made: plan one kind')
    count = int(match[1])
    if count < 2:
        raise ConfigError(
            f'--cluster={text!r}: {count} devices are too few; engines and learner need one each, or more'
        )
    return count, find_chip(match[2])


def describe_lengths(text: str, count: int, group_size: int, limit: int = 0, prompt: int = MEAN_PROMPT) -> Answers:
    """Describes answers whose lengths have a distribution.

    Args:
      limit: rollout.max_new_tokens; 0 = LIMIT_MEANS mean lengths.

    Raises ConfigError for a text that is no distribution, that drifts, or that has several phases.
    """
    require_batch(count, group_size)
    if '->' in text or ';' in text:
        raise ConfigError(f'--lengths={text!r} changes in a run: plan for its start and for its end, each by itself')
    if not limit:
        free = group_moments(parse_lengths(text, 1 << 30, field='--lengths'), group_size)
        limit = _round_up(LIMIT_MEANS * free.mean)
    lengths = parse_lengths(text, limit, field='--lengths')
    moments = group_moments(lengths, group_size)
    return _describe(text, count, group_size, moments, group_moments(lengths, count).longest, prompt, limit)


def describe_log(
    text: str, groups: Sequence[Sequence[tuple[int, float]]], count: int, limit: int, prompt: int = MEAN_PROMPT
) -> Answers:
    """Describes the answers of a run; `groups` as from drawn_answers.read_groups, `text` as in simulation.answers."""
    size = len(groups[0])
    require_batch(count, size)
    moments = logged_moments(groups, limit)
    longest = max(min(length, limit) for group in groups for length, _ in group)
    return _describe(text, count, size, moments, float(longest), prompt, limit)


def logged_moments(groups: Sequence[Sequence[tuple[int, float]]], limit: int) -> GroupMoments:
    """Moments of the answers of a run, after a cut at the limit."""
    rows = [np.minimum([float(length) for length, _ in group], limit) for group in groups]
    every = np.concatenate(rows)
    longest = np.array([row.max() for row in rows])
    products = np.concatenate([row * row.max() for row in rows])
    return GroupMoments(float(every.mean()), float((every**2).mean()), float(longest.mean()), float(products.mean()))


def require_batch(count: int, group_size: int) -> None:
    """Raises ConfigError for a batch that does not consist of whole groups."""
    if group_size < 1 or count < group_size:
        raise ConfigError(f'--answers={count} --group_size={group_size}: a batch has one group at least')
    if count % group_size:
        raise ConfigError(
            f'--answers={count} is no multiple of --group_size={group_size}: '
            f'use {count // group_size * group_size} or {-(-count // group_size) * group_size}'
        )


def make_setting(
    devices: int, chip: Chip, shape: ModelShape, answers: Answers, max_age: float | None = None,
    most_eta: int = MOST_ETA, age_price: float = 0.0,
) -> Setting:  # fmt: skip
    """Makes the setting; raises ConfigError for too few devices, and for an invalid bound or price."""
    if max_age is not None and not max_age >= 0:
        raise ConfigError(f'--max_age={max_age:g} must be at least 0')
    if most_eta < 0:
        raise ConfigError(f'--max_eta={most_eta} must be at least 0')
    if not 0 <= age_price < 1:
        raise ConfigError(f'--age_price={age_price:g} must be a share of the speed, from 0 to below 1')
    engine_devices = find_engine_devices(chip, shape, answers.context)
    require_room(devices, chip, shape, engine_devices)
    return Setting(
        devices, chip, shape, answers, engine_devices,
        most_slots=count_slots(chip, shape, engine_devices, answers.live_positions),
        least_training=count_training(chip, shape),
        optimizer_steps=math.gcd(4, answers.groups), most_eta=most_eta, max_age=max_age, age_price=age_price,
    )  # fmt: skip


def _describe(
    text: str, count: int, size: int, moments: GroupMoments, longest: float, prompt: int, limit: int
) -> Answers:
    context = limit + _round_up(_PROMPTS * prompt)
    return Answers(text, count, size, moments, longest, prompt, limit, context)


def _round_up(tokens: float) -> int:
    """Rounds up to a multiple of _PIECE, or of a sixteenth of it if `tokens` are at most _PIECE."""
    piece = _PIECE if tokens > _PIECE else _PIECE // 16
    return math.ceil(tokens / piece) * piece


DRAWS = 200
DEVIATIONS = 2.0  # standard deviations of a normal number, which one in twenty exceeds
LEAST_SCATTER = 0.02  # for a simulation that saw less: its own result is that uncertain


@dataclasses.dataclass(frozen=True)
class Range:
    """The lowest and the highest published value."""

    low: float
    high: float
    source: str

    @property
    def bounds(self) -> tuple[float, float]:
        return self.low, self.high


PUBLISHED: Mapping[str, Range] = {
    'bandwidth': Range(0.6, 0.85, 'served engines'),
    'prefill': Range(0.5, 0.73, 'MaxText on 8 H100; ragged paged attention on TPU'),
    'mfu': Range(0.39, 0.46, 'arXiv 2505.24298, figure 6a, packed, H800'),
    'load_s': Range(1.2, 7.2, 'publications of whole weights, 67B to 1T'),
    'sigma': Range(0.6, 0.75, 'of the logarithm of a length: a guess, see the constants of benchmarks/simulation'),
}


def find_interval(setting: Setting, plan: Plan, found: Outcome, seed: int = 0) -> tuple[float, float]:
    """Returns (low, high) tokens a second: the range of a few updates in a row, nineteen times out of twenty.

    It covers two uncertainties: costs known within a range, by the 5th and 95th percentile of DRAWS in `find_factors`;
    and lengths, by DEVIATIONS times the scatter of the simulated run to either side.
    """
    low, high = find_factors(setting, plan, seed)
    room = DEVIATIONS * max(found.scatter, LEAST_SCATTER)
    return low * max(0.0, 1 - room) * found.tokens_s, high * (1 + room) * found.tokens_s


def find_factors(setting: Setting, plan: Plan, seed: int = 0) -> tuple[float, float]:
    """Returns (low, high): factors on the speed of a plan, low <= 1 <= high.

    The constants with which a plan is simulated are low ends of most ranges, so `low` is often 1.

    The closed forms with each draw are compared with the closed forms with the setting's own constants; the simulation
    is assumed to differ from them by the same factor for all draws. Ranges are drawn uniformly and independently.
    """
    drawn = np.random.default_rng(seed)
    base = predict(setting, plan).period_s
    factors = [base / predict(_draw(setting, drawn), plan).period_s for _ in range(DRAWS)]
    low, high = np.percentile(factors, (5, 95))
    return min(1.0, float(low)), max(1.0, float(high))


def _draw(setting: Setting, drawn: np.random.Generator) -> Setting:
    found = {name: float(drawn.uniform(one.low, one.high)) for name, one in PUBLISHED.items()}
    reached = Reached(found['bandwidth'], found['prefill'], found['mfu'])
    answers = setting.answers
    if answers.text.startswith('lognormal'):
        # E[L^2] = exp(sigma^2) E[L]^2 of a lognormal: the factor for another sigma within the range
        factor = float(np.exp(found['sigma'] ** 2 - PUBLISHED['sigma'].high ** 2))
        second = max(answers.moments.mean**2, answers.moments.second * factor)
        answers = dataclasses.replace(answers, moments=dataclasses.replace(answers.moments, second=second))
    costs = Costs(reached, setting.costs.load_s)
    return dataclasses.replace(setting, costs=costs, answers=answers)


_BUSY = 0.93  # of the time: a lane that is busy for more sets the pace
_FULL = 0.9  # of the slots: an engine with fewer answers could decode more
_NEAR = 0.5  # of a limit: a larger use of it is mentioned
_AS_FAST = 0.99
_HOUR_S = 3600.0


@dataclasses.dataclass(frozen=True)
class Advice:
    """The sentences on a plan, in addition to its numbers."""

    binding: str  # 'learner', 'publication', 'engines', 'memory', 'max_eta', 'max_age', 'age_price' or 'eta'
    binds: str  # one sentence on `binding`
    breaks_next: str  # one sentence
    asynchrony: str  # one sentence on training in turns
    trains_in_turns: bool  # training in turns is as fast or faster, or no asynchronous plan keeps the age


@dataclasses.dataclass(frozen=True)
class Trade:
    """A plan that is better if `Setting.age_price` is `price` or more."""

    price: float
    plan: Plan
    outcome: Outcome


def advise(
    setting: Setting, plan: Plan, outcome: Outcome, load: Load, live: float, in_turns: Outcome | None, why_not: str
) -> Advice:
    """Makes the advice on a plan.

    Args:
      live: answers that an engine decodes at a time.
      in_turns: outcome of the same devices with engines that share them with the learner; None = `why_not`.
    """
    binding = find_binding(setting, plan, outcome, live)
    binds, breaks_next = describe_binding(setting, plan, outcome, live, binding), describe_next(load)
    if in_turns is None:
        return Advice(binding, binds, breaks_next, why_not, False)
    max_age = setting.max_age
    ratio = worth(setting, outcome) / worth(setting, in_turns)
    too_old = max_age is not None and outcome.age_mean > max_age
    numbers = (
        f'{in_turns.tokens_s:,.0f} tokens a second with eta 0 on shared devices, {outcome.tokens_s:,.0f} with these'
    )
    if too_old:
        sentence = f'no asynchronous plan keeps the mean age to {max_age:g}: train synchronously ({numbers})'
    elif ratio <= 1 / _AS_FAST:
        sentence = f'asynchrony does not pay here: train synchronously ({numbers})'
    else:
        sentence = f'asynchrony pays {ratio:.2f} times ({numbers}; changing roles costs nothing there)'
    return Advice(binding, binds, breaks_next, sentence, too_old or ratio <= 1 / _AS_FAST)


def find_binding(setting: Setting, plan: Plan, outcome: Outcome, live: float) -> str:
    """Returns the limit on the pace: a side, a publication, or the bound of the gate, which leaves slots empty."""
    if outcome.learner_busy >= _BUSY:
        return 'learner'
    if publication_s(setting, plan.training) >= _BUSY * outcome.period_s:
        return 'publication'
    if outcome.engines_busy >= _BUSY and live >= _FULL * plan.slots and plan.slots == setting.most_slots:
        return 'engines' if plan.slots >= MOST_SLOTS else 'memory'
    if setting.max_age is not None:
        return 'max_age'
    if plan.eta >= setting.most_eta:
        return 'max_eta'
    return 'age_price' if setting.age_price else 'eta'


def describe_binding(setting: Setting, plan: Plan, outcome: Outcome, live: float, binding: str) -> str:
    """Returns the sentence on the limit that `find_binding` found."""
    engines, learner = f'{100 * outcome.engines_busy:.0f}%', f'{100 * outcome.learner_busy:.0f}%'
    shares = f'engines are busy {engines} of the time, the learner {learner}'
    of_devices = {
        'learner': f'the learner binds: {shares}',
        'publication': f'the publication binds, which takes {publication_s(setting, plan.training):.1f} s: {shares}',
        'engines': f'the engines bind: {shares}, with {live:.0f} of {plan.slots} slots filled',
        'memory': f'the memory of the engines binds: {shares}, and more than {plan.slots} answers do not fit',
    }
    if binding in of_devices:
        return of_devices[binding]
    of_gate = {
        'max_eta': f'--max_eta={setting.most_eta}',
        'max_age': f'--max_age={setting.max_age}',
        'age_price': f'--age_price={setting.age_price:g}: a larger eta is faster, and not worth its age',
        'eta': 'a larger eta is no faster',
    }
    waits = outcome.engines_busy < _BUSY
    filled = 'both wait for it' if waits else f'{live:.0f} of {plan.slots} slots are filled'
    return f'the staleness bound binds ({of_gate[binding]}): {shares}, and {filled}'


def list_trades(tried: Mapping[Plan, Outcome], plan: Plan) -> list[Trade]:
    """Returns the plans in `tried` that a higher price of age would choose, each with the least such price."""
    trades: list[Trade] = []
    while True:
        now = tried[plan]
        younger = [
            Trade(max(0.0, 1 - (one.tokens_s / now.tokens_s) ** (1 / (now.age_mean - one.age_mean))), other, one)
            for other, one in tried.items()
            if one.age_mean < now.age_mean
        ]
        if not younger:
            return trades
        trades.append(min(younger, key=lambda trade: trade.price))
        plan = trades[-1].plan


def describe_next(load: Load) -> str:
    """Returns a sentence on the limit, other than the accelerators, that is used the most."""
    name, share = max(load.shares().items(), key=lambda item: item[1])
    used = f'{100 * share:,.0f}% of {name} is used'
    if share > 1:
        return f'{used}: this pace is not reached until that is changed (docs/cluster/plan.md)'
    return f'{used}: {"this breaks next" if share > _NEAR else "nothing beside the accelerators is near its limit"}'


def make_load(setting: Setting, layout: Layout, plan: Plan, tokens_s: float, costs: HostCosts = MEASURED) -> Load:
    """Makes the load at the simulated pace, with the smallest pieces of answers that the controller can process."""
    answers = setting.answers
    return choose_pieces(Load(layout, Pace(tokens_s, answers.moments.mean, answers.live_positions, plan.slots), costs))


def count_running_groups(setting: Setting, plan: Plan) -> int:
    """Groups that are open at a time: each holds its place until its longest answer ends."""
    live = predict(setting, plan).live
    return math.ceil(live * plan.engines * setting.answers.moments.tail / setting.answers.group_size)


def device_hours(setting: Setting, plan: Plan, tokens_s: float) -> float:
    """Device-hours for a million trained tokens; devices that the plan leaves unused do not count."""
    return 1e6 / tokens_s * count_devices(setting, plan) / _HOUR_S


def count_devices(setting: Setting, plan: Plan) -> int:
    return plan.training + (0 if plan.shared else plan.engines * setting.engine_devices)


def joules_a_token(setting: Setting, plan: Plan, outcome: Outcome, live: float) -> Energy | None:
    """The energy of a trained token, by the published watts of the chip; None without watts, and for shared devices.

    Boards alone, without host, network and cooling. Prefill counts as decoding, and unused devices do not count.
    """
    power = POWER.get(setting.chip.name)
    if power is None or plan.shared:
        return None
    engines = [
        Phase(DECODE, outcome.engines_busy, decode_activity(live)),
        Phase(IDLE, max(0.0, 1 - outcome.engines_busy)),
    ]
    learner = [Phase(TRAIN, outcome.learner_busy), Phase(IDLE, max(0.0, 1 - outcome.learner_busy))]
    a_second = joules(engines, power, plan.engines * setting.engine_devices) + joules(learner, power, plan.training)
    return Energy(*(value / outcome.tokens_s for value in (a_second.low, a_second.mid, a_second.high)))
