"""Arms of seconds: one layer, four symbols, 2 groups of 4 answers."""

from __future__ import annotations

import jax
import numpy as np

from areal_jax.studies.arms.arm import Arm
from areal_jax.studies.arms.arm_training import ArmsProgram
from tests.app.small import small_config

_SMALL = {'rollout__ignore_eos': True, 'rollout__max_new_tokens': 4, 'staleness__schedule': 'fixed(0)'}


def arm_config(**fields):
    """`fields` like run__seed=1."""
    return small_config(**{'model__n_layers': 1, **_SMALL, **fields})


def make_arm(name, **fields):
    return Arm(name, arm_config(**fields))


class Compiled:
    """A program of arms that can be run again and again, with other states and constants."""

    def __init__(self, *arms, updates_per_call=3):
        self.program = ArmsProgram(arms, updates_per_call)
        self.program.compile()
        self.state = to_host(self.program.state)
        self.constants, self.problems = to_host(self.program.fixed)

    def run(self, order=None, state=None):
        """(sums, state) after the first call, numpy; `order` permutes the arms."""
        pick = (lambda tree: tree) if order is None else (lambda tree: jax.tree.map(lambda x: x[order], tree))
        fixed = pick((self.constants, self.problems))
        state = jax.device_put(pick(self.state if state is None else state))
        state, sums = self.program.compiled(self.program.calls[0], *jax.device_put(fixed), state)
        return to_host(sums), to_host(state)


def to_host(tree):
    return jax.tree.map(np.array, tree)


def of_arm(tree, index):
    return jax.tree.map(lambda x: x[index], tree)


def largest_difference(a, b):
    return max(jax.tree.leaves(jax.tree.map(lambda x, y: float(np.abs(x - y).max()), a, b)))


def are_equal(a, b):
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: np.array_equal(x, y, equal_nan=True), a, b)))
