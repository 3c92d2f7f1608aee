"""The sections `loss` and `critic`: what an update optimizes. Fields, and rules that join them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from areal_jax.config.fields import (
    POSITIVE,
    SHARE,
    Config,
    ConfigSection,
    Option,
    Options,
    choice,
    declare,
    own_choice,
    path_text,
    real,
)
from areal_jax.config.generation import cuts_softmax
from areal_jax.config.objectives import OBJECTIVES, PAIRS, find_objective, list_set, reads_reference, trains_critic
from areal_jax.config.policy_choices import CHOICE_FIELDS
from areal_jax.config.training import generates
from areal_jax.plugins import is_own


def _is_own(c: Config) -> bool:
    return is_own(c.loss.objective)


def _reads_choice(name: str, c: Config) -> bool:
    return name in list_set(c.loss)


def _filters(c: Config) -> bool:
    return generates(c) and c.learner.filter_equal_rewards


def _has_pairs(c: Config) -> bool:
    kind = find_objective(c.loss.objective)
    return kind.given == PAIRS and not kind.scores


def _has_teacher(c: Config) -> bool:
    return find_objective(c.loss.objective).teacher


_OBJECTIVE = own_choice(
    'decoupled_ppo',
    tuple(OBJECTIVES),
    'a method, docs/objectives.md; sft, dpo and reward_model have no engines',
    other_names='algorithm loss_type loss_fn adv_mode',
)
_OPTIONS = declare(
    Options({}, 'FILE.py:FUNCTION: its parameters by name, any keys', used_if=_is_own),
    default=dataclasses.MISSING,
    default_factory=dict,
)
# the fields of choices, as they are set: '' or None leaves a choice to the method
_CHOICES = [
    (name, Any, declare(dataclasses.replace(field, used_if=functools.partial(_reads_choice, name))))
    for name, field in CHOICE_FIELDS.items()
]
_Chosen: Any = dataclasses.make_dataclass(
    '_Chosen',
    [('objective', str, _OBJECTIVE), ('options', Mapping[str, Option], _OPTIONS), *_CHOICES],
    bases=(ConfigSection,),
    namespace={'__doc__': 'The first fields of `loss`.'},
    frozen=True,
    kw_only=True,
    init=False,  # as the next two: every start would compile these methods of a base, each of 50 fields
    repr=False,
    eq=False,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossSection(_Chosen):
    """The objective of an update; objectives.py combines these fields with the choices of the method."""

    section: ClassVar[str] = 'loss'
    title: ClassVar[str] = 'What an update optimizes'

    denominator: str = choice(
        'kept',
        ('kept', 'all'),
        'kept: the fewer groups filter_equal_rewards keeps, the more each weighs',
        used_if=_filters,
    )
    truncated_sampling: str = choice(
        'refuse',
        ('refuse', 'full_softmax'),
        'top_k, top_p: biased by the mass kept, a metric',
        used_if=lambda c: generates(c) and cuts_softmax(c),
    )
    dpo_beta: float = real(
        0.1, POSITIVE, 'dpo: how far a pair pulls the policy away from loss.reference', used_if=_has_pairs
    )
    divergence: str = choice(
        'sampled',
        ('sampled', 'reverse', 'forward'),
        'distillation: reverse KL on sampled tokens; or reverse or forward KL over the whole vocabulary',
        used_if=_has_teacher,
    )
    teacher: str = path_text(
        '',
        'distillation: a Hugging Face directory with the vocabulary of the model',
        used_if=lambda c: _has_teacher(c) or _is_own(c),
    )
    reference: str = path_text(
        '',
        "a Hugging Face directory; '' = the weights at the start",
        used_if=lambda c: reads_reference(c.loss) or _is_own(c),
        other_names='ref_model reference_model ref_path ref_model_path ref',
    )


TRUNK_CRITIC, COPIED_CRITIC = 'trunk', 'copy'  # names in critic.model; any other is a directory


def _may_train_critic(c: Config) -> bool:
    """Tells whether an update may train values; the user's own objective decides that when it is built."""
    return trains_critic(c.loss) or _is_own(c)


def _reads_values(c: Config) -> bool:
    """Tells whether values are read in addition to the trained output; a reward model trains the values themselves."""
    return not find_objective(c.loss.objective).scores


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticSection(ConfigSection):
    """The values that an objective reads."""

    section: ClassVar[str] = 'critic'
    title: ClassVar[str] = "Values of loss.advantage='gae', or of a reward model, see docs/critic.md"
    used_if: ClassVar[Callable[[Config], bool]] = _may_train_critic

    model: str = path_text(
        TRUNK_CRITIC,
        "trunk: a value head on the policy; copy: a model of its own, first the policy's; or a HF directory",
        used_if=_reads_values,
        other_names='critic_path critic_pretrain critic_model_path value_model',
    )
    learning_rate: float = real(
        1e-4,
        POSITIVE,
        'of its own optimizer, which has the other settings of the section optimizer',
        other_names='critic_lr critic_learning_rate value_lr',
    )
    trunk_gradient: float = real(
        0.1,
        SHARE,
        "trunk: weight of the value loss for the policy's weights; 0 = the head alone",
        used_if=lambda c: _reads_values(c) and c.critic.model == TRUNK_CRITIC,
    )

    @property
    def own_model(self) -> bool:
        """Tells whether the values come from a separate model, not from a head on the policy's trunk."""
        return self.model != TRUNK_CRITIC


def find_critic_problems(c: Config) -> Iterator[str]:
    """Yields a sentence for each rule that an objective with a critic breaks."""
    if trains_critic(c.loss) and c.optimizer.blocks > 1:
        yield (
            f'loss.objective={c.loss.objective!r} with optimizer.blocks={c.optimizer.blocks}: a critic is trained in '
            'every update, and an update of a block trains the leaves of that block; use optimizer.blocks=1'
        )
