"""Holds the token ledger of a run against what its loop still has. It runs once, when the loop has ended."""

from __future__ import annotations

import collections
from collections.abc import Iterator

from areal_jax.control.controller import HostState
from areal_jax.telemetry.token_ledger import LedgerError, TokenLedger
from areal_jax.types import NOT_GENERATED, Segment


def find_ledger_fault(ledger: TokenLedger | None, state: HostState) -> LedgerError | None:
    """Why the ledger does not close, where it does not: raised when everything else of the run is written.

    Args:
      ledger: None = the run kept none from its start.
      state: of the host side at an instant at which no engine decodes.
    """
    if ledger is None:
        return None
    rest: collections.Counter[int] = collections.Counter()
    for segment in _segments(state):
        if segment.policy_version != NOT_GENERATED:
            rest[segment.policy_version] += len(segment.tokens)
    for group in state['running']:
        for episode in group.episodes:
            if episode.finish_reason is None and not episode.label:  # its end tells what was discarded
                rest.update(episode.discarded)
    try:
        ledger.require_closed(rest)
    except LedgerError as error:
        return error
    return None


def _segments(state: HostState) -> Iterator[Segment]:
    """Of all answers that are admitted and in no batch."""
    for group in state['running']:
        for episode in group.episodes:
            yield from episode.all_segments()
    for finished in state['buffer']:
        for trajectory in finished.trajectories:
            yield from trajectory.segments
