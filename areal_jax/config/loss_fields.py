"""The fields of the section `loss`: which objective, its choices (policy_choices.py), and what other objectives read.

A choice whose default is '' or None is the method's, unless it is set; objectives.py says which method has which.
"""

from __future__ import annotations

from collections.abc import Mapping

from areal_jax.config.fields import Choice, ChoiceOrOwn, Field, Options, Path, Real
from areal_jax.config.objectives import OBJECTIVES
from areal_jax.config.policy_choices import CHOICE_FIELDS
from areal_jax.config.ranges import POSITIVE

LOSS_FIELDS: Mapping[str, Field] = {
    'objective': ChoiceOrOwn(
        'decoupled_ppo', tuple(OBJECTIVES), 'a method, docs/objectives.md; sft, dpo and reward_model have no engines'
    ),
    'options': Options('FILE.py:FUNCTION: its parameters by name, any keys'),
    **CHOICE_FIELDS,
    'denominator': Choice(
        'kept', ('kept', 'all'), 'kept: the fewer groups filter_equal_rewards keeps, the more each weighs'
    ),
    'truncated_sampling': Choice(
        'refuse', ('refuse', 'full_softmax'), 'top_k, top_p: biased by the mass kept, a metric'
    ),
    'dpo_beta': Real(0.1, POSITIVE, 'dpo: how far a pair pulls the policy away from loss.reference'),
    'divergence': Choice(
        'sampled',
        ('sampled', 'reverse', 'forward'),
        'distillation: reverse KL on sampled tokens; or reverse or forward KL over the whole vocabulary',
    ),
    'teacher': Path('', 'distillation: a Hugging Face directory with the vocabulary of the model'),
    'reference': Path('', "a Hugging Face directory; '' = the weights at the start"),
}  # fmt: skip
