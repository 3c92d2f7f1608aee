"""The log of a ToyRun as a file has it, and what its config promises."""

from __future__ import annotations

import json
from typing import Any

from areal_jax.config.drawn_lengths import AnswerLimits
from areal_jax.control.clocks.real import RealClock
from areal_jax.report.rules.log_rules import Limits
from tests.toys import LONGEST

Events = list[dict[str, Any]]
LIMITS = Limits(
    groups_per_update=3, eta=2, in_order=True, max_running=8, buffer_capacity=64, max_admitted=18, in_process=True,
    group_size=2, answers=AnswerLimits(LONGEST), keeps_cache=False, single_turn=True, max_token_age=None,
    is_inline=False,
)  # fmt: skip


def log_of(run: Any) -> Events:
    return [json.loads(json.dumps(event)) for event in run.log.events]


def real_clock(lanes: Any, log: Any, start_s: float) -> RealClock:
    return RealClock(lanes, log, 30.0, start_s)
