"""What an objective reads of whole distributions: a mesh that cuts tokens and vocabulary does not change it."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from areal_jax.config.policy_choices import PolicyChoices
from areal_jax.errors import UserError
from areal_jax.learning.objective.objective import CLAMPED_ENTROPY, REVERSE_KL, STATISTICS
from areal_jax.learning.objective.objectives import PolicyObjective
from areal_jax.models.decoder import Decoder
from areal_jax.sharding.rules import make_mesh
from tests.learning.examples import make_learner
from tests.learning.test_meshes import CONFIG, GROUPS, PARAMS
from tests.learning.test_objectives_packed import AllStatistics

_RATE = 10.0
_TEACHER = Decoder(dataclasses.replace(CONFIG, d_model=16, n_layers=1, d_ff=24))


def update_once(objective, strategy='fsdp', **mesh):
    learner = make_learner(
        make_mesh(**mesh), decoder=Decoder(CONFIG), params=PARAMS, learning_rate=_RATE,
        parts={'teacher': (_TEACHER, _TEACHER.init(seed=4, scale=2.0))},
        strategy=strategy, objective=objective, temperature=0.7, rows_per_microbatch=4,
    )  # fmt: skip
    metrics = learner.update(GROUPS, version=2)
    return metrics, jax.tree.map(lambda after, before: after - before, learner.save()['params'], PARAMS)


@pytest.mark.slow
def test_a_mesh_that_cuts_tokens_and_vocabulary_changes_nothing():
    metrics, steps = update_once(AllStatistics())
    found, cut = update_once(AllStatistics(), 'fsdp_tensor', fsdp=2, context=2, tensor=2)
    for name in ('loss/value', 'loss/kept', 'loss/all'):
        np.testing.assert_allclose(found[name], metrics[name], rtol=1e-5)
    assert metrics['loss/kept'] < metrics['loss/all']
    for path, step in jax.tree_util.tree_leaves_with_path(steps):
        (other,) = (s for p, s in jax.tree_util.tree_leaves_with_path(cut) if p == path)
        assert np.linalg.norm(step) > 0
        assert np.linalg.norm(step - other) <= 1e-5 * np.linalg.norm(step), jax.tree_util.keystr(path)


@dataclasses.dataclass(frozen=True)
class Undeclared(AllStatistics):
    reads: frozenset[str] = frozenset({REVERSE_KL})
    source: str = 'mine.py:build'


def test_a_statistic_that_is_not_asked_for_is_not_there():
    with pytest.raises(UserError, match=r"mine\.py:build: the objective reads 'clamped_entropy', .* in its `reads`"):
        update_once(Undeclared())


def test_only_a_clamped_entropy_that_counts_is_computed():
    of = lambda **choices: PolicyObjective(PolicyChoices(**choices))
    assert CLAMPED_ENTROPY in of(entropy_coefficient=0.1, entropy_clamp=0.3).reads
    assert of(entropy_coefficient=0.1, entropy_clamp=0.3).entropy_clamp == 0.3
    for idle in ({'entropy_clamp': 0.3}, {'entropy_coefficient': 0.1}):
        assert not of(**idle).reads & STATISTICS
