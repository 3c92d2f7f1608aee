"""How large an engine must be, how many answers fit into it, and how many devices hold what training needs."""

from __future__ import annotations

import math

from areal_jax.config.ranges import ConfigError
from areal_jax.simulation.prices import MEMORY_SHARE, WEIGHT_BYTES, Chip, ModelShape, Roofline

WEIGHTS_SHARE = 0.25  # of an engine's memory at most for its weights: an assumption, as the next
MOST_SLOTS = 256
_FILLED = 0.9  # of the cache by answers of average length: where they fill all of it, long ones are preempted
STATE_BYTES = 16  # of a parameter that is trained with Adam: float32 weight and two moments, 16-bit weight and gradient
STATE_SHARE = 0.5  # of the memory at most for them: the rest is for activations
_LARGEST = 64  # devices of one engine


def find_engine_devices(chip: Chip, shape: ModelShape, context: int) -> int:
    """The least power of two whose weights take a quarter of the memory and beside which one sequence fits.

    Raises ConfigError, with both numbers, where no engine is large enough.
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
    """Answers of average length that take nine tenths of the cache, at most MOST_SLOTS."""
    cache = _FILLED * Roofline(chip, shape, devices=devices).cache_tokens()
    return max(1, min(MOST_SLOTS, int(cache / live_positions)))


def count_training(chip: Chip, shape: ModelShape) -> int:
    """Devices of the learner at least."""
    return math.ceil(STATE_BYTES * shape.parameters / (STATE_SHARE * chip.memory_bytes))


def require_room(devices: int, chip: Chip, shape: ModelShape, engine_devices: int) -> None:
    """Raises ConfigError where the devices do not hold one engine and a learner: both numbers."""
    training = count_training(chip, shape)
    if devices < (needed := engine_devices + training):
        memory = MEMORY_SHARE * chip.memory_bytes * engine_devices
        raise ConfigError(
            f'--cluster={devices} x {chip.name} is too small for {shape.name}: an engine takes {engine_devices} '
            f'({memory / 1e9:,.0f} GB for weights and cache) and the learner {training} '
            f'({STATE_BYTES * shape.parameters / 1e9:,.0f} GB of weights, gradients and moments), {needed} together'
        )
