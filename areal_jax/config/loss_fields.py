"""The fields of the section `loss`: which objective, and its choices. objectives.py says which method has which.

A choice whose default is '' or None is the method's, unless it is set.
"""

from __future__ import annotations

from collections.abc import Mapping

from areal_jax.config.fields import Choice, ChoiceOrOwn, Field, Integer, Options, Real, Text
from areal_jax.config.objectives import OBJECTIVES
from areal_jax.config.ranges import COUNT_OR_OFF, DECAY, NOT_NEGATIVE, POSITIVE, SHARE, SHARE_ABOVE_ZERO

OF_METHOD = ''  # a choice that loss.objective makes

LOSS_FIELDS: Mapping[str, Field] = {
    'objective': ChoiceOrOwn(
        'decoupled_ppo', tuple(OBJECTIVES), 'a method, docs/objectives.md; sft, dpo and reward_model have no engines'
    ),
    'options': Options('FILE.py:FUNCTION: its parameters by name, any keys'),
    'ratio': Choice(
        OF_METHOD,
        (OF_METHOD, 'none', 'token', 'sequence', 'geometric', 'geometric_token'),
        'what the surrogate reads; geometric_token: the value of a sequence, the gradient of each token',
    ),
    'ratio_denominator': Choice(OF_METHOD, (OF_METHOD, 'proximal', 'behavior'), 'π_θ / this'),
    'proximal': Choice('recompute', ('recompute', 'loglinear', 'behavior'), 'loglinear: A-3PO; behavior: plain PPO'),
    'surrogate': Choice(
        OF_METHOD,
        (
            *(OF_METHOD, 'clip', 'dual_clip', 'cispo', 'reinforce', 'is_pg', 'sapo', 'topr', 'quadratic', 'oapl'),
            'delight',
        ),
        'what is done with ratio and advantage',
    ),
    'clip_epsilon': Real(None, SHARE_ABOVE_ZERO, 'lower half width of the trust region'),
    'clip_epsilon_high': Real(None, POSITIVE, 'upper half width; None in a method too = clip_epsilon'),
    'dual_clip': Real(None, POSITIVE, 'dual_clip: a ratio above it counts as it where the advantage is negative'),
    'sapo_positive': Real(None, POSITIVE, 'sapo: temperature where the advantage is positive'),
    'sapo_negative': Real(None, POSITIVE, 'sapo: temperature where it is not'),
    'quadratic_weight': Real(None, POSITIVE, 'quadratic: of half the square of the log-ratio'),
    'oapl_beta': Real(None, POSITIVE, 'oapl: of the log-ratio of a sequence'),
    'oapl_value_beta': Real(None, POSITIVE, 'optimal_value: temperature of the soft maximum of a group'),
    'delight_gate': Choice(
        OF_METHOD,
        (OF_METHOD, 'sigmoid', 'bernoulli', 'kondo', 'additive'),
        'delight: what makes a weight of advantage times surprisal',
    ),
    'delight_temperature': Real(None, POSITIVE, 'delight: of its sigmoid'),
    'delight_share': Real(None, SHARE_ABOVE_ZERO, 'kondo: share of the tokens that are trained'),
    'delight_mix': Real(None, SHARE, 'additive: weight of the surprisal, beside the advantage'),
    'correction': Choice(
        OF_METHOD,
        (OF_METHOD, 'none', 'truncate', 'mask'),
        'weight π_prox / π_behav (ratio none: π_θ / π_behav), constant; mask: 0 outside the bounds',
    ),
    'correction_level': Choice(OF_METHOD, (OF_METHOD, 'token', 'sequence', 'geometric'), 'of that weight'),
    'behavior_weight_cap': Real(None, POSITIVE, 'truncate: cap of that weight; None in a method too = no cap'),
    'correction_low': Real(None, NOT_NEGATIVE, 'mask: smallest weight that is trained'),
    'correction_high': Real(None, POSITIVE, 'mask: largest weight that is trained'),
    'veto': Real(None, SHARE_ABOVE_ZERO, 'drop an answer one of whose tokens has a smaller π_prox / π_behav'),
    'gate': Choice(
        OF_METHOD,
        (OF_METHOD, 'none', 'probability_shift', 'second_moment'),
        'which tokens are trained; second_moment: M2PO, over the minibatch, needs a pass',
    ),
    'gate_threshold': Real(None, POSITIVE, 'probability_shift: of |π_θ - π|; second_moment: of the mean square'),
    'advantage': ChoiceOrOwn(
        OF_METHOD,
        (
            *(OF_METHOD, 'reward', 'group', 'group_mean', 'rloo', 'max_rl', 'optimal_value', 'length_baseline'),
            *('optimal_baseline', 'gae'),
        ),
        'group: (r-mean)/std; group_mean: r-mean; reward: r; optimal_baseline: VCPO, gae: a critic; both need a pass',
    ),
    'deviation': Choice(
        OF_METHOD, (OF_METHOD, 'population', 'sample'), 'group: std + 1e-4, or with ddof 1 + 1e-6 as the papers have it'
    ),
    'discount': Real(None, SHARE_ABOVE_ZERO, 'gae: of the reward one token later'),
    'gae_lambda': Real(None, SHARE, 'gae: 0 = the next value alone, 1 = the whole return'),
    'truncated_value': Choice(
        OF_METHOD, (OF_METHOD, 'zero', 'last'), "gae: after an answer that ended at its limit; last = its last state's"
    ),
    'value_clip': Real(None, NOT_NEGATIVE, 'gae: values are trained within this of those before the update; 0 = off'),
    'whiten': Choice(OF_METHOD, (OF_METHOD, 'none', 'batch'), 'advantages to mean 0 and deviation 1 over the tokens'),
    'aggregation': Choice(
        OF_METHOD,
        (
            *(OF_METHOD, 'token_mean', 'sequence_mean', 'sequence_sum', 'constant', 'prompt_mean', 'token_sum'),
        ),
        'what the loss is a mean over; constant: a sum over loss.length_constant tokens an answer',
    ),
    'length_constant': Integer(0, COUNT_OR_OFF, 'constant: tokens; 0 = rollout.max_new_tokens'),
    'denominator': Choice(
        'kept', ('kept', 'all'), 'kept: the fewer groups filter_equal_rewards keeps, the more each weighs'
    ),
    'truncated_sampling': Choice(
        'refuse', ('refuse', 'full_softmax'), 'top_k, top_p: biased by the mass kept, a metric'
    ),
    'truncated_answers': Choice(
        'trained', ('trained', 'masked'), 'answers that ended at their limit; masked: count, and train nothing'
    ),
    'reward_bias': Real(0.0, NOT_NEGATIVE, 'is taken from each reward, before its scale'),
    'reward_scale': Real(1.0, POSITIVE, 'multiplies each reward'),
    'reward_clip': Real(None, POSITIVE, 'rewards lie between -this and this, after the scale; None = any'),
    'overlong_tokens': Integer(None, COUNT_OR_OFF, 'penalty over the last so many of rollout.max_new_tokens; 0 = off'),
    'overlong_penalty': Real(1.0, POSITIVE, 'of an answer of rollout.max_new_tokens'),
    'entropy_coefficient': Real(None, NOT_NEGATIVE, 'above 0 rewards entropy'),
    'entropy_clamp': Real(None, DECAY, 'share of the vocabulary, its least likely tokens, that it leaves out'),
    'kl_coefficient': Real(None, NOT_NEGATIVE, 'above 0 keeps the policy near loss.reference'),
    'kl_estimator': Choice(
        'k3', ('k1', 'k2', 'k3', 'unbiased'), 'of that divergence; unbiased: also on tokens of older weights'
    ),
    'kl_in': Choice('loss', ('loss', 'reward'), 'where it counts; reward: that of the policy that drew the answers'),
    'dpo_beta': Real(0.1, POSITIVE, 'dpo: how far a pair pulls the policy away from loss.reference'),
    'divergence': Choice(
        'sampled',
        ('sampled', 'reverse', 'forward'),
        'distillation: reverse KL on sampled tokens; or reverse or forward KL over the whole vocabulary',
    ),
    'teacher': Text('', 'distillation: a Hugging Face directory with the vocabulary of the model'),
    'reference': Text('', "a Hugging Face directory; '' = the weights at the start"),
}  # fmt: skip
