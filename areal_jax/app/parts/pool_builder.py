"""Builds the pool of engines in this process; server_builder.py has that of servers. Imports no jax."""

from __future__ import annotations

from collections.abc import Sequence

from areal_jax.app.parts.part_settings import build_requirements
from areal_jax.config import TrackedConfig
from areal_jax.control.clocks.loop import LoopClock
from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.protocols import RolloutEngine
from areal_jax.rollout.pool import Pool


def build_pool(
    config: TrackedConfig, engines: Sequence[RolloutEngine], clock: LoopClock, log: EventLog, supervisor: Supervisor
) -> Pool:
    """Raises EngineError where an engine cannot do what the run needs."""
    rollout = config.rollout
    return Pool(
        engines, clock, log, supervisor, build_requirements(config),
        slow_versions=rollout.slow_versions, spare_slots=rollout.slots if rollout.slow_engines == 'spare' else 0,
    )  # fmt: skip
