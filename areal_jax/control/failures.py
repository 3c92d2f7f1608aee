"""Ends a run whose verifications fail again and again."""

from __future__ import annotations

from collections.abc import Iterable

from areal_jax.errors import UserError


class UnverifiedError(UserError, RuntimeError):
    """Nothing could be verified for too long; names the last failure, its labels and the field."""


class FailureCount:
    """Failed verifications in a row: a scorer that always fails would have the engines generate for nothing."""

    def __init__(self, limit: int, unit: str):
        """`unit` is what is counted, in the plural: 'groups'."""
        self._limit, self._unit = limit, unit
        self._in_a_row = 0

    def note_verified(self) -> None:
        self._in_a_row = 0

    def note_failed(self, name: str, labels: Iterable[str]) -> None:
        """Counts one failure, 'draw 5' with the labels of its attempts. Raises UnverifiedError at the limit."""
        self._in_a_row += 1
        if self._in_a_row >= self._limit:
            raise UnverifiedError(
                f'{self._in_a_row} {self._unit} in a row (task.max_failed_groups) could not be verified; the last, '
                f'{name}, ended in: {", ".join(sorted(set(labels)))}. The warnings above say what the scorer did: mend '
                'it, or raise task.verifier_deadline_s or task.verifier_memory_mb if it needs more'
            )


class RequestLostError(RuntimeError):
    """No engine finished a request; the iteration over a generation raises it, and the group is dropped."""
