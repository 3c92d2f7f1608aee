"""From a config to what a simulation draws and what its work costs."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from ml_collections import config_dict

from areal_jax.app.model.text_model import describe_text_model
from areal_jax.app.parts.agent_builder import read_budgets
from areal_jax.app.parts.clock import unit_prices
from areal_jax.app.parts.part_settings import count_cache_blocks, find_splits
from areal_jax.app.parts.task_builder import build_stream, build_task
from areal_jax.app.parts.workflow_builder import WorkflowFactory
from areal_jax.config import TrackedConfig
from areal_jax.config.agent_fields import PROGRAM
from areal_jax.config.cluster import EnginesLayout, parse_learner
from areal_jax.config.kinds import DEVICE, FILES, OWN, find_server
from areal_jax.config.ranges import ConfigError
from areal_jax.config.simulation_fields import ROOFLINE, TASK, VIRTUAL
from areal_jax.config.splits import parse_split
from areal_jax.control.clocks.virtual import Price
from areal_jax.errors import UserError
from areal_jax.events.schema import FILE as EVENTS
from areal_jax.events.schema import Event
from areal_jax.learning.objective.counting import UpdatePrice
from areal_jax.protocols import Clock, PromptStream
from areal_jax.report.event_log import load_events
from areal_jax.rollout.workflow import SingleTurn
from areal_jax.simulation.calibration import read_table
from areal_jax.simulation.count_backend import UpdateShape
from areal_jax.simulation.drawn_answers import DrawnAnswers, LoggedAnswers, read_groups
from areal_jax.simulation.drawn_task import Answers, CountedPrompts, DrawnAgents, DrawnPrompts, count_prompt
from areal_jax.simulation.lengths import Lengths, parse_lengths
from areal_jax.simulation.prices import (
    Cluster,
    LearnerDevices,
    ModelShape,
    Reached,
    RooflineSettings,
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
from areal_jax.simulation.simulated_clock import NO_CONTENTION, Contention
from areal_jax.types import Prompt

_LONGEST = 1 << 30  # tokens of an answer before its limit
# what a simulation does not do, or does otherwise
_FIXED: Mapping[str, object] = {
    'run.clock': 'virtual', 'run.export': False, 'diagnostics.ratio_sample': 0.0, 'telemetry.profile_steps': (),
    'rollout.record_routes': False, 'learner.routes': 'live',
}  # fmt: skip
# servers of any kind are those of this project, and how versions get there is a price
_AS_SERVERS: Mapping[str, object] = {
    'rollout.server': OWN.name, 'rollout.urls': (), 'publication.channel': FILES.name,
}  # fmt: skip
_AS_ENGINES: Mapping[str, object] = {'publication.channel': DEVICE.name}
_NOT_SIMULATED = (
    'agent', 'model', 'task', 'lora', 'loss', 'cluster', 'publication',
)  # fmt: skip


class Prices(NamedTuple):
    """What work costs, and on what; None: no devices are named."""

    by_kind: Mapping[str, Price]
    cluster: Cluster | None = None
    contention: Contention = NO_CONTENTION
    host: Mapping[str, float] = MappingProxyType({})
    learner: LearnerDevices | None = None


def as_simulated(config: config_dict.ConfigDict) -> config_dict.ConfigDict:
    """The config with the fields changed that a simulation does not follow.

    Raises ConfigError for one that is no simulation.
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
    return changed.lock()


def note_not_simulated(config: TrackedConfig) -> None:
    """Sections of which a simulation reads what it needs: the rest of them is not idle by mistake."""
    config.note_used((*_NOT_SIMULATED, *_FIXED, *_AS_SERVERS, *find_server(config.rollout.server).reads))


def build_answers(config: TrackedConfig) -> Answers:
    """Raises ConfigError, or FileError for a log that cannot be read."""
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
    """One turn, or drawn episodes of agents, of which agent.programs run at once where they are programs."""
    if not answers.of_agents:
        return SingleTurn
    most = config.agent.programs if config.rollout.workflow == PROGRAM else math.inf
    return DrawnAgents(answers, clock, read_budgets(config), deadline_s=config.rollout.episode_deadline_s, most=most)


def build_prompts(config: TrackedConfig) -> PromptStream:
    """Raises ConfigError, or what building the task raises."""
    text, rollout, seed = config.simulation.prompts, config.rollout, config.run.seed
    if text == TASK:
        return CountedPrompts(build_stream(config, build_task(config, describe_text_model(config).tokenizer)))
    longest = rollout.context_tokens - rollout.max_new_tokens
    draws = config.run.steps * config.learner.groups_per_update
    return DrawnPrompts(parse_lengths(text, longest, draws_of_run=draws, field='simulation.prompts'), seed)


def build_held_out(config: TrackedConfig, count: int) -> list[Prompt]:
    """Held-out prompts, as the stream's."""
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
    """Raises ConfigError for an unknown chip or model, and for a plan that does not fit the memory."""
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
    """Those of the split with most engines; raises ConfigError for splits whose engines are of unequal size."""
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
    )


def _find_shape(config: TrackedConfig) -> ModelShape:
    if name := config.simulation.model:
        return find_shape(name)
    return shape_of(config.model.path or 'the model of the config', describe_text_model(config).shape)


def cache_blocks(config: TrackedConfig, cluster: Cluster | None, engine: int) -> int:
    """Blocks of the KV cache of the engine of this number: as in a run, but no more than it has room for."""
    blocks = count_cache_blocks(config, config.rollout.slots)
    if cluster is None:
        return blocks
    return min(blocks, cluster.engines[engine].cache_tokens() // config.rollout.block_tokens)


def describe_hardware(cluster: Cluster | None, engine: int, devices: int) -> str:
    """Number and kind of the devices of an engine: '1 x H800/3'; without chips their number alone, '2 x device'."""
    if cluster is None:
        return f'{devices} x device'
    return f'{cluster.engines[engine].devices} x {cluster.engines[engine].chip.name}'


def read_update(config: TrackedConfig) -> tuple[UpdatePrice, UpdateShape]:
    """How the simulated learner counts: no learner of a run is needed to know."""
    learner, staleness = config.learner, config.staleness
    masks_truncated = config.loss.truncated_answers == 'masked'
    price = UpdatePrice(learner.packing, learner.epochs, learner.filter_equal_rewards, masks_truncated)
    return price, UpdateShape(learner.n_minibatches * learner.epochs, staleness.oldest_trained)
