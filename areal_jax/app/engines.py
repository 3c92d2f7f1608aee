"""Builds the engines of a run, their decode backends, and the channel that brings them weights. Used by session.py."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Mapping

import jax
import numpy as np

from areal_jax.app.build import cuts_softmax
from areal_jax.config import TrackedConfig
from areal_jax.control.clocks.loop import LoopClock
from areal_jax.control.events import EventLog
from areal_jax.control.schedule import VersionRing
from areal_jax.models.decoder import Decoder
from areal_jax.models.weights import Params
from areal_jax.publication.device import DeviceChannel
from areal_jax.publication.files import FilesChannel
from areal_jax.rollout import requirements
from areal_jax.rollout.decode.backend import JaxDecodeBackend
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.rollout.requirements import Requirement
from areal_jax.sharding.allocation import Allocation
from areal_jax.types import PublishedWeights


def build_channel(
    config: TrackedConfig, workdir: pathlib.Path, decoder: Decoder, allocation: Allocation
) -> DeviceChannel | FilesChannel:
    verify = config.publication.verify
    if config.publication.channel == 'device':
        # engines that share a device decode with the copy that the channel holds there
        return DeviceChannel(allocation.engines[0] if allocation.engine_shares(0) else None, verify=verify)
    directory = pathlib.Path(config.publication.directory or workdir / 'publication')
    return FilesChannel(directory, decoder.config, verify=verify)


def build_backends(
    config: TrackedConfig, decoder: Decoder, allocation: Allocation
) -> dict[jax.Device, JaxDecodeBackend]:
    """The compiled programs of every device on which engines decode; its engines share them."""
    return {device: build_backend(config, decoder, device) for device in allocation.by_device()}


def build_backend(config: TrackedConfig, decoder: Decoder, device: jax.Device) -> JaxDecodeBackend:
    """The decode programs on `device`."""
    rollout = config.rollout
    return JaxDecodeBackend(
        decoder,
        slots=rollout.slots,
        context_tokens=rollout.context_tokens,
        prefill_buckets=tuple(rollout.prefill_buckets),
        decode_steps=rollout.decode_steps,
        filtered=cuts_softmax(config),
        dtype=config.publication.dtype,
        device=device,
    )


def build_evaluation_backends(
    config: TrackedConfig, decoder: Decoder, allocation: Allocation
) -> dict[jax.Device, JaxDecodeBackend]:
    """The compiled programs for evaluation beside training, by device; none where there is no such evaluation."""
    rollout, evaluation = config.rollout, config.evaluation
    if not evaluation.every:
        return {}
    return {
        device: JaxDecodeBackend(
            decoder,
            slots=evaluation.slots,
            context_tokens=rollout.context_tokens,
            prefill_buckets=tuple(rollout.prefill_buckets),
            decode_steps=rollout.decode_steps,
            filtered=evaluation.every_samples > 0 and cuts_softmax(config),
            dtype=config.publication.dtype,
            device=device,
        )
        for device in allocation.by_device()
    }


def build_requirements(config: TrackedConfig) -> list[Requirement]:
    """What this run needs of every engine."""
    rollout, evaluation = config.rollout, config.evaluation
    needed = [
        requirements.needs_logprobs('learning from its answers', 'behavior'),
        requirements.needs_spans('learning from its answers'),
        requirements.needs_update(f'rollout.kv_policy={rollout.kv_policy!r}', rollout.kv_policy),
        requirements.needs_pause('taking checkpoints'),
    ]
    if cuts_softmax(config):
        setting = f'rollout.top_k={rollout.top_k}, rollout.top_p={rollout.top_p}'
        needed.append(requirements.needs_logprobs(setting, 'sampling'))
    if evaluation.every:
        needed.append(requirements.needs_pinned(f'evaluation.every={evaluation.every}'))
    return needed


def build_engines(
    config: TrackedConfig,
    allocation: Allocation,
    backends: Mapping[jax.Device, JaxDecodeBackend],
    evaluation_backends: Mapping[jax.Device, JaxDecodeBackend],
    channel: DeviceChannel | FilesChannel,
    published: PublishedWeights,
    clock: LoopClock,
    log: EventLog,
) -> list[LocalEngine]:
    """The engines of cluster.engines with the weights `published`, each on its device."""
    every_dispatches = config.evaluation.every_dispatches if evaluation_backends else 1
    return [
        LocalEngine(
            index,
            backends[device],
            clock,
            log,
            receive=functools.partial(channel.receive, device=device),
            version=published.version,
            params=channel.receive(published, device),
            kv_policy=config.rollout.kv_policy,
            decode_steps=config.rollout.decode_steps,
            evaluation=evaluation_backends.get(device),
            every_dispatches=every_dispatches,
        )
        for index, device in enumerate(allocation.engines)
    ]


def restore_ring(ring: VersionRing, channel: DeviceChannel | FilesChannel, saved: Mapping[str, Params]) -> None:
    """Fills the ring with the weights of earlier versions out of a checkpoint, by version."""
    for version, weights in sorted(saved.items(), key=lambda item: int(item[0])):
        copy = jax.device_put(jax.tree.map(np.asarray, weights), jax.local_devices()[0])
        ring.add(channel.transfer(int(version), copy))
