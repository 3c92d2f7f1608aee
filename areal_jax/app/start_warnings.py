"""Warnings on stderr before the first update: values that are probably a mistake, attention backends that fail here.

Used by app/run.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from ml_collections import config_dict


def print_warnings(config: config_dict.ConfigDict) -> None:
    for warning in find_warnings(config):
        print(f'warning: {warning}', file=sys.stderr, flush=True)


def print_passed_over(reasons: Sequence[str]) -> None:
    """Says why learner.attention='auto' did not choose a faster backend; a reason for each backend that failed."""
    for reason in reasons:
        print(f"warning: learner.attention='auto' passes over a backend: {reason}", file=sys.stderr, flush=True)


def find_warnings(c: config_dict.ConfigDict) -> Iterator[str]:
    """A sentence each."""
    steps = c.run.steps * c.learner.n_minibatches * c.learner.epochs
    if c.optimizer.warmup_steps > steps:
        yield (
            f'optimizer.warmup_steps={c.optimizer.warmup_steps} is more than the {steps} optimizer steps of the run '
            '(run.steps * learner.n_minibatches * learner.epochs): the learning rate never reaches its value'
        )
