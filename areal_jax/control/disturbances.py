"""Where the frictions of a run meet its loop: each is applied and logged with both values (frictions.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from areal_jax.control import frictions as pure
from areal_jax.control.episode import Episode
from areal_jax.control.event_writer import EventLog
from areal_jax.control.frictions import Change, Frictions
from areal_jax.types import TrajectoryGroup


class Disturbances:
    """The frictions of a run that has some."""

    def __init__(self, frictions: Frictions, log: EventLog):
        self._frictions, self._log = frictions, log

    def disturb_answer(self, draw: int, episode: Episode) -> None:
        """Of an answer that has ended, before it is verified.

        An answer whose log-probs are not an engine's is not counted among those of its engine: who compares them with
        the learner's would take the engine out of service.
        """
        episode.segments, change = pure.disturb_answer(self._frictions, draw, episode.sample, episode.segments)
        if change:
            episode.engine = pure.ENGINE if change.friction != pure.TEMPERATURE else episode.engine
            self._write(draw, change)

    def disturb_batch(self, groups: Sequence[TrajectoryGroup]) -> tuple[list[TrajectoryGroup], dict[str, float]]:
        """The groups with the rewards that the learner gets, and metrics of the batch (names.FRICTION and a name)."""
        disturbed, changes = pure.disturb_rewards(self._frictions, groups)
        for draw, found in changes.items():
            for change in found:
                self._write(draw, change)
        return disturbed, self._count(groups, changes)

    def _count(self, groups: Sequence[TrajectoryGroup], changes: Mapping[int, Sequence[Change]]) -> dict[str, float]:
        made = [change.friction for found in changes.values() for change in found]
        hit = [self._frictions.is_hit(group.draw, t.sample) for group in groups for t in group.heads]
        rewards = list(pure.undisturbed_rewards(self._frictions, groups))
        return {
            'actor': float(sum(hit)),
            'reward': float(made.count(pure.REWARD)),
            'unrewarded': float(made.count(pure.UNREWARDED)),
            **({'policy_reward': sum(rewards) / len(rewards)} if rewards else {}),
        }

    def _write(self, draw: int, change: Change) -> None:
        fields = dataclasses.asdict(change)
        if change.tokens is None:
            del fields['tokens']
        self._log.write('friction', None, draw=draw, **fields)
