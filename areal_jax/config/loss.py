"""The section `critic`: fields, and rules that join them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import ClassVar

from areal_jax.config.fields import POSITIVE, SHARE, Config, ConfigSection, Path, Real, declare
from areal_jax.config.objectives import find_objective, trains_critic
from areal_jax.plugins import is_own

TRUNK_CRITIC, COPIED_CRITIC = 'trunk', 'copy'  # of critic.model; else a directory


def _may_train_critic(c: Config) -> bool:
    """Tells whether an update trains values; an objective of the user's own says so when it is built."""
    return trains_critic(c.loss) or is_own(c.loss.objective)


def _reads_values(c: Config) -> bool:
    """Tells whether values are read beside what is trained; those of a reward model are what is trained."""
    return not find_objective(c.loss.objective).scores


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticSection(ConfigSection):
    """The values that an objective reads."""

    section: ClassVar[str] = 'critic'
    title: ClassVar[str] = "Values of loss.advantage='gae', or of a reward model, see docs/critic.md"
    used_if: ClassVar[Callable[[Config], bool]] = _may_train_critic

    model: str = declare(
        Path(
            TRUNK_CRITIC,
            "trunk: a value head on the policy; copy: a model of its own, first the policy's; or a HF directory",
            used_if=_reads_values,
            other_names='critic_path critic_pretrain critic_model_path value_model',
        )
    )
    learning_rate: float = declare(
        Real(
            1e-4,
            POSITIVE,
            'of its own optimizer, which has the other settings of the section optimizer',
            other_names='critic_lr critic_learning_rate value_lr',
        )
    )
    trunk_gradient: float = declare(
        Real(
            0.1,
            SHARE,
            "trunk: weight of the value loss for the policy's weights; 0 = the head alone",
            used_if=lambda c: _reads_values(c) and c.critic.model == TRUNK_CRITIC,
        )
    )

    @property
    def own_model(self) -> bool:
        """Tells whether the values have a model of their own, and are not a head on the policy's trunk."""
        return self.model != TRUNK_CRITIC


def find_critic_problems(c: Config) -> Iterator[str]:
    """Yields a sentence for each rule that an objective with a critic breaks."""
    if trains_critic(c.loss) and c.optimizer.blocks > 1:
        yield (
            f'loss.objective={c.loss.objective!r} with optimizer.blocks={c.optimizer.blocks}: a critic is trained in '
            'every update, and an update of a block trains the leaves of that block; use optimizer.blocks=1'
        )
