"""How long the pool waits for engines in other processes, and how often it tries; app/ makes it from the config."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class ProbeSettings:
    """The request that an engine answers before it gets work."""

    prompt_tokens: np.ndarray  # int32 [P]
    max_difference: float  # of one token, between its log-probs and the learner's
    max_mean: float  # the same on average: what an engine must keep to that was taken out for its mismatch
    new_tokens: int = 16
    temperature: float = 0.0  # of the learner's log-probs; 0 = greedy, with log-probs at temperature 1
    again_s: float = 60.0  # from a failed probe to the next


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """Deadlines and waits are seconds of the clock."""

    max_retries: int = 3  # of a request given up by engines that failed; then its group is dropped
    # health checks in a row without an answer, or requests that failed, each after it was found well; then the engine
    # is out of service
    max_failures: int = 3
    max_versions_behind: int = 1  # of an engine that refuses new weights and goes on decoding
    stage_s: float = 600.0
    swap_s: float = 120.0
    pause_s: float = 120.0
    ask_s: float = 10.0  # also of a fence
    probe_s: float = 300.0
    drain_s: float = 60.0  # for an engine that leaves to finish what it has
    retry_s: float = 1.0  # from a refusal, or a question without an answer, to the next
    health_every_s: float = 5.0
    no_server_s: float = 300.0  # without a serving engine the run goes on for so long
    probe: ProbeSettings | None = None  # None: engines get work without one
