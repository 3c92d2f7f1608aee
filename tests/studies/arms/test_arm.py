"""Which arms go into one program; the others are refused in a sentence that names arm, field and value."""

import pytest

from areal_jax.config.declarations import FIELDS
from areal_jax.config.fields import ConfigError
from areal_jax.studies.arms.arm import VARIES, partition, require_one_program
from tests.studies.arms.small import make_arm


@pytest.mark.parametrize(
    ('fields', 'words'),
    [
        (
            {'model__d_ff': 32},
            r"arm 'b' has model\.d_ff=32 and arm 'a' 64, but .* can differ in run\.seed, ",
        ),
        ({'learner__n_minibatches': 2}, r"arm 'b' has learner\.n_minibatches=2 and arm 'a' 1"),
        ({'task__length': 3, 'rollout__max_new_tokens': 3}, r"arm 'b' has rollout\.max_new_tokens=3 and arm 'a' 4"),
        (
            {'rollout__max_new_tokens': 5},
            r"arm 'b': rollout\.max_new_tokens=5 with task\.length=4.*set rollout\.max",
        ),
        (
            {'rollout__ignore_eos': False},
            r"arm 'b': rollout\.ignore_eos=False, but a program of arms has rollout",
        ),
        ({'staleness__schedule': 'natural'}, r"arm 'b': staleness\.schedule='natural'.*use fixed\(k\)"),
        ({'staleness__schedule': 'uniform(0,3)'}, r"arm 'b': staleness\.schedule='uniform\(0,3\)'"),
        ({'loss__kl_coefficient': 0.1}, r"arm 'b': loss\.kl_coefficient=0\.1, but"),
        (
            {'loss__entropy_coefficient': 0.1, 'loss__entropy_clamp': 0.3},
            r"arm 'b': loss\.entropy_clamp=0\.3, but",
        ),
        ({'loss__advantage': 'mine.py:f'}, r"arm 'b': loss\.advantage='mine\.py:f'"),
        ({'rollout__group_size': 0}, r"arm 'b': rollout\.group_size=0 must be at least 1"),
    ],
)
def test_an_arm_that_the_program_cannot_train_is_named(fields, words):
    with pytest.raises(ConfigError, match=words) as error:
        require_one_program([make_arm('a'), make_arm('b', **fields)])
    assert '\n' not in str(error.value)


def test_names_are_unique_and_there_is_an_arm():
    with pytest.raises(ConfigError, match="arm 'a' is there twice"):
        require_one_program([make_arm('a'), make_arm('a', run__seed=1)])
    with pytest.raises(ConfigError, match='no arm'):
        require_one_program([])


def test_arms_may_differ_in_what_varies_and_in_what_changes_no_number():
    others = {'staleness__schedule': 'fixed(9)', 'loss__proximal': 'behavior', 'run__seed': 7, 'rollout__slots': 3}
    require_one_program([make_arm('a'), make_arm('b', **others, learner__row_tokens=128, telemetry__plots=True)])
    assert set(VARIES) <= set(FIELDS)


def test_partition_makes_the_fewest_programs_in_the_order_of_the_arms():
    arms = [make_arm('a'), make_arm('b', learner__n_minibatches=2), make_arm('c', run__seed=3)]
    assert [[arm.name for arm in program] for program in partition(arms)] == [['a', 'c'], ['b']]
    with pytest.raises(ConfigError, match="arm 'd'"):
        partition([*arms, make_arm('d', loss__kl_coefficient=0.1)])
