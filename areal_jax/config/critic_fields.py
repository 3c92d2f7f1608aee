"""The fields of the section `critic`, and what they do not go with. docs/critic.md is their page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ml_collections import config_dict

from areal_jax.config.fields import Field, Path, Real
from areal_jax.config.objectives import trains_critic
from areal_jax.config.ranges import POSITIVE, SHARE

TRUNK_CRITIC, COPIED_CRITIC = 'trunk', 'copy'  # of critic.model; else a directory

CRITIC_FIELDS: Mapping[str, Field] = {
    'model': Path(
        TRUNK_CRITIC,
        "trunk: a value head on the policy; copy: a model of its own, first the policy's; or a HF directory",
    ),
    'learning_rate': Real(
        1e-4, POSITIVE, 'of its own optimizer, which has the other settings of the section optimizer'
    ),
    'trunk_gradient': Real(0.1, SHARE, "trunk: weight of the value loss for the policy's weights; 0 = the head alone"),
}


def find_critic_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """A sentence for each rule that an objective with a critic breaks."""
    if trains_critic(c.loss) and c.optimizer.blocks > 1:
        yield (
            f'loss.objective={c.loss.objective!r} with optimizer.blocks={c.optimizer.blocks}: a critic is trained in '
            'every update, and an update of a block trains the leaves of that block; use optimizer.blocks=1'
        )
