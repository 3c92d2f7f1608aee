"""The sections `loss` and `critic`: what an update optimizes. Fields, and rules that join them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from ml_collections import config_dict

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
from areal_jax.config.objectives import (
    BASE,
    FIELD,
    OBJECTIVES,
    PAIRS,
    find_objective,
    is_policy,
    list_set,
    reads_reference,
    resolve,
    trains_critic,
)
from areal_jax.config.policy_choices import ADVANTAGES, CHOICE_FIELDS, SURROGATES
from areal_jax.config.training import generates
from areal_jax.plugins import is_own


def _is_own(c: Config) -> bool:
    return is_own(c.loss.objective)


def _reads_choice(name: str, c: Config) -> bool:
    return name in list_set(c.loss)


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
        used_if=lambda c: generates(c) and c.learner.filter_equal_rewards,
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


_READ_RATIO = tuple(name for name, kind in SURROGATES.items() if kind.reads_ratio)
_READ_NONE = tuple(name for name, kind in SURROGATES.items() if not kind.reads_ratio)
_OF_TOKENS = tuple(name for name, kind in SURROGATES.items() if kind.of_tokens)
_OF_SEQUENCES = ('sequence', 'geometric', 'geometric_token')  # ratios with one value per answer
_GROUP_BASELINES = tuple(name for name, kind in ADVANTAGES.items() if kind.centres_groups)
_MEANINGFUL = tuple(name for name, kind in ADVANTAGES.items() if kind.is_meant)
_READ_LOG = tuple(name for name, kind in SURROGATES.items() if kind.reads_log)
_IDLE_AT_ONE = tuple(name for name, kind in SURROGATES.items() if kind.idle_at_one)
_LONG_ANSWER = 1000  # tokens: a product over more ratios is 0 or at its bound


class _Combination:
    """The choices of a config, and their names in messages."""

    def __init__(self, c: Config):
        self.config, self.choices = c, resolve(c.loss)

    def get(self, name: str) -> Any:
        """Returns the choice, or None if the combination does not use it."""
        return self.choices.get(name)

    def has(self, name: str, *values: Any) -> bool:
        return self.choices.get(name) in values

    def show(self, name: str) -> str:
        """ "loss.correction='truncate' (of loss.objective='decoupled_ppo')", parentheses only if the field is unset."""
        shown = f'loss.{name}={self.choices[name]!r}'
        is_set = getattr(self.config.loss, name, None) not in (None, '')
        return shown if is_set else f'{shown} (of {FIELD}={self.config.loss.objective!r})'


def find_objective_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """A sentence for each contradiction: both fields, both values and the fix. None without a policy objective."""
    if not is_policy(c.loss.objective):
        return
    ours = _Combination(c)
    yield from _ratio_problems(ours)
    yield from _sequence_problems(ours)
    yield from _surrogate_problems(ours)
    yield from _regression_problems(ours)
    yield from _advantage_problems(ours)
    yield from _bound_problems(ours)
    if ours.get('kl_coefficient') and c.loss.kl_in == 'reward' and c.loss.kl_estimator == 'unbiased':
        yield (
            "loss.kl_estimator='unbiased' with loss.kl_in='reward': no gradient flows through a reward, in which the "
            "divergence is that of the policy that drew the answers; use 'k1' or 'k3', or loss.kl_in='loss'"
        )


def find_objective_warnings(c: Config) -> Iterator[str]:
    """Yields a sentence for each combination that does less than its fields suggest, or something else."""
    if not is_policy(c.loss.objective):
        return
    ours = _Combination(c)
    steps = c.learner.n_minibatches * c.learner.epochs
    named = any(ours.get(name) != BASE[name] for name in ('surrogate', 'clip_epsilon', 'clip_epsilon_high'))
    at_one = ours.has('ratio_denominator', 'proximal') and c.loss.proximal == 'recompute' and steps == 1
    # no warning about the default clip with a correction: the user has not asked for that clip
    if at_one and ours.has('surrogate', *_IDLE_AT_ONE) and (named or ours.has('correction', 'none')):
        yield (
            f"{ours.show('surrogate')} over loss.ratio_denominator='proximal' with learner.n_minibatches=1 and "
            'learner.epochs=1: the only step of an update is made where the ratio is 1, so that the surrogate bounds '
            'nothing and only a correction or a gate acts; use more minibatches, or '
            "loss.ratio_denominator='behavior' with loss.correction='none'"
        )
    if ours.get('kl_coefficient') and c.loss.kl_in == 'loss' and c.loss.kl_estimator == 'k1':
        yield (
            "loss.kl_estimator='k1' with loss.kl_in='loss': the gradient of k1 is 0 in expectation on fresh data and "
            "biased on stale data, so that it keeps the policy near nothing; use 'k2' or 'k3', or loss.kl_in='reward'"
        )
    if ours.get('kl_coefficient') and c.loss.kl_in == 'reward' and ours.has('advantage', *_GROUP_BASELINES):
        yield (
            f"loss.kl_in='reward' with {ours.show('advantage')}: the baseline of a group takes a part of the "
            "divergence out again; use loss.advantage='reward', or loss.kl_in='loss'"
        )
    if ours.has('whiten', 'batch') and ours.has('advantage', *_GROUP_BASELINES):
        yield (
            f'{ours.show("whiten")} after {ours.show("advantage")}: groups are centred already, and whitening '
            'subtracts the mean over tokens as well, which is not 0 where answers differ in length; use '
            "loss.advantage='reward', or loss.whiten='none'"
        )
    product = 'ratio' if ours.has('ratio', 'sequence') and not ours.has('surrogate', *_READ_LOG) else 'correction_level'
    if ours.has(product, 'sequence') and c.rollout.max_new_tokens > _LONG_ANSWER:
        yield (
            f'{ours.show(product)} with rollout.max_new_tokens={c.rollout.max_new_tokens}: the sum of more than a '
            f"thousand log-ratios soon lies beyond its bounds of -20 and 20; use loss.{product}='geometric', or "
            'shorter answers'
        )


def find_group_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """Yields a sentence for groups of one answer if the advantage compares the answers of a group and so is 0."""
    size = f'rollout.group_size={c.rollout.group_size}'
    if c.rollout.group_size > 1 or not is_policy(c.loss.objective):
        return
    ours = _Combination(c)
    if ':' in ours.get('advantage'):
        if c.learner.filter_equal_rewards:
            yield (
                f'{size} with learner.filter_equal_rewards=True leaves no group to train: set '
                'learner.filter_equal_rewards=False'
            )
    elif not ours.has('advantage', 'reward', 'gae'):
        yield (
            f'{size} with {ours.show("advantage")} gives every answer the advantage 0; use rollout.group_size >= 2, or '
            "loss.advantage='reward'"
        )


def _ratio_problems(ours: _Combination) -> Iterator[str]:
    """Requires that each factor of π_θ / π_behav counts once, and a ratio if and only if the surrogate reads one."""
    if ours.has('ratio_denominator', 'behavior') and not ours.has('correction', 'none'):
        yield (
            f'{ours.show("ratio_denominator")} with {ours.show("correction")} counts π_prox / π_behav twice, in the '
            "ratio and in the weight; use loss.correction='none', or loss.ratio_denominator='proximal'"
        )
    if ours.has('ratio', 'none') and ours.has('surrogate', *_READ_RATIO):
        yield (
            f'{ours.show("ratio")} with {ours.show("surrogate")}, which reads a ratio; use '
            "loss.surrogate='reinforce', or loss.ratio='token'"
        )
    if not ours.has('ratio', 'none') and ours.has('surrogate', *_READ_NONE):
        yield (
            f'{ours.show("surrogate")} reads no ratio, and {ours.show("ratio")} would not be used; use '
            "loss.ratio='none'"
        )


def _sequence_problems(ours: _Combination) -> Iterator[str]:
    """Requires weights and means of whole answers for a ratio of whole answers."""
    if not ours.has('ratio', *_OF_SEQUENCES):
        return
    ratio = ours.show('ratio')
    for name, values in (('surrogate', _OF_TOKENS), ('gate', ('probability_shift',))):
        if ours.has(name, *values):
            yield f"{ours.show(name)} with {ratio}: it is defined for single tokens; use loss.ratio='token'"
    if ours.has('correction_level', 'token'):
        yield (
            f'{ratio} with {ours.show("correction_level")}: one ratio an answer goes with one weight an answer; use '
            "loss.correction_level='geometric' or 'sequence', or loss.ratio='token'"
        )
    if ours.has('surrogate', 'topr', 'oapl'):  # topr sums over tokens with one weight; oapl: _regression_problems
        return
    allowed = ['sequence_mean'] if ours.has('ratio', 'sequence') else ['sequence_mean', 'sequence_sum']
    if not ours.has('aggregation', *allowed):
        yield (
            f'{ratio} with {ours.show("aggregation")}: one ratio an answer would weigh as often as the answer has '
            f"tokens; use loss.aggregation={' or '.join(map(repr, allowed))}, or loss.ratio='token'"
        )


def _surrogate_problems(ours: _Combination) -> Iterator[str]:
    """Yields a sentence for a correction, gate or whitening that conflicts with the surrogate."""
    if ours.has('surrogate', 'delight') and not ours.has('correction', 'none'):
        yield (
            f'{ours.show("surrogate")} with {ours.show("correction")}: its weight takes the place of every correction; '
            "use loss.correction='none', or loss.surrogate='reinforce'"
        )
    if ours.has('surrogate', 'clip', 'dual_clip') and ours.has('gate', 'probability_shift'):
        yield (
            f'{ours.show("gate")} with {ours.show("surrogate")} are two trust regions for the same step; use '
            "loss.surrogate='is_pg', or loss.gate='none'"
        )
    if ours.has('surrogate', 'quadratic') and ours.has('whiten', 'batch'):
        yield (
            f'{ours.show("surrogate")} with {ours.show("whiten")}: loss.quadratic_weight would mean something else in '
            "each batch; use loss.whiten='none', or another surrogate"
        )


def _regression_problems(ours: _Combination) -> Iterator[str]:
    """OAPL regresses one number per answer on another: each refused choice would change the target or drop the pull."""
    c = ours.config
    if not ours.has('surrogate', 'oapl'):
        return
    surrogate = ours.show('surrogate')
    for name, fix, why in (
        ('ratio', 'sequence', 'it regresses the log-ratio of a whole answer'),
        ('ratio_denominator', 'behavior', 'its target belongs to the policy that answered'),
        ('correction', 'none', 'its target belongs to the policy that answered, and needs no weight'),
        ('gate', 'none', 'an answer counts whole'),
        ('veto', None, 'no answer is left out'),
        ('whiten', 'none', 'advantages are its targets'),
        ('aggregation', 'sequence_mean', 'its loss is one value an answer'),
        ('kl_coefficient', 0.0, 'it pulls towards the policy that answered already'),
    ):
        if name in ours.choices and not ours.has(name, fix):
            yield f'{surrogate} with {ours.show(name)}: {why}; use loss.{name}={fix!r}, or another surrogate'
    if ours.has('advantage', 'group', 'max_rl', 'gae'):
        yield (
            f'{surrogate} with {ours.show("advantage")}: advantages are its targets, and are not to be divided; use '
            "loss.advantage='optimal_value'"
        )
    if c.task.filter != 'none':
        yield (
            f'{surrogate} with task.filter={c.task.filter!r}: a group of equal rewards still pulls towards the policy '
            "that answered; use task.filter='none'"
        )


def _advantage_problems(ours: _Combination) -> Iterator[str]:
    if ours.has('whiten', 'batch') and ours.has('advantage', *_MEANINGFUL):
        yield (
            f'{ours.show("whiten")} with {ours.show("advantage")}, whose scale and centre carry meaning; use '
            "loss.whiten='none', or loss.advantage='group'"
        )
    if ours.has('truncated_value', 'last') and ours.config.loss.truncated_answers == 'masked':
        yield (
            f"{ours.show('truncated_value')} with loss.truncated_answers='masked': answers that reach their limit "
            "train nothing, so that no value behind them is read; use loss.truncated_answers='trained', or "
            "loss.truncated_value='zero'"
        )
    if not (overlong := ours.get('overlong_tokens')):
        return
    if ours.config.loss.truncated_answers == 'masked':
        yield (
            f"{ours.show('overlong_tokens')} with loss.truncated_answers='masked': answers that reach their limit "
            "would carry a penalty that trains nothing; use loss.truncated_answers='trained', or "
            'loss.overlong_tokens=0'
        )
    if ours.has('advantage', 'max_rl'):
        yield (
            f'{ours.show("overlong_tokens")} with {ours.show("advantage")}: the penalty makes rewards negative, and it '
            "divides by their mean; use loss.overlong_tokens=0, or loss.advantage='group'"
        )
    if overlong > (longest := ours.config.rollout.max_new_tokens):
        yield (
            f'{ours.show("overlong_tokens")} is more than rollout.max_new_tokens={longest}, so that an empty answer '
            'would be penalised; lower it'
        )


def _bound_problems(ours: _Combination) -> Iterator[str]:
    low, high = ours.get('correction_low'), ours.get('correction_high')
    if low is not None and low > high:
        yield (
            f'{ours.show("correction_low")} is above {ours.show("correction_high")}, so that no token would be '
            'trained; exchange them'
        )
    if ours.has('surrogate', 'dual_clip') and ours.get('dual_clip') <= 1:
        yield (
            f'{ours.show("surrogate")} with {ours.show("dual_clip")} would cut fresh tokens; set loss.dual_clip above '
            '1, usually 3'
        )


def find_reference_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """Yields a sentence for a missing teacher, and for adapters with a reference from a directory."""
    kind = find_objective(c.loss.objective)
    if kind.teacher and not c.loss.teacher:
        yield (
            f'loss.objective={c.loss.objective!r} needs loss.teacher: a Hugging Face directory with the vocabulary of '
            'the model'
        )
    if c.loss.reference and reads_reference(c.loss) and c.lora.rank:
        yield (
            f'loss.reference={c.loss.reference!r} with lora.rank={c.lora.rank}: the frozen weights are kept once, and '
            "those of the reference are others; use loss.reference='', the model at the start, or lora.rank=0"
        )
