"""Warnings on stderr about config values that are valid but probably a mistake; printed before the run starts."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from ml_collections import config_dict


def print_warnings(config: config_dict.ConfigDict) -> None:
    for warning in find_warnings(config):
        print(f'warning: {warning}', file=sys.stderr, flush=True)


def find_warnings(c: config_dict.ConfigDict) -> Iterator[str]:
    """A sentence each."""
    steps = c.run.steps * c.learner.n_minibatches * c.learner.epochs
    if c.optimizer.warmup_steps > steps:
        yield (
            f'optimizer.warmup_steps={c.optimizer.warmup_steps} is more than the {steps} optimizer steps of the run '
            '(run.steps * learner.n_minibatches * learner.epochs): the learning rate never reaches its value'
        )
