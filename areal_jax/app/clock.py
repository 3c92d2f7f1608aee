"""Builds the clock of a run with its lanes. Used by session.py; control/clocks/ has the clocks."""

from __future__ import annotations

from areal_jax import events
from areal_jax.config import TrackedConfig
from areal_jax.config.cluster import parse_engines
from areal_jax.control.clocks.loop import LoopClock
from areal_jax.control.clocks.real import RealClock
from areal_jax.control.clocks.virtual import VirtualClock
from areal_jax.control.events import EventLog


def build_clock(config: TrackedConfig, log: EventLog, start_s: float) -> LoopClock:
    of_engine = (events.engine_lane, events.publish_lane)
    lanes = {lane(index): 1 for index in range(parse_engines(config.cluster.engines).count) for lane in of_engine}
    if config.evaluation.every:
        lanes[events.EVALUATION_REWARD] = 1
    lanes |= {events.LEARNER: 1, events.REWARD: config.task.verifier_workers, events.DISK: 1}
    if config.run.clock == 'real':
        return RealClock(lanes, log, config.run.stall_timeout_s, start_s)
    prices = config.virtual
    per_unit = {
        **dict.fromkeys(('decode', 'evaluation_decode'), prices.decode_step_s),
        **dict.fromkeys(('prefill', 'evaluation_prefill'), prices.prefill_token_s),
        'train': prices.train_token_s,
        **dict.fromkeys(('publish', 'load', 'snapshot', 'pin'), prices.publish_s),
        'reward': prices.reward_s,
        'save': prices.save_s,
    }
    return VirtualClock(lanes, log, per_unit, start_s)
