"""Builds the pool of servers of a simulation, where rollout.server is not 'in_process'."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import numpy as np

from areal_jax.app.parts.part_settings import build_requirements
from areal_jax.app.parts.server_parts import EndedBy, Servers
from areal_jax.config import TrackedConfig
from areal_jax.control.clocks.loop import LoopClock
from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.rollout.servers.keeper import MismatchWatch
from areal_jax.rollout.servers.member import ServerSettings
from areal_jax.rollout.servers.server_pool import ServerPool
from areal_jax.simulation.lengths import Lengths, parse_lengths
from areal_jax.simulation.simulated_servers import SimulatedRegistry
from areal_jax.types import PublishedWeights

_LONGEST_S = 1 << 30


def build_simulated_servers(
    config: TrackedConfig,
    clock: LoopClock,
    log: EventLog,
    supervisor: Supervisor,
    build_engine: Callable[[int, bool], LocalEngine],
    *,
    count: int,
    published: PublishedWeights,
    stop: Callable[[], None],
) -> Servers:
    """See SimulatedRegistry. Raises ConfigError for times that cannot be read."""

    def parse(name: str) -> Lengths:
        return parse_lengths(getattr(config.simulation, name), _LONGEST_S, field=f'simulation.{name}')

    ended_by = EndedBy(stop)
    pool = ServerPool(
        clock, log, supervisor,
        ServerSettings(max_retries=config.rollout.max_retries, no_server_s=config.run.stall_timeout_s),
        published=published, score=_never_asked, on_no_server=ended_by.note,
        requirements=build_requirements(config),
        warn=lambda sentence: print(f'warning: {sentence}', file=sys.stderr, flush=True),
    )  # fmt: skip
    registry = SimulatedRegistry(
        clock, pool, supervisor, build_engine,
        count=count, seed=config.run.seed, up=parse('failures') if config.simulation.failures else None,
        down=parse('restart'),
    )  # fmt: skip
    return Servers(pool, registry, MismatchWatch(math.inf, pool.quarantine), ended_by)


async def _never_asked(version: int, prompt_tokens: np.ndarray, answer_tokens: np.ndarray) -> None:
    """Servers get work without a probe."""
