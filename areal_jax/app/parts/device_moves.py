"""The devices of a process, as they move between its learner and its engines.

control/reallocation.py decides when; own_site.py builds what the run begins with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax

from areal_jax.app.parts.channels import PlacedChannel
from areal_jax.app.parts.engines import bind_fetch, build_backend, build_engine, place_of
from areal_jax.app.parts.part_settings import build_allocation
from areal_jax.config import TrackedConfig
from areal_jax.config.cluster import DeviceSplit
from areal_jax.control.clocks.loop import LoopClock
from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.lanes import engine_lane, short_name
from areal_jax.learning.learner import MovingLearner
from areal_jax.models.decoder import Decoder
from areal_jax.protocols import RolloutEngine
from areal_jax.rollout.decode.decode_weights import PreparedWeights
from areal_jax.rollout.decode.jax_backend import JaxDecodeBackend, compile_ahead
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.sharding.placement import compile_move
from areal_jax.sharding.rules import Allocation, EngineDevices
from areal_jax.types import PublishedWeights

Fetch = Callable[[PublishedWeights], PreparedWeights]


class DeviceMoves:
    """Implements control.device_site.DeviceSite for a learner and engines of this process.

    Args:
      weights: as the first engines take them, whose shapes are compiled for.
      backends: of the engines that the run begins with.
    """

    def __init__(
        self,
        config: TrackedConfig,
        decoder: Decoder,
        learner: MovingLearner,
        channel: PlacedChannel,
        clock: LoopClock,
        log: EventLog,
        supervisor: Supervisor,
        *,
        weights: PreparedWeights,
        backends: Mapping[EngineDevices, JaxDecodeBackend],
    ):
        self._config, self._decoder, self._learner, self._channel = config, decoder, learner, channel
        self._clock, self._log, self._supervisor = clock, log, supervisor
        self._weights = jax.tree.map(_describe, weights)
        self._each = len(next(iter(backends)))  # devices of an engine whose weights have these shapes
        self._prepared = {devices: self._bind(devices, backend) for devices, backend in backends.items()}

    def allocation_of(self, split: DeviceSplit) -> Allocation:
        return build_allocation(self._config, split)

    def engines_of(self, split: DeviceSplit) -> dict[str, tuple[str, ...]]:
        engines = self.allocation_of(split).engines
        return {engine_lane(index): tuple(map(str, devices)) for index, devices in enumerate(engines)}

    def prepare(self, split: DeviceSplit) -> None:
        allocation = self.allocation_of(split)
        published = self._learner.prepare(allocation.learner)
        for devices in allocation.engines:
            place = place_of(self._config, self._decoder, devices)
            for version in published:  # that an engine joins with, and those that come
                compile_move(version, place)
            if devices not in self._prepared:
                backend = build_backend(self._config, self._decoder, devices)
                if len(devices) == self._each:
                    compile_ahead(backend, self._weights)
                self._prepared[devices] = self._bind(devices, backend)

    def move_learner(self, split: DeviceSplit) -> None:
        self._learner.move(self.allocation_of(split).learner)

    def build_engine(self, name: str, split: DeviceSplit, published: PublishedWeights) -> LocalEngine:
        index = int(short_name(name))
        backend, fetch = self._prepared[self.allocation_of(split).engines[index]]
        backend.warm_up(fetch(published))  # compiled ahead: no more than a run of each program
        return build_engine(
            self._config, index, backend, self._clock, self._log, fetch=fetch, published=published
        )  # fmt: skip

    def start_engine(self, engine: RolloutEngine) -> None:
        assert isinstance(engine, LocalEngine)
        engine.start(self._supervisor)

    def stop_engine(self, engine: RolloutEngine) -> None:
        assert isinstance(engine, LocalEngine)
        engine.stop()

    def _bind(self, devices: EngineDevices, backend: JaxDecodeBackend) -> tuple[JaxDecodeBackend, Fetch]:
        return backend, bind_fetch(self._channel, place_of(self._config, self._decoder, devices), backend)


def _describe(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
