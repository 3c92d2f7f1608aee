"""Takes an engine out of service if its log-probs differ from the learner's, which measures this in every update."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable

from areal_jax.telemetry.metrics import Line, number
from areal_jax.telemetry.names import MISMATCH_OF

_TOKENS = 500  # over which the mean is taken


class MismatchWatch:
    """The mean |mismatch| of each engine over windows of at least 500 tokens of age 0, in nats.

    Args:
      most: largest mean of an engine that is right (rollout.max_mismatch).
      quarantine: called with the engine and a sentence (ServerPool.quarantine).
    """

    def __init__(self, most: float, quarantine: Callable[[str, str], None]):
        self._most, self._quarantine = most, quarantine
        self._tokens: collections.Counter[str] = collections.Counter()  # of the window under way
        self._sums: dict[str, float] = {}

    def note_update(self, metrics: Line) -> None:
        """The metrics of an update (learning/diagnostics/data_metrics.py)."""
        for name in metrics:
            if name.startswith(MISMATCH_OF) and name.endswith('/n'):
                engine = name.removeprefix(MISMATCH_OF).removesuffix('/n')
                tokens, mean = number(metrics, name), number(metrics, f'{MISMATCH_OF}{engine}/mean_abs')
                self.note(engine, int(tokens or 0), math.nan if mean is None else mean)  # JSON has no NaN

    def note(self, engine: str, tokens: int, mean: float) -> None:
        """The learner has compared so many tokens of age 0 that the engine generated."""
        if not tokens:
            return
        self._tokens[engine] += tokens
        self._sums[engine] = self._sums.get(engine, 0.0) + tokens * mean
        if self._tokens[engine] < _TOKENS:
            return
        count, total = self._tokens.pop(engine), self._sums.pop(engine)
        if not total / count <= self._most:  # also NaN
            self._quarantine(
                engine,
                f"its log-probs differ from the learner's by {total / count:.3g} on average over {count} tokens "
                f'(rollout.max_mismatch={self._most:g})',
            )
