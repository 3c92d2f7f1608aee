"""Turns a user's request for a plan into a `Setting`. Pure: app/ reads the log of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np

from areal_jax.config.fields import ConfigError
from areal_jax.simulation.drawn_answers import GroupMoments, group_moments
from areal_jax.simulation.lengths import parse_lengths
from areal_jax.simulation.planner.neighbours import MOST_ETA, Answers, Setting
from areal_jax.simulation.prices import MEMORY_SHARE, WEIGHT_BYTES, Chip, ModelShape, Roofline, find_chip

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
        if weights <= WEIGHTS_SHARE and Roofline(chip, shape, devices=devices).cache_tokens() >= context:
            return devices
        devices *= 2
    needed = WEIGHT_BYTES * shape.parameters / WEIGHTS_SHARE
    raise ConfigError(
        f'an engine for {shape.name} needs {needed / 1e9:,.0f} GB, a quarter of them for its weights, and '
        f'{_LARGEST} x {chip.name} have {_LARGEST * chip.memory_bytes / 1e9:,.0f} GB: use another chip or model'
    )


def count_slots(chip: Chip, shape: ModelShape, devices: int, live_positions: float) -> int:
    """The number of answers of average length that fill nine tenths of the cache, at most MOST_SLOTS."""
    cache = _FILLED * Roofline(chip, shape, devices=devices).cache_tokens()
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
