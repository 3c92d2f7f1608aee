"""Staleness without a gate: engines are always full, and a full queue drops its oldest groups.

Formulas of 'Predicting and Controlling Staleness in Fully Asynchronous RL Training' (Applied Compute, 2026-07-03).
Letters: C sampling slots, B trajectories of a batch, q capacity of the queue in batches, rho rate of rollout over rate
of the trainer, M_tail = E[L_max] / E[L] of a group (`group_moments`). Staleness is in versions, from the first token to
training.
"""

from __future__ import annotations

from areal_jax.simulation.closed_forms.throughput import mean_floor


def pre_queue_staleness(slots: float, batch: float, tail: float, rho: float) -> float:
    """While a group is generated: C M_tail / (B max(1, rho))."""
    return slots * tail / (batch * max(1.0, rho))


def in_queue_staleness(capacity: float, rho: float) -> float:
    """While it waits: rho below 1, else (2 q + rho - 1) / (2 rho)."""
    return rho if rho < 1 else (2 * capacity + rho - 1) / (2 * rho)


def staleness(slots: float, batch: float, capacity: float, rho: float, tail: float) -> float:
    """The two together."""
    return pre_queue_staleness(slots, batch, tail, rho) + in_queue_staleness(capacity, rho)


def fluid_in_queue_staleness(capacity: float, rho: float) -> float:
    """While it waits, exact for groups that come evenly and faster than they are used, rho > 1.

    The mean of floor(x) + 1 over x from (q - 1) / rho to q / rho.
    """
    return 1 + mean_floor((capacity - 1) / rho, capacity / rho)


def token_age(slots: float, batch: float, capacity: float, rho: float, token_tail: float) -> float:
    """The mean age of a token: with kappa = (E[L L_max] - E[L^2] / 2) / E[L]^2 of a group in place of M_tail."""
    return staleness(slots, batch, capacity, rho, token_tail)


def relative_period(trainer_rate: float, rollout_rate: float, rho: float) -> float:
    """Seconds an update times devices, up to a factor: (1 / c_T + rho / c_R) / min(1, rho).

    c_T and c_R are what one device trains and generates in a second; devices are split so that rates have ratio rho.
    """
    return (1 / trainer_rate + rho / rollout_rate) / min(1.0, rho)
