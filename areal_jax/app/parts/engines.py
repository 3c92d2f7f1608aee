"""Builds the engines of a run and their decode backends, and moves devices between learner and engines."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from areal_jax.app.parts.channels import PlacedChannel
from areal_jax.app.parts.compilations import print_passed_over
from areal_jax.app.parts.host import EngineMoves
from areal_jax.app.parts.part_settings import build_allocation
from areal_jax.config import TrackedConfig
from areal_jax.config.cluster import DeviceSplit, parse_engines
from areal_jax.config.generation import cuts_softmax
from areal_jax.control.clocks.loop import LoopClock
from areal_jax.control.event_writer import EventLog
from areal_jax.control.frictions import TEMPERATURE
from areal_jax.control.lock_step import VersionRing
from areal_jax.control.supervisor import Supervisor
from areal_jax.lanes import engine_lane, short_name
from areal_jax.learning.learner import MovingLearner
from areal_jax.models.decoder import Decoder
from areal_jax.models.weights import Params
from areal_jax.publication.record_channel import RecordReaders
from areal_jax.rollout.backend import DecodeBackend
from areal_jax.rollout.decode.generate import weight_shardings
from areal_jax.rollout.decode.jax_backend import (
    JaxDecodeBackend,
    PreparedWeights,
    compile_ahead,
    share_backend,
    share_prepared,
)
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.rollout.stream import IN_TRAINING, LogprobFailure
from areal_jax.sharding.placement import Place, compile_move
from areal_jax.sharding.rules import Allocation, EngineDevices, describe_hardware
from areal_jax.telemetry.progress import StartProgress, format_bytes
from areal_jax.types import PublishedWeights


def place_of(config: TrackedConfig, decoder: Decoder, devices: EngineDevices) -> Place:
    """Returns the device or shardings that an engine on these devices needs its weights in."""
    return devices[0] if len(devices) == 1 else weight_shardings(decoder, devices, _expert(config, devices))


def _expert(config: TrackedConfig, devices: EngineDevices) -> int:
    return parse_engines(config.cluster.engines).find_group(len(devices)).expert


def build_backends(
    config: TrackedConfig, decoder: Decoder, allocation: Allocation
) -> dict[EngineDevices, JaxDecodeBackend]:
    """Builds the decode programs for all engine devices; engines on the same devices share one backend."""
    backends = {devices: build_backend(config, decoder, devices) for devices in allocation.by_devices()}
    reasons = itertools.chain.from_iterable(backend.passed_over for backend in backends.values())
    print_passed_over('rollout.attention', tuple(dict.fromkeys(reasons)))
    return backends


def build_backend(config: TrackedConfig, decoder: Decoder, devices: EngineDevices) -> JaxDecodeBackend:
    """Builds the decode programs of training on `devices`."""
    rollout = config.rollout
    tempered = config.friction.actor_share > 0 and config.friction.actor == TEMPERATURE
    blocks, cuts = rollout.count_cache_blocks(rollout.slots), cuts_softmax(config)
    return _build_backend(config, decoder, devices, rollout.slots, blocks, filtered=cuts, adjusted=tempered)


def build_serving_backend(config: TrackedConfig, decoder: Decoder, devices: EngineDevices) -> JaxDecodeBackend:
    """Builds the decode programs of a server, whose requests each bring sampling parameters."""
    slots = config.rollout.slots
    blocks = config.rollout.count_cache_blocks(slots)
    return _build_backend(config, decoder, devices, slots, blocks, filtered=True, adjusted=True)


def build_evaluation_backends(
    config: TrackedConfig, decoder: Decoder, allocation: Allocation
) -> dict[EngineDevices, JaxDecodeBackend]:
    """Builds the programs for evaluation during training, by devices; empty if there is no such evaluation."""
    evaluation = config.evaluation
    if not evaluation.every:
        return {}
    blocks = config.rollout.count_cache_blocks(evaluation.slots, beside=True)
    filtered = evaluation.every_samples > 0 and cuts_softmax(config)
    return {
        devices: _build_backend(config, decoder, devices, evaluation.slots, blocks, filtered=filtered)
        for devices in allocation.by_devices()
    }


def _build_backend(
    config: TrackedConfig,
    decoder: Decoder,
    devices: EngineDevices,
    slots: int,
    cache_blocks: int,
    *,
    filtered: bool,
    adjusted: bool = False,
) -> JaxDecodeBackend:
    rollout = config.rollout
    return share_backend(
        decoder.config,
        decoder.lora,
        slots=slots,
        context_tokens=rollout.context_tokens,
        block_tokens=rollout.block_tokens,
        cache_blocks=cache_blocks,
        state_snapshots=rollout.state_snapshots if decoder.config.delta else None,
        prefill_buckets=rollout.prefill_buckets,
        decode_steps=rollout.decode_steps,
        filtered=filtered,
        adjusted=adjusted,
        dtype=config.publication.dtype,
        devices=tuple(devices),
        expert=_expert(config, devices),
        attention=rollout.attention,
        weights=rollout.weights,
        small_batches=config.run.clock == 'virtual',  # its runs keep their bits
        records_routes=rollout.record_routes,
        mla=rollout.mla,
    )


def describe_caches(
    training: Mapping[EngineDevices, DecodeBackend], evaluation: Mapping[EngineDevices, DecodeBackend] | None = None
) -> str:
    """Returns a sentence such as 'KV cache of an engine: 8 blocks of 64 positions, 47.2 MB'."""
    beside = f', and for evaluation {_describe_cache(evaluation)}' if evaluation else ''
    return f'KV cache of an engine: {_describe_cache(training)}{beside}'


def _describe_cache(backends: Mapping[EngineDevices, DecodeBackend]) -> str:
    backend = next(iter(backends.values()))  # all have equally many blocks, divided among an engine's devices
    windows = backend.windows
    beside = f', {windows.blocks} in layers with a window of up to {windows.tokens}' if windows else ''
    states = f' and {backend.states.places} recurrent states' if backend.states else ''
    size = format_bytes(backend.state_bytes)
    return f'{backend.cache_blocks} blocks of {backend.block_tokens} positions{beside}{states}, {size}'


def build_engines(
    config: TrackedConfig,
    decoder: Decoder,
    allocation: Allocation,
    backends: Mapping[EngineDevices, JaxDecodeBackend],
    evaluation_backends: Mapping[EngineDevices, JaxDecodeBackend],
    channel: PlacedChannel,
    published: PublishedWeights,
    clock: LoopClock,
    log: EventLog,
    failure: LogprobFailure = IN_TRAINING,
) -> list[LocalEngine]:
    """Builds the engines of cluster.engines, each on its devices, with the weights `published`."""
    fetches = {
        devices: bind_fetch(channel, place_of(config, decoder, devices), backend)
        for devices, backend in backends.items()
    }
    return [
        build_engine(
            config, index, backends[devices], clock, log,
            fetch=fetches[devices], published=published, evaluation=evaluation_backends.get(devices), failure=failure,
            hardware=describe_hardware(devices),
        )
        for index, devices in enumerate(allocation.engines)
    ]  # fmt: skip


def build_engine(
    config: TrackedConfig,
    index: int,
    backend: JaxDecodeBackend,
    clock: LoopClock,
    log: EventLog,
    *,
    fetch: Callable[[PublishedWeights], PreparedWeights],
    published: PublishedWeights,
    evaluation: JaxDecodeBackend | None = None,
    failure: LogprobFailure = IN_TRAINING,
    hardware: str = '',
) -> LocalEngine:
    """Builds one engine with the weights `published`, which it gets with `fetch`."""
    return LocalEngine(
        index,
        backend,
        clock,
        log,
        receive=fetch,
        version=published.version,
        params=fetch(published),
        rollout=config.rollout,
        evaluation=evaluation,
        every_dispatches=config.evaluation.every_dispatches if evaluation else 1,
        failure=failure,
        hardware=hardware,
    )


def bind_fetch(
    channel: PlacedChannel, place: Place, backend: JaxDecodeBackend
) -> Callable[[PublishedWeights], PreparedWeights]:
    """Returns a function that fetches a version for all engines with this backend, once per version.

    A reader of records keeps the weights in the backend's layout, so that a delta is applied there without another
    conversion.
    """
    if isinstance(channel, RecordReaders) and (transposed := backend.find_transposed()) is not None:
        return share_prepared(functools.partial(channel.read, place=place, transposed=transposed), PreparedWeights)
    return share_prepared(functools.partial(channel.receive, place=place), backend.prepare)


def compile_engines(
    engines: Sequence[LocalEngine],
    allocation: Allocation,
    kinds: Mapping[str, Mapping[EngineDevices, JaxDecodeBackend]],
    start: StartProgress,
) -> int:
    """Compiles the programs of every backend, for its devices; returns their number."""
    programs, by_devices = 0, allocation.by_devices()
    for name, backends in kinds.items():
        for devices, backend in backends.items():
            announce = functools.partial(start.count_programs, of=f'{name} on {", ".join(map(str, devices))}')
            programs += backend.warm_up(engines[by_devices[devices][0]].params, announce)
    return programs


def restore_ring(ring: VersionRing, channel: PlacedChannel, saved: Mapping[str, Params]) -> None:
    """Fills the ring with the weights of earlier versions from a checkpoint, by version."""
    for version, weights in sorted(saved.items(), key=lambda item: int(item[0])):
        copy = jax.device_put(jax.tree.map(np.asarray, weights), jax.local_devices()[0])
        ring.add(channel.transfer(int(version), copy))


# The devices of a process, as they move between its learner and its engines; control/reallocation.py decides when.


Fetch = Callable[[PublishedWeights], PreparedWeights]


class DeviceMoves(EngineMoves):
    """Implements control.reallocation.DeviceSite for a learner and engines of this process.

    Args:
      weights: in the form that the first engines take; programs are compiled for their shapes.
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
        super().__init__(supervisor)
        self._config, self._decoder, self._learner, self._channel = config, decoder, learner, channel
        self._clock, self._log = clock, log
        self._weights = jax.tree.map(_describe, weights)
        self._each = len(next(iter(backends)))  # devices per engine for which these shapes hold
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
            for version in published:  # the version that an engine joins with, and the later ones
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
        backend.warm_up(fetch(published))  # compiled ahead: this only runs each program once
        return build_engine(self._config, index, backend, self._clock, self._log, fetch=fetch, published=published)

    def _bind(self, devices: EngineDevices, backend: JaxDecodeBackend) -> tuple[JaxDecodeBackend, Fetch]:
        return backend, bind_fetch(self._channel, place_of(self._config, self._decoder, devices), backend)


def _describe(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
