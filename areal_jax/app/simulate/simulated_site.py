"""Simulates a run: draws its prompts and answers, prices its work, and has a site without weights. No jax."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from ml_collections import config_dict

from areal_jax.app.model.text_model import describe_text_model
from areal_jax.app.parts.host import (
    EndedBy,
    EngineMoves,
    Servers,
    UsedDevices,
    build_pool,
    group_devices,
    lane_widths,
    unit_prices,
)
from areal_jax.app.parts.part_settings import build_requirements, find_splits
from areal_jax.app.parts.task_builder import build_stream, build_task
from areal_jax.app.parts.workflow_builder import WorkflowFactory, read_budgets
from areal_jax.app.run.loop import Loop, Outside, build_loop
from areal_jax.app.run.run import (
    Built,
    Checkpoint,
    EngineFacts,
    LocalEngines,
    LoopSite,
    Moves,
    NoCompilations,
    RemoteModel,
    Rollout,
    Run,
    RunContext,
    RunKind,
    Site,
    find_split,
    require_sound,
)
from areal_jax.config import TrackedConfig
from areal_jax.config.agent_fields import PROGRAM
from areal_jax.config.cluster import DeviceSplit, EnginesLayout, LearnerLayout, parse_engines, parse_learner
from areal_jax.config.declarations import ROOFLINE, TASK, VIRTUAL
from areal_jax.config.drawn_lengths import Lengths, parse_lengths
from areal_jax.config.fields import ConfigError
from areal_jax.config.generation import uses_servers
from areal_jax.config.kinds import DEVICE, FILES, OWN, find_channel, find_server
from areal_jax.config.splits import parse_split
from areal_jax.control.clocks.loop import LoopClock
from areal_jax.control.clocks.virtual import Price, VirtualClock
from areal_jax.control.event_writer import EventLog
from areal_jax.control.lock_step import VersionRing
from areal_jax.control.supervisor import Supervisor
from areal_jax.errors import UserError
from areal_jax.events.schema import FILE as EVENTS
from areal_jax.events.schema import Event
from areal_jax.lanes import LEARNER, REWARD, TOOL, engine_lane, publish_lane, short_name
from areal_jax.learning.objective.counting import UpdatePrice
from areal_jax.protocols import Clock, PromptStream
from areal_jax.report.event_log import load_events
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.rollout.servers.keeper import MismatchWatch
from areal_jax.rollout.servers.member import ServerSettings
from areal_jax.rollout.servers.server_pool import ServerPool
from areal_jax.rollout.workflow import SingleTurn
from areal_jax.simulation.calibration import read_table
from areal_jax.simulation.count_backend import CountBackend, CountChannel, CountLearner, UpdateShape
from areal_jax.simulation.drawn_answers import DrawnAnswers, LoggedAnswers, read_groups
from areal_jax.simulation.drawn_task import (
    Answers,
    CountedPrompts,
    DrawnAgents,
    DrawnPrompts,
    DrawnTask,
    DrawnVerifier,
    count_prompt,
    keep_lengths,
)
from areal_jax.simulation.prices import (
    Cluster,
    LearnerDevices,
    ModelShape,
    Reached,
    RooflineSettings,
    StreamLinks,
    build_cluster,
    check_memory,
    find_chip,
    find_shape,
    parse_chips,
    price_evaluations,
    price_roofline,
    price_tool,
    shape_of,
)
from areal_jax.simulation.simulated_clock import NO_CONTENTION, Contention, SimulatedClock
from areal_jax.simulation.simulated_servers import ServerLog, SimulatedRegistry
from areal_jax.telemetry.devices import DeviceRates
from areal_jax.text.tokenizer import CharacterTokenizer
from areal_jax.types import Prompt, PublishedWeights, Tree

_LONGEST = 1 << 30  # of an answer, before its limit is applied
# fields of work that a simulation omits or does differently
_FIXED: Mapping[str, object] = {
    'run.clock': 'virtual', 'run.export': False, 'run.mirror': '', 'diagnostics.ratio_sample': 0.0,
    'telemetry.profile_steps': (), 'rollout.record_routes': False, 'learner.routes': 'live',
}  # fmt: skip
# every kind of server is simulated as a server of this project; the transport of versions is only a price, of sockets
# or of the networks of the devices
_AS_SERVERS: Mapping[str, object] = {
    'rollout.server': OWN.name, 'rollout.urls': (), 'publication.channel': FILES.name,
}  # fmt: skip
_AS_ENGINES: Mapping[str, object] = {'publication.channel': DEVICE.name}
_NOT_SIMULATED = ('agent', 'model', 'task', 'lora', 'cluster', 'publication')


class Prices(NamedTuple):
    """The prices of work, and the devices that do it; None: no devices are named."""

    by_kind: Mapping[str, Price]
    cluster: Cluster | None = None
    contention: Contention = NO_CONTENTION
    host: Mapping[str, float] = MappingProxyType({})
    learner: LearnerDevices | None = None


def as_simulated(config: config_dict.ConfigDict) -> config_dict.ConfigDict:
    """Returns the config with those fields changed that a simulation does not follow.

    Raises ConfigError for a config without a simulation.
    """
    if not config.simulation.prices:
        raise ConfigError(
            "simulation.prices='' makes this config none of a simulation: set it to 'roofline', with simulation.chip "
            "and simulation.model, or to 'virtual'"
        )
    if own := config.evaluation.engines:
        raise ConfigError(
            f'evaluation.engines={own}: engines that evaluate alone are not simulated; set it to 0, and '
            f'cluster.engines to {own} fewer or evaluation.every=0'
        )
    changed = config.copy_and_resolve_references()
    with changed.unlocked():
        is_alone = find_server(config.rollout.server).in_process
        changed.update_from_flattened_dict({**_FIXED, **(_AS_ENGINES if is_alone else _AS_SERVERS)})
        if find_channel(config.publication.channel).uses_network and not is_alone:
            changed.publication.channel = config.publication.channel
    return changed.lock()


def note_not_simulated(config: TrackedConfig) -> None:
    """Marks sections as read that a simulation only partly uses."""
    config.note_used((*_NOT_SIMULATED, *_FIXED, *_AS_SERVERS, *find_server(config.rollout.server).reads))


def build_answers(config: TrackedConfig) -> Answers:
    """Builds the source of answers; raises ConfigError, or FileError for a log that cannot be read."""
    simulation, batch = config.simulation, config.learner.groups_per_update
    draws, share = config.run.steps * batch, simulation.group_share

    def parse(name: str, most: int, group_share: float = 0.0) -> Lengths:
        text = getattr(simulation, name)
        return parse_lengths(text, most, group_share=group_share, draws_of_run=draws, field=f'simulation.{name}')

    verifier, tool = parse('verifier', _LONGEST), parse('tool', _LONGEST)
    text = simulation.answers.strip()
    if text.startswith('log(') and text.endswith(')'):
        workdir = pathlib.Path(text[4:-1])
        groups = read_groups(_load_events(workdir), workdir, batch)
        logged = LoggedAnswers(groups, config.run.seed, verifier, tool)
        if logged.of_agents and config.rollout.workflow == 'single_turn':
            raise ConfigError(
                f'simulation.answers={text!r}: answers of {workdir} have several turns, and rollout.workflow='
                "'single_turn': use the config of that run"
            )
        return logged
    return DrawnAnswers(
        config.run.seed, parse('answers', _LONGEST, share), verifier, simulation.success,
        results=parse('results', _LONGEST), tool=tool, episode=parse('turns', _LONGEST) if simulation.turns else None,
    )  # fmt: skip


def build_workflow(config: TrackedConfig, answers: Answers, clock: Clock) -> WorkflowFactory:
    """Builds one turn, or drawn episodes of agents; if these are programs, at most agent.programs run at once."""
    if not answers.of_agents:
        return SingleTurn
    most = config.agent.programs if config.rollout.workflow == PROGRAM else math.inf
    return DrawnAgents(answers, clock, read_budgets(config), deadline_s=config.rollout.episode_deadline_s, most=most)


def build_prompts(config: TrackedConfig) -> PromptStream:
    """Builds the prompts; raises ConfigError, and the errors of building the task."""
    text, rollout, seed = config.simulation.prompts, config.rollout, config.run.seed
    if text == TASK:
        return CountedPrompts(build_stream(config, build_task(config, describe_text_model(config).tokenizer)))
    longest = rollout.context_tokens - rollout.max_new_tokens
    draws = config.run.steps * config.learner.groups_per_update
    return DrawnPrompts(parse_lengths(text, longest, draws_of_run=draws, field='simulation.prompts'), seed)


def build_held_out(config: TrackedConfig, count: int) -> list[Prompt]:
    """Returns held-out prompts, in the form of the stream's prompts."""
    if config.simulation.prompts == TASK:
        task = build_task(config, describe_text_model(config).tokenizer)
        return [count_prompt(prompt) for prompt in task.held_out(count, config.run.seed)]
    stream = build_prompts(config)
    return [stream.draw() for _ in range(count)]


def _load_events(workdir: pathlib.Path) -> list[Event]:
    if not (workdir / EVENTS).is_file():
        raise UserError(f'simulation.answers=log({workdir}): there is no {workdir / EVENTS}; name the workdir of a run')
    return load_events(workdir / EVENTS)


def build_prices(config: TrackedConfig, answers: Answers) -> Prices:
    """Builds the prices; raises ConfigError for an unknown chip or model, and for a plan that exceeds the memory."""
    prices = config.simulation.prices
    if prices == VIRTUAL:
        return Prices(unit_prices(config))
    if prices != ROOFLINE:
        table = read_table(pathlib.Path(prices))
        by_kind = {**price_evaluations(table.by_kind()), 'tool': price_tool(answers)}
        return Prices(by_kind, contention=table.contention, host=table.host)
    learner, engines = parse_learner(config.cluster.learner), _most_engines(config)
    cluster = build_cluster(settings := _read_roofline(config, engines.count), learner, engines)
    check_memory(cluster, config.rollout.cache_tokens, config.rollout.context_tokens)
    devices = LearnerDevices(learner.devices)
    by_kind = {**price_evaluations(price_roofline(settings, cluster, devices)), 'tool': price_tool(answers)}
    return Prices(by_kind, cluster, learner=devices)


def _most_engines(config: TrackedConfig) -> EnginesLayout:
    """Returns the split's engines with the largest count; raises ConfigError if splits differ in engine size."""
    layouts = [parse_split(split)[1] for split in find_splits(config)]
    if len(layouts) > 1 and len({layout.devices_each for layout in layouts}) > 1:
        raise ConfigError(
            f'cluster.reallocate={config.cluster.reallocate!r} has engines of several sizes, and a simulation '
            'of moving devices has one: give all splits the same'
        )
    return max(layouts, key=lambda layout: layout.count)


def _read_roofline(config: TrackedConfig, engines: int) -> RooflineSettings:
    ours, learner = config.simulation, config.learner
    chip = find_chip(ours.chip)
    return RooflineSettings(
        chip=chip,
        engine_chips=parse_chips(ours.engine_chips, engines, chip),
        shape=_find_shape(config),
        reached=Reached(ours.bandwidth, ours.prefill, ours.mfu),
        passes=ours.passes * learner.epochs,
        update_s=ours.update_s,
        load_s=ours.load_s,
        switch_s=ours.switch_s,
        optimizer_steps=learner.n_minibatches * learner.epochs,
        stream=StreamLinks(parse_learner(config.cluster.learner).processes, ours.link_bytes_s)
        if find_channel(config.publication.channel).uses_network
        else None,
    )


def _find_shape(config: TrackedConfig) -> ModelShape:
    if name := config.simulation.model:
        return find_shape(name)
    return shape_of(config.model.path or 'the model of the config', describe_text_model(config).shape)


def cache_blocks(config: TrackedConfig, cluster: Cluster | None, engine: int) -> int:
    """Returns the KV cache blocks of an engine by number: as in a run, but no more than fit its memory."""
    blocks = config.rollout.count_cache_blocks(config.rollout.slots)
    if cluster is None:
        return blocks
    fits = cluster.engines[engine].cache_tokens(config.rollout.context_tokens)
    return min(blocks, fits // config.rollout.block_tokens)


def describe_hardware(cluster: Cluster | None, engine: int, devices: int) -> str:
    """Describes an engine's devices, '1 x H800/3', or, without chips, only their number: '2 x device'."""
    if cluster is None:
        return f'{devices} x device'
    return f'{cluster.engines[engine].devices} x {cluster.engines[engine].chip.name}'


def read_update(config: TrackedConfig) -> tuple[UpdatePrice, UpdateShape]:
    """Returns the rules by which the simulated learner counts, without a real learner."""
    learner, staleness = config.learner, config.staleness
    masks_truncated = config.loss.truncated_answers == 'masked'
    price = UpdatePrice(learner.packing, learner.epochs, learner.filter_equal_rewards, masks_truncated)
    return price, UpdateShape(learner.n_minibatches * learner.epochs, staleness.oldest_trained)


# The devices of a simulated run that move between its learner and its engines. See control/reallocation.py.


BuildEngine = Callable[[str, Sequence[int], PublishedWeights], LocalEngine]


class SimulatedMoves(EngineMoves):
    """Implements control.reallocation.DeviceSite without devices; `move_learner` gets the learner's next split."""

    def __init__(self, build_engine: BuildEngine, move_learner: Callable[[DeviceSplit], None], supervisor: Supervisor):
        super().__init__(supervisor)
        self._build_engine, self.move_learner = build_engine, move_learner

    def engines_of(self, split: DeviceSplit) -> dict[str, tuple[str, ...]]:
        return {name: tuple(map(str, devices)) for name, devices in place_engines(split).items()}

    def prepare(self, split: DeviceSplit) -> None:
        """Does nothing: there are no programs."""

    def build_engine(self, name: str, split: DeviceSplit, published: PublishedWeights) -> LocalEngine:
        return self._build_engine(name, place_engines(split)[name], published)


def place_engines(split: DeviceSplit) -> dict[str, list[int]]:
    """Returns device numbers by engine, the last devices first, so that engines stay in place when devices move."""
    learner, engines = parse_split(split)
    total, each = learner.devices + engines.devices, engines.devices_each
    return {
        engine_lane(index): list(range(total - (index + 1) * each, total - index * each))
        for index in range(engines.count)
    }


# Builds the pool of servers of a simulation, if rollout.server is not 'in_process'.


_LONGEST_S = 1 << 30


def build_simulated_servers(
    config: TrackedConfig,
    clock: LoopClock,
    log: EventLog,
    supervisor: Supervisor,
    build_engine: Callable[[int, bool], LocalEngine],
    *,
    count: int,
    published: PublishedWeights,
    stop: Callable[[], None],
) -> Servers:
    """Builds the servers of SimulatedRegistry. Raises ConfigError for times that cannot be read."""

    def parse(name: str) -> Lengths:
        return parse_lengths(getattr(config.simulation, name), _LONGEST_S, field=f'simulation.{name}')

    ended_by = EndedBy(stop)
    pool = ServerPool(
        clock, log, supervisor,
        ServerSettings(max_retries=config.rollout.max_retries, no_server_s=config.run.stall_timeout_s),
        published=published, score=_never_asked, on_no_server=ended_by.note,
        requirements=build_requirements(config),
        warn=lambda sentence: print(f'warning: {sentence}', file=sys.stderr, flush=True),
    )  # fmt: skip
    registry = SimulatedRegistry(
        clock, pool, supervisor, build_engine,
        count=count, seed=config.run.seed, up=parse('failures') if config.simulation.failures else None,
        down=parse('restart'),
    )  # fmt: skip
    return Servers(pool, registry, MismatchWatch(math.inf, pool.quarantine), ended_by)


async def _never_asked(version: int, prompt_tokens: np.ndarray, answer_tokens: np.ndarray) -> None:
    """Does nothing: servers get work without a probe."""


# The site.


class CountTokenizer(CharacterTokenizer):
    """A tokenizer whose decoded text of an answer is the answer's length."""

    def decode(self, tokens: np.ndarray) -> str:
        return str(len(tokens))


def build_simulation(config: config_dict.ConfigDict, workdir: pathlib.Path, **settings: Any) -> Run[Loop]:
    """Builds the run of a simulation's config; `train` runs it. Settings and errors as for Run."""
    kind = RunKind(require_sound, lambda config: None, build_simulated_loop)
    return Run(kind, as_simulated(config), workdir, **settings)


def build_simulated_loop(context: RunContext) -> Built[Loop]:
    """Builds the loop with a simulation in place of learner, engines and the outside world."""
    answers = build_answers(context.config)
    simulation = Simulation(context.config, answers, build_prices(context.config, answers))
    note_not_simulated(context.config)
    tokenizer = CountTokenizer('0')
    model = RemoteModel(tokenizer, None, tokenizer.vocab_size)
    return build_loop(context, model, functools.partial(simulation.build_site, model), simulation.outside())


@dataclasses.dataclass(frozen=True)
class Simulation:
    """The drawn answers and the prices of a simulated run; a device split is None if devices do not move."""

    config: TrackedConfig
    answers: Answers
    prices: Prices

    def outside(self) -> Outside:
        """Returns the replacements of the outside world: clock, prompts, verifier."""
        return Outside(
            make_clock=self._build_clock,
            load_workflow=lambda config, tokenizer: functools.partial(build_workflow, config, self.answers),
            build_task=lambda config, tokenizer: DrawnTask(
                lambda: build_prompts(config), functools.partial(build_held_out, config)
            ),
            build_verifier=self._build_verifier,
            build_servers=self._build_servers,
        )

    def build_site(self, model: RemoteModel, checkpoint: Checkpoint | None) -> Site[CountLearner]:
        """Builds a learner that counts; there are no weights."""
        split = find_split(self.config, checkpoint)
        if split:
            self._move_learner(split)
        learner = CountLearner(*read_update(self.config))
        return Site(model, learner, NoCompilations(), functools.partial(self._open_loop, split), devices=())

    def _open_loop(self, split: DeviceSplit | None) -> LoopSite:
        is_served = uses_servers(self.config)
        local = LocalEngines(functools.partial(self._build_rollout, split), _copy_version, _restore_ring)
        return LoopSite(
            CountChannel(), self._find_rates(split), lambda compile_rollout: compile_rollout(), self._describe_engines,
            None if is_served else local,
            find_devices=functools.partial(self._find_devices, split),
            awaited_engines=len(self._list_devices(split)) if is_served else 0,
        )  # fmt: skip

    def _find_rates(self, split: DeviceSplit | None) -> DeviceRates:
        learner, engines = self._find_layouts(split)
        return DeviceRates(learner.devices, engines.devices or learner.devices, None)

    def _find_devices(self, split: DeviceSplit | None) -> UsedDevices:
        cluster = self.prices.cluster
        if cluster is None:
            return UsedDevices((), simulated=True)
        uses = [(number, cluster.learner.chip.name, LEARNER) for number in range(cluster.learner.devices)]
        for (lane, numbers), engine in zip(self._list_devices(split).items(), cluster.engines, strict=True):
            uses += [(number, engine.chip.name, lane) for number in numbers]
        return UsedDevices(group_devices(uses), simulated=True)

    def _build_rollout(
        self, split: DeviceSplit | None, published: PublishedWeights, clock: LoopClock, log: EventLog,
        supervisor: Supervisor,
    ) -> Rollout:  # fmt: skip
        build_engine = functools.partial(self._build_engine, clock=clock, log=log)
        engines = [build_engine(name, devices, published) for name, devices in self._list_devices(split).items()]
        pool = build_pool(self.config, engines, clock, log, supervisor)
        if split is None:
            return Rollout(pool, engines)
        site = SimulatedMoves(build_engine, self._move_learner, supervisor)
        return Rollout(pool, engines, moves=Moves(site, split, self._find_rates))

    def _move_learner(self, split: DeviceSplit) -> None:
        assert self.prices.learner is not None
        self.prices.learner.number = parse_split(split)[0].devices

    def _build_verifier(
        self, clock: LoopClock, workers: int | None = None, lane: str = REWARD, workdir: pathlib.Path | None = None
    ) -> DrawnVerifier:
        task = self.config.task
        return DrawnVerifier(
            clock, self.answers, workers or task.verifier_workers,
            deadline_s=task.verifier_deadline_s, attempts=task.verifier_attempts, lane=lane,
        )  # fmt: skip

    def _build_servers(
        self, config: TrackedConfig, clock: LoopClock, log: EventLog, supervisor: Supervisor,
        *, published: PublishedWeights, stop: Callable[[], None], **settings: object,
    ) -> Servers:  # fmt: skip
        devices = list(self._list_devices(None).items())
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
        prices = self.prices
        widths = dict(lane_widths(config))
        if uses_servers(config):
            numbers = range(len(self._list_devices(None)))
            widths |= {lane(number): 1 for number in numbers for lane in (engine_lane, publish_lane)}
        if self.answers.of_agents:
            widths[TOOL] = config.agent.tool_calls
        if config.simulation.prices == VIRTUAL:
            return VirtualClock(widths, log, prices.by_kind, start_s)
        return SimulatedClock(widths, log, prices.by_kind, start_s, host=prices.host, contention=prices.contention)

    def _build_engine(
        self, name: str, devices: Sequence[int], published: PublishedWeights, *, clock: LoopClock, log: EventLog
    ) -> LocalEngine:
        rollout, index = self.config.rollout, int(short_name(name))
        build_backend = functools.partial(
            CountBackend,
            keep_lengths(self.answers),
            context_tokens=rollout.context_tokens,
            block_tokens=rollout.block_tokens,
            buckets=rollout.prefill_buckets,
            devices=[str(device) for device in devices],
            jumps=isinstance(clock, SimulatedClock) and self.config.simulation.join,
            distinct=self.answers.of_agents,
        )
        blocks = cache_blocks(self.config, self.prices.cluster, index)
        evaluation = self.config.evaluation
        beside: CountBackend | None = None
        if evaluation.every:
            of_slots = rollout.count_cache_blocks(evaluation.slots, beside=True)
            beside = build_backend(slots=evaluation.slots, cache_blocks=of_slots)
        return LocalEngine(
            index, build_backend(slots=rollout.slots, cache_blocks=blocks), clock, log,
            receive=CountChannel().receive, version=published.version, params=published.version,
            rollout=rollout, evaluation=beside, every_dispatches=evaluation.every_dispatches if beside else 1,
            hardware=describe_hardware(self.prices.cluster, index, len(devices)),
        )  # fmt: skip

    def _describe_engines(self, split: DeviceSplit | None) -> EngineFacts:
        learner = parse_learner(self.config.cluster.learner).devices
        return {
            'memory_parts': {},
            'lanes_own_devices': not parse_engines(self.config.cluster.engines).shared,
            'devices': {'learner': list(range(learner)), 'engines': self._list_devices(split)},
            'simulation': self._describe(),
        }

    def _describe(self) -> str:
        """Describes the simulation for the report."""
        ours, cluster = self.config.simulation, self.prices.cluster
        what = 'prices of the section virtual' if ours.prices == VIRTUAL else f'prices of {ours.prices}'
        if cluster is not None:
            kinds = itertools.groupby(f'{engine.devices} x {engine.chip.name}' for engine in cluster.engines)
            named = ', '.join(f'{len(list(group))} engines on {kind}' for kind, group in kinds)
            learner = cluster.learner
            what = f'{learner.shape.name}, learner on {learner.devices} x {learner.chip.name}, {named}'
        agents = f', turns {ours.turns}, results of tools {ours.results}' if ours.turns else ''
        return f'{what}; answers {ours.answers}, prompts {ours.prompts}{agents}'

    def _list_devices(self, split: DeviceSplit | None) -> dict[str, list[int]]:
        """Returns the device numbers of each engine, after the learner's devices unless they are shared."""
        learner, engines = self._find_layouts(split)
        if split:
            return place_engines(split)
        places: Sequence[range] = engines.place(learner.devices)
        if engines.shared:
            each = max(1, learner.devices // engines.count)
            places = [range(index * each, (index + 1) * each) for index in range(engines.count)]
        return {engine_lane(index): list(numbers) for index, numbers in enumerate(places)}

    def _find_layouts(self, split: DeviceSplit | None) -> tuple[LearnerLayout, EnginesLayout]:
        if split:
            return parse_split(split)
        return parse_learner(self.config.cluster.learner), parse_engines(self.config.cluster.engines)


def _copy_version(published: PublishedWeights) -> Tree:
    return {'none': np.zeros(1, np.float32)}


def _restore_ring(ring: VersionRing, saved: Mapping[str, Tree]) -> None:
    for version in sorted(map(int, saved)):
        ring.add(CountChannel().transfer(version, version))
