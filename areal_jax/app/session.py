"""The run of the asynchronous loop in this process: its learner, and its engines where they are no servers."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Mapping

import jax

from areal_jax.app import build
from areal_jax.app.channels import ChannelParts, PlacedChannel, build_channel
from areal_jax.app.engines import (
    build_backends,
    build_engines,
    build_evaluation_backends,
    compile_engines,
    describe_caches,
    restore_ring,
)
from areal_jax.app.environment import Environment, read_environment
from areal_jax.app.loop_parts import EngineFacts
from areal_jax.app.loop_run import LoopRun
from areal_jax.app.own_learner import OwnLearner
from areal_jax.config.cluster import parse_learner
from areal_jax.control.schedule import VersionRing
from areal_jax.lanes import LEARNER
from areal_jax.learning.learner import SpmdLearner
from areal_jax.learning.programs import AHEAD
from areal_jax.models.weights import Params
from areal_jax.publication.files import FilesChannel
from areal_jax.publication.manifest import weights_sha256
from areal_jax.rollout.decode.backend import JaxDecodeBackend
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.rollout.pool import Pool
from areal_jax.sharding.allocation import EngineDevices
from areal_jax.sharding.shares import is_shared
from areal_jax.telemetry.devices import DeviceRates
from areal_jax.types import PublishedWeights, Work


class Session(OwnLearner, LoopRun):
    """See LoopRun. The parts are attributes for tests."""

    _channel: PlacedChannel
    _backends: Mapping[EngineDevices, JaxDecodeBackend] = {}  # of this process, as are the next ones
    _evaluation_backends: Mapping[EngineDevices, JaxDecodeBackend] = {}

    def _find_vocab_size(self) -> int:
        return self.decoder.config.vocab_size

    def _find_rates(self) -> DeviceRates:
        self.allocation = build.build_allocation(self.config)
        return build.build_device_rates(self.config, self.allocation)

    def _build_channel(self) -> PlacedChannel:
        parts = ChannelParts(self.config, self.workdir, self._model, self.allocation, self.learner.writers)
        return build_channel(parts)

    def _restore_ring(self, ring: VersionRing, saved: Mapping[str, Params]) -> None:
        restore_ring(ring, self._channel, saved)

    def _build_pool_here(self, published: PublishedWeights) -> Pool:
        self._engines = self._build_engines(published)
        return Pool(self._engines, self.clock, self.log, self.supervisor, build.build_requirements(self.config))

    def _build_engines(self, published: PublishedWeights) -> list[LocalEngine]:
        config = self.config
        self._backends = build_backends(config, self.decoder, self.allocation)
        self._evaluation_backends = build_evaluation_backends(config, self.decoder, self.allocation)
        backends = self._backends, self._evaluation_backends
        self._start.begin(f'building the engines; {describe_caches(*backends)}')
        return build_engines(
            config, self.decoder, self.allocation, *backends, self._channel, published, self.clock, self.log
        )

    def _compile(self) -> int:
        """Compiles what trains and what generates side by side: XLA compiles a program on one core for the most part.

        The learner's programs are compiled on a thread of their own, in order; followers do the same.
        Where an evaluation comes before training, they are compiled beside it.
        """
        if self._trains_later():
            self._start.begin('compiling what generates:')
            generated = self._compile_engines()
            assert isinstance(self.learner, SpmdLearner)
            self.learner.wait_traced()  # tracing would hold up the loop
            self.learner.begin_compiling()
            return generated
        self._start.begin('compiling what trains and generates:')
        with concurrent.futures.ThreadPoolExecutor(1, AHEAD) as beside:
            trained = beside.submit(self.learner.warm_up)
            generated = self._compile_engines()
            return trained.result() + generated

    def _compile_engines(self) -> int:
        backends = {'engines': self._backends, 'evaluation': self._evaluation_backends}
        return compile_engines(self._engines, self.allocation, backends, self._start)

    def _trains_later(self) -> bool:
        is_alone = parse_learner(self.config.cluster.learner).processes == 1 and not build.uses_servers(self.config)
        return is_alone and self.version_at_start == 0 and self.config.evaluation.problems > 0

    async def _finish_compiling(self) -> None:
        if self._trains_later():
            assert isinstance(self.learner, SpmdLearner)
            self._start.begin('compiling what trains:')
            programs = await self.clock.run(LEARNER, self.learner.finish_compiling, Work('compile'))
            self._start.end()
            print(f'compiled {programs} programs of the learner', flush=True)

    def _copy_version(self, published: PublishedWeights) -> Params:
        return jax.device_get(self._channel.receive(published))

    def _find_final_weights(self) -> Params:
        """Those of the last version; from its files where no process has them all."""
        weights = self.learner.publish(self.config.run.steps)
        if is_shared(weights):
            assert isinstance(self._channel, FilesChannel)
            return self._channel.map_version(self.config.run.steps)
        return weights

    def _digest(self, weights: Params) -> str:
        return weights_sha256(weights)

    def _read_environment(self) -> Environment:
        return read_environment()

    def _find_engine_facts(self) -> EngineFacts:
        return {
            'kv_cache_bytes': next((backend.state_bytes for backend in self._backends.values()), None),
            'memory_parts': self._measure_memory(),
            'lanes_own_devices': self.allocation.lanes_own_devices,
            'devices': self.allocation.describe(),
        }
