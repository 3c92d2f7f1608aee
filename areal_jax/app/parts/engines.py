"""Builds the engines of a run and their decode backends."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from areal_jax.app.parts.channels import PlacedChannel
from areal_jax.app.parts.part_settings import count_cache_blocks, cuts_softmax
from areal_jax.app.run.start_warnings import print_passed_over
from areal_jax.config import TrackedConfig
from areal_jax.config.cluster import parse_engines
from areal_jax.control.clocks.loop import LoopClock
from areal_jax.control.event_writer import EventLog
from areal_jax.control.frictions import TEMPERATURE
from areal_jax.control.lock_step import VersionRing
from areal_jax.models.decoder import Decoder
from areal_jax.models.weights import Params
from areal_jax.publication.record_channel import RecordChannel
from areal_jax.rollout.backend import DecodeBackend
from areal_jax.rollout.decode.decode_weights import PreparedWeights, share_prepared
from areal_jax.rollout.decode.generate import weight_shardings
from areal_jax.rollout.decode.jax_backend import JaxDecodeBackend, share_backend
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.rollout.stream import IN_TRAINING, LogprobFailure
from areal_jax.sharding.placement import Place
from areal_jax.sharding.rules import Allocation, EngineDevices, describe_hardware
from areal_jax.telemetry.progress import StartProgress, format_bytes
from areal_jax.types import PublishedWeights


def place_of(config: TrackedConfig, decoder: Decoder, devices: EngineDevices) -> Place:
    """Where the weights of an engine on these devices have to be."""
    return devices[0] if len(devices) == 1 else weight_shardings(decoder, devices, _expert(config, devices))


def _expert(config: TrackedConfig, devices: EngineDevices) -> int:
    return parse_engines(config.cluster.engines).find_group(len(devices)).expert


def build_backends(
    config: TrackedConfig, decoder: Decoder, allocation: Allocation
) -> dict[EngineDevices, JaxDecodeBackend]:
    """The compiled programs of all devices on which engines decode; engines on the same ones share them."""
    backends = {devices: build_backend(config, decoder, devices) for devices in allocation.by_devices()}
    reasons = itertools.chain.from_iterable(backend.passed_over for backend in backends.values())
    print_passed_over('rollout.attention', tuple(dict.fromkeys(reasons)))
    return backends


def build_backend(config: TrackedConfig, decoder: Decoder, devices: EngineDevices) -> JaxDecodeBackend:
    """The decode programs of training on `devices`."""
    slots = config.rollout.slots
    tempered = config.friction.actor_share > 0 and config.friction.actor == TEMPERATURE
    blocks, cuts = count_cache_blocks(config, slots), cuts_softmax(config)
    return _build_backend(config, decoder, devices, slots, blocks, filtered=cuts, adjusted=tempered)


def build_serving_backend(config: TrackedConfig, decoder: Decoder, devices: EngineDevices) -> JaxDecodeBackend:
    """The decode programs of a server, whose requests bring sampling parameters of their own."""
    slots = config.rollout.slots
    blocks = count_cache_blocks(config, slots)
    return _build_backend(config, decoder, devices, slots, blocks, filtered=True, adjusted=True)


def build_evaluation_backends(
    config: TrackedConfig, decoder: Decoder, allocation: Allocation
) -> dict[EngineDevices, JaxDecodeBackend]:
    """The compiled programs for evaluation beside training, by devices; none where there is no such evaluation."""
    evaluation = config.evaluation
    if not evaluation.every:
        return {}
    blocks = count_cache_blocks(config, evaluation.slots, beside=True)
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
        prefill_buckets=tuple(rollout.prefill_buckets),
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
    )


def describe_caches(
    training: Mapping[EngineDevices, DecodeBackend], evaluation: Mapping[EngineDevices, DecodeBackend] | None = None
) -> str:
    """'KV cache of an engine: 8 blocks of 64 positions, 47.2 MB'."""
    beside = f', and for evaluation {_describe_cache(evaluation)}' if evaluation else ''
    return f'KV cache of an engine: {_describe_cache(training)}{beside}'


def _describe_cache(backends: Mapping[EngineDevices, DecodeBackend]) -> str:
    backend = next(iter(backends.values()))  # all have as many blocks, which engines of several devices share out
    return f'{backend.cache_blocks} blocks of {backend.block_tokens} positions, {format_bytes(backend.state_bytes)}'


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
    """The engines of cluster.engines with the weights `published`, each on its devices."""
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
    """One engine with the weights `published`, which it gets with `fetch`."""
    return LocalEngine(
        index,
        backend,
        clock,
        log,
        receive=fetch,
        version=published.version,
        params=fetch(published),
        kv_policy=config.rollout.kv_policy,
        decode_steps=config.rollout.decode_steps,
        evaluation=evaluation,
        every_dispatches=config.evaluation.every_dispatches if evaluation else 1,
        failure=failure,
        hardware=hardware,
    )


def bind_fetch(
    channel: PlacedChannel, place: Place, backend: JaxDecodeBackend
) -> Callable[[PublishedWeights], PreparedWeights]:
    """How engines with this backend fetch a version, once for all of them.

    A reader of records keeps the weights as the backend takes them, so that a delta is applied there and nothing is
    laid out again.
    """
    if isinstance(channel, RecordChannel) and (transposed := backend.find_transposed()) is not None:
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
    """Fills the ring with the weights of earlier versions out of a checkpoint, by version."""
    for version, weights in sorted(saved.items(), key=lambda item: int(item[0])):
        copy = jax.device_put(jax.tree.map(np.asarray, weights), jax.local_devices()[0])
        ring.add(channel.transfer(int(version), copy))
