"""Builds the learner of a process from a config: objective, update settings, optimizer, and the weights it reads.

Each function reads the fields that its part uses.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, Literal

from jax.sharding import Mesh

from areal_jax.app.model.model import Model, build_lora, load_other_models
from areal_jax.app.model.text_model import describe_source
from areal_jax.config import TrackedConfig
from areal_jax.config.declarations import FIELDS
from areal_jax.config.fields import ConfigError
from areal_jax.config.kinds import find_channel, find_server
from areal_jax.config.loss import CriticSection
from areal_jax.config.objectives import PAIRS, build_choices, find_objective
from areal_jax.config.training import count_steps
from areal_jax.distributed.averaged_learner import AveragedLearner, Averages, ClientSettings
from areal_jax.distributed.handshake import digest_config
from areal_jax.distributed.remote_learner import CommandLeader
from areal_jax.learning.blockwise import BlockLearner, BlockOrder
from areal_jax.learning.learner import MovingLearner, SpmdLearner
from areal_jax.learning.objective.objective import FROM_TEACHER, REFERENCE, Objective
from areal_jax.learning.objective.objectives import (
    DirectPreference,
    Likelihood,
    PolicyObjective,
    RewardModel,
    SampledDistillation,
    VocabularyDistillation,
    load_objective,
)
from areal_jax.learning.optimizer import Optimizer, add_critic_optimizer, make_optimizer
from areal_jax.learning.settings import Brake, LearnerSettings
from areal_jax.models.decoder import Decoder
from areal_jax.models.weights import Params
from areal_jax.plugins import is_own


def build_learner(
    config: TrackedConfig, model: Model, mesh: Mesh, *, compile_ahead: bool = False, moves: bool = False
) -> SpmdLearner:
    """Builds the learner of this process, which copies `model.params`.

    Args:
      mesh: its devices (part_settings.build_mesh), or the devices that it begins with.
      compile_ahead: see SpmdLearner.
      moves: whether it moves to other devices during the run.
    """
    decoder, params = build_training_decoder(config, model)
    if config.diagnostics.delta_rule and decoder.config.delta is None:
        raise ConfigError('diagnostics.delta_rule=True needs a model with delta nets; set it to False')
    if config.diagnostics.latent_form and decoder.config.latent is None:
        raise ConfigError('diagnostics.latent_form=True needs a model with latent attention; set it to False')
    settings, optimizer = build_learner_settings(config), build_optimizer(config)
    if settings.critic is not None:
        optimizer = add_critic_optimizer(optimizer, config.critic.learning_rate)
    form: dict[str, Any] = {
        'optimizer': optimizer,
        'learning_rate': config.optimizer.learning_rate,
        'settings': settings,
        'compile_ahead': compile_ahead,
    }
    if (blocks := build_blocks(config)) is None:
        others = load_other_models(config, model, settings)
        make = MovingLearner if moves else SpmdLearner
        return make(decoder, params, mesh, **form, **vars(others))
    if config.distributed.clients == 1:
        return BlockLearner(decoder, params, mesh, **form, blocks=blocks)
    client = ClientSettings(config.distributed.overlap, config.run.steps)
    return AveragedLearner(decoder, params, mesh, **form, blocks=blocks, averages=build_averages(config), client=client)


def build_learner_settings(config: TrackedConfig) -> LearnerSettings:
    """Returns the settings of an update, under any objective."""
    learner, objective = config.learner, build_objective(config)
    supervised = not objective.learns_from_answers
    if supervised:
        learner = dataclasses.replace(learner, packing='ordinary')
    most_rows = learner.groups_per_update * (1 if supervised else config.rollout.group_size)
    return LearnerSettings(
        learner=learner,
        rollout=config.rollout,
        loss=config.loss,
        staleness=config.staleness,
        diagnostics=config.diagnostics,
        max_microbatches=-(-most_rows // learner.rows_per_microbatch),
        strategy=config.cluster.strategy,
        publish_dtype=str(FIELDS['publication.dtype'].default) if supervised else config.publication.dtype,
        publication=_find_publication(config, supervised=supervised),
        objective=objective,
        scores=not find_server(config.rollout.server).in_process,
        seed=config.run.seed,
        brake=Brake(config.optimizer, config.diagnostics.brakes),
        critic=build_critic_settings(config, objective),
        records_routes=config.rollout.record_routes,
    )


def _find_publication(config: TrackedConfig, *, supervised: bool) -> Literal['gathered', 'leaves', 'shards']:
    channel = find_channel(config.publication.channel)
    if supervised or not channel.reaches_processes:
        return 'gathered'
    return 'shards' if channel.sends_records else 'leaves'


def build_critic_settings(config: TrackedConfig, objective: Objective) -> CriticSection | None:
    """Returns the section `critic`; None for an objective that trains no values."""
    if not objective.trains_values:
        return None
    if objective.scores_answers:  # the objective trains the values themselves
        return dataclasses.replace(config.critic, trunk_gradient=1.0)
    return config.critic


def build_objective(config: TrackedConfig) -> Objective:
    """Builds the objective of `loss`, reading the fields it uses. Raises UserError for an own one that is invalid."""
    loss = config.loss
    if is_own(loss.objective):
        objective = load_objective(loss.objective, dict(loss.options))
        config.note_idle(_list_idle(objective))
        return objective
    kind = find_objective(loss.objective)
    if kind.scores:
        return RewardModel()
    if kind.given == PAIRS:
        return DirectPreference(loss.dpo_beta)
    if kind.teacher:
        length = (loss.length_constant or config.rollout.max_new_tokens) if loss.aggregation == 'constant' else 1
        summed = (loss.aggregation or 'token_mean', length)
        if loss.divergence != 'sampled':
            return VocabularyDistillation(loss.divergence, *summed)
        return SampledDistillation(loss.behavior_weight_cap, *summed)
    if not kind.generates:
        return Likelihood(loss.aggregation or 'token_mean')
    return PolicyObjective(build_choices(loss, config.rollout.max_new_tokens, config.run.seed))


def _list_idle(objective: Objective) -> list[str]:
    """Lists the fields, and the section, that an objective of the user could use but does not."""
    reads = {
        'loss.reference': REFERENCE in objective.reads,
        'loss.teacher': bool(objective.reads & FROM_TEACHER),
        'critic': objective.trains_values,
    }
    return [name for name, is_read in reads.items() if not is_read]


def build_training_decoder(config: TrackedConfig, model: Model) -> tuple[Decoder, Params]:
    """Returns the decoder in its trained form, and its weights: the model's, plus new adapters if lora.rank is set."""
    if config.lora.rank > model.decoder.config.d_model:
        raise ConfigError(
            f'lora.rank={config.lora.rank} is above the width of the model, {model.decoder.config.d_model}: adapters '
            'would be larger than what they adapt; lower it, or set lora.rank=0 to train all weights'
        )
    lora = build_lora(config)
    form = {'layers': config.learner.layers, 'remat': config.learner.remat}
    decoder = Decoder(model.decoder.config, **form, lora=lora)
    assert model.params is not None, 'a learner has taken the weights already'
    return decoder, decoder.complete(model.params, config.run.seed)


def build_optimizer(config: TrackedConfig) -> Optimizer:
    return make_optimizer(config.optimizer, count_steps(config), compares=config.diagnostics.brakes)


def build_blocks(config: TrackedConfig) -> BlockOrder | None:
    """Returns the order of the blocks; None if an update trains all leaves."""
    return None if config.optimizer.blocks == 1 else BlockOrder(config.optimizer, config.run.seed)


def build_averages(config: TrackedConfig) -> Averages:
    """Returns the averages over a shared directory, through which this client averages with the others."""
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

    All processes take part: `learner` is the one that own_site.lead returns.
    """
    learner.require_finite(*describe_source(config, model.source))
