"""Builds the learner of one process from a config and a model."""

from __future__ import annotations

import pathlib
from typing import Any

from areal_jax.app.model.model import Model, read_given_model, require_same_shape
from areal_jax.app.model.text_model import describe_source
from areal_jax.app.parts.part_settings import (
    build_allocation,
    build_blocks,
    build_learner_settings,
    build_lora,
    build_mesh,
    build_optimizer,
)
from areal_jax.config import TrackedConfig
from areal_jax.config.cluster import DeviceSplit
from areal_jax.config.fields import ConfigError
from areal_jax.config.loss import COPIED_CRITIC
from areal_jax.distributed.averaged_learner import AveragedLearner, ClientSettings
from areal_jax.distributed.averages import Averages
from areal_jax.distributed.handshake import digest_config
from areal_jax.distributed.remote_learner import CommandLeader
from areal_jax.learning.blockwise.block_learner import BlockLearner
from areal_jax.learning.learner import MovingLearner, SpmdLearner
from areal_jax.learning.objective.objective import FROM_TEACHER, REFERENCE
from areal_jax.learning.optimizer.critic_optimizer import add_critic_optimizer
from areal_jax.learning.settings import LearnerSettings
from areal_jax.learning.weights.trained_leaves import VALUE_HEAD, make_value_head
from areal_jax.models.decoder import Decoder
from areal_jax.models.weights import Params


def build_learner(
    config: TrackedConfig, model: Model, *, compile_ahead: bool = False, split: DeviceSplit | None = None
) -> SpmdLearner:
    """The learner of this process. It copies `model.params`; for `compile_ahead` see SpmdLearner.

    `split`: the one that it begins with, of a run whose devices move.
    """
    mesh = build_mesh(config) if split is None else build_allocation(config, split).learner
    decoder, params = build_training_decoder(config, model)
    settings, rate = build_learner_settings(config), config.optimizer.learning_rate
    optimizer = build_optimizer(config)
    if settings.critic is not None:
        optimizer = add_critic_optimizer(optimizer, config.critic.learning_rate)
    if (blocks := build_blocks(config)) is None:
        reference, teacher = build_reference(config, model, settings), build_teacher(config, model, settings)
        make = SpmdLearner if split is None else MovingLearner
        return make(
            decoder, params, mesh,
            optimizer=optimizer, learning_rate=rate, settings=settings, compile_ahead=compile_ahead,
            reference=reference, teacher=teacher, critic=build_critic(config, model, settings),
        )  # fmt: skip
    form: dict[str, Any] = {'blocks': blocks, 'optimizer': optimizer, 'learning_rate': rate, 'settings': settings}
    if config.distributed.clients == 1:
        return BlockLearner(decoder, params, mesh, **form, compile_ahead=compile_ahead)
    client = ClientSettings(config.distributed.overlap, config.run.steps)
    averages = build_averages(config)
    return AveragedLearner(decoder, params, mesh, **form, compile_ahead=compile_ahead, averages=averages, client=client)


def build_reference(config: TrackedConfig, model: Model, settings: LearnerSettings) -> Params | None:
    """The weights of loss.reference; None = those at the start, or that the objective does not read it."""
    if REFERENCE not in settings.objective.reads or not config.loss.reference:
        return None
    given = read_given_model(config, 'loss.reference', model)
    require_same_shape(given, 'loss.reference', model.decoder.config)
    return given.load(config, settings.learner.dtype)


def build_teacher(config: TrackedConfig, model: Model, settings: LearnerSettings) -> tuple[Decoder, Params] | None:
    """Decoder and weights of loss.teacher, whose architecture may be another one; None where nothing reads it."""
    if not settings.objective.reads & FROM_TEACHER or not config.loss.teacher:
        return None
    given = read_given_model(config, 'loss.teacher', model)
    return Decoder(given.shape, layers=config.learner.layers), given.load(config, settings.learner.dtype)


def build_critic(config: TrackedConfig, model: Model, settings: LearnerSettings) -> Params | None:
    """A value head, with the weights of a model of its own if it has one; None where the objective trains no values."""
    if settings.critic is None:
        return None
    head = make_value_head(model.decoder.config.d_model)
    if not settings.critic.own_model:
        return {VALUE_HEAD: head}
    assert model.params is not None, 'a learner has taken the weights already'
    if config.critic.model == COPIED_CRITIC:
        return {**model.params, VALUE_HEAD: head}
    given = read_given_model(config, 'critic.model', model)
    require_same_shape(given, 'critic.model', model.decoder.config)
    return {**given.load(config, 'float32'), VALUE_HEAD: given.load_value_head() or head}


def build_averages(config: TrackedConfig) -> Averages:
    """The directory through which this client averages with the others."""
    ours, values = config.distributed, config.as_dict()
    model = {field: value for field, value in values['model'].items() if field != 'path'}  # each host has its own
    shared = {'model': model, 'optimizer': values['optimizer'], 'seed': config.run.seed, 'steps': config.run.steps}
    return Averages(
        pathlib.Path(ours.average_directory),
        ours.client,
        ours.clients,
        run=digest_config(shared),
        deadline_s=ours.average_deadline_s,
        kept_turns=ours.kept_turns,
    )


def require_finite_weights(config: TrackedConfig, learner: SpmdLearner | CommandLeader, model: Model) -> None:
    """Raises NonFiniteError if a weight is NaN or infinite; the message names the source of the weights.

    All processes take part: `learner` is the one that processes.lead returns.
    """
    learner.require_finite(*describe_source(config, model.source))


def build_training_decoder(config: TrackedConfig, model: Model) -> tuple[Decoder, Params]:
    """The decoder in its trained form, and its weights: the model's, and new adapters if lora.rank is set."""
    if config.lora.rank > model.decoder.config.d_model:
        raise ConfigError(
            f'lora.rank={config.lora.rank} is above the width of the model, {model.decoder.config.d_model}: adapters '
            'would be larger than what they adapt; lower it, or set lora.rank=0 to train all weights'
        )
    form = {'layers': config.learner.layers, 'remat': config.learner.remat}
    decoder = Decoder(model.decoder.config, **form, lora=build_lora(config))
    assert model.params is not None, 'a learner has taken the weights already'
    return decoder, decoder.complete(model.params, config.run.seed)
