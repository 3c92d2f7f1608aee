"""The choices of a policy objective: one value per axis (docs/objectives.md). objectives.py has the methods.

Each is declared here once: its default in the loss, the field of the section `loss` that sets it (loss.py), and that
field's names in other libraries. A surrogate or an advantage is an entry of SURROGATES or ADVANTAGES, which lists the
fields that it reads, and a function of learning/objective/ratios.py or advantages.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from areal_jax.config.fields import (
    COUNT_OR_OFF,
    DECAY,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    SHARE_ABOVE_ZERO,
    Choice,
    ChoiceOrOwn,
    Field,
    Integer,
    Range,
    Real,
    choice,
    declare,
    list_fields,
    real,
)

OF_METHOD = ''  # a choice that loss.objective makes


class SurrogateKind(NamedTuple):
    """The properties of a surrogate that the config needs."""

    reads: tuple[str, ...] = ()  # fields of PolicyChoices
    reads_ratio: bool = True
    reads_log: bool = False  # it reads the log of the ratio, which has no bound
    idle_at_one: bool = False  # at a ratio of 1 its bounds or penalty have no effect
    of_tokens: bool = False  # it is defined for ratios of single tokens only


_EDGES = ('clip_epsilon', 'clip_epsilon_high')
SURROGATES: Mapping[str, SurrogateKind] = {
    'clip': SurrogateKind(reads=_EDGES, idle_at_one=True),
    'dual_clip': SurrogateKind(reads=(*_EDGES, 'dual_clip'), idle_at_one=True),
    'cispo': SurrogateKind(reads=_EDGES, idle_at_one=True, of_tokens=True),
    'reinforce': SurrogateKind(reads_ratio=False),
    'is_pg': SurrogateKind(),
    'sapo': SurrogateKind(reads=('sapo_positive', 'sapo_negative'), idle_at_one=True),
    'topr': SurrogateKind(),
    'quadratic': SurrogateKind(reads=('quadratic_weight',), reads_log=True, idle_at_one=True),
    'oapl': SurrogateKind(reads=('oapl_beta',), reads_log=True),
    'delight': SurrogateKind(reads=('delight_gate', 'delight_temperature'), reads_ratio=False),
}


class AdvantageKind(NamedTuple):
    """The properties of an advantage that the config needs; learning/objective/advantages.py computes it."""

    reads: tuple[str, ...] = ()  # fields of PolicyChoices
    centres_groups: bool = False  # a baseline of the group is subtracted from the rewards of its answers
    is_meant: bool = False  # scale and centre carry meaning


ADVANTAGES: Mapping[str, AdvantageKind] = {
    'reward': AdvantageKind(),
    'group': AdvantageKind(reads=('deviation',), centres_groups=True),
    'group_mean': AdvantageKind(centres_groups=True),
    'rloo': AdvantageKind(centres_groups=True),
    'max_rl': AdvantageKind(centres_groups=True, is_meant=True),
    'optimal_value': AdvantageKind(reads=('oapl_value_beta',), is_meant=True),
    'length_baseline': AdvantageKind(centres_groups=True),
    'optimal_baseline': AdvantageKind(is_meant=True),
    'gae': AdvantageKind(reads=('discount', 'gae_lambda', 'truncated_value', 'value_clip')),
}


def _axis(default: str, names: tuple[str, ...], meaning: str, other_names: str = '') -> Any:
    """Declares a choice among `names`; the method makes it if it is not set."""
    return declare(Choice(OF_METHOD, (OF_METHOD, *names), meaning, other_names=other_names), default=default)


def _number(default: float | None, allowed: Range, meaning: str, other_names: str = '') -> Any:
    """Declares a number; the method chooses it if it is not set."""
    return declare(Real(None, allowed, meaning, other_names=other_names), default=default)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyChoices:
    """One combination. Numbers may also be arrays, if a program computes several combinations at once.

    A field that the other choices do not use keeps its value here and is not read; None = off.
    """

    ratio: str = _axis(
        'token',
        ('none', 'token', 'sequence', 'geometric', 'geometric_token'),
        'what the surrogate reads; geometric_token: the value of a sequence, the gradient of each token',
        'importance_sampling_level imp_ratio_level is_level sequence_level_importance_ratios',
    )
    ratio_denominator: str = _axis(
        'proximal', ('proximal', 'behavior'), 'π_θ / this', 'use_rollout_logprobs use_vllm_logprobs cispo_anchor'
    )
    proximal: str = choice(
        'recompute',
        ('recompute', 'loglinear', 'behavior'),
        'loglinear: A-3PO; behavior: plain PPO',
        other_names='use_decoupled_loss recompute_logprob decoupled bypass_mode',
    )
    surrogate: str = _axis(
        'clip',
        tuple(SURROGATES),
        'what is done with ratio and advantage',
        'policy_loss_type policy_loss loss_mode pg_loss_type',
    )
    clip_epsilon: float = _number(
        0.2,
        SHARE_ABOVE_ZERO,
        'lower half width of the trust region',
        'clip_eps eps_clip epsilon clip_ratio cliprange clip_range clip_ratio_low epsilon_low eps_clip_low clip '
        'clip_param',
    )
    clip_epsilon_high: float | None = _number(
        None,
        POSITIVE,
        'upper half width; None in a method too = clip_epsilon',
        'clip_ratio_high epsilon_high eps_clip_high clip_higher eps_clip_higher',
    )
    dual_clip: float = _number(
        3.0,
        POSITIVE,
        'dual_clip: a ratio above it counts as it where the advantage is negative',
        'clip_ratio_c c_clip ratio_clip_c',
    )
    sapo_positive: float = _number(
        1.0, POSITIVE, 'sapo: temperature where the advantage is positive', 'sapo_temperature_pos tau_pos'
    )
    sapo_negative: float = _number(1.05, POSITIVE, 'sapo: temperature where it is not', 'sapo_temperature_neg tau_neg')
    quadratic_weight: float = _number(0.1, POSITIVE, 'quadratic: of half the square of the log-ratio')
    oapl_beta: float = _number(0.001, POSITIVE, 'oapl: of the log-ratio of a sequence')
    oapl_value_beta: float = _number(1.0, POSITIVE, 'optimal_value: temperature of the soft maximum of a group')
    delight_gate: str = _axis(
        'sigmoid',
        ('sigmoid', 'bernoulli', 'kondo', 'additive'),
        'delight: what makes a weight of advantage times surprisal',
    )
    delight_temperature: float = _number(1.0, POSITIVE, 'delight: of its sigmoid')
    delight_share: float = _number(0.1, SHARE_ABOVE_ZERO, 'kondo: share of the tokens that are trained')
    delight_mix: float = _number(0.5, SHARE, 'additive: weight of the surprisal, beside the advantage')
    correction: str = _axis(
        'truncate',
        ('none', 'truncate', 'mask'),
        'weight π_prox / π_behav (ratio none: π_θ / π_behav), constant; mask: 0 outside the bounds',
        'rollout_is use_tis tis importance_sampling_correction rejection_sampling',
    )
    correction_level: str = _axis('token', ('token', 'sequence', 'geometric'), 'of that weight')
    behavior_weight_cap: float | None = _number(
        None,
        POSITIVE,
        'truncate: cap of that weight; None in a method too = no cap',
        'behav_imp_weight_cap tis_imp_ratio_cap importance_sampling_cap rollout_is_threshold is_cap',
    )
    correction_low: float = _number(
        0.5, NOT_NEGATIVE, 'mask: smallest weight that is trained', 'rollout_rs_threshold_lower tis_clip_low is_low'
    )
    correction_high: float = _number(
        5.0, POSITIVE, 'mask: largest weight that is trained', 'rollout_rs_threshold tis_clip is_high'
    )
    veto: float | None = _number(
        None,
        SHARE_ABOVE_ZERO,
        'drop an answer one of whose tokens has a smaller π_prox / π_behav',
        'rollout_token_veto_threshold veto_threshold',
    )
    gate: str = _axis(
        'none',
        ('none', 'probability_shift', 'second_moment'),
        'which tokens are trained; second_moment: M2PO, over the minibatch, needs a pass',
    )
    gate_threshold: float = _number(0.2, POSITIVE, 'probability_shift: of |π_θ - π|; second_moment: of the mean square')
    advantage: str = declare(
        ChoiceOrOwn(
            OF_METHOD,
            (OF_METHOD, *ADVANTAGES),
            'group: (r-mean)/std; group_mean: r-mean; reward: r; optimal_baseline: VCPO, gae: a critic; both need a '
            'pass',
            other_names='adv_estimator advantage_estimator scale_rewards adv_norm',
        ),
        default='group',
    )
    deviation: str = _axis(
        'population', ('population', 'sample'), 'group: std + 1e-4, or with ddof 1 + 1e-6 as the papers have it'
    )
    discount: float = _number(1.0, SHARE_ABOVE_ZERO, 'gae: of the reward one token later', 'gamma')
    gae_lambda: float = _number(1.0, SHARE, 'gae: 0 = the next value alone, 1 = the whole return', 'lam gae_lam lambd')
    truncated_value: str = _axis(
        'zero',
        ('zero', 'last'),
        'gae: behind an answer that ended at its limit; last = of the state behind its last token',
    )
    value_clip: float = _number(
        0.5,
        NOT_NEGATIVE,
        'gae: values are trained within this of those before the update; 0 = off',
        'cliprange_value value_clip_range eps_clip_value',
    )
    whiten: str = _axis(
        'none',
        ('none', 'batch'),
        'advantages to mean 0 and deviation 1 over the loss tokens',
        'whiten_advantages normalize_advantages adv_normalization advantage_normalization normalize_advantage',
    )
    aggregation: str = _axis(
        'token_mean',
        ('token_mean', 'sequence_mean', 'sequence_sum', 'constant', 'prompt_mean', 'token_sum'),
        'what the loss is a mean over; constant: a sum over loss.length_constant tokens an answer',
        'loss_agg_mode loss_reduction',
    )
    length_constant: int = declare(
        Integer(0, COUNT_OR_OFF, 'constant: tokens; 0 = rollout.max_new_tokens', other_names='loss_scale_factor'),
        default=1,
    )
    truncated_answers: str = choice(
        'trained',
        ('trained', 'masked'),
        'answers that ended at their limit; masked: train nothing, and do not count',
        other_names='mask_truncated_completions overlong_filtering mask_no_eos_with_zero',
    )
    reward_bias: float = real(
        0.0, NOT_NEGATIVE, 'is taken from each reward, before its scale', other_names='reward_shift'
    )
    reward_scale: float = real(1.0, POSITIVE, 'multiplies each reward', other_names='reward_scaling reward_multiplier')
    reward_clip: float | None = _number(
        None,
        POSITIVE,
        'rewards lie between -this and this, after the scale; None = any',
        'reward_clip_range clip_reward cliprange_reward',
    )
    overlong_tokens: int = declare(
        Integer(
            None,
            COUNT_OR_OFF,
            'penalty over the last so many of rollout.max_new_tokens; 0 = off',
            other_names='overlong_buffer_len overlong_buffer soft_punish_cache overlong_len',
        ),
        default=0,
    )
    overlong_penalty: float = real(
        1.0,
        POSITIVE,
        'of an answer of rollout.max_new_tokens, before loss.reward_scale',
        other_names='overlong_penalty_factor',
    )
    entropy_coefficient: float = _number(
        0.0,
        NOT_NEGATIVE,
        'above 0 rewards entropy',
        'entropy entropy_coeff entropy_coef ent_coef entropy_bonus entropy_loss_coef',
    )
    entropy_clamp: float = _number(
        0.0, DECAY, 'share of the vocabulary, its least likely tokens, that it leaves out', 'clamp_p'
    )
    kl_coefficient: float = _number(
        0.0,
        NOT_NEGATIVE,
        'above 0 keeps the policy near loss.reference',
        'kl beta kl_coef kl_coeff init_kl_coef kl_loss_coef kl_ctl kl_penalty kl_weight kl_beta use_kl_loss kl_ctrl',
    )
    kl_estimator: str = choice(
        'k3',
        ('k1', 'k2', 'k3', 'unbiased'),
        'of that divergence; unbiased: also on tokens of older weights',
        other_names='kl_loss_type kl_type kl_penalty_type',
    )
    kl_in: str = choice(
        'loss',
        ('loss', 'reward'),
        'where it counts; reward: that of the policy that drew the answers',
        other_names='use_kl_in_reward kl_in_reward',
    )
    longest_answer: int = 1  # tokens, for the overlong penalty
    seed: int = 0  # for randomly drawn gates

    @property
    def uses_proximal(self) -> bool:
        """Whether the loss reads log π_prox."""
        if self.ratio == 'none':
            return False
        return self.ratio_denominator == 'proximal' or self.correction != 'none' or self.veto is not None


CHOICE_FIELDS: Mapping[str, Field] = list_fields(PolicyChoices)
