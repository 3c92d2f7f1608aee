"""What work costs in a simulation: by flops and bytes of chips, or by constants that were fitted to logs.

A price is a function of the lane and the work (control/clocks/virtual.py), so that engines can differ.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from areal_jax.config.cluster import EnginesLayout, LearnerLayout
from areal_jax.config.ranges import ConfigError
from areal_jax.control.clocks.virtual import Price
from areal_jax.lanes import engine_lane, publish_lane
from areal_jax.simulation.drawn_task import Answers
from areal_jax.simulation.prices import Chip, ModelShape, Reached, Roofline, find_chip, step_overhead_s
from areal_jax.types import Work

STATE_BYTES = 12  # of a parameter: weight and two moments, float32
_ENGINES = re.compile(r'\s*(\d+)\s*x\s*(.+?)\s*')


@dataclasses.dataclass(frozen=True)
class RooflineSettings:
    """Fields of the section `simulation` that prices by flops and bytes read."""

    chip: Chip  # of the learner
    engine_chips: tuple[Chip, ...]  # one an engine
    shape: ModelShape
    reached: Reached
    passes: float
    update_s: float
    load_s: float
    switch_s: float
    optimizer_steps: int  # of an update


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The engines and the learner of a simulated run, each with its devices."""

    engines: tuple[Roofline, ...]
    learner: Roofline
    shares: bool  # the engines decode on the learner's devices


def parse_chips(text: str, count: int, default: Chip) -> tuple[Chip, ...]:
    """'4 x H800, 4 x H800/3' -> one chip for each of `count` engines, in their order; '' = the default for all.

    Raises ConfigError for another number of engines, an unknown chip, or a text that says neither.
    """
    if not text.strip():
        return (default,) * count
    found: list[Chip] = []
    for part in text.split(','):
        match = _ENGINES.fullmatch(part)
        if match is None:
            raise ConfigError(f"simulation.engine_chips={text!r}: {part.strip()!r} is not of the form '4 x H100'")
        found += [_find_share(match[2])] * int(match[1])
    if len(found) != count:
        raise ConfigError(
            f'simulation.engine_chips={text!r} names {len(found)} engines, and cluster.engines has {count}: name each'
        )
    return tuple(found)


def _find_share(name: str) -> Chip:
    """'H800/3': a chip with a third of the speed of an H800, and its memory."""
    whole, _, divisor = name.partition('/')
    chip = find_chip(whole)
    if not divisor:
        return chip
    if not divisor.isdecimal() or not int(divisor):
        raise ConfigError(f'simulation.engine_chips: {name!r} must divide the speed by a whole number, as H800/3 does')
    by = int(divisor)
    return dataclasses.replace(
        chip, name=f'{chip.name}/{by}', flops=chip.flops / by, bytes_s=chip.bytes_s / by,
        interconnect_bytes_s=chip.interconnect_bytes_s / by,
    )  # fmt: skip


def build_cluster(settings: RooflineSettings, learner: LearnerLayout, engines: EnginesLayout) -> Cluster:
    """Engines on the learner's devices have equal shares of them. Raises ConfigError where that cannot be."""
    sizes = engines.sizes
    if engines.shared:
        if learner.devices % engines.count:
            raise ConfigError(
                f'cluster.engines={str(engines)!r} shares {learner.devices} devices of the learner: use a number of '
                'engines that divides them'
            )
        sizes = (learner.devices // engines.count,) * engines.count

    def roofline(chip: Chip, devices: int) -> Roofline:
        overhead_s = step_overhead_s(chip, settings.shape, settings.reached)
        return Roofline(chip, settings.shape, settings.reached, devices, max(0.0, overhead_s))

    return Cluster(
        engines=tuple(roofline(chip, size) for chip, size in zip(settings.engine_chips, sizes, strict=True)),
        learner=roofline(settings.chip, learner.devices),
        shares=engines.shared,
    )


class LearnerDevices:
    """How many the learner has now; site of a run whose devices move changes it."""

    def __init__(self, number: int):
        self.number = number


def price_roofline(settings: RooflineSettings, cluster: Cluster, devices: LearnerDevices) -> Mapping[str, Price]:
    """The prices of all work of a run. A checkpoint and the copy of the weights in the learner's memory cost nothing.

    Publication: engines fetch a version while they decode, at the pace of the slower network. A learner that moves to
    other devices sends weights and moments, float32, at the network of the fewer ones.
    """
    engines = {engine_lane(index): engine.prices() for index, engine in enumerate(cluster.engines)}
    switch_s = settings.switch_s if cluster.shares else 0.0
    fetching = {publish_lane(index): engine.devices for index, engine in enumerate(cluster.engines)}

    def find_learner() -> Roofline:
        return dataclasses.replace(cluster.learner, devices=devices.number)

    def fetch(lane: str, work: Work) -> float:
        return find_learner().publication_s(fetching[lane], devices.number) + settings.load_s + switch_s

    def reshard(lane: str, work: Work) -> float:
        moved = STATE_BYTES * settings.shape.parameters
        return moved / (settings.chip.network_bytes_s * devices.number) + settings.switch_s

    def of_engine(lane: str, work: Work) -> float:
        price = engines[lane][work.kind]
        assert callable(price)
        return price(lane, work)

    def train(lane: str, work: Work) -> float:
        learner = find_learner()
        computed_s = learner.train_s(work.amount, work.size['positions'], settings.passes)
        return computed_s + settings.optimizer_steps * learner.optimizer_s() + settings.update_s + switch_s

    return {
        'decode': of_engine, 'prefill': of_engine, 'train': train, 'load': fetch, 'reshard': reshard,
        'reward': price_verifier, 'snapshot': 0.0, 'publish': 0.0, 'save': 0.0, 'compile': 0.0,
    }  # fmt: skip


def price_evaluations(by_kind: Mapping[str, Price]) -> Mapping[str, Price]:
    """The same with the work of evaluations beside training, which costs what that of training does."""
    like = {'evaluation_decode': 'decode', 'evaluation_prefill': 'prefill', 'pin': 'load'}
    return {**by_kind, **{kind: _as(by_kind[other], other) for kind, other in like.items()}}


def _as(price: Price, kind: str) -> Price:
    if not callable(price):
        return price
    return lambda lane, work: price(lane, dataclasses.replace(work, kind=kind))


def price_tool(answers: Answers) -> Price:
    """What was drawn for the call."""

    def price(lane: str, work: Work) -> float:
        return answers.tool_s(work.detail['draw'], work.detail['sample'], int(work.size['call']))

    return price


def price_verifier(lane: str, work: Work) -> float:
    """What was drawn for the answer."""
    return work.size['seconds']


def check_memory(cluster: Cluster, cache_tokens: int, context_tokens: int) -> None:
    """Raises ConfigError where an engine has no room for weights and one sequence, or for the KV cache asked for.

    Args:
      cache_tokens: of the KV cache of an engine; 0 = what fits.
    """
    for index, engine in enumerate(cluster.engines):
        fits = engine.cache_tokens()
        needed = cache_tokens or context_tokens
        if needed > fits:
            what = 'rollout.cache_tokens' if cache_tokens else 'rollout.context_tokens'
            memory = engine.chip.memory_bytes * engine.devices
            raise ConfigError(
                f'{engine_lane(index)} of {engine.devices} x {engine.chip.name} has {memory / 1e9:.0f} GB, in which '
                f'{max(fits, 0):,} positions of {engine.shape.name} fit beside its weights, and {what}={needed:,}: '
                'use more devices an engine, another chip or a shorter context'
            )
