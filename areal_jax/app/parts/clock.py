"""Builds the clock of a run with its lanes. control/clocks/ has the clocks."""

from __future__ import annotations

from areal_jax import lanes
from areal_jax.app.parts.part_settings import find_splits, moves_devices, uses_servers
from areal_jax.config import TrackedConfig
from areal_jax.config.agent_fields import PROGRAM
from areal_jax.config.splits import parse_split
from areal_jax.control.clocks.loop import LoopClock
from areal_jax.control.clocks.real import END_OF_WORK_S, RealClock
from areal_jax.control.clocks.virtual import Price, VirtualClock
from areal_jax.control.event_writer import EventLog
from areal_jax.plugins import is_own

_MOST_EPISODES = 1 << 16  # that wait for their programs at once: agent.programs bounds the programs
SERVERS_S = 90.0  # in which dead servers are out of service: then the pool, which saves the run's state, ends it first


def build_clock(config: TrackedConfig, log: EventLog, start_s: float, *, waits_for_work: bool = False) -> LoopClock:
    """The clock of `run.clock`.

    Args:
      waits_for_work: at the end, wait for work under way as long as it is not taken to hang (run.stall_timeout_s): the
        process goes on after the run, and a thread left behind would write into a workdir that is free again.
    """
    widths = lane_widths(config)
    if config.run.clock == 'real':
        stall_s = config.run.stall_timeout_s + (SERVERS_S if uses_servers(config) else 0.0)
        return RealClock(
            widths, log, stall_s, start_s, max(stall_s, END_OF_WORK_S) if waits_for_work else END_OF_WORK_S
        )
    return VirtualClock(widths, log, unit_prices(config), start_s)


def unit_prices(config: TrackedConfig) -> dict[str, Price]:
    """The prices of the section `virtual`, in seconds per unit."""
    prices = config.virtual
    return {
        **dict.fromkeys(('decode', 'evaluation_decode'), prices.decode_step_s),
        **dict.fromkeys(('prefill', 'evaluation_prefill'), prices.prefill_token_s),
        'train': prices.train_token_s,
        **dict.fromkeys(('publish', 'load', 'snapshot', 'pin', 'reshard'), prices.publish_s),
        'reward': prices.reward_s,
        'tool': prices.tool_s,
        'save': prices.save_s,
        'compile': 0.0,
    }


def lane_widths(config: TrackedConfig) -> dict[str, int]:
    """The lanes of a run, with what each does at once."""
    beside = {lanes.EVALUATION_REWARD: 1} if config.evaluation.every else {}
    others = {lanes.LEARNER: 1, lanes.REWARD: config.task.verifier_workers, lanes.DISK: 1}
    return _engine_lanes(config) | beside | others | _agent_lanes(config)


def _agent_lanes(config: TrackedConfig) -> dict[str, int]:
    if config.rollout.workflow == PROGRAM:
        return {lanes.PROGRAM: _MOST_EPISODES}
    return {lanes.TOOL: config.agent.tool_calls} if is_own(config.rollout.workflow) else {}


def _engine_lanes(config: TrackedConfig) -> dict[str, int]:
    """Those of engines in this process; of servers, whose lanes are declared when they join, what all of them share."""
    if uses_servers(config):
        return {lanes.REGISTRY: 1, lanes.publish_lane(0): 1}
    of_engine = (lanes.engine_lane, lanes.publish_lane)
    most = max(parse_split(split)[1].count for split in find_splits(config))
    beside = {lanes.PREPARE: 1} if moves_devices(config) else {}
    return {lane(index): 1 for index in range(most) for lane in of_engine} | beside
