"""An own objective with a critic: what it gets, and what is refused in one sentence."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from areal_jax.config.loss import CriticSection
from areal_jax.errors import UserError
from areal_jax.learning.objective.objective import RETURNS, VALUES, Objective, TokenAdvantages
from areal_jax.learning.objective.objectives import load_objective, require_token_advantages
from areal_jax.learning.optimizer import add_critic_optimizer
from areal_jax.learning.packing import empty_batch
from areal_jax.learning.weights import VALUE_HEAD, make_value_head
from tests.learning.examples import make_learner, make_optimizer, random_groups, tiny_decoder


@dataclasses.dataclass(frozen=True)
class OneStep(Objective):
    """The advantage of a token is 1 - V, and every return is 1."""

    reads = frozenset({VALUES})
    replaces_advantages = True
    mistake: str = ''

    def token_advantages(self, groups, batches, passed):
        ones = [np.ones(batch.loss_mask.shape, np.float32) for batch in batches]
        if self.mistake == 'shape':
            return [TokenAdvantages(one[0], one) for one in ones]
        if self.mistake == 'nan':
            return [TokenAdvantages(one, one * np.nan) for one in ones]
        if self.mistake == 'returns':
            return [TokenAdvantages(one) for one in ones]
        return [TokenAdvantages(one - of[VALUES], one) for one, of in zip(ones, passed, strict=True)]

    def loss(self, tokens):
        of_values = (tokens.values - tokens.read(RETURNS)) ** 2 / 2
        loss = tokens.mean(of_values - tokens.policy_logprobs * tokens.advantages)
        return loss, {'token_count': tokens.count(), 'value_sum': tokens.total(tokens.read(VALUES))}

    def metrics(self, merged):
        return {'own/value': merged['value_sum'] / merged['token_count']}


def test_it_trains_values_and_reads_those_of_before_the_update():
    learner = make_learner(
        params=tiny_decoder(n_layers=1).init(seed=2), learning_rate=1e-9, rows_per_microbatch=2,
        optimizer=add_critic_optimizer(make_optimizer('sgd', clip_norm=0), 0.05),
        parts={'critic': {VALUE_HEAD: make_value_head(16)}},
        objective=OneStep(), critic=CriticSection(trunk_gradient=0.0),
    )  # fmt: skip
    values = [learner.update(random_groups(5, 3), 2)['own/value'] for _ in range(4)]
    assert values[0] == 0.0
    assert 0.0 < values[1] < values[2] < values[3] < 1.0


@pytest.mark.parametrize(
    ('mistake', 'message'),
    [
        ('shape', r'own\.py:build: OneStep\.token_advantages returned advantages of the shapes .* one a minibatch'),
        ('nan', 'returned returns with a number that is not finite at a loss token'),
        ('returns', r'returned returns of the shapes \[\(\)\], and must return one a minibatch'),
    ],
)
def test_what_it_may_not_return_is_one_sentence(mistake, message):
    objective, batch = OneStep(mistake), empty_batch(1, 1, 8, 4)
    object.__setattr__(objective, 'source', 'own.py:build')
    batch.loss_mask[0, 0, :2] = True
    with pytest.raises(UserError, match=message):
        require_token_advantages(objective, [], [batch], [{VALUES: np.zeros((1, 1, 4), np.float32)}])


def test_values_without_advantages_of_its_own_are_refused(tmp_path):
    path = tmp_path / 'own.py'
    path.write_text(
        'import dataclasses\n'
        'from areal_jax.learning.objective.objective import VALUES, Objective\n'
        '@dataclasses.dataclass(frozen=True)\n'
        'class Own(Objective):\n'
        '    reads = frozenset({VALUES})\n'
        '    def loss(self, tokens):\n'
        '        return tokens.mean(tokens.values), {}\n'
        'build = Own\n'
    )
    with pytest.raises(UserError, match=r"its `reads` has 'values', of which `token_advantages` makes .* set replaces"):
        load_objective(f'{path}:build', {})
