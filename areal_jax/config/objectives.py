"""The objectives of an update, by name: code asks an entry of this table and never compares names.

`loss.objective` names an ObjectiveKind of this file, or FILE.py:FUNCTION, the user's own function that returns an
areal_jax.learning.objective.objective.Objective (docs/own_objective.md). A policy objective is a combination of one
choice per axis, each a field of the section `loss`. A method lists the choices in which it differs from decoupled PPO;
a field that is set overrides one choice of the method. `resolve` combines both.
"""

from __future__ import annotations

import dataclasses
import itertools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from areal_jax.config.fields import ConfigError
from areal_jax.config.policy_choices import ADVANTAGES, SURROGATES, PolicyChoices
from areal_jax.plugins import is_own

FIELD, KL = 'loss.objective', 'loss.kl_coefficient'
DEMONSTRATIONS, PAIRS = 'demonstrations', 'pairs'
Choices: TypeAlias = Mapping[str, Any]  # fields of the section `loss`, by name

# the choices of decoupled PPO (AReaL, arXiv 2505.24298, equation 5)
BASE: Choices = {field.name: field.default for field in dataclasses.fields(PolicyChoices)}
AXES = (
    *('ratio', 'surrogate', 'correction', 'veto', 'gate', 'advantage', 'whiten', 'aggregation'),
    *('entropy_coefficient', 'kl_coefficient', 'overlong_tokens'),
)
# the fields that a choice reads
_READS: Mapping[str, Mapping[Any, tuple[str, ...]]] = {
    'ratio': dict.fromkeys(('token', 'sequence', 'geometric', 'geometric_token'), ('ratio_denominator',)),
    'surrogate': {name: kind.reads for name, kind in SURROGATES.items()},
    'delight_gate': {'kondo': ('delight_share',), 'additive': ('delight_mix',)},
    'correction': {
        'truncate': ('correction_level', 'behavior_weight_cap'),
        'mask': ('correction_level', 'correction_low', 'correction_high'),
    },
    'gate': {'probability_shift': ('gate_threshold',), 'second_moment': ('gate_threshold',)},
    'advantage': {name: kind.reads for name, kind in ADVANTAGES.items()},
}
_READS_ABOVE_ZERO: Mapping[str, tuple[str, ...]] = {'entropy_coefficient': ('entropy_clamp',)}


class ObjectiveKind(NamedTuple):
    """An objective, as an entry of OBJECTIVES."""

    name: str
    choices: Choices = types.MappingProxyType({})  # in which a method differs from BASE
    source: str = ''  # where the method is described
    generates: bool = True  # it learns from answers of engines; False: from given answers
    given: str = DEMONSTRATIONS  # the kind of given answers: DEMONSTRATIONS or PAIRS
    combines: bool = True  # if it generates: it is a combination of choices
    teacher: bool = False  # it reads log-probs of loss.teacher
    scores: bool = False  # it trains a value head, not log-probs
    reference: bool = False  # it reads log-probs of loss.reference; combinations do if they have a KL penalty
    method: str = 'reinforcement-learning'  # tag of an exported model
    title: str = 'asynchronous reinforcement learning'  # of an exported model


DECOUPLED_PPO = ObjectiveKind('decoupled_ppo', source='AReaL, arXiv 2505.24298, equation 5')
SFT = ObjectiveKind(
    'sft', generates=False, method='supervised-fine-tuning', title='supervised training', source='docs/sft.md'
)
DPO = ObjectiveKind(
    'dpo', generates=False, given=PAIRS, reference=True, method='direct-preference-optimization',
    title='preference training', source='DPO, arXiv 2305.18290',
)  # fmt: skip
REWARD_MODEL = ObjectiveKind(
    'reward_model', generates=False, given=PAIRS, scores=True, method='reward-model',
    title='training of a reward model', source='arXiv 2203.02155, equation 1',
)  # fmt: skip
DISTILLATION = ObjectiveKind(
    'distillation', combines=False, teacher=True, method='distillation', title='on-policy distillation',
    source='arXiv 2306.13649',
)  # fmt: skip
_GROUP = {'advantage': 'group', 'deviation': 'sample'}
_NO_CORRECTION = {'correction': 'none'}
_OBJECTIVES = (
    DECOUPLED_PPO,
    SFT,
    DPO,
    REWARD_MODEL,
    ObjectiveKind('ppo', _NO_CORRECTION | {'advantage': 'reward', 'whiten': 'batch'}, 'arXiv 1707.06347'),
    ObjectiveKind(
        'ppo_critic',
        {'advantage': 'gae', 'whiten': 'batch'},
        'GAE, arXiv 1506.02438; clipped value loss, docs/critic.md',
    ),
    ObjectiveKind(
        'grpo',
        _NO_CORRECTION | _GROUP | {'aggregation': 'sequence_mean', 'kl_coefficient': 0.04},
        'DeepSeekMath, arXiv 2402.03300',
    ),
    ObjectiveKind(
        'dr_grpo', _NO_CORRECTION | {'advantage': 'group_mean', 'aggregation': 'constant'}, 'arXiv 2503.20783'
    ),
    ObjectiveKind(
        'rloo',
        _NO_CORRECTION
        | {'ratio': 'none', 'surrogate': 'reinforce', 'advantage': 'rloo', 'aggregation': 'sequence_sum'},
        'arXiv 2402.14740',
    ),
    ObjectiveKind('reinforce_pp', _NO_CORRECTION | {'advantage': 'reward', 'whiten': 'batch'}, 'arXiv 2501.03262'),
    ObjectiveKind(
        'reinforce_pp_baseline', _NO_CORRECTION | {'advantage': 'group_mean', 'whiten': 'batch'}, 'arXiv 2501.03262'
    ),
    ObjectiveKind('maxrl', _NO_CORRECTION | {'advantage': 'max_rl'}, 'arXiv 2602.02710'),
    ObjectiveKind('dapo', _NO_CORRECTION | _GROUP | {'clip_epsilon_high': 0.28}, 'arXiv 2503.14476'),
    ObjectiveKind(
        'gspo',
        _NO_CORRECTION
        | _GROUP
        | {'ratio': 'geometric', 'aggregation': 'sequence_mean', 'clip_epsilon': 3e-4, 'clip_epsilon_high': 4e-4},
        'arXiv 2507.18071',
    ),
    ObjectiveKind(
        'cispo',
        _NO_CORRECTION | _GROUP | {'surrogate': 'cispo', 'clip_epsilon': 1.0, 'clip_epsilon_high': 4.0},
        'MiniMax-M1, arXiv 2506.13585, equations 4 and 5; bounds of ScaleRL, arXiv 2510.13786',
    ),
    ObjectiveKind(
        'sapo', _NO_CORRECTION | _GROUP | {'surrogate': 'sapo', 'aggregation': 'sequence_mean'}, 'arXiv 2511.20347'
    ),
    ObjectiveKind(
        'm2po',
        _NO_CORRECTION
        | _GROUP
        | {'ratio_denominator': 'behavior', 'surrogate': 'is_pg', 'gate': 'second_moment', 'gate_threshold': 0.04},
        'arXiv 2510.01161',
    ),
    ObjectiveKind(
        'dppo_tv',
        _NO_CORRECTION
        | _GROUP
        | {'ratio_denominator': 'behavior', 'surrogate': 'is_pg', 'gate': 'probability_shift', 'gate_threshold': 0.2},
        'arXiv 2602.04879',
    ),
    ObjectiveKind(
        'topr',
        _NO_CORRECTION
        | {'ratio': 'sequence', 'ratio_denominator': 'behavior', 'surrogate': 'topr', 'advantage': 'group_mean'},
        'arXiv 2503.14286',
    ),
    ObjectiveKind(
        'kimi', _NO_CORRECTION | {'surrogate': 'quadratic', 'advantage': 'group_mean'}, 'Kimi k1.5, arXiv 2501.12599'
    ),
    ObjectiveKind('tis', _GROUP | {'behavior_weight_cap': 2.0}, 'truncated importance sampling, docs/objectives.md'),
    ObjectiveKind('icepop', _GROUP | {'correction': 'mask'}, 'IcePop, docs/objectives.md'),
    ObjectiveKind(
        'oapl',
        _NO_CORRECTION
        | {'ratio': 'sequence', 'ratio_denominator': 'behavior', 'surrogate': 'oapl', 'advantage': 'optimal_value'}
        | {'aggregation': 'sequence_mean'},
        'arXiv 2602.19362',
    ),
    ObjectiveKind(
        'aent',
        _NO_CORRECTION | _GROUP | {'entropy_coefficient': 2e-4, 'entropy_clamp': 0.3},
        'AEnt, arXiv 2509.03493, with a fixed coefficient',
    ),
    DISTILLATION,
    ObjectiveKind(
        'vcpo',
        {'ratio': 'none', 'surrogate': 'reinforce', 'correction_level': 'sequence', 'behavior_weight_cap': 8.0}
        | {'advantage': 'optimal_baseline', 'aggregation': 'sequence_mean'},
        'arXiv 2602.17616',
    ),
    ObjectiveKind(
        'dg',
        _NO_CORRECTION | {'ratio': 'none', 'surrogate': 'delight', 'advantage': 'group_mean'},
        'Delightful Policy Gradient, arXiv 2603.14608',
    ),
)
OBJECTIVES: Mapping[str, ObjectiveKind] = {kind.name: kind for kind in _OBJECTIVES}


def find_objective(name: str) -> ObjectiveKind:
    """Returns the entry of a name; the user's own function gets one that learns from answers of engines."""
    if is_own(name):
        return ObjectiveKind(name, source=name)
    if name not in OBJECTIVES:
        raise ConfigError(f'{FIELD}={name!r} is not known; use one of {", ".join(OBJECTIVES)}, or FILE.py:FUNCTION')
    return OBJECTIVES[name]


def is_policy(name: str) -> bool:
    """Whether the objective is a combination of choices, so that it reads their fields."""
    kind = find_objective(name)
    return not is_own(name) and kind.generates and kind.combines


def reads_reference(loss: Any) -> bool:
    """Whether an update reads log-probs of loss.reference, for the section `loss` of a config."""
    if is_policy(loss.objective):
        return bool(find_kl(loss))
    return find_objective(loss.objective).reference


def find_kl(loss: Any) -> float:
    """Returns loss.kl_coefficient, or the method's if it is not set, for the section `loss` of a config."""
    return resolve(loss)['kl_coefficient'] if is_policy(loss.objective) else 0.0


def trains_critic(loss: Any) -> bool:
    """Whether the section `loss` of a config names a method of this project that trains values."""
    if is_policy(loss.objective):
        return bool(resolve(loss)['advantage'] == 'gae')
    return find_objective(loss.objective).scores


def build_choices(loss: Any, longest_answer: int, seed: int) -> PolicyChoices:
    """Returns the combination of a policy objective from the section `loss` as TrackedConfig has it.

    Args:
      loss: the section, in which a field that is not used has its default.
      longest_answer: rollout.max_new_tokens.
      seed: of the run.
    """
    found = resolve(loss)
    if found['aggregation'] == 'constant':
        found['length_constant'] = loss.length_constant or longest_answer
    if found['overlong_tokens']:
        found['longest_answer'] = longest_answer
    if found.get('delight_gate') == 'bernoulli':
        found['seed'] = seed
    return PolicyChoices(**{name: getattr(loss, name) for name in SET_ALONE} | found)


def resolve(loss: Any) -> dict[str, Any]:
    """Returns the choices of a policy objective from the section `loss` of a config, without unused fields.

    A field counts as set unless it is '' or None. Only the fields that the combination uses are read.
    """
    kind = find_objective(loss.objective)

    def pick(name: str) -> Any:
        value = getattr(loss, name, None)  # a config of an earlier version has fewer fields
        return kind.choices.get(name, BASE[name]) if value is None or value == '' else value

    return select_used(pick)


# fields that no method chooses: every combination reads the first; the others are read if a number is above 0
_ALWAYS = ('truncated_answers', 'reward_bias', 'reward_scale', 'reward_clip')
_SET_ABOVE_ZERO: Mapping[str, tuple[str, ...]] = {
    'kl_coefficient': ('kl_estimator', 'kl_in'),
    'overlong_tokens': ('overlong_penalty',),
}
SET_ALONE = (*_ALWAYS, 'proximal', *itertools.chain.from_iterable(_SET_ABOVE_ZERO.values()))


def list_set(loss: Any) -> frozenset[str]:
    """Returns the fields of PolicyChoices that the objective reads, for the section `loss` of a config."""
    kind = find_objective(loss.objective)
    if is_policy(kind.name):
        found = resolve(loss)
        beside = [name for number, names in _SET_ABOVE_ZERO.items() if found[number] for name in names]
        proximal = ['proximal'] if PolicyChoices(**found).uses_proximal else []
        return frozenset((*found, *_ALWAYS, *beside, *proximal, *_list_lengths(found['aggregation'])))
    if is_own(kind.name) or kind.given == PAIRS:
        return frozenset()
    sums = ('aggregation', *(_list_lengths(loss.aggregation) if kind.teacher else ()))
    return frozenset((*sums, 'behavior_weight_cap') if kind.teacher and loss.divergence == 'sampled' else sums)


def _list_lengths(aggregation: str) -> tuple[str, ...]:
    return ('length_constant',) if aggregation == 'constant' else ()


def select_used(pick: Callable[[str], Any]) -> dict[str, Any]:
    """Returns the choices that a combination uses, by name, in the order of the axes; calls `pick` for these only."""

    def choose(name: str) -> Iterator[tuple[str, Any]]:
        value = pick(name)
        yield name, value
        for read in (*_READS.get(name, {}).get(value, ()), *(_READS_ABOVE_ZERO.get(name, ()) if value else ())):
            yield from choose(read)

    return {name: value for axis in AXES for name, value in choose(axis)}


def describe(choices: Choices) -> str:
    """'ratio token over proximal, surrogate clip, ...': the combination in one line."""
    shown = {name: value for name, value in choices.items() if value not in (None, 'none', 0, 0.0)}
    return ', '.join(f'{name} {value}' for name, value in shown.items())


def describe_method(loss: Any) -> str:
    """Returns 'grpo (DeepSeekMath, ...): ratio token, ...'; the name alone for an objective without choices."""
    kind = find_objective(loss.objective)
    if not is_policy(kind.name):
        return kind.name
    choices = resolve(loss)
    if PolicyChoices(**choices).uses_proximal:
        choices |= {'proximal': loss.proximal}
    return f'{kind.name} ({kind.source}): {describe(choices)}'
