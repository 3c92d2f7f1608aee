"""The site of a simulated run: engines, learner and channel without weights. Imports no jax."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from ml_collections import config_dict

from areal_jax.app.parts.clock import lane_widths
from areal_jax.app.parts.energy_builder import UsedDevices, group_devices
from areal_jax.app.parts.part_settings import count_cache_blocks, uses_servers
from areal_jax.app.parts.pool_builder import build_pool
from areal_jax.app.parts.server_parts import Servers
from areal_jax.app.run.loop import Loop, build_loop
from areal_jax.app.run.loop_parts import Outside
from areal_jax.app.run.observer import Compilations
from areal_jax.app.run.remote_site import NoCompilations, RemoteModel
from areal_jax.app.run.run import Run, RunKind
from areal_jax.app.run.run_context import Checkpoint, RunContext
from areal_jax.app.run.site import EngineFacts, EngineSite, LocalRollout, find_split
from areal_jax.app.simulate.simulated_moves import SimulatedMoves, place_engines
from areal_jax.app.simulate.simulated_pool import build_simulated_servers
from areal_jax.app.simulate.simulation_settings import (
    as_simulated,
    build_answers,
    build_held_out,
    build_prices,
    build_prompts,
    build_workflow,
    cache_blocks,
    describe_hardware,
    note_not_simulated,
    read_update,
)
from areal_jax.app.workdir import provenance
from areal_jax.app.workdir.environment import Environment, read_environment
from areal_jax.config import TrackedConfig
from areal_jax.config.cluster import DeviceSplit, EnginesLayout, LearnerLayout, parse_engines, parse_learner
from areal_jax.config.simulation_fields import VIRTUAL
from areal_jax.config.splits import parse_split
from areal_jax.control.clocks.loop import LoopClock
from areal_jax.control.clocks.virtual import VirtualClock
from areal_jax.control.event_writer import EventLog
from areal_jax.control.lock_step import VersionRing
from areal_jax.control.supervisor import Supervisor
from areal_jax.lanes import LEARNER, REWARD, TOOL, engine_lane, publish_lane, short_name
from areal_jax.protocols import Learner
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.simulation.count_backend import CountBackend, CountChannel, CountLearner
from areal_jax.simulation.drawn_task import DrawnTask, DrawnVerifier, keep_lengths
from areal_jax.simulation.simulated_clock import SimulatedClock
from areal_jax.simulation.simulated_servers import ServerLog
from areal_jax.telemetry.devices import DeviceRates
from areal_jax.text.tokenizer import CharacterTokenizer
from areal_jax.types import PublishedWeights, Tree


class CountTokenizer(CharacterTokenizer):
    """Its end of an answer is spelled by none, and the text of an answer is its length."""

    def decode(self, tokens: np.ndarray) -> str:
        return str(len(tokens))


SimulatedRun: TypeAlias = Run['SimulatedSite', Loop]


def build_simulation(config: config_dict.ConfigDict, workdir: pathlib.Path, **settings: Any) -> SimulatedRun:
    """The run of a config that is one of a simulation; `train` runs it. Settings and errors as for Run."""

    def build(context: RunContext, site: SimulatedSite) -> Loop | None:
        return build_loop(context, site, site.outside())

    kind = RunKind(lambda config: None, lambda config: None, SimulatedSite, build)
    return Run(kind, as_simulated(config), workdir, **settings)


class SimulatedSite:
    """See site.LoopSite."""

    awaited_beside = 0
    learner: CountLearner
    split: DeviceSplit | None = None  # in use; None: devices do not move

    def __init__(self, context: RunContext):
        self._context, self._config = context, context.config
        self.engine_site: EngineSite | None = self
        self.compilations: Compilations = NoCompilations()
        self._answers = build_answers(context.config)
        self._prices = build_prices(context.config, self._answers)
        note_not_simulated(context.config)
        self.awaited_engines = len(self._list_devices()) if uses_servers(context.config) else 0

    def outside(self) -> Outside:
        """What takes the place of the world outside: clock, prompts, verifier."""
        return Outside(
            make_clock=self._build_clock,
            load_workflow=lambda config, tokenizer: functools.partial(build_workflow, config, self._answers),
            build_task=lambda config, tokenizer: DrawnTask(
                lambda: build_prompts(config), functools.partial(build_held_out, config)
            ),
            build_verifier=self._build_verifier,
            build_servers=self._build_servers,
        )

    def load_model(self) -> RemoteModel:
        tokenizer = CountTokenizer('0')
        return RemoteModel(tokenizer, None, tokenizer.vocab_size)

    def build_learner(self, checkpoint: Checkpoint | None) -> CountLearner:
        self.split = find_split(self._config, checkpoint)
        if self.split:
            self._move_learner(self.split)
        self.learner = CountLearner(*read_update(self._config))
        return self.learner

    def trace(self) -> Learner:
        return self.learner

    def find_hardware(self) -> provenance.Hardware:
        return provenance.describe_hardware([])

    # The loop.

    def find_rates(self) -> DeviceRates:
        learner, engines = self._find_layouts()
        return DeviceRates(learner.devices, engines.devices or learner.devices, None)

    def find_devices(self) -> UsedDevices:
        cluster = self._prices.cluster
        if cluster is None:
            return UsedDevices((), simulated=True)
        uses = [(number, cluster.learner.chip.name, LEARNER) for number in range(cluster.learner.devices)]
        for (lane, numbers), engine in zip(self._list_devices().items(), cluster.engines, strict=True):
            uses += [(number, engine.chip.name, lane) for number in numbers]
        return UsedDevices(group_devices(uses), simulated=True)

    def build_channel(self) -> CountChannel:
        return CountChannel()

    def restore_ring(self, ring: VersionRing, saved: Mapping[str, Tree]) -> None:
        for version in sorted(map(int, saved)):
            ring.add(CountChannel().transfer(version, version))

    def copy_version(self, published: PublishedWeights) -> Tree:
        return {'none': np.zeros(1, np.float32)}

    def build_rollout(
        self, published: PublishedWeights, clock: LoopClock, log: EventLog, supervisor: Supervisor
    ) -> LocalRollout:
        build_engine = functools.partial(self._build_engine, clock=clock, log=log)
        engines = [build_engine(name, devices, published) for name, devices in self._list_devices().items()]
        pool = build_pool(self._config, engines, clock, log, supervisor)
        moves = SimulatedMoves(build_engine, self._move_learner, supervisor) if self.split else None
        return LocalRollout(engines, pool, moves)

    def note_split(self, split: DeviceSplit) -> DeviceRates:
        self.split = split
        return self.find_rates()

    def _move_learner(self, split: DeviceSplit) -> None:
        assert self._prices.learner is not None
        self._prices.learner.number = parse_split(split)[0].devices

    def _build_verifier(
        self, clock: LoopClock, workers: int | None = None, lane: str = REWARD, workdir: pathlib.Path | None = None
    ) -> DrawnVerifier:
        task = self._config.task
        return DrawnVerifier(
            clock, self._answers, workers or task.verifier_workers,
            deadline_s=task.verifier_deadline_s, attempts=task.verifier_attempts, lane=lane,
        )  # fmt: skip

    def _build_servers(
        self, config: TrackedConfig, clock: LoopClock, log: EventLog, supervisor: Supervisor,
        *, published: PublishedWeights, stop: Callable[[], None], **settings: object,
    ) -> Servers:  # fmt: skip
        devices = list(self._list_devices().items())
        without = dataclasses.replace(published, version=-1)

        def build_engine(index: int, is_first: bool) -> LocalEngine:
            return self._build_engine(
                *devices[index], published if is_first else without, clock=clock, log=ServerLog(log)
            )

        return build_simulated_servers(
            config, clock, log, supervisor, build_engine, count=len(devices), published=published, stop=stop
        )

    def _build_clock(
        self, config: TrackedConfig, log: EventLog, start_s: float, *, waits_for_work: bool
    ) -> VirtualClock:
        prices = self._prices
        widths = dict(lane_widths(config))
        if uses_servers(config):
            numbers = range(len(self._list_devices()))
            widths |= {lane(number): 1 for number in numbers for lane in (engine_lane, publish_lane)}
        if self._answers.of_agents:
            widths[TOOL] = config.agent.tool_calls
        if config.simulation.prices == VIRTUAL:
            return VirtualClock(widths, log, prices.by_kind, start_s)
        return SimulatedClock(widths, log, prices.by_kind, start_s, host=prices.host, contention=prices.contention)

    def _build_engine(
        self, name: str, devices: Sequence[int], published: PublishedWeights, *, clock: LoopClock, log: EventLog
    ) -> LocalEngine:
        rollout, index = self._config.rollout, int(short_name(name))
        build_backend = functools.partial(
            CountBackend,
            keep_lengths(self._answers),
            context_tokens=rollout.context_tokens,
            block_tokens=rollout.block_tokens,
            buckets=tuple(rollout.prefill_buckets),
            devices=[str(device) for device in devices],
            jumps=isinstance(clock, SimulatedClock) and self._config.simulation.join,
            distinct=self._answers.of_agents,
        )
        blocks = cache_blocks(self._config, self._prices.cluster, index)
        evaluation = self._config.evaluation
        beside: CountBackend | None = None
        if evaluation.every:
            of_slots = count_cache_blocks(self._config, evaluation.slots, beside=True)
            beside = build_backend(slots=evaluation.slots, cache_blocks=of_slots)
        return LocalEngine(
            index, build_backend(slots=rollout.slots, cache_blocks=blocks), clock, log,
            receive=CountChannel().receive, version=published.version, params=published.version,
            kv_policy=rollout.kv_policy, decode_steps=rollout.decode_steps,
            evaluation=beside, every_dispatches=evaluation.every_dispatches if beside else 1,
            hardware=describe_hardware(self._prices.cluster, index, len(devices)),
        )  # fmt: skip

    def compile(self, engines: Sequence[LocalEngine], version: int) -> int:
        return 0

    async def finish_compiling(self, clock: LoopClock) -> None:
        """Nothing is compiled."""

    def read_environment(self) -> Environment:
        return read_environment([])

    def describe_engines(self) -> EngineFacts:
        learner = parse_learner(self._config.cluster.learner).devices
        return {
            'kv_cache_bytes': None,
            'memory_parts': {},
            'lanes_own_devices': not parse_engines(self._config.cluster.engines).shared,
            'devices': {'learner': list(range(learner)), 'engines': self._list_devices()},
        }

    def describe_simulation(self) -> str:
        """For the report."""
        ours, cluster = self._config.simulation, self._prices.cluster
        what = 'prices of the section virtual' if ours.prices == VIRTUAL else f'prices of {ours.prices}'
        if cluster is not None:
            kinds = itertools.groupby(f'{engine.devices} x {engine.chip.name}' for engine in cluster.engines)
            named = ', '.join(f'{len(list(group))} engines on {kind}' for kind, group in kinds)
            learner = cluster.learner
            what = f'{learner.shape.name}, learner on {learner.devices} x {learner.chip.name}, {named}'
        agents = f', turns {ours.turns}, results of tools {ours.results}' if ours.turns else ''
        return f'{what}; answers {ours.answers}, prompts {ours.prompts}{agents}'

    def _list_devices(self) -> dict[str, list[int]]:
        """Numbers of the devices of each engine, behind those of the learner where they do not share them."""
        learner, engines = self._find_layouts()
        if self.split:
            return place_engines(self.split)
        places: Sequence[range] = engines.place(learner.devices)
        if engines.shared:
            each = max(1, learner.devices // engines.count)
            places = [range(index * each, (index + 1) * each) for index in range(engines.count)]
        return {engine_lane(index): list(numbers) for index, numbers in enumerate(places)}

    def _find_layouts(self) -> tuple[LearnerLayout, EnginesLayout]:
        """Of the split in use."""
        if self.split:
            return parse_split(self.split)
        return parse_learner(self._config.cluster.learner), parse_engines(self._config.cluster.engines)

    # The report.

    def find_final_weights(self) -> tuple[None, str]:
        return None, ''

    def export(self, weights: Tree, digest: str) -> None:
        """There are no weights."""

    def complete_export(self) -> None:
        """There are no weights."""

    def close_learner(self) -> None:
        """Nothing is open."""
